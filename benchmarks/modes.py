"""Run one trace in every mode: disaggregated, colocated (chunked prefill, prefill first), static and windowed batching.

    python -m benchmarks.modes [--requests 120] [--rate 3]

Requests arrive in a Poisson process, with ShareGPT-like lengths. The batching policies run on one engine in this
process with both cores' threads: the decode scheduler with its prompts computed locally, and the same scheduler fed
batch by batch (`benchmarks.baselines`). The disaggregated mode is the real stack, a prefill and a decode worker with
one thread each, including gateway and network; the colocated mode is also measured over the same network. Every output
of every mode is compared with that of the first mode.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.baselines import BatchAtATime
from benchmarks.command import Result, run, show
from benchmarks.dispatched import greedy, on_stack, stream
from benchmarks.driver import Arrival, Driver, Real
from benchmarks.load.lengths import Clipped, LogNormal
from benchmarks.load.summary import percentile
from benchmarks.models import llama_15m
from benchmarks.process import restart_as_a_worker
from common.engine.block_pool import BlockPool
from common.engine.runner import load_runner
from common.engine.timing import measure_costs
from common.runtime.config import DEFAULTS_BY_DEVICE
from decode_worker.policy import Policy
from decode_worker.scheduler import DecodeScheduler
from gateway.dispatch.dispatcher import Dispatcher

BATCH = 16
WINDOW_S = 0.5
BLOCK_SIZE = 16
KV_BYTES = 256 * 2**20
PROMPTS, OUTPUTS = Clipped(LogNormal(300, 400), 1500), Clipped(LogNormal(80, 80), 400)

Outcome = tuple[list[int], list[float]]
"""(tokens of a request, seconds from its arrival to each token)."""


def trace(num: int, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; prompts of 300 tokens on average, outputs of 80."""
    draw = random.Random(seed)
    moment, arrivals = 0.0, []
    for _ in range(num):
        moment += draw.expovariate(rate)
        num_prompt, num_output = PROMPTS.draw(draw), OUTPUTS.draw(draw)
        prompt = tuple(draw.randrange(10, 30000) for _ in range(num_prompt))
        arrivals.append(Arrival(time_s=moment, prompt=prompt, num_output=num_output, max_tokens=num_output))
    return arrivals


def in_process(folder: Path, arrivals: list[Arrival], mode: str) -> list[Outcome]:
    """Run the trace on one engine in this process, with two threads and no network."""
    torch.set_num_threads(2)
    runner = load_runner(folder, kv_cache_bytes=KV_BYTES, block_size=BLOCK_SIZE, swap_bytes=2**20)
    costs = measure_costs(runner, DEFAULTS_BY_DEVICE["cpu"]["token_budget"])
    pool = BlockPool(runner.cache.num_blocks)
    policy = Policy(
        block_size=BLOCK_SIZE,
        max_num_seqs=BATCH,
        max_sequence_tokens=2048,
        prefill_priority=mode in ("prefill-priority", "static", "windowed"),
        num_host_blocks=runner.num_host_blocks,
    )
    own = DecodeScheduler(pool, policy, costs)
    scheduler: DecodeScheduler | BatchAtATime = own
    if mode in ("static", "windowed"):
        scheduler = BatchAtATime(own, BATCH, math.inf if mode == "static" else WINDOW_S)
    driver = Driver(pool, scheduler, Real(runner), block_size=BLOCK_SIZE, max_sequence_tokens=2048, real_time=True)
    stories = driver.run(arrivals)
    return [(story.token_ids, [each - story.arrival.time_s for each in story.times_s]) for story in stories]


def over_the_wire(folder: Path, arrivals: list[Arrival], mode: str) -> list[Outcome]:
    """Run the trace on the real stack; tokens are received at the dispatcher."""
    environment = {
        "BATON_BLOCK_SIZE": str(BLOCK_SIZE),
        "BATON_KV_CACHE_BYTES": str(KV_BYTES),
        "BATON_MAX_NUM_SEQS": str(BATCH),
        "BATON_LOCAL_PREFILL_TOKENS": "0",
    }
    prefill = "1" if mode == "disaggregated" else "0"

    async def body(dispatcher: Dispatcher) -> list[Outcome]:
        began = time.perf_counter()

        async def one(arrival: Arrival) -> Outcome:
            await asyncio.sleep(max(0.0, began + arrival.time_s - time.perf_counter()))
            times: list[float] = []
            tokens = await stream(dispatcher, greedy(arrival.prompt, arrival.max_tokens), times)
            return tokens, [each - began - arrival.time_s for each in times]

        return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))

    return on_stack(["--prefill", prefill], environment, folder, body)


MODES: dict[str, Callable[[Path, list[Arrival], str], list[Outcome]]] = {
    "disaggregated": over_the_wire,
    "colocated-wire": over_the_wire,
    "colocated": in_process,
    "prefill-priority": in_process,
    "windowed": in_process,
    "static": in_process,
}


def summary(arrivals: list[Arrival], outcomes: list[Outcome]) -> dict[str, float]:
    """The figures of a mode that its users see."""
    ttfts = [times[0] for _, times in outcomes]
    gaps = [later - earlier for _, times in outcomes for earlier, later in itertools.pairwise(times)]
    last = max(arrival.time_s + times[-1] for arrival, (_, times) in zip(arrivals, outcomes, strict=True))
    return {
        "ttft_mean_s": statistics.mean(ttfts),
        "ttft_p99_s": percentile(ttfts, 99),
        "itl_p50_ms": 1000 * percentile(gaps, 50),
        "itl_p99_ms": 1000 * percentile(gaps, 99),
        "latency_mean_s": statistics.mean(times[-1] for _, times in outcomes),
        "tokens_per_s": sum(len(tokens) for tokens, _ in outcomes) / last,
    }


def measure(
    scratch: Path, *, requests: int = 120, rate: Annotated[float, "requests per second"] = 3.0, seed: int = 0
) -> Result:
    """Run the trace in every mode, and compare the outputs with those of the first."""
    restart_as_a_worker()
    arrivals, folder = trace(requests, rate, seed), llama_15m(scratch)
    figures: dict[str, dict[str, float]] = {}
    expected: list[list[int]] | None = None
    for mode, play in MODES.items():
        outcomes = play(folder, arrivals, mode)
        tokens = [each for each, _ in outcomes]
        expected = expected or tokens
        different = sum(a != b for a, b in zip(expected, tokens, strict=True))
        figures[mode] = summary(arrivals, outcomes) | {"different_outputs": different}
        show(mode, figures[mode])
    return Result(name="modes", figures=figures, workload={"model": "llama 15m", "max_num_seqs": BATCH})


if __name__ == "__main__":
    run(measure, __doc__)
