"""Measure the stall of a stream whose worker dies, freezes or drains, and the time to release a dead gateway's work.

    python -m benchmarks.recovery --rounds 40
    python -m benchmarks.recovery --ranks 2 --rounds 20

There are one prefill and two decode workers. Each round streams a request; once it has 20 tokens, its decode worker is
killed (kill -9), frozen (SIGSTOP) or told to drain. `detect`: time from the fault until the gateway knows. `stall`: the
longest gap between two tokens of the stream, including the detection. `pause`: the longest gap of a stream that
migrates. A second gateway with four streams is killed, too. `free`: time until the workers hold nothing for it.

With `--ranks N` each decode worker has N ranks; rank 1 of one is killed or frozen, in turns with the worker itself, and
nothing else is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from benchmarks.command import Result, run
from benchmarks.dispatched import greedy, stream
from benchmarks.figures import spread
from benchmarks.load.summary import percentile
from benchmarks.local import children
from benchmarks.models import llama_long
from benchmarks.process import Process
from common.contract.ids import new_incarnation
from common.runtime.checkpoint import config_hash
from common.runtime.clock import Pulse, monotonic
from common.runtime.config import DEFAULTS_BY_DEVICE
from gateway.dispatch.dispatcher import Dispatcher
from gateway.workers.registry import Registry

BEFORE = 20
"""Tokens that a stream has received when the fault happens."""


HELD = ("blocks_used", "waiting", "pulling", "computing", "running", "leases", "requests")
"""Counts in a worker's `/ready` that are zero at rest."""


async def held(session: aiohttp.ClientSession, worker: Process) -> int:
    """The sum of a worker's `HELD` counts."""
    async with session.get(f"http://{worker.http}/ready") as response:
        state = await response.json()
    return sum(state.get(name, 0) for name in HELD)


class Bench:
    """A gateway's dispatcher in this process, and its workers."""

    def __init__(self, folder: Path, prefill: Process, decode: list[Process], draw: random.Random) -> None:
        self.folder = folder
        self.workers = [prefill, *decode]
        self.registry = Registry((prefill.address,), tuple(each.address for each in decode), config_hash(folder))
        self.dispatcher = Dispatcher(new_incarnation(), self.registry, monotonic, Pulse())
        self.decode = {each.address: each for each in decode}
        self.draw = draw

    async def usable(self) -> None:
        """Wait until every worker is usable."""
        while not all(worker.usable for worker in self.registry.workers.values()):
            await asyncio.sleep(0.05)

    async def stream(self, length: int, num_tokens: int) -> tuple[asyncio.Task[list[int]], list[float], Process]:
        """Start a stream and wait for its first tokens: (its task, arrival times of its tokens, its decode worker)."""
        token_ids = tuple(self.draw.randrange(10, 200) for _ in range(length))
        arrivals: list[float] = []
        task = asyncio.create_task(stream(self.dispatcher, greedy(token_ids, num_tokens), arrivals))
        while len(arrivals) < BEFORE:
            await asyncio.sleep(0.001)
        [busy] = [worker for address, worker in self.decode.items() if self.registry.workers[address].in_flight]
        return task, arrivals, busy

    async def fault(self, number: int, *, of_rank: bool = False) -> tuple[float, float]:
        """(seconds until detection, seconds of the stall), if the worker gets this signal, or one of its other
        ranks."""
        task, arrivals, victim = await self.stream(200, 120)
        view = self.registry.workers[victim.address]
        pid = children(victim.pid)[0] if of_rank else victim.pid
        began = time.perf_counter()
        os.kill(pid, number)
        while view.incarnation is not None:
            await asyncio.sleep(0.001)
        detected = time.perf_counter() - began
        await task
        if number == signal.SIGKILL or of_rank:
            await asyncio.to_thread(victim.close)
            await asyncio.to_thread(victim.start)
        else:
            victim.signal(signal.SIGCONT)
        await self.usable()
        return detected, longest_gap(arrivals[BEFORE - 1 :])

    async def move(self, length: int) -> tuple[float, float]:
        """(seconds of the pause, median gap between tokens of the same stream)."""
        moves = self.dispatcher.recovery.tally.moves
        moved = moves["moved"]
        task, arrivals, leaving = await self.stream(length, 20_000)
        self.dispatcher.links.tell(leaving.address, drain=True)
        end = None
        while end is None or len(arrivals) < end:
            await asyncio.sleep(0.001)
            assert not task.done(), "the stream has ended before it moved"
            if end is None and moves["moved"] > moved:
                end = len(arrivals) + BEFORE
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.dispatcher.links.tell(leaving.address, drain=False)
        await self.usable()
        gaps = [b - a for a, b in itertools.pairwise(arrivals[1:])]
        return longest_gap(arrivals[BEFORE - 1 :]), percentile(gaps, 50)

    async def lose_gateway(self) -> float:
        """Seconds from the death of a gateway with four streams until its workers hold nothing."""
        places = ["--prefill-workers", self.workers[0].address, "--decode-workers", ",".join(self.decode)]
        options = ["--model", str(self.folder), "--port", "0", "--log-level", "error", *places]
        gateway = Process("gateway", options)
        await asyncio.to_thread(gateway.start)
        async with aiohttp.ClientSession() as session:
            streams = [asyncio.create_task(self._ask(session, gateway.http)) for _ in range(4)]
            while await self._held(session) < 4 * (
                200 // DEFAULTS_BY_DEVICE["cpu"]["block_size"]
            ):  # until a decode worker holds every prompt
                await asyncio.sleep(0.01)
            gateway.signal(signal.SIGKILL)
            began = time.perf_counter()
            while await self._held(session):
                await asyncio.sleep(0.005)
            taken = time.perf_counter() - began
            ended = await asyncio.gather(*streams)
            assert not any(ended), "a stream had ended before"
        await asyncio.to_thread(gateway.close)
        return taken

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> bool:
        """Whether the answer was complete."""
        prompt = [self.draw.randrange(10, 200) for _ in range(200)]
        body = {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return b"[DONE]" in await response.read()
        except aiohttp.ClientError:
            return False

    async def _held(self, session: aiohttp.ClientSession) -> int:
        return sum([await held(session, worker) for worker in self.workers])


def longest_gap(arrivals: list[float]) -> float:
    """The longest gap between two tokens of a stream, in seconds."""
    return max(b - a for a, b in itertools.pairwise(arrivals))


async def in_turns(bench: Bench, rounds: int, ranks: int) -> dict[str, dict[str, list[float]]]:
    """Measure every fault, in turns."""
    running = asyncio.create_task(bench.dispatcher.links.run())
    await bench.dispatcher.links.wait_usable()
    await bench.usable()
    for _ in range(3):  # connects every pair of workers before anything is measured
        for length in (500, 4000):
            await bench.move(length)
    taken: dict[str, dict[str, list[float]]] = {}
    faults = [("kill", signal.SIGKILL, False), ("freeze", signal.SIGSTOP, False)]
    if ranks > 1:
        faults += [("kill-rank", signal.SIGKILL, True), ("freeze-rank", signal.SIGSTOP, True)]
    for _ in range(rounds):
        for name, number, of_rank in faults:
            detected, stall = await bench.fault(number, of_rank=of_rank)
            each = taken.setdefault(name, {"detect_ms": [], "stall_ms": []})
            each["detect_ms"].append(1000 * detected)
            each["stall_ms"].append(1000 * stall)
        if ranks > 1:
            continue
        for length in (500, 4000):
            pause, gap = await bench.move(length)
            each = taken.setdefault(f"move-{length}", {"pause_ms": [], "gap_ms": []})
            each["pause_ms"].append(1000 * pause)
            each["gap_ms"].append(1000 * gap)
        taken.setdefault("gateway", {"free_ms": []})["free_ms"].append(1000 * await bench.lose_gateway())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return taken


def measure(scratch: Path, *, rounds: int = 100, ranks: int = 1, seed: int = 0) -> Result:
    """Start the workers, and measure every fault."""
    folder = llama_long(scratch)
    common = ["--model", str(folder), "--num-threads", "1", "--log-level", "error"]
    wide = [*common, "--tensor-parallel", str(ranks)]
    with ExitStack() as stack:
        prefill, *decode = [
            stack.enter_context(Process(module, options))
            for module, options in (("prefill_worker", common), ("decode_worker", wide), ("decode_worker", wide))
        ]
        taken = asyncio.run(in_turns(Bench(folder, prefill, decode, random.Random(seed)), rounds, ranks))
    figures = {
        name: {what: spread(values) | {"p99": percentile(values, 99)} for what, values in each.items()}
        for name, each in taken.items()
    }
    workload = {"model": "llama_long", "prefill": 1, "decode": 2}
    return Result(name="recovery" if ranks == 1 else "recovery-ranks", figures=figures, workload=workload)


if __name__ == "__main__":
    run(measure, __doc__)
