"""Repeat published claims for continuous batching and paged memory on this scheduler.

    python -m benchmarks.claims

* Iteration-level scheduling has 36.9 times the throughput of FasterTransformer at equal latency (Orca, OSDI 2022). It
  has 8 times that of static batching by scheduling alone, 23 times with paged memory (Anyscale, 2023). Here the ratio
  is measured over the variation of the output lengths. All requests are present at the start, and continuous batching
  has as many places as static batching, or as many as fit into a cache in which static batching reserves the longest
  sequence for each place.
* Under 4 % of a paged cache is reserved and empty, and 62 to 80 % of a pre-allocated one (vLLM, SOSP 2023, figure 2).
* Ragged batches need no padding (Orca's selective batching): the padding that is saved is computed.

The scheduler, the block pool and static batching are those of the other benchmarks. Time comes from a clock that is
fitted to steps of the real engine in the same run, and checked against the engine at one point. On a CPU a step costs
more with every sequence; `ratio_of_steps` is the ratio if it did not, which is nearer to a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.baselines import BatchAtATime
from benchmarks.driver import Arrival, Driver, Execution, Modelled, Real, Story, Timing, gaps_s
from benchmarks.load.lengths import WORKLOADS, Fixed, Lengths, LogNormal, clipped
from benchmarks.models import llama_15m
from benchmarks.record import record
from common.engine.batch import Sampled
from common.engine.block_pool import BlockPool
from common.engine.runner import ModelRunner, load_runner
from common.scheduling.costs import Costs
from decode_worker.policy import Policy
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
MAX_PROMPT = 512
MEAN_TOKENS = 64
"""Mean tokens of a prompt, and of an output, in the comparison of batching."""
PLENTY = 16384
"""Enough blocks that memory limits no request."""
CACHE_SLOTS = 8192
"""Token slots of the cache in the comparison where memory is the limit."""
MAX_TOKENS = 512
"""`max_tokens` of every request in the measurement of memory."""
KV_BYTES = 256 * 2**20

TIMED_BATCHES = (1, 2, 4, 6, 8, 16, 32, 64, 128)
TIMED_OUTPUT, TIMED_PROMPT, TIMED_ROUNDS = 32, 256, 3


class Size(NamedTuple):
    """Prompt and output tokens of a request."""

    prompt: int
    output: int


def draw_sizes(prompts: Lengths, outputs: Lengths, num: int, seed: int) -> list[Size]:
    """Draw `num` sizes. The prompts depend only on the seed, not on the distribution of the outputs."""
    prompt_draw, output_draw = Random(f"prompt {seed}"), Random(f"output {seed}")
    return [Size(prompts.draw(prompt_draw), outputs.draw(output_draw)) for _ in range(num)]


def varied_sizes(cv: float, num: int, seed: int) -> list[Size]:
    """Sizes whose outputs have one mean and the coefficient of variation `cv`, before they are cut to fit."""
    prompts = clipped(LogNormal(MEAN_TOKENS, MEAN_TOKENS), MAX_PROMPT)
    outputs = LogNormal(MEAN_TOKENS, cv * MEAN_TOKENS) if cv else Fixed(MEAN_TOKENS)
    return draw_sizes(prompts, clipped(outputs, MAX_MODEL_LEN - MAX_PROMPT), num, seed)


def serve(
    sizes: Sequence[Size],
    execution: Execution,
    places: int,
    *,
    static: bool = False,
    num_blocks: int = PLENTY,
    max_tokens: int = MAX_MODEL_LEN,
    handoff: bool = False,
) -> tuple[Driver, list[Story]]:
    """Serve requests that are all present at the start. Static batches compute their prompts first, then decode."""
    pool = BlockPool(num_blocks, prefix_cache=False)
    policy = Policy(
        block_size=BLOCK_SIZE, max_num_seqs=places, max_sequence_tokens=MAX_MODEL_LEN, prefill_priority=static
    )
    scheduler = DecodeScheduler(pool, policy, Costs())
    driver = Driver(
        pool,
        BatchAtATime(scheduler, places) if static else scheduler,
        execution,
        block_size=BLOCK_SIZE,
        max_sequence_tokens=MAX_MODEL_LEN,
        real_time=isinstance(execution, Real),
    )
    arrivals = []
    for size in sizes:
        prompt, allowed = (7,) * size.prompt, min(max_tokens, MAX_MODEL_LEN - size.prompt)
        arrivals.append(Arrival(time_s=0.0, prompt=prompt, num_output=size.output, max_tokens=allowed, handoff=handoff))
    return driver, driver.run(arrivals)


def tokens_per_s(stories: Sequence[Story]) -> float:
    """Output tokens per second, from the start to the last token."""
    return sum(len(story.token_ids) for story in stories) / max(story.times_s[-1] for story in stories)


# --- the clock ---------------------------------------------------------------------------------------------------


class Clock:
    """Models an engine: a step takes the measured time, interpolated linearly between the timed batch sizes.

    A single line through all of them (`Timing`) misses the short steps of few sequences, with which static batches end.
    """

    def __init__(self, decode_step_s: Mapping[int, float], prompt_token_s: float) -> None:
        self._batches, self._seconds = list(decode_step_s), list(decode_step_s.values())
        self._prompt_token_s = prompt_token_s

    def step_s(self, num_decodes: int, num_prompt: int) -> float:
        """Seconds of a step that decodes `num_decodes` sequences and computes `num_prompt` prompt tokens."""
        return float(np.interp(num_decodes, self._batches, self._seconds)) + self._prompt_token_s * num_prompt

    def run(self, step: Step) -> list[tuple[Sampled, ...]]:
        """Return arbitrary tokens, which nothing reads."""
        return Modelled(Timing()).run(step)

    def seconds(self, step: Step) -> float:
        """Seconds of the step, by the measured times."""
        return self.step_s(len(step.decodes), sum(chunk.end - chunk.start for chunk in step.chunks))


def timed(runner: ModelRunner) -> tuple[dict[int, float], float]:
    """(seconds of a decode step for each batch size, seconds of a prompt), both including scheduling.

    Each is the minimum over the rounds of the round's median, since other processes can only make steps longer.
    """

    engine, num_blocks = Real(runner), runner.cache.num_blocks

    def stories(size: Size, num: int, places: int) -> list[Story]:
        sizes, most = [size] * num, size.output
        return serve(sizes, engine, places, static=True, num_blocks=num_blocks, max_tokens=most)[1]

    def decode_step_s(batch: int) -> float:
        return statistics.median(gaps_s(stories(Size(MEAN_TOKENS, TIMED_OUTPUT), batch, places=batch)))

    def prompt_s() -> float:
        one_by_one = stories(Size(TIMED_PROMPT, 1), 8, places=1)
        return statistics.median(b.times_s[0] - a.times_s[0] for a, b in itertools.pairwise(one_by_one))

    rounds = [({batch: decode_step_s(batch) for batch in TIMED_BATCHES}, prompt_s()) for _ in range(TIMED_ROUNDS)]
    decodes = {batch: min(steps[batch] for steps, _ in rounds) for batch in TIMED_BATCHES}
    return decodes, min(prompt for _, prompt in rounds)


def fit(decode_step_s: Mapping[int, float], prompt_s: float) -> tuple[Clock, Timing]:
    """The clock, and the cost model that is linear in the batch size. The time of a step without decodes is
    extrapolated from batches of one and two."""
    one, two = decode_step_s[1], decode_step_s[2]
    base_s = max(0.0, 2 * one - two)
    clock = Clock({0: base_s, **decode_step_s}, (prompt_s - base_s) / TIMED_PROMPT)
    decode_s, step_s = statistics.linear_regression(list(decode_step_s), list(decode_step_s.values()))
    prompt_token_s = (prompt_s - step_s) / TIMED_PROMPT
    return clock, Timing(step_s=step_s, decode_s=decode_s, prompt_token_s=prompt_token_s, swap_block_s=0.0)


def check(runner: ModelRunner, clock: Clock, line: Timing, *, num: int, rounds: int, seed: int) -> dict[str, Any]:
    """Ratio of continuous to static throughput at one point, by the clock, by the linear model, and on the engine."""
    cv, batch, num_blocks = 1, 8, runner.cache.num_blocks
    sizes = varied_sizes(cv, num, seed)

    def ratio(execution: Execution) -> float:
        _, continuous = serve(sizes, execution, batch, num_blocks=num_blocks)
        _, static = serve(sizes, execution, batch, static=True, num_blocks=num_blocks)
        return tokens_per_s(continuous) / tokens_per_s(static)

    engine = [ratio(Real(runner)) for _ in range(rounds)]
    ratios: dict[str, Any] = {"clock_ratio": ratio(clock), "linear_ratio": ratio(Modelled(line))}
    ratios |= {"engine_ratio": statistics.median(engine), "engine_ratios": engine}
    return {"cv": cv, "batch": batch, "requests": num, **ratios}


# --- batching ----------------------------------------------------------------------------------------------------


def batches(sizes: Sequence[Size], batch: int) -> Iterable[Sequence[Size]]:
    """Split the requests into the batches of static batching."""
    return (sizes[start : start + batch] for start in range(0, len(sizes), batch))


def naive_static_s(sizes: Sequence[Size], batch: int, clock: Clock) -> float:
    """Seconds of static batching in which every sequence costs as much as the longest one of its batch: prompts are
    padded, and ended sequences are computed until all have ended. The step of the prompts gives the first tokens."""
    total_s = 0.0
    for members in batches(sizes, batch):
        prompt = max(size.prompt for size in members)
        num_steps = max(size.output for size in members) - 1
        total_s += clock.step_s(0, len(members) * prompt) + num_steps * clock.step_s(len(members), 0)
    return total_s


def static_utilisation(sizes: Sequence[Size], batch: int) -> float:
    """Output tokens / (places x steps)."""
    num_steps = sum(max(size.output for size in members) for members in batches(sizes, batch))
    return sum(size.output for size in sizes) / (batch * num_steps)


def compare(
    sizes: Sequence[Size], clock: Clock, batch: int, *, places: int | None = None, num_blocks: int = PLENTY
) -> dict[str, float]:
    """Compare static batches of `batch` requests, naive ones, and continuous batching. `places` and `num_blocks` limit
    only continuous batching."""
    places = places or batch
    driver, stories = serve(sizes, clock, places, num_blocks=num_blocks)
    baseline, static_stories = serve(sizes, clock, batch, static=True)
    outputs, num_steps = [size.output for size in sizes], driver.num_steps
    continuous, static = tokens_per_s(stories), tokens_per_s(static_stories)
    naive = sum(outputs) / naive_static_s(sizes, batch, clock)
    return {
        "batch": batch,
        "output_cv": statistics.pstdev(outputs) / statistics.mean(outputs),
        "continuous_tokens_per_s": continuous,
        "static_tokens_per_s": static,
        "naive_tokens_per_s": naive,
        "ratio": continuous / static,
        "ratio_to_naive": continuous / naive,
        "ratio_of_steps": baseline.num_steps / num_steps,
        "mean_decoding": driver.slot_steps / num_steps,
        "static_utilisation": static_utilisation(sizes, batch),
        "continuous_utilisation": driver.slot_steps / (places * num_steps),
    }


# --- memory and padding ------------------------------------------------------------------------------------------


def stored(size: Size) -> range:
    """Tokens in the cache after each decode step of a request; the last output token is never stored."""
    return range(size.prompt + 1, size.prompt + size.output)


def empty_share(sizes: Sequence[Size], reserved: Callable[[Size], int]) -> float:
    """Share of the reserved slots without a token, over all decode steps, if each request keeps what it reserved."""
    num_reserved = sum(len(stored(size)) * reserved(size) for size in sizes)
    return 1 - sum(sum(stored(size)) for size in sizes) / num_reserved


def paged_empty_share(sizes: Sequence[Size]) -> float:
    """Share of the slots of the blocks in use, as the pool counts them, without a token, over all decode steps."""
    driver, _ = serve(sizes, Modelled(Timing()), len(sizes), max_tokens=MAX_TOKENS, handoff=True)
    return 1 - sum(sum(stored(size)) for size in sizes) / (BLOCK_SIZE * driver.block_steps)


def memory(num: int, seed: int) -> dict[str, float]:
    """Shares of slots that are reserved and empty, for requests with ShareGPT's lengths."""
    prompts, outputs = WORKLOADS["sharegpt"]
    prompts, outputs = clipped(prompts, MAX_MODEL_LEN - MAX_TOKENS), clipped(outputs, MAX_TOKENS)
    sizes = draw_sizes(prompts, outputs, num, seed)
    return {
        "max_model_len": empty_share(sizes, lambda size: MAX_MODEL_LEN),
        "prompt_and_max_tokens": empty_share(sizes, lambda size: size.prompt + MAX_TOKENS),
        "paged": paged_empty_share(sizes),
    }


def padding(prompts: Sequence[int]) -> int:
    """Padding tokens of a batch whose prompts are padded to the longest."""
    return len(prompts) * max(prompts) - sum(prompts)


def mean_padding(batch: int, num_batches: int, seed: int) -> dict[str, float]:
    """Mean padding tokens of a batch of prompts with ShareGPT's lengths, and their share of all computed tokens."""
    prompts, outputs = WORKLOADS["sharegpt"]
    sizes = draw_sizes(prompts, outputs, batch * num_batches, seed)
    groups = [[size.prompt for size in members] for members in batches(sizes, batch)]
    num_padding = sum(map(padding, groups))
    num_needed = sum(map(sum, groups))
    return {"tokens": num_padding / num_batches, "share": num_padding / (num_padding + num_needed)}


# --- the script --------------------------------------------------------------------------------------------------


def show(title: str, rows: Sequence[dict[str, Any]], *names: str) -> None:
    """Print a table."""
    print(f"\n{title}")
    print("  ".join(f"{name:>{max(10, len(name))}}" for name in names))
    for row in rows:
        cells = (f"{row[name]:,.3f}" if isinstance(row[name], float) else row[name] for name in names)
        print("  ".join(f"{cell:>{max(10, len(name))}}" for name, cell in zip(names, cells, strict=True)), flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer requests and points: to see that it works")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    quick, seed = options.quick, options.seed
    num, cvs = (64, (0, 1, 3)) if quick else (256, (0, 0.5, 1, 2, 3))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        runner = load_runner(llama_15m(Path(scratch)), kv_cache_bytes=KV_BYTES, block_size=BLOCK_SIZE, dtype="float32")
    decode_step_s, prompt_s = timed(runner)
    clock, line = fit(decode_step_s, prompt_s)
    steps = [{"batch": batch, "ms": 1e3 * seconds} for batch, seconds in decode_step_s.items()]
    show(f"Decode steps of the engine; {TIMED_PROMPT} prompt tokens take {1e3 * prompt_s:.1f} ms", steps, "batch", "ms")
    point = check(runner, clock, line, num=24 if quick else 64, rounds=1 if quick else 3, seed=seed)
    ratios = ("ratio", "ratio_to_naive", "ratio_of_steps")
    show("The clock and the engine", [point], "cv", "batch", "clock_ratio", "linear_ratio", "engine_ratio")
    sizes = {cv: varied_sizes(cv, num, seed) for cv in cvs}
    rows = [{"cv": cv} | compare(sizes[cv], clock, batch) for batch in (8, 32) for cv in cvs]
    show("Continuous over static throughput", rows, "cv", "batch", "output_cv", *ratios)
    show("Places in use", rows, "cv", "batch", "static_utilisation", "continuous_utilisation")
    limits = {"places": num, "num_blocks": CACHE_SLOTS // BLOCK_SIZE}
    limited = [{"cv": cv} | compare(sizes[cv], clock, CACHE_SLOTS // MAX_MODEL_LEN, **limits) for cv in cvs]
    show(f"Both in a cache of {CACHE_SLOTS} slots", limited, "cv", "batch", "mean_decoding", *ratios)
    empty = memory(num, seed)
    show("Share of the reserved slots that is empty", [empty], *empty)
    padded = mean_padding(8, 100 if quick else 2000, seed)
    show("Padding of 8 prompts", [padded], *padded)
    figures = {
        "timing": asdict(line),
        "timed": {"decode_step_s": decode_step_s, "prompt_s": prompt_s},
        "check": point,
        "batching": rows,
        "memory_limited": limited,
        "empty_slots": empty,
        "padding": padded,
    }
    if not options.no_record:
        workload = {"model": "llama 15m", "dtype": "float32", "threads": 1, "requests": num, "quick": quick}
        workload |= {"mean_tokens": MEAN_TOKENS, "max_model_len": MAX_MODEL_LEN, "cache_slots": CACHE_SLOTS}
        print(record("claims", workload=workload | {"max_tokens": MAX_TOKENS}, figures=figures, seed=seed))


if __name__ == "__main__":
    main()
