"""`baton gateway --processes N`: one gateway as several processes that share its port.

Each process is a gateway of its own, with its own links and view of the workers; the kernel distributes connections.
One parent process only watches: it forks them, announces that the gateway is ready when all are, and ends all when told
to, or when one of them ends. A process that is asked for `/metrics` or `/ready` answers for all: it asks the others
through sockets in a private folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.contract.errors import OperatorError
from common.runtime.lifecycle import Announcer, end_with_parent, exit_on_operator_error, run

log = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds within which a process must answer another one."""
_GRACE_S = 12.0
"""Seconds after the grace period of open requests before a process is killed. Requests that are left are ended with an
error and traces are sent in this time."""


@dataclass(frozen=True, slots=True)
class Share:
    """One process's place among those of its gateway."""

    index: int
    number: int
    listener: socket.socket
    """Socket bound to the port that all processes share."""
    folder: Path
    """Folder of the UNIX sockets between the processes."""
    announce_fd: int
    """File descriptor on which the parent process receives this process's announcement."""

    @property
    def middleware(self) -> Middleware:
        """Middleware that turns this process's `/metrics` and `/ready` into those of all processes."""

        @web.middleware
        async def for_all(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            if request.path not in ("/metrics", "/ready") or "own" in request.query:
                return response
            assert isinstance(response, web.Response)
            assert isinstance(response.body, bytes)
            try:
                bodies = await self._ask_all(request.path, response.body)
            except (OSError, TimeoutError, aiohttp.ClientError) as error:
                log.warning("a process of this gateway does not answer: %r", error)
                return web.json_response({"ready": False, "reason": "a process does not answer"}, status=503)
            if request.path == "/metrics":
                return web.Response(
                    body=merged_metrics(bodies), headers={"Content-Type": response.headers["Content-Type"]}
                )
            readiness = merged_readiness([json.loads(body) for body in bodies])
            return web.json_response(readiness, status=200 if readiness["ready"] else 503)

        return for_all

    @property
    def path(self) -> str:
        """Path of the UNIX socket on which the other processes ask this one."""
        return str(self.folder / str(self.index))

    async def _ask_all(self, path: str, own: bytes) -> list[bytes]:
        """The bodies of all processes' answers, in order."""

        async def ask(index: int) -> bytes:
            if index == self.index:
                return own
            connector = aiohttp.UnixConnector(str(self.folder / str(index)))
            async with aiohttp.ClientSession(connector=connector) as session:
                async with session.get(f"http://localhost{path}?own") as response:
                    return await response.read()

        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.gather(*(ask(index) for index in range(self.number)))


# --- one answer for all ------------------------------------------------------------------------------------------


def merged_metrics(expositions: Sequence[bytes]) -> bytes:
    """All samples of all processes, distinguished by the label `process`. The merge works on text, because parsing
    would take several times as long as the rest of a scrape."""
    families: dict[str, list[str]] = {}
    for index, exposition in enumerate(expositions):
        label = f'process="{index}"'
        samples: list[str] = []
        for line in exposition.decode().splitlines():
            if line.startswith("# HELP "):
                samples = families.setdefault(line.split(" ", 3)[2], [])
            if not line.startswith("#"):
                name, brace, rest = line.partition("{")
                if brace:
                    samples.append(f"{name}{{{label},{rest}")
                else:
                    name, _, value = line.partition(" ")
                    samples.append(f"{name}{{{label}}} {value}")
            elif line not in samples:
                samples.append(line)
    return "".join(f"{line}\n" for samples in families.values() for line in samples).encode()


def merged_readiness(answers: Sequence[dict[str, object]]) -> dict[str, object]:
    """Ready if all processes are, because a client may reach any of them. The reason is that of the first unready
    one."""
    worst = next((answer for answer in answers if not answer["ready"]), answers[0])
    details = {"processes": [answer["details"] for answer in answers]}
    return {"ready": worst["ready"], "reason": worst["reason"], "details": details}


# --- the process that watches ------------------------------------------------------------------------------------


def bind_shared(host: str, port: int, number: int) -> list[socket.socket]:
    """`number` sockets bound to one port that no other process listens on. Raises `OperatorError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as alone:  # SO_REUSEPORT alone would share another gateway's port
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        sockets = [socket.socket(family, kind, protocol) for _ in range(number)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(address)
    except OSError as error:
        raise OperatorError(f"cannot bind {host}:{port}: {error.strerror or error}") from error
    return sockets


def run_processes(
    host: str,
    port: int,
    number: int,
    serve: Callable[[Share, asyncio.Event], Coroutine[Any, Any, None]],
    announcer: Announcer,
    grace_s: float,
) -> None:
    """Run `serve(share, stop)` in `number` processes until SIGTERM or SIGINT, or until one of them ends.

    Raises `OperatorError` if the port is taken, and `SystemExit` with the code of a process that has ended by itself.
    """
    watcher = os.getpid()
    fork = multiprocessing.get_context("fork")

    def process(share: Share, shares: Sequence[Share]) -> None:
        for other in shares:
            if other is not share:
                other.listener.close()
        end_with_parent(watcher)
        exit_on_operator_error(lambda: run(lambda stop: serve(share, stop)))

    with TemporaryDirectory(prefix="baton-gateway-") as folder:
        pipes = [os.pipe() for _ in range(number)]
        listeners = bind_shared(host, port, number)
        shares = [
            Share(index, number, listener, Path(folder), pipe[1])
            for index, (listener, pipe) in enumerate(zip(listeners, pipes, strict=True))
        ]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until each has a handler of its own
        processes = [fork.Process(target=process, args=(share, shares)) for share in shares]
        for each in processes:
            each.start()
        for share in shares:  # a connection to this copy would never be accepted
            share.listener.close()
            os.close(share.announce_fd)
        codes: list[int] = []
        run(lambda stop: _watch(processes, [reader for reader, _ in pipes], announcer, stop, grace_s, codes))
    if codes:
        log.error("a process of this gateway has ended by itself, with exit code %d, and so the gateway ends", codes[0])
        sys.exit(max(1, *codes))


async def _watch(
    processes: Sequence[BaseProcess],
    readers: Sequence[int],
    announcer: Announcer,
    stop: asyncio.Event,
    grace_s: float,
    codes: list[int],
) -> None:
    """Wait until it is time to end, then end all processes. Appends the exit codes of those that had ended by
    themselves to `codes`."""
    loop = asyncio.get_running_loop()
    ended: list[BaseProcess] = []

    def on_end(process: BaseProcess) -> None:
        loop.remove_reader(process.sentinel)
        if not stop.is_set():  # a signal from the terminal reaches all processes
            ended.append(process)
        stop.set()

    def hang_up() -> None:
        """Pass SIGHUP on: an operator who has changed the keys signals only this process, whose id is known."""
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGHUP)

    for process in processes:
        loop.add_reader(process.sentinel, on_end, process)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    announcing = asyncio.create_task(_announce(readers, announcer))
    await stop.wait()
    for process in processes:
        loop.remove_reader(process.sentinel)
        process.terminate()
    end_s = loop.time() + grace_s + _GRACE_S
    for process in processes:
        await asyncio.to_thread(process.join, max(0.0, end_s - loop.time()))
        process.kill()
        process.join()
    codes += [process.exitcode or 0 for process in ended]
    await announcing


async def _announce(readers: Sequence[int], announcer: Announcer) -> None:
    """Announce that the gateway is ready, with the first process's facts, once every process is."""

    def read() -> list[dict[str, object]]:
        """Read what each process announces; those that have ended announce nothing."""
        facts = []
        for fd in readers:
            with os.fdopen(fd) as pipe:
                facts.append(json.loads(pipe.readline() or "{}"))
        return facts

    facts = await asyncio.to_thread(read)
    if all(each.get("ready") for each in facts):
        announcer.say(**facts[0])
        log.info("ready, with %d processes", len(facts))
