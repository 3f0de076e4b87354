"""The process around a worker: its two ports, the announcement to a supervisor, drain and exit.

The ports are bound before the model is loaded, so that an occupied port is reported at once and probes are always
answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from common.contract.errors import OperatorError, TransferError
from common.contract.ids import Incarnation, new_incarnation
from common.contract.messages.session import Phase
from common.runtime.channel import ControlServer, ServerHandler
from common.runtime.checkpoint import resolve_model
from common.runtime.clock import monotonic
from common.runtime.config import WorkerSettings, load
from common.runtime.curve import CurveKeys
from common.runtime.daemon_threads import DaemonThreads
from common.runtime.descriptors import allow_descriptors
from common.runtime.lifecycle import (
    Announcer,
    collector_paused,
    end_with_parent,
    exit_on_operator_error,
    freeze_startup_objects,
    leave,
    run,
)
from common.runtime.logs import configure_logging
from common.runtime.probes import Probed, ProbeServer
from common.runtime.ucx import guard_allocator, guard_memory, guard_route
from common.runtime.worker_packages import require_worker_packages

log = logging.getLogger(__name__)

_DESCRIPTORS = 2**16
"""Open files that a worker asks for: some nine for each worker that it pulls from."""
_DRAIN_LOOK_S = 0.02
"""Seconds between two checks whether a worker that leaves is drained."""


class Worker(ServerHandler, Probed, Protocol):
    """A role: its callbacks for clients, the state that it shows its operator, and the loops that it runs."""

    async def run(self) -> None:
        """Work until cancelled. Raises what the worker cannot go on after, such as an exception in a step."""

    async def close(self) -> None:
        """Release everything, after `run`."""

    def drain(self) -> None:
        """Accept no new work; finish the present work, hand it over or hand it back."""

    def give_up(self, why: str) -> None:
        """Fail the requests that are left."""

    @property
    def phase(self) -> Phase:
        """Whether the worker accepts work, and whether it holds any."""


class WorkerHost:
    """The identity and the ports of one worker process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.me: Incarnation = new_incarnation()
        self.server = ControlServer(self.me, monotonic, settings.pulse, CurveKeys.load(settings.curve_keys))
        self._settings = settings
        self._announcer = Announcer(settings.announce_fd)
        self._probes = ProbeServer()

    async def bind(self) -> None:
        """Bind both ports and announce them. Raises `OperatorError`."""
        host = self._settings.host
        control = f"{host}:{self.server.bind(host, self._settings.control_port)}"
        http = f"{host}:{await self._probes.bind(host, self._settings.http_port)}"
        self._announcer.say(control=control, http=http)
        log.info("control on %s, probes on %s", control, http)

    def progress(self, done: int, total: int) -> None:
        """Report to the supervisor how much of the model is loaded; called on the engine's thread."""
        self._announcer.say(loaded=done, total=total)

    async def serve(self, worker: Worker, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, and drain. If anything fails before that is done, the worker's clients see a
        crash, and suspect the requests that it had; after a Goodbye they would suspect none."""
        freeze_startup_objects()
        self._probes.probed = worker
        self._announcer.say(ready=True)
        log.info("ready")
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(self.server.run(worker)), tasks.create_task(worker.run())]
                await stop.wait()
                self._probes.stopping = True
                await self._drain(worker)
                log.info("stopping")
                for loop in loops:
                    loop.cancel()
        except BaseException:
            self._probes.stopping = True
            self.server.abandon()  # before the worker is closed: that may take half a minute, and nobody computes
            raise
        finally:
            await worker.close()

    async def _drain(self, worker: Worker) -> None:
        """Let the worker finish its requests, or hand them over, within `drain_grace_s`; then fail the others."""
        worker.drain()
        deadline = monotonic() + self._settings.drain_grace_s
        while worker.phase is not Phase.DRAINED and monotonic() < deadline:  # noqa: ASYNC110 (made of many counts)
            await asyncio.sleep(_DRAIN_LOOK_S)
        if worker.phase is not Phase.DRAINED:
            log.warning("not drained within %.1f s", self._settings.drain_grace_s)
            worker.give_up("the worker has left before the request was finished")

    async def close(self) -> None:
        """Close both ports."""
        await self.server.close()
        await self._probes.close()


_Settings = TypeVar("_Settings", bound=WorkerSettings)


def run_worker(
    settings_type: type[_Settings],
    program: str,
    make_worker: Callable[[_Settings, WorkerHost, Path], Awaitable[Worker]],
) -> None:
    """Run a worker process from start to exit.

    `make_worker(settings, host, model folder)` is called once the ports are bound and the model is found; it may raise
    `OperatorError` or `TransferError`. It is the first to import torch.
    """
    # OpenMP reads these when torch is loaded. Its threads would spin on cores for which other threads have work, and it
    # would bind the thread that loads it, and so all that this one starts, to the first core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        os.environ.pop(name, None)

    async def make(settings: _Settings, host: WorkerHost) -> Worker:
        # A download may never end, and a process that is stopped must not wait for it.
        threads = DaemonThreads(1, "find-model")
        finding = threads.submit(lambda: resolve_model(settings.model, settings.revision, weights=True))
        folder = await asyncio.wrap_future(finding)
        with collector_paused():
            return await make_worker(settings, host, folder)

    async def serve(settings: _Settings, stop: asyncio.Event) -> None:
        host = WorkerHost(settings)
        try:
            await host.bind()
            making = asyncio.ensure_future(make(settings, host))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([making, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if making.done():
                await host.serve(making.result(), stop)
            else:
                making.cancel()
        except TransferError as error:
            raise OperatorError(f"the {settings.transport} transport cannot start: {error}") from error
        finally:
            await host.close()

    def main() -> None:
        settings = load(settings_type, program, sys.argv[1:])
        configure_logging(settings.log_level, program, settings.log_format)
        end_with_parent(settings.end_with_parent)
        allow_descriptors(_DESCRIPTORS)
        require_worker_packages(settings.transport, settings.device)
        guard_allocator(settings.device)  # before the model is loaded; `auto` is known only then
        guard_memory(settings)
        guard_route(settings, settings.device)
        run(lambda stop: serve(settings, stop))

    try:
        exit_on_operator_error(main)
    except Exception:  # a bug, or a thread that hangs, for which the interpreter would wait
        log.exception("the worker ends")
        leave(1)
    leave()
