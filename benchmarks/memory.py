"""Run a real stack at twice its KV memory: how many requests fail or are preempted, and how full the memory is.

    python -m benchmarks.memory [--requests 300]

The scheduler does not know the output lengths: sampling is at temperature 1 from a random-weight model, and each
request has its own number of stop tokens, so that its length is geometric with a mean of its own. The same requests
also run, few at a time, on a stack with memory for all of them; seeds make the outputs comparable, token by token. Two
more runs commit 1.5 times the memory, so that preemptions occur and their outputs can be compared, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Result, run, show
from benchmarks.dispatched import connected, stream
from benchmarks.local import counts
from benchmarks.models import llama_long
from common.contract.sampling import SamplingParams
from common.runtime.config import DecodeSettings, ServeSettings
from common.runtime.local_stack import LocalStack
from gateway.serving.generation import Generation

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * 32 * BLOCK_SIZE * 4  # layers, keys and values, heads, head size, float32
NUM_BLOCKS = 1024
MAX_TOKENS = 1500
VOCABULARY = 4096


def drawn(num: int, seed: int) -> list[Generation]:
    """Requests with prompts of 50 to 600 tokens; the mean output length of each request is 60 to 340 tokens."""
    draw = random.Random(seed)
    generations = []
    for number in range(num):
        prompt = tuple(draw.randrange(10, VOCABULARY) for _ in range(draw.randrange(50, 600)))
        sampling = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=number,
            ignore_eos=True,
            stop_token_ids=tuple(draw.sample(range(10, VOCABULARY), draw.randrange(12, 64))),
        )
        generations.append(Generation(token_ids=prompt, num_choices=1, sampling=sampling, budget_s=3600))
    return generations


async def run_all(
    folder: Path, generations: Sequence[Generation], *, num_blocks: int, in_flight: int, environment: dict[str, str]
) -> tuple[list[list[int]], list[dict[str, float]]]:
    """Run the requests, at most `in_flight` at a time: (tokens of each, samples of the decode worker's counters)."""
    environment = {"BATON_BLOCK_SIZE": str(BLOCK_SIZE)} | environment
    os.environ.update(environment)
    size = num_blocks * BLOCK_BYTES
    settings = ServeSettings(model=str(folder), port=0, kv_cache_bytes=size, log_level="warning", restart="never")
    stack = LocalStack(settings)
    samples: list[dict[str, float]] = []
    try:
        url = await stack.start()
        decode = next(address for name, address in stack.probes.items() if name.startswith("decode"))
        places = asyncio.Semaphore(in_flight)
        num_done = 0

        async def one(generation: Generation) -> list[int]:
            nonlocal num_done
            async with places:
                tokens = await stream(dispatcher, generation, [])
                num_done += 1
                return tokens

        async def watch() -> None:
            while True:
                samples.append(await asyncio.to_thread(counts, decode) | {"done": num_done})
                await asyncio.sleep(0.25)

        async with connected(url, folder) as dispatcher:
            watching = asyncio.create_task(watch())
            outputs = await asyncio.gather(*(one(generation) for generation in generations))
            watching.cancel()
    finally:
        await stack.stop()
        for name in environment:
            del os.environ[name]
    return list(outputs), samples


def loaded(
    folder: Path, generations: Sequence[Generation], free: list[list[int]], reserve: float, preempt_by: str
) -> dict[str, float]:
    """One run at twice the memory; its outputs are compared with `free`, those of the run with memory for all."""
    pairs = zip(generations, free, strict=True)
    demand = statistics.mean(-(-(len(work.token_ids) + len(tokens)) // BLOCK_SIZE) for work, tokens in pairs)
    in_flight = round(2 * NUM_BLOCKS / demand)
    environment = {
        "BATON_MEMORY_RESERVE": str(reserve),
        "BATON_PREEMPT_BY": preempt_by,
        "BATON_MAX_NUM_SEQS": "512",
        "BATON_LOCAL_PREFILL_TOKENS": "0",
    }
    outputs, samples = asyncio.run(
        run_all(folder, generations, num_blocks=NUM_BLOCKS, in_flight=in_flight, environment=environment)
    )
    # Only samples with the most requests in flight, without the first sixth, in which the scheduler learns the lengths.
    num = len(generations)
    window = [sample for sample in samples if num // 6 <= sample["done"] <= num - in_flight]
    first, last = window[0], window[-1]

    def grown(name: str) -> float:
        return last[name] - first[name]

    return {
        "failed": 0,  # a failure would have ended the run
        "different_outputs": sum(a != b for a, b in zip(free, outputs, strict=True)),
        "in_flight": in_flight,
        "demand_over_memory": in_flight * demand / NUM_BLOCKS,
        "preemptions_share_of_requests": grown("baton_preemptions_total") / grown("done"),
        "preemptions_with_warm_up": samples[-1]["baton_preemptions_total"],
        "blocks_used_share": grown("baton_block_steps_total") / grown("baton_engine_steps_total") / NUM_BLOCKS,
        "requests_in_window": grown("done"),
        "steps_in_window": grown("baton_engine_steps_total"),
    }


def measure(scratch: Path, *, requests: int = 300, seed: int = 0) -> Result:
    """Run the requests with memory for all, then in each way with half of what they want."""
    folder, generations = llama_long(scratch), drawn(requests, seed)
    free, _ = asyncio.run(run_all(folder, generations, num_blocks=32 * NUM_BLOCKS, in_flight=4, environment={}))
    figures: dict[str, Any] = {"mean_output_tokens": statistics.mean(map(len, free))}
    for name, reserve, preempt_by in (
        ("default", DecodeSettings().memory_reserve, DecodeSettings().preempt_by),
        ("over-committed, swap", -0.5, "swap"),
        ("over-committed, recompute", -0.5, "recompute"),
    ):
        figures[name] = loaded(folder, generations, free, reserve, preempt_by)
        show(name, figures[name])
    workload = {"blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_tokens": MAX_TOKENS}
    return Result(name="memory", figures=figures, workload=workload)


if __name__ == "__main__":
    run(measure, __doc__)
