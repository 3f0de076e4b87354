"""`baton serve`: gateway and workers as separate processes on this machine, started, watched and ended together.

Nothing is restarted silently: when one process ends, the stack says which one and ends. With `--prefill 0` there are
decode workers alone, which compute the prompts too, and share the cores among themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contract.errors import OperatorError
from common.runtime.checkpoint import DEMO_FOLDER, resolve_model
from common.runtime.config import ServeSettings, load
from common.runtime.lifecycle import end_with_parent, exit_on_operator_error, run
from common.runtime.logs import configure_logging

log = logging.getLogger(__name__)

_MODULES = {"gateway": "gateway", "prefill": "prefill_worker", "decode": "decode_worker"}


@dataclass(eq=False)
class Child:
    """One process of the stack and what it has announced."""

    name: str
    process: asyncio.subprocess.Process
    facts: dict[str, object] = field(default_factory=dict)


class LocalStack:
    """The processes of one local stack."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._changed = asyncio.Condition()
        """Notified of every announcement of a process."""
        self._listeners: list[asyncio.Task[None]] = []
        self._screen = _Progress()

    async def start(self) -> str:
        """Start everything; the gateway's URL once the stack can serve. Raises `OperatorError`."""
        settings = self._settings
        _require_free_port(settings.host, settings.port)
        workers = [("prefill", i) for i in range(settings.prefill)] + [("decode", i) for i in range(settings.decode)]
        threads = max(1, (os.cpu_count() or 1) // len(workers))
        common = ["--model", settings.model, "--log-level", settings.log_level, "--log-format", settings.log_format]
        common += ["--heartbeat-interval-s", str(settings.heartbeat_interval_s)]
        common += ["--heartbeat-timeout-s", str(settings.heartbeat_timeout_s)]
        common += [] if settings.curve_keys is None else ["--curve-keys", settings.curve_keys]
        for role, index in workers:
            options = ["--num-threads", str(threads), "--kv-cache-bytes", str(settings.kv_cache_bytes)]
            options += ["--dtype", settings.dtype, "--transport", settings.transport, "--device", settings.device]
            options += ["--host", "127.0.0.1", "--control-port", "0", "--http-port", "0"]
            await self._spawn(f"{role}-{index}", role, [*common, *options])
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        for child in self._children:
            addresses[child.name.split("-")[0]].append(str(await self._fact(child, "control")))
        options = ["--host", settings.host, "--port", str(settings.port)]
        options += ["--prefill-workers", ",".join(addresses["prefill"])]
        options += ["--decode-workers", ",".join(addresses["decode"])]
        options += ["--admin-port", str(settings.admin_port), "--explain-routing"]
        await self._spawn("gateway", "gateway", [*common, *options])
        for child in self._children:
            await self._fact(child, "ready")
        self._screen.clear()
        return str(self._children[-1].facts["url"])

    @property
    def dashboard(self) -> str | None:
        """The URL of the gateway's page, once started; None where it has none."""
        url = self._children[-1].facts["dashboard"]
        return None if url is None else str(url)

    @property
    def probes(self) -> dict[str, str]:
        """`host:port` of each worker's `/metrics`, by its name, once started."""
        return {child.name: str(child.facts["http"]) for child in self._children if "http" in child.facts}

    async def watch(self) -> None:
        """Return when a process has ended by itself. Raises `OperatorError`, naming it."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        ended = ", ".join(f"{waits[task].name} with {_describe_exit(task.result())}" for task in done)
        raise OperatorError(f"ended unexpectedly: {ended}; the stack stops (see the log above)")

    async def stop(self) -> None:
        """End every process: the gateway, which lets open requests finish for a while, and then the workers."""
        await self._end([child for child in self._children if child.name == "gateway"])
        await self._end(self._children)
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)

    async def _end(self, children: Sequence[Child]) -> None:
        """SIGTERM, and SIGKILL to whoever outlives the grace period."""
        for child in children:
            if child.process.returncode is None:
                child.process.send_signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in children]
        if waits:
            await asyncio.wait(waits, timeout=self._settings.grace_s)
        for child in children:
            if child.process.returncode is None:
                log.error("%s did not end within %.0f s; killing it", child.name, self._settings.grace_s)
                child.process.kill()
                await child.process.wait()

    async def _spawn(self, name: str, role: str, options: Sequence[str]) -> None:
        reader, writer = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULES[role],
                *options,
                "--announce-fd",
                str(writer),
                "--end-with-parent",
                str(os.getpid()),
                pass_fds=(writer,),
                stdin=asyncio.subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the stack alone, which then ends its processes in order
            )
        finally:
            os.close(writer)
        child = Child(name, process)
        self._children.append(child)
        self._listeners.append(asyncio.create_task(self._listen(child, reader)))

    async def _listen(self, child: Child, fd: int) -> None:
        """Collect what a process announces, until it closes the pipe."""
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb"))
        try:
            while line := await stream.readline():
                async with self._changed:
                    child.facts.update(json.loads(line))
                    self._changed.notify_all()
                self._screen.show(self._children)
        finally:
            transport.close()
            async with self._changed:
                child.facts["ended"] = True
                self._changed.notify_all()

    async def _fact(self, child: Child, name: str) -> object:
        """Wait until a process has announced `name`. Raises `OperatorError` if any process ends before."""
        async with self._changed:
            await self._changed.wait_for(lambda: name in child.facts or any("ended" in c.facts for c in self._children))
        for each in self._children:
            if "ended" in each.facts:
                code = await each.process.wait()
                raise OperatorError(f"{each.name} ended with {_describe_exit(code)} while starting (see the log above)")
        return child.facts[name]


class _Progress:
    """One line on a terminal that shows how far each process has come; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()

    def show(self, children: Sequence[Child]) -> None:
        if self._on and not all(child.facts.get("ready") for child in children):
            states = "  ".join(f"{child.name} {_describe(child.facts)}" for child in children)
            print(f"\r\033[K{states[:118]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _describe(facts: dict[str, object]) -> str:
    if facts.get("ready"):
        return "ready"
    if "loaded" in facts:
        return f"loading {facts['loaded']}/{facts['total']}"
    return "starting"


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """This process's: `BATON_*` reaches the roles too, beneath the options given here. Idle OpenMP threads sleep."""
    return os.environ | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"), "PYTHONUNBUFFERED": "1"}


def _require_free_port(host: str, port: int) -> None:
    """Raise `OperatorError` at once, not after the models are loaded, when the API's port is taken."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OperatorError(f"cannot bind the API's port {host}:{port}: {error.strerror}") from error


def _curl(url: str, model: str) -> str:
    question = "Say hello."
    if resolve_model(model, weights=False) == DEMO_FOLDER:
        question = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"
    body = json.dumps({"messages": [{"role": "user", "content": question}], "temperature": 0})
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


async def serve(settings: ServeSettings, stop: asyncio.Event) -> None:
    """Start the stack and keep it until `stop`. Raises `OperatorError`."""
    stack = LocalStack(settings)
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(stack.start())
    watching: asyncio.Task[None] | None = None
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        url = starting.result()
        if stack.dashboard is not None:
            log.info("dashboard on %s", stack.dashboard)
        print(f"ready: {_curl(url, settings.model)}", flush=True)
        watching = asyncio.create_task(stack.watch())
        await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            watching.result()
    finally:
        for task in (starting, stopping, watching):
            if task is not None:
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OperatorError):
            await starting
        await stack.stop()


def main() -> None:
    """Entry point."""

    def body() -> None:
        settings = load(ServeSettings, "baton serve", sys.argv[1:])
        resolve_model(settings.model, weights=True)
        configure_logging(settings.log_level, "baton serve", settings.log_format)
        end_with_parent(settings.end_with_parent)
        run(lambda stop: serve(settings, stop))

    exit_on_operator_error(body)


if __name__ == "__main__":
    main()
