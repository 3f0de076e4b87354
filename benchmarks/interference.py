"""Measure how other work disturbs interactive streams: a very long prompt, a flood of the batch tier, or grammars.

    python -m benchmarks.interference long-prompt [--prompt 32000] [--streams 8]
    python -m benchmarks.interference flood [--flood 200]
    python -m benchmarks.interference grammar [--streams 8] [--rounds 5]

`long-prompt`: streams decode steadily; a long prompt arrives; the gaps between the streams' tokens (ITL) while it is
computed are compared with those before. This is repeated for several chunk sizes, on one worker that computes prompts
and decodes with two threads (colocated), and on a prefill and a decode worker with one thread each (disaggregated).

`flood`: interactive requests arrive one by one while a prefill and a decode worker serve a flood of long requests of
the batch tier or, for comparison, of the interactive tier. The decode worker's cache holds a fraction of the flood.

`grammar`: streams of the demo model decode steadily on a decode worker; a request of 16 choices arrives. In turn, its
choices are free, follow a usual grammar, or follow one that is expensive to compile or to follow. Gateways refuse most
of the expensive grammars; here they bypass that check and reach the worker.

Tokens are received at the gateway's dispatcher, which runs in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from llguidance import grammar_from

from benchmarks.dispatched import greedy, on_stack, stream
from benchmarks.figures import quantile
from benchmarks.models import llama_15m, llama_long
from benchmarks.record import record
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.checkpoint import DEMO_FOLDER
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Generation, GenerationFailed

CHUNK_SIZES = (256, 512, 1024, 2048, 4096)
BEFORE_S = 2.0
"""Seconds before the long prompt with which its time is compared."""


def summary_ms(values: Sequence[float]) -> dict[str, float]:
    """P50, P99 and maximum, in milliseconds."""
    return {
        "p50_ms": 1000 * quantile(values, 0.5),
        "p99_ms": 1000 * quantile(values, 0.99),
        "max_ms": 1000 * max(values),
        "n": len(values),
    }


def tokens(draw: random.Random, num: int) -> list[int]:
    """A random prompt, so that no cache holds it."""
    return [draw.randrange(10, 200) for _ in range(num)]


def start(
    dispatcher: Dispatcher, prompts: Sequence[Sequence[int]], most: int, streams: Sequence[list[float]]
) -> list[asyncio.Task[list[int]]]:
    """Start an interactive stream of each prompt."""
    works = [greedy(prompt, most, Tier.INTERACTIVE) for prompt in prompts]
    return [asyncio.create_task(stream(dispatcher, work, times)) for work, times in zip(works, streams, strict=True)]


# --- a very long prompt --------------------------------------------------------------------------------------------


async def long_prompt(dispatcher: Dispatcher, args: argparse.Namespace) -> dict[str, object]:
    """ITL of the streams before and while the long prompt is computed."""
    draw = random.Random(args.seed)
    streams: list[list[float]] = [[] for _ in range(args.streams)]
    most = 8000
    running = start(dispatcher, [tokens(draw, 128) for _ in streams], most, streams)
    await asyncio.sleep(3)
    injected = time.perf_counter()
    first: list[float] = []
    await stream(dispatcher, greedy(tokens(draw, args.prompt), 1), first)
    ended = time.perf_counter()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(len(times) < most for times in streams), "a stream ended before the long prompt did"
    before, during = gaps_around(streams, injected, ended)
    return {"itl_before": summary_ms(before), "itl_during": summary_ms(during), "long_ttft_s": first[0] - injected}


def gaps_around(streams: Sequence[Sequence[float]], injected: float, ended: float) -> tuple[list[float], list[float]]:
    """(gaps before, gaps during) of all streams: gaps that ended within `BEFORE_S` before the prompt arrived, and gaps
    that overlap with the time of the prompt. The gap in which the prompt arrived counts only as during."""
    gaps = [(a, b) for times in streams for a, b in itertools.pairwise(times)]
    before = [b - a for a, b in gaps if injected - BEFORE_S < b <= injected]
    during = [b - a for a, b in gaps if b > injected and a < ended]
    return before, during


def measure_long_prompt(args: argparse.Namespace, folder: Path, chunk: int, *, colocated: bool) -> dict[str, object]:
    """Start a stack and measure one long prompt on it."""
    environment = {
        "BATON_CHUNK_SIZE": str(chunk),
        "BATON_PREFILL_TOKENS": str(chunk),
        "BATON_TOKEN_BUDGET": str(chunk + 64),
        "BATON_KV_CACHE_BYTES": str(256 * 2**20),
        "BATON_LOCAL_PREFILL_TOKENS": "0",
    }
    prefill = "0" if colocated else "1"
    return on_stack(["--prefill", prefill], environment, folder, lambda dispatcher: long_prompt(dispatcher, args))


# --- a flood -------------------------------------------------------------------------------------------------------


async def flood(dispatcher: Dispatcher, args: argparse.Namespace, tier: Tier | None) -> dict[str, object]:
    """TTFT and ITL of interactive requests that come one by one, beside a flood of `tier` (None: alone)."""
    draw = random.Random(args.seed)
    flooding: list[asyncio.Task[list[int]]] = []
    finished: list[list[float]] = []
    if tier is not None:
        for _ in range(args.flood):
            times: list[float] = []
            finished.append(times)
            generation = greedy(tokens(draw, 256), 128, tier)
            flooding.append(asyncio.create_task(stream(dispatcher, generation, times)))
        await asyncio.sleep(1)
    ttfts, gaps = [], []
    for _ in range(args.requests):
        times = []
        began = time.perf_counter()
        await stream(dispatcher, greedy(tokens(draw, 64), 32, Tier.INTERACTIVE), times)
        ttfts.append(times[0] - began)
        gaps += [b - a for a, b in itertools.pairwise(times)]
    still_going = sum(not task.done() for task in flooding)
    await asyncio.gather(*flooding)
    assert all(len(times) == 128 for times in finished), "a request of the flood was not finished"
    return {
        "ttft": summary_ms(ttfts),
        "itl": summary_ms(gaps),
        "flood_going_on_at_the_end": still_going,
    }


def measure_flood(args: argparse.Namespace, folder: Path, tier: Tier | None) -> dict[str, object]:
    """Start a stack and measure one flood on it."""
    block_size = 16
    block_bytes = 6 * 2 * 6 * 48 * block_size * 4
    environment = {
        "BATON_BLOCK_SIZE": str(block_size),
        "BATON_KV_CACHE_BYTES": str(600 * block_bytes),  # about a tenth of the flood
        "BATON_LOCAL_PREFILL_TOKENS": "0",
        "BATON_MAX_NUM_SEQS": "16",
    }
    return on_stack([], environment, folder, lambda dispatcher: flood(dispatcher, args, tier))


# --- grammars ------------------------------------------------------------------------------------------------------

_OBJECT = {"type": "object", "properties": {f"field{number}": {"type": "string"} for number in range(10)}}
_OPTIONAL = {"type": "object", "properties": {f"field{number}": {"type": "integer"} for number in range(300)}}
GRAMMARS: dict[str, str | None] = {
    "free": None,
    "an object with ten fields": grammar_from(
        "json_schema", json.dumps(_OBJECT | {"required": [*_OBJECT["properties"]]})
    ),
    "300 optional fields": grammar_from("json_schema", json.dumps(_OPTIONAL)),
    "ambiguous": grammar_from("lark", "start: e\ne: e e e | e e | /[ -~]/ |"),
    "99,999 repetitions": grammar_from("regex", "a{99999}"),
}
"""Name → grammar that the 16 choices follow."""
ALONE_S = 0.5
BESIDE_S = 1.0
"""The streams run alone for `ALONE_S` seconds before the 16 choices arrive; the choices run for at most `BESIDE_S`."""


async def beside_grammar(dispatcher: Dispatcher, args: argparse.Namespace, seed: int, what: str) -> dict[str, object]:
    """The gaps between the streams' tokens before and while 16 choices that follow a grammar are generated."""
    draw = random.Random(seed)
    streams: list[list[float]] = [[] for _ in range(args.streams)]
    most = 1900
    running = start(dispatcher, [tokens(draw, 64) for _ in streams], most, streams)
    while not all(streams):
        await asyncio.sleep(0.01)
    await asyncio.sleep(ALONE_S)
    grammar = GRAMMARS[what]
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=32, min_tokens=32, grammar=grammar)
    prompt = tuple(tokens(draw, 64))
    generation = Generation(token_ids=prompt, num_choices=16, sampling=sampling, budget_s=3600, tier=Tier.INTERACTIVE)
    injected = time.perf_counter()
    theirs: list[float] = []
    end = "complete"
    try:
        async with asyncio.timeout(BESIDE_S):
            await stream(dispatcher, generation, theirs)
    except TimeoutError:
        end = "cut off"
    except GenerationFailed as failed:
        end = str(failed.cause)
    ended = time.perf_counter()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(len(times) < most for times in streams), "a stream ended before the 16 choices did"
    before, during = gaps_around(streams, injected, ended)
    return {
        "itl_before": summary_ms(before),
        "itl_during": summary_ms(during),
        "their_tokens": len(theirs),
        "their_s": ended - injected,
        "end": end,
    }


def measure_grammars(args: argparse.Namespace) -> dict[str, object]:
    """Start one stack and measure every grammar on it, in turns."""
    rounds: dict[str, list[object]] = {what: [] for what in GRAMMARS}

    async def body(dispatcher: Dispatcher) -> None:
        for number in range(args.rounds):
            for what in GRAMMARS:
                found = await beside_grammar(dispatcher, args, args.seed + number, what)
                rounds[what].append(found)
                print(f"{what:<26}: {found}", flush=True)

    on_stack([], {"BATON_LOCAL_PREFILL_TOKENS": "0"}, DEMO_FOLDER, body)
    return dict(rounds)


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["long-prompt", "flood", "grammar"])
    parser.add_argument("--prompt", type=int, default=32000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, object] = {}
    with TemporaryDirectory() as scratch:
        if args.what == "long-prompt":
            folder = llama_long(Path(scratch))
            for chunk in CHUNK_SIZES:  # the two modes take turns
                for mode in ("colocated", "disaggregated"):
                    found = measure_long_prompt(args, folder, chunk, colocated=mode == "colocated")
                    figures[f"{mode}-{chunk}"] = found
                    print(f"{mode:<14} chunk {chunk:5}: {found}", flush=True)
        elif args.what == "grammar":
            figures = measure_grammars(args)
        else:
            folder = llama_15m(Path(scratch))
            for name, tier in (("alone", None), ("batch-flood", Tier.BATCH), ("interactive-flood", Tier.INTERACTIVE)):
                figures[name] = measure_flood(args, folder, tier)
                print(f"{name:<18}: {figures[name]}", flush=True)
    workload = {key: value for key, value in vars(args).items() if key not in ("what", "seed")}
    print(record(f"interference-{args.what}", workload=workload, figures=figures, seed=args.seed))


if __name__ == "__main__":
    main()
