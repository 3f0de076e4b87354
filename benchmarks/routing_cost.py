"""Measure what it costs a gateway to choose workers for a prompt, with 10 to 2,000 workers.

    python -m benchmarks.routing_cost [--seed 0]

Half of the workers are prefill workers. `idle`: they have nothing to do, and their speeds differ by 10 %. `busy`: their
queues and batches differ, and each was given three requests since its last heartbeat. The beginning of the prompt is
cached by no worker, by 20 of them, or by all. `report` is the time to take a heartbeat. CPU time of the thread, the
least of several repetitions, since other processes share the machine.

Of the prefix index the bytes are measured for each block and worker that holds it, as `tracemalloc` counts them, and
the time to look up the 60 blocks of a prompt that all of these workers hold.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from benchmarks.command import Result, run, show
from common.contract.block_hashes import HASH_BYTES, SHORT_NAME_BYTES, BlockHash
from common.contract.ids import Incarnation
from common.contract.kv_layout import Fingerprint, KVLayout
from common.contract.messages.session import Heartbeat, Phase, Role, Welcome
from common.contract.messages.worker import CacheEvents
from common.contract.tiers import Tier
from gateway.dispatch.ask import Ask
from gateway.dispatch.router import Router
from gateway.workers.discovery import Endpoint
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import Given

WORKERS = (10, 100, 1000, 2000)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=32, dtype="float32")
FINGERPRINT = Fingerprint(config_hash="c", weights_hash="w", layout=LAYOUT)
HOLDERS = (1, 2, 10, 100)
PROMPT_TOKENS = 2000
PROMPT_BLOCKS = 60
NUM_CHAINS = 2000
REPETITIONS = 9
NOW = 100.2


def heartbeat(draw: random.Random, *, busy: bool) -> Heartbeat:
    """The load of a worker."""
    token_s = 1e-4 * draw.uniform(0.95, 1.05)
    idle = Heartbeat(
        number=1, steps=1, running=0, waiting=0, blocks_used=0, blocks_total=1000, phase=Phase.SERVING, token_s=token_s
    )
    if not busy:
        return idle
    return Heartbeat(
        number=1,
        steps=1,
        running=1,
        waiting=0,
        blocks_used=draw.randrange(900),
        blocks_total=1000,
        phase=Phase.SERVING,
        queued_tokens=(draw.randrange(2000), draw.randrange(8000), draw.randrange(8000)),
        sequences=(draw.randrange(40), draw.randrange(40), draw.randrange(10)),
        places=64,
        sequence_s=draw.uniform(5, 6),
        token_s=token_s,
        pulled_token_s=1e-5,
    )


def pool(num_workers: int, draw: random.Random, *, busy: bool) -> Registry:
    """Workers that are all usable."""
    registry = Registry((), (), "c", colocated=False)
    for number in range(num_workers):
        role = (Role.PREFILL, Role.DECODE)[number % 2]
        address = f"10.0.{number // 250}.{number % 250}:7001"
        registry.add(role, Endpoint(address=address))
        welcome = Welcome(
            role=role,
            fingerprint=FINGERPRINT,
            max_sequence_tokens=10_000,
            transport="zmq",
            transport_metadata=b"",
            open_requests=(),
        )
        registry.opened(address, Incarnation(address), welcome)
        registry.heartbeat(address, heartbeat(draw, busy=busy), NOW - draw.uniform(0.1, 0.2))
        for each in range(3 if busy else 0):
            decodes = role is Role.DECODE
            given = Given(
                number=each + 1,
                tier=draw.choice(list(Tier)),
                num_tokens=0 if decodes else draw.randrange(500),
                num_sequences=int(decodes),
                num_blocks=10 * decodes,
                at=NOW - 0.05,
            )
            registry.took(address, given)
    return registry


def least_us(work: Callable[[], object], num: int) -> float:
    """Microseconds that a piece of work takes, at least."""
    work()
    taken = []
    for _ in range(REPETITIONS):
        began = time.thread_time()
        for _ in range(num):
            work()
        taken.append(1e6 * (time.thread_time() - began) / num)
    return min(taken)


def measure(num_workers: int, draw: random.Random, *, busy: bool) -> dict[str, float]:
    """Microseconds of a choice, by the number of workers that have the beginning of the prompt, and of a report."""
    registry = pool(num_workers, draw, busy=busy)
    router = Router(registry, local_prefill_tokens=64)
    ask = Ask(num_tokens=PROMPT_TOKENS, most_tokens=4000, now=NOW)
    found = {}
    for name, num_holders in (("none", 0), ("20", min(20, num_workers)), ("all", num_workers)):
        holders = draw.sample(list(registry.workers.values()), num_holders)
        cached = {worker.life: 128 * draw.randrange(1, 9) for worker in holders}
        found[f"choose_us_{name}"] = least_us(lambda cached=cached: router.choose(ask, cached), 200)  # type: ignore[misc]
    address, load = next(iter(registry.workers)), heartbeat(draw, busy=busy)
    found["report_us"] = least_us(lambda: registry.heartbeat(address, load, NOW), 1000)
    return found


def measure_index(num_holders: int, draw: random.Random) -> dict[str, float]:
    """Bytes of the prefix index for each block and worker, if that many workers hold each block, and a look-up."""
    chains = [[BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(PROMPT_BLOCKS)] for _ in range(NUM_CHAINS)]
    index = PrefixIndex()
    tracemalloc.start()
    for holder in range(num_holders):
        life = WorkerLife(f"10.0.0.{holder}:7001", Incarnation(f"life-{holder}"))
        for chain in chains:
            stored = b"".join(name[:SHORT_NAME_BYTES] for name in chain)
            index.apply(life, CacheEvents(begins=False, stored=stored, removed=b""))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "bytes_block_and_worker": taken / index.num_blocks,
        "bytes_block": taken / index.num_names,
        "longest_us": least_us(lambda: index.longest(chains[0]), 100),
    }


def measure_all(scratch: Path, *, seed: int = 0) -> Result:
    """The cost by state and number of workers, and that of the index by number of holders."""
    figures: dict[str, dict[str, dict[str, float]]] = {"idle": {}, "busy": {}, "index": {}}
    for state in ("idle", "busy"):
        for num_workers in WORKERS:
            found = measure(num_workers, random.Random(seed), busy=state == "busy")
            figures[state][str(num_workers)] = found
            show(f"{state}, {num_workers} workers", found)
    for num_holders in HOLDERS:
        found = figures["index"][str(num_holders)] = measure_index(num_holders, random.Random(seed))
        show(f"index, {num_holders} holders", found)
    workload = {"prompt_tokens": PROMPT_TOKENS, "repetitions": REPETITIONS}
    return Result(name="routing-cost", figures=figures, workload=workload)


if __name__ == "__main__":
    run(measure_all, __doc__)
