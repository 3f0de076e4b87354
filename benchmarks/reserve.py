"""Sweep the share of the KV cache that is kept from new requests, from over- to under-commitment, on a cost model.

The scheduler, the block pool and the forecast are the product's; time is modelled, so the result depends on no machine.
Twice as many sequences are in flight as the cache holds at their full lengths, so half of the demand always waits.

    python -m benchmarks.reserve
"""

from __future__ import annotations

import argparse
import random

from benchmarks.driver import Arrival, Driver, Modelled, Timing
from benchmarks.record import record
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from decode_worker.policy import Policy
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
MAX_SEQUENCE_TOKENS = 16384
MAX_TOKENS = 2048
RESERVES = (-1.0, -0.5, -0.2, -0.1, -0.05, 0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
WORKLOADS = {
    "azure-conv": ((1155, 1109), (211, 163)),
    "azure-code": ((2048, 1973), (28, 60)),
    "sharegpt": ((306, 500), (500, 300)),
}
"""(mean, standard deviation) of prompt and of output tokens."""


def lognormal(draw: random.Random, mean: float, deviation: float, most: int) -> int:
    """A length from a log-normal distribution with this mean and standard deviation, cut to 1 to `most`."""
    import math

    sigma2 = math.log(1 + (deviation / mean) ** 2)
    return max(1, min(most, round(draw.lognormvariate(math.log(mean) - sigma2 / 2, math.sqrt(sigma2)))))


def trace(workload: str, num_requests: int, seed: int) -> list[Arrival]:
    """Requests that arrive at twice the rate at which the cache can hold them."""
    draw = random.Random(seed)
    prompt_shape, output_shape = WORKLOADS[workload]
    arrivals = []
    for number in range(num_requests):
        num_prompt = lognormal(draw, *prompt_shape, MAX_SEQUENCE_TOKENS - MAX_TOKENS)
        num_output = lognormal(draw, *output_shape, MAX_TOKENS)
        prompt = tuple(number * 100_000 + position for position in range(num_prompt))
        arrivals.append(Arrival(time_s=0.0, prompt=prompt, num_output=num_output, max_tokens=MAX_TOKENS, handoff=True))
    return arrivals


def measure(workload: str, reserve: float, num_requests: int, seed: int, warm_up: int) -> dict[str, float]:
    """Figures of one run; the first `warm_up` requests fill the profile and the cache, and are not counted."""
    pool = BlockPool(NUM_BLOCKS, prefix_cache=False)
    policy = Policy(
        block_size=BLOCK_SIZE,
        max_num_seqs=4096,
        max_sequence_tokens=MAX_SEQUENCE_TOKENS,
        token_budget=8192,
        memory_reserve=reserve,
        num_host_blocks=NUM_BLOCKS,
    )
    scheduler = DecodeScheduler(pool, policy, Costs())
    counted = {"steps": 0, "blocks": 0, "finished_at_start": 0, "preempted_at_start": 0, "waiting": 0}
    arrivals = trace(workload, num_requests, seed)
    finished = 0

    def note(driver: Driver, step: Step) -> None:
        nonlocal finished
        finished = num_requests - len(driver._open)
        if finished < warm_up:
            counted["finished_at_start"] = finished
            counted["preempted_at_start"] = scheduler.num_swapped + scheduler.num_recomputed
        elif len(scheduler._entrance.waiting) > 0:  # while demand exceeds the cache
            counted["steps"] += 1
            counted["blocks"] += pool.num_used
            counted["waiting"] = scheduler.num_swapped + scheduler.num_recomputed
            counted["finished"] = finished

    driver = Driver(
        pool,
        scheduler,
        Modelled(Timing()),
        block_size=BLOCK_SIZE,
        max_sequence_tokens=MAX_SEQUENCE_TOKENS,
        after_step=note,
    )
    stories = driver.run(arrivals)
    assert all(len(story.token_ids) == story.arrival.num_output for story in stories)
    num_counted = counted["finished"] - counted["finished_at_start"]
    return {
        "preempted_share": (counted["waiting"] - counted["preempted_at_start"]) / num_counted,
        "blocks_used_share": counted["blocks"] / counted["steps"] / NUM_BLOCKS,
        "steps": driver.num_steps,
        "modelled_tokens_per_s": sum(len(story.token_ids) for story in stories) / driver.now,
    }


def main() -> None:
    """Sweep, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for workload in WORKLOADS:
        figures[workload] = {}
        for reserve in RESERVES:
            found = measure(workload, reserve, args.requests, args.seed, args.warm_up)
            figures[workload][f"{reserve:g}"] = found
            print(
                f"{workload:<12} reserve {reserve:6.2f}: preempted {found['preempted_share']:7.2%} of requests, "
                f"blocks in use {found['blocks_used_share']:6.2%}, {found['modelled_tokens_per_s']:8.0f} tokens/s",
                flush=True,
            )
    described = {
        "requests": args.requests,
        "warm_up": args.warm_up,
        "blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "max_tokens": MAX_TOKENS,
        "lengths": WORKLOADS,
    }
    print(record("reserve", workload=described, figures=figures, seed=args.seed))


if __name__ == "__main__":
    main()
