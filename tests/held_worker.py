"""A worker in the process of the tests, whose steps can be held."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from step_tokens import handles

from common.contract.ids import Incarnation, RequestKey, new_incarnation, new_request_id
from common.contract.kv_layout import Fingerprint
from common.contract.messages.gateway import Decode, Source
from common.contract.messages.session import Role
from common.contract.sampling import SamplingParams
from common.engine.batch import Decodes, Slice
from common.engine.engine import Engine
from common.engine.engine_thread import EngineThread
from common.engine.runner import ModelRunner, Submitted, load_runner
from common.runtime.channel import ControlServer
from common.runtime.checkpoint import config_hash, weights_hash
from common.runtime.clock import Pulse, monotonic
from common.runtime.config import DecodeSettings, PrefillSettings
from common.worker.shell import WorkerShell
from common.worker.start import region_of
from decode_worker.core import DecodeCore
from kv_transfer.transports import transport_maker
from prefill_worker.core import PrefillCore

PULSE = Pulse(interval_s=0.05, timeout_s=20)


class HeldRunner:
    """A real runner whose steps can be held."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._changed = threading.Condition()
        self._num_free_steps = math.inf
        self.in_step = threading.Event()
        """Set while a step is held."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def hold(self, *, after: int = 0) -> None:
        """Hold every step but for the next `after`: those that are held now are among them."""
        with self._changed:
            self._num_free_steps = after
            self._changed.notify_all()

    def release(self) -> None:
        """Let steps run again."""
        with self._changed:
            self._num_free_steps = math.inf
            self._changed.notify_all()

    def submit(self, slices: Sequence[Slice], decodes: Decodes | None = None) -> Submitted:
        with self._changed:
            if self._num_free_steps < 1:
                self.in_step.set()
                assert self._changed.wait_for(lambda: self._num_free_steps >= 1, 30)
                self.in_step.clear()
            self._num_free_steps -= 1
        return self._runner.submit(slices, decodes)


@asynccontextmanager
async def worker(role: Role, folder: Path, **settings: Any) -> AsyncIterator[tuple[Any, HeldRunner, str, str]]:
    """A worker in this process: (worker, its runner, its address, its incarnation)."""
    me = new_incarnation()
    held = HeldRunner(load_runner(folder, kv_cache_bytes=8 * 2**20, block_size=16))
    fingerprint = Fingerprint(config_hash=config_hash(folder), weights_hash=weights_hash(folder), layout=held.layout)
    engine = Engine(EngineThread("engine"), held, fingerprint)  # type: ignore[arg-type]
    cache = held.cache
    region = region_of(cache)
    server = ControlServer(me, monotonic, PULSE)
    port = server.bind("127.0.0.1", 0)
    common: dict[str, Any] = {"transport": "zmq", "heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 20, **settings}
    decided: PrefillSettings | DecodeSettings
    core: PrefillCore | DecodeCore
    if role is Role.PREFILL:
        decided = PrefillSettings(**common).on("cpu")
        core = PrefillCore(decided, me, engine, region)
    else:
        decided = DecodeSettings(**common).on("cpu")
        core = DecodeCore(decided, engine, region)
    maker = transport_maker(decided, region, me, cache.synchronize)
    made = WorkerShell(core, decided, me, server, engine, region, maker, monotonic)
    await made.start()
    loops = [asyncio.create_task(server.run(made)), asyncio.create_task(made.run())]
    try:
        yield made, held, f"127.0.0.1:{port}", me
        made.check_invariants()
    finally:
        held.release()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await made.close()
        await server.close()


def decode_from(request: dict[str, Any], address: str, incarnation: str) -> Decode:
    """For the offer that a Prefill of the same key makes there."""
    key = RequestKey(request["request"], request["attempt"])
    return Decode(
        **request, handles=handles(), source=Source(address=address, incarnation=Incarnation(incarnation)), offered=key
    )


def work(length: int, max_tokens: int) -> dict[str, Any]:
    return {
        "request": new_request_id(),
        "attempt": 1,
        "token_ids": tuple(range(10, 10 + length)),
        "prompt_len": length,
        "choices": (0,),
        "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        "budget_s": 60,
    }
