"""Requests over HTTP, streaming and not, while workers are killed, frozen, cut off, reset, slowed down and drained.

    make chaos            500 requests on each transport
    make test             a short run on one

The seed is printed; `SOAK_SEED` repeats it, `SOAK_REQUESTS` sets the number; with `SOAK_RECORD` a run that passes is
recorded in `benchmarks/results`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from near_ties import is_near_tie
from needs import needs
from stack import BLOCK_BYTES, prompt

from benchmarks.record import record
from chaos.client import Outcome, ask
from chaos.theatre import FAULTS, Actor, Theatre, theatre

pytestmark = needs("hosts")

NUM_BLOCKS = 256
CONCURRENCY = 8
KILL_SPACING_S = 4.0
"""Between two kills: a request whose worker is killed, too, while it computes nothing else is refused, and rightly."""


def body(draw: random.Random, index: int) -> dict[str, Any]:
    """A request of its own: greedy or seeded, short or long."""
    sampled = {"temperature": 1.0, "top_k": 20, "seed": index} if index % 2 else {"temperature": 0.0}
    return {
        "prompt": prompt(1000 + index, draw.choice((40, 150, 400))),
        "max_tokens": draw.randrange(50, 400),
        "ignore_eos": True,
        "logprobs": 0,
        "stream": index % 3 != 0,
        "stream_options": {"include_usage": True} if index % 3 != 0 else None,
        **sampled,
    }


class Chaos:
    """Faults at random moments. One decode worker, at least, is always left alone."""

    def __init__(self, stage: Theatre, draw: random.Random, admin: str) -> None:
        self.stage = stage
        self.draw = draw
        self.admin = admin
        self.happened: Counter[str] = Counter()
        self.last_kill = 0.0
        self.busy: set[int] = set()
        self.failed: list[BaseException] = []
        """Why faults did not happen."""

    async def run(self) -> None:
        """Until cancelled."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                await asyncio.sleep(self.draw.uniform(0.5, 1.5))
                victim = self._victim()
                if victim is not None:
                    task = asyncio.create_task(self._happen(victim))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
        finally:
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _drain(self, actor: Actor) -> None:
        """An operator drains a worker, and changes his mind."""
        async with aiohttp.ClientSession(f"{self.admin}/workers/{actor.address}/") as session:
            async with session.post("drain") as response:
                self.happened[f"drain {actor.role.value}"] += response.status == 202
            await asyncio.sleep(self.draw.uniform(0.3, 4.0))
            while (await session.post("resume")).status != 202 and actor.process.popen.poll() is None:
                await asyncio.sleep(0.1)

    def _victim(self) -> int | None:
        free = [index for index in range(4) if index not in self.busy]
        if {2, 3} & self.busy:
            free = [index for index in free if index < 2]
        return self.draw.choice(free) if free else None

    async def _happen(self, index: int) -> None:
        """A fault of one worker, or its new start if UCX has aborted it."""
        self.busy.add(index)
        actor: Actor = self.stage.actors[index]
        try:
            if actor.process.popen.poll() is None:
                await self._befall(actor)
        except (AssertionError, OSError, aiohttp.ClientError) as error:
            # UCX may abort a worker at any moment, and a process that is gone cannot be frozen.
            if actor.process.popen.poll() is None:
                self.failed.append(error)
        try:
            if actor.process.popen.poll() is not None:
                self.failed += map(AssertionError, self.stage.unexpected_deaths())
                await self._restart(actor)
        finally:
            self.busy.discard(index)

    async def _befall(self, actor: Actor) -> None:
        name = self.draw.choice([*FAULTS, "drain"])
        if name == "drain":
            await self._drain(actor)
            return
        if name == "kill" and time.monotonic() - self.last_kill < KILL_SPACING_S:
            name = "freeze"
        fault = FAULTS[name]()
        if name == "kill":
            self.last_kill = time.monotonic()
        await asyncio.to_thread(fault.begin, actor)
        self.happened[f"{name} {actor.role.value}"] += 1
        await asyncio.sleep(self.draw.uniform(0.3, 4.0))
        await asyncio.to_thread(fault.end, actor)

    async def _restart(self, actor: Actor) -> None:
        actor.start()
        await asyncio.to_thread(actor.ready)
        await asyncio.sleep(1.0)


def _transports() -> list[Any]:
    return [pytest.param("nixl-tcp"), *(pytest.param(wire, marks=pytest.mark.chaos) for wire in ("nixl", "zmq"))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", _transports())
async def test_nothing_is_lost_and_nothing_is_wrong(
    transport: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.randrange(2**31)))
    number = int(os.environ.get("SOAK_REQUESTS", 60))
    print(f"SOAK_SEED={seed} SOAK_REQUESTS={number} over {transport}")
    draw = random.Random(seed)
    bodies = [body(draw, index) for index in range(number)]
    options = ("--kv-cache-bytes", str(NUM_BLOCKS * BLOCK_BYTES), "--log-level", "info")
    folder = checkpoint("llama")
    with theatre(folder, tmp_path, transport, options=options) as stage:
        pulse = ("--heartbeat-interval-s", "0.25", "--heartbeat-timeout-s", "1.5", "--patience-s", "30")
        with stage.workers().gateway(*pulse, "--admin-port", "0") as gateway:
            url = gateway.fact("url")
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
                expected = await _all(session, url, bodies)
                assert {outcome.error for outcome in expected} == {""}
                chaos = Chaos(stage, draw, gateway.fact("admin"))
                running = asyncio.create_task(chaos.run())
                began = time.monotonic()
                found = await _all(session, url, bodies)
                seconds = time.monotonic() - began
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await asyncio.to_thread(stage.revive)
            different = [index for index in range(number) if found[index] != expected[index]]
            wrong = [
                index for index in different if not is_near_tie(folder, bodies[index], expected[index], found[index])
            ]
            text = gateway.get("/metrics")
        num_near_ties = len(different) - len(wrong)
        print(f"{number} requests in {seconds:.0f} s; faults: {dict(chaos.happened)}; near ties: {num_near_ties}")
        print("\n".join(line for line in text.splitlines() if "failovers_total{" in line or "trials_total{" in line))
        assert not chaos.failed, chaos.failed
        assert sum(chaos.happened.values()) > seconds / 4, "hardly anything happened"
        assert not wrong, [
            (index, found[index].error, expected[index].tokens, found[index].tokens) for index in wrong[:3]
        ]
        stage.wait_for_baseline(30)
    if "SOAK_RECORD" in os.environ:
        figures = {
            "seconds": seconds,
            "faults": dict(chaos.happened),
            "near_ties": num_near_ties,
            "lost": sum(bool(outcome.error) for outcome in found),
            "wrong": len(wrong),
        }
        workload = {"requests": number, "transport": transport, "concurrency": CONCURRENCY}
        command = (
            f"SOAK_SEED={seed} SOAK_REQUESTS={number} python -m pytest -s tests/chaos/test_soak.py -k '[{transport}]'"
        )
        record(f"soak-{transport}", workload=workload, figures=figures, seed=seed, command=command)


async def _all(session: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]]) -> list[Outcome]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(request: dict[str, Any]) -> Outcome:
        async with places:
            return await ask(session, url, request)

    return list(await asyncio.gather(*(one(request) for request in bodies)))
