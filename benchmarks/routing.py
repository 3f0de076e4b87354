"""Compare routing by the expected time of each worker with routing in turn, on one stack.

    python -m benchmarks.routing [--rounds 3]

There are three workloads: conversations in which every turn contains the turns before it; prompts that begin with one
of a few long system prompts; prompts that share nothing. Each is sent to the same workers under both policies, in
alternation. Each run has its own cache salt, so that it cannot use blocks that another run has left in a cache. The
dispatcher runs in this process, as in a gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.dispatched import connected, greedy, stream
from benchmarks.figures import quantile
from benchmarks.memory import counts
from benchmarks.models import llama_15m
from benchmarks.record import record
from common.runtime.config import ServeSettings
from common.runtime.local_stack import LocalStack
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.router import Routing

POLICIES: Final[tuple[Routing, ...]] = ("expected", "round_robin")
COMPUTED = "baton_prompt_tokens_computed_total"


@dataclass(frozen=True)
class Dialogue:
    """A conversation: its start time, the tokens that each turn adds, and the client's pause after each turn."""

    start_s: float
    turns: tuple[tuple[int, ...], ...]
    think_s: tuple[float, ...]


def tokens(draw: random.Random, num: int) -> tuple[int, ...]:
    """Random tokens, so that no cache holds them."""
    return tuple(draw.randrange(10, 30000) for _ in range(num))


def starts(draw: random.Random, num: int, rate: float) -> Iterator[float]:
    """Start times of a Poisson process."""
    moment = 0.0
    for _ in range(num):
        moment += draw.expovariate(rate)
        yield moment


def multi_turn(draw: random.Random, scale: float) -> list[Dialogue]:
    """Conversations of five turns; each turn brings 150 tokens."""
    return [
        Dialogue(start, tuple(tokens(draw, 150) for _ in range(5)), tuple(draw.expovariate(1.0) for _ in range(5)))
        for start in starts(draw, int(24 * scale), 1.0)
    ]


def shared_prefix(draw: random.Random, scale: float) -> list[Dialogue]:
    """Prompts of one of eight system prompts of 640 tokens, and 100 tokens of their own."""
    systems = [tokens(draw, 640) for _ in range(8)]
    return [
        Dialogue(start, ((*draw.choice(systems), *tokens(draw, 100)),), (0.0,))
        for start in starts(draw, int(100 * scale), 4.0)
    ]


def unshared(draw: random.Random, scale: float) -> list[Dialogue]:
    """Prompts of 100 to 700 tokens."""
    return [
        Dialogue(start, (tokens(draw, draw.randrange(100, 700)),), (0.0,))
        for start in starts(draw, int(80 * scale), 3.0)
    ]


WORKLOADS: dict[str, Callable[[random.Random, float], list[Dialogue]]] = {
    "multi-turn": multi_turn,
    "shared-prefix": shared_prefix,
    "unshared": unshared,
}


async def converse(dispatcher: Dispatcher, dialogue: Dialogue, salt: str, began: float) -> list[float]:
    """Run a conversation; return the seconds to the first token of each turn."""
    await asyncio.sleep(max(0.0, began + dialogue.start_s - time.perf_counter()))
    history: list[int] = []
    ttfts = []
    for new, think_s in zip(dialogue.turns, dialogue.think_s, strict=True):
        history += new
        asked = time.perf_counter()
        times: list[float] = []
        history += await stream(dispatcher, greedy(history, 24, salt=salt), times)
        ttfts.append(times[0] - asked)
        await asyncio.sleep(think_s)
    return ttfts


def computed(stack: LocalStack) -> float:
    """Prompt tokens that the workers have computed so far."""
    return sum(counts(address).get(COMPUTED, 0.0) for address in stack.probes.values())


async def play(dispatcher: Dispatcher, dialogues: Sequence[Dialogue], salt: str) -> list[float]:
    """Run all conversations, each at its start time; return the seconds to the first token of every turn."""
    began = time.perf_counter()
    ttfts = await asyncio.gather(*(converse(dispatcher, each, salt, began) for each in dialogues))
    return [each for some in ttfts for each in some]


async def measure(stack: LocalStack, url: str, folder: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure every workload in every round, with both policies in alternation."""
    runs: list[dict[str, object]] = []
    for number in range(-1, args.rounds):  # the first warms up
        for name, make in WORKLOADS.items():
            for policy in POLICIES if number % 2 else POLICIES[::-1]:
                dialogues = make(random.Random(args.seed + number), args.scale if number >= 0 else 0.2)
                before = computed(stack)
                async with connected(url, folder, policy) as dispatcher:
                    ttfts = await play(dispatcher, dialogues, f"{number} {policy}")
                run = {
                    "workload": name,
                    "routing": policy,
                    "round": number,
                    "ttft_mean_ms": 1000 * statistics.mean(ttfts),
                    "ttft_p99_ms": 1000 * quantile(ttfts, 0.99),
                    "tokens_computed": computed(stack) - before,
                    "requests": len(ttfts),
                }
                print("  ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in run.values()))
                runs += [run] if number >= 0 else []
    return runs


async def run(folder: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Start the stack, and measure on it."""
    os.environ["BATON_NUM_THREADS"] = "1"
    settings = ServeSettings(model=str(folder), port=0, prefill=2, decode=2, log_level="warning", restart="never")
    stack = LocalStack(settings)
    try:
        return await measure(stack, await stack.start(), folder, args)
    finally:
        await stack.stop()


def ratios(runs: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """For each workload, the ratios of routing by expected time to routing in turn: medians of the rounds."""
    made: dict[str, dict[str, float]] = {}
    for name in WORKLOADS:
        of = {(run["routing"], run["round"]): run for run in runs if run["workload"] == name}
        rounds = sorted({int(str(number)) for _, number in of})
        made[name] = {
            figure: statistics.median(
                float(str(of["expected", number][figure])) / float(str(of["round_robin", number][figure]))
                for number in rounds
            )
            for figure in ("ttft_mean_ms", "ttft_p99_ms", "tokens_computed")
        }
    return made


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = llama_15m(Path(scratch))
        runs = asyncio.run(run(folder, args))
    figures = {"ratios": ratios(runs), "runs": runs}
    for name, ratio in ratios(runs).items():
        print(name, {figure: round(value, 3) for figure, value in ratio.items()})
    workload = {"model": "llama 15m", "prefill": 2, "decode": 2, "rounds": args.rounds, "scale": args.scale}
    print(record("routing", workload=workload, figures=figures, seed=args.seed))


if __name__ == "__main__":
    main()
