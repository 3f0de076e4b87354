"""A real stack whose requests want twice the KV memory that there is: what fails, what is preempted, how full it is.

    python -m benchmarks.memory [--requests 300] [--reserve 0.05]

Output lengths are unknown to the scheduler: sampling is at temperature 1 from a random-weight model, and each request
has its own number of stop tokens, so that lengths are geometric with a mean of its own. The same requests then run on
a stack with memory for all of them, few at a time; seeds make the outputs comparable, token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.interference import connected
from benchmarks.local import Local
from benchmarks.models import llama_long
from benchmarks.record import record
from common.contract.sampling import SamplingParams
from common.runtime.config import ServeSettings
from common.runtime.local_stack import LocalStack
from gateway.dispatcher import Dispatcher
from gateway.generation import Generation

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * 32 * BLOCK_SIZE * 4  # layers, keys and values, heads, head size, float32
NUM_BLOCKS = 1024
MAX_TOKENS = 1500
VOCABULARY = 4096


def requests(num: int, seed: int) -> list[Generation]:
    """Prompts of 50 to 600 tokens; outputs of 60 to 340 on average, by request."""
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


def counts(address: str) -> dict[str, float]:
    """A worker's counters and gauges, summed over labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


async def output(dispatcher: Dispatcher, generation: Generation) -> list[int]:
    """The tokens of one request."""
    return [token async for delta in dispatcher.generate(generation) for token in delta.token_ids]


async def run(
    folder: Path, generations: Sequence[Generation], *, num_blocks: int, in_flight: int, environment: dict[str, str]
) -> tuple[list[list[int]], list[dict[str, float]]]:
    """Every request's tokens, at most `in_flight` at a time, and the decode worker's counters over time."""
    os.environ.update(environment)
    settings = ServeSettings(model=str(folder), port=0, kv_cache_bytes=num_blocks * BLOCK_BYTES, log_level="warning")
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
                tokens = await output(dispatcher, generation)
                num_done += 1
                return tokens

        async def watch() -> None:
            while True:
                samples.append(await asyncio.to_thread(counts, decode) | {"done": num_done})
                await asyncio.sleep(0.25)

        async with connected(Local(url, {}), folder) as dispatcher:
            watching = asyncio.create_task(watch())
            outputs = await asyncio.gather(*(one(generation) for generation in generations))
            watching.cancel()
    finally:
        await stack.stop()
        for name in environment:
            del os.environ[name]
    return list(outputs), samples


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--reserve", type=float, default=0.05)
    parser.add_argument("--preempt-by", default="cost", choices=["cost", "swap", "recompute"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generations = requests(args.requests, args.seed)
    with TemporaryDirectory() as scratch:
        folder = llama_long(Path(scratch))
        free, _ = asyncio.run(
            run(
                folder,
                generations,
                num_blocks=32 * NUM_BLOCKS,
                in_flight=4,
                environment={"BATON_PREFIX_CACHE": "false"},
            )
        )
        demand = [
            -(-(len(g.token_ids) + len(tokens)) // BLOCK_SIZE) for g, tokens in zip(generations, free, strict=True)
        ]
        in_flight = round(2 * NUM_BLOCKS / statistics.mean(demand))
        environment = {
            "BATON_MEMORY_RESERVE": str(args.reserve),
            "BATON_PREEMPT_BY": args.preempt_by,
            "BATON_MAX_NUM_SEQS": "512",
            "BATON_LOCAL_PREFILL_TOKENS": "0",
        }
        loaded, samples = asyncio.run(
            run(folder, generations, num_blocks=NUM_BLOCKS, in_flight=in_flight, environment=environment)
        )
    # While as many are in flight as may be, without the first sixth, in which the lengths are learnt.
    window = [s for s in samples if args.requests // 6 <= s["done"] <= args.requests - in_flight]
    first, last = window[0], window[-1]
    steps = last["baton_engine_steps_total"] - first["baton_engine_steps_total"]
    used = last["baton_block_steps_total"] - first["baton_block_steps_total"]
    preempted = last["baton_preemptions_total"] - first["baton_preemptions_total"]
    figures = {
        "failed": 0,  # a failure would have ended the run
        "different_outputs": sum(a != b for a, b in zip(free, loaded, strict=True)),
        "in_flight": in_flight,
        "demand_over_memory": in_flight * statistics.mean(demand) / NUM_BLOCKS,
        "preemptions_share_of_requests": preempted / (last["done"] - first["done"]),
        "preemptions_with_warm_up": samples[-1]["baton_preemptions_total"] / args.requests,
        "blocks_used_share": used / steps / NUM_BLOCKS,
        "requests_in_window": last["done"] - first["done"],
        "steps_in_window": steps,
        "mean_output_tokens": statistics.mean(map(len, free)),
    }
    for name, value in figures.items():
        print(f"{name:<32}{value:10.3f}")
    workload = {
        "requests": args.requests,
        "reserve": args.reserve,
        "preempt_by": args.preempt_by,
        "blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_tokens": MAX_TOKENS,
    }
    print(record("memory", workload=workload, figures=figures, seed=args.seed))


if __name__ == "__main__":
    main()
