"""`baton serve`: gateway and workers as separate processes on this machine, started, watched and ended together.

A process that ends is started again with the same ports (`Restarts` says when), and the others serve meanwhile: to them
it is a worker, or a gateway, that has crashed. Nothing is restarted silently, nor while the stack starts. With
`--prefill 0` there are decode workers alone, which compute the prompts too, and share the cores among themselves.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.contract.errors import OperatorError
from common.runtime.checkpoint import DEMO_FOLDER, has_chat_template, is_hub_id, resolve_model
from common.runtime.clock import monotonic
from common.runtime.config import ENV_PREFIX, GatewaySettings, ServeSettings, load
from common.runtime.cores import cores_here
from common.runtime.gpus import VISIBLE, gpus_here, placed
from common.runtime.lifecycle import Announcer, command_of, end_with_parent, exit_on_operator_error, run
from common.runtime.logs import configure_logging
from common.runtime.malloc import with_large_pages
from common.runtime.restarts import MAX_RESTARTS, WINDOW_S, Restarts
from common.runtime.worker_packages import require_worker_packages

log = logging.getLogger(__name__)

_MODULES = {"gateway": "gateway", "prefill": "prefill_worker", "decode": "decode_worker"}
_OF_THE_STACK = (
    *("TENSOR_PARALLEL", "GPU_SHARE", "NUM_THREADS", "CONTROL_PORT", "HTTP_PORT"),
    *("PREFILL_WORKERS", "DECODE_WORKERS"),
)
"""Settings of the roles that the stack decides."""
_PATIENCE_S = "86400"
"""As long as a gateway can be told to wait for a worker."""


@dataclass(eq=False)
class Child:
    """One process of the stack, in all its lives, and what its present one has announced."""

    name: str
    role: str
    options: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    """What its environment has besides that of the stack."""
    restarts: Restarts = field(default_factory=Restarts)
    process: asyncio.subprocess.Process | None = None
    facts: dict[str, object] = field(default_factory=dict)
    listener: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return self.process is not None and self.process.returncode is None


class LocalStack:
    """The processes of one local stack."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []
        """One for each child. They end only by what ends the stack."""
        self._ports: list[socket.socket] = []
        self._changed = asyncio.Condition()
        """Notified of every announcement of a process."""
        self._serves = False
        """Whether all processes have been ready: before, none that ends is restarted."""
        self._screen = _Progress()

    async def start(self) -> str:
        """Start everything; the gateway's URL once the stack can serve. Raises `OperatorError`."""
        settings = self._settings
        port, admin_port = (self._reserve(*each) for each in _api_ports(settings))
        pools = {"prefill": settings.prefill, "decode": settings.decode, "latency": settings.latency}
        workers = [(pool, index) for pool, number in pools.items() for index in range(number)]
        width_of = {"prefill": settings.prefill_tp, "decode": settings.decode_tp, "latency": settings.decode_tp}
        threads = max(1, cores_here() // sum(width_of[pool] for pool, _ in workers))
        common = ["--model", settings.model, "--log-level", settings.log_level, "--log-format", settings.log_format]
        common += ["--heartbeat-interval-s", str(settings.heartbeat_interval_s)]
        common += ["--heartbeat-timeout-s", str(settings.heartbeat_timeout_s)]
        common += [] if settings.revision is None else ["--revision", settings.revision]
        common += [] if settings.curve_keys is None else ["--curve-keys", settings.curve_keys]
        addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
        places = placed([width_of[pool] for pool, _ in workers], gpus_here())
        if settings.device != "cpu" and any(place.gpus and place.share < 1 for place in places):
            log.warning(
                "workers share a GPU: without NVIDIA's MPS their kernels take turns; with --prefill 0 the decode "
                "workers compute the prompts too"
            )
        for (pool, index), place in zip(workers, places, strict=True):
            role = "decode" if pool == "latency" else pool
            control, http = (self._reserve("127.0.0.1", 0) for _ in range(2))
            addresses[role].append(f"127.0.0.1:{control}")
            options = ["--num-threads", str(threads), "--tensor-parallel", str(width_of[pool])]
            if settings.kv_cache_bytes is not None:
                options += ["--kv-cache-bytes", str(settings.kv_cache_bytes)]
            variables = {VISIBLE: ",".join(place.gpus)} if place.gpus else {}
            options += ["--gpu-share", str(place.share)]
            options += ["--dtype", settings.dtype, "--transport", settings.transport, "--device", settings.device]
            options += ["--host", "127.0.0.1", "--control-port", str(control), "--http-port", str(http)]
            # Said only of these: a variable may give the others a profile.
            options += ["--profile", "latency"] if pool == "latency" else []
            self._children.append(Child(f"{pool}-{index}", role, [*common, *options], variables))
        options = ["--host", settings.host, "--port", str(port)]
        options += ["--prefill-workers", ",".join(addresses["prefill"])]
        options += ["--decode-workers", ",".join(addresses["decode"])]
        options += ["--admin-port", str(admin_port)]
        options += [] if settings.chat_template is None else ["--chat-template", settings.chat_template]
        # Said either way: the gateway reads the same variable, and this process's options go before it.
        options += ["--explain-routing" if settings.explain_routing else "--no-explain-routing"]
        self._children.append(Child("gateway", "gateway", [*common, *options]))
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        await self._all_ready()
        self._serves = True
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
        """Wait until a process has ended that is not started again. Raises `OperatorError`, naming it."""
        done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_COMPLETED)
        for keeper in done:
            keeper.result()

    async def stop(self) -> None:
        """End every process: the gateway, which lets open requests finish for a while, and then the workers."""
        self._screen.clear()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self._end([child for child in self._children if child.name == "gateway"])
        await self._end(self._children)
        for child in self._children:
            await _dismiss(child.listener)
        for port in self._ports:
            port.close()

    async def _end(self, children: Sequence[Child]) -> None:
        """SIGTERM, and SIGKILL to whoever outlives the grace period."""
        running = [(child.name, child.process) for child in children if child.process is not None and child.runs]
        for _, process in running:
            process.send_signal(signal.SIGTERM)
        if running:
            await asyncio.wait(
                [asyncio.create_task(process.wait()) for _, process in running], timeout=self._settings.grace_s
            )
        for name, process in running:
            if process.returncode is None:
                log.error("%s did not end within %.0f s; killing it", name, self._settings.grace_s)
                process.kill()
                await process.wait()

    def _reserve(self, host: str, port: int, what: str = "") -> int:
        """Bind a port (0: any free one) without listening, for as long as the stack lives. Between two lives of its
        process the kernel gives it to nobody who asks for port 0, and to nobody who binds it without `SO_REUSEADDR`.
        Whoever binds with it, as that process does, may listen there. Raises `OperatorError` if it is taken."""
        self._ports.append(_bound(host, port, what))
        number: int = self._ports[-1].getsockname()[1]
        return number

    # --- one process -------------------------------------------------------------------------------------------------

    async def _keep(self, child: Child) -> None:
        """Start a process, and start it again when it has ended. Raises `OperatorError` when it shall not be."""
        while True:
            try:
                process = await self._spawn(child)
            except OSError as error:  # no memory, no descriptor, no process
                how = f"could not be started: {error.strerror}"
            else:
                how = f"ended with {_describe_exit(await process.wait())}"
            if not self._serves:
                raise OperatorError(f"{child.name} {how} while starting (see the log above)")
            if self._settings.restart == "never":
                raise OperatorError(f"{child.name} {how} unexpectedly; the stack stops (see the log above)")
            pause_s = child.restarts.ended(monotonic())
            if pause_s is None:
                raise OperatorError(
                    f"{child.name} {how} after {MAX_RESTARTS} restarts in {WINDOW_S:.0f} s of service; the "
                    "stack gives it up and stops (see the log above)"
                )
            log.error("%s %s; restart %d begins in %.1f s", child.name, how, child.restarts.num, pause_s)
            await asyncio.sleep(pause_s)

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        """Begin a life of a process."""
        await _dismiss(child.listener)
        child.facts.clear()
        reader, writer = os.pipe()
        try:
            child.process = await asyncio.create_subprocess_exec(
                *command_of(_MODULES[child.role], *child.options),
                "--announce-fd",
                str(writer),
                "--end-with-parent",
                str(os.getpid()),
                pass_fds=(writer,),
                stdin=asyncio.subprocess.DEVNULL,
                env=_environment(self._settings) | child.variables,
                start_new_session=True,  # Ctrl-C reaches the stack alone, which then ends its processes in order
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        child.listener = asyncio.create_task(self._listen(child, reader))
        return child.process

    async def _listen(self, child: Child, fd: int) -> None:
        """Collect what a process announces, until it closes the pipe."""
        began = monotonic()
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb"))
        try:
            while line := await stream.readline():
                facts = json.loads(line)
                async with self._changed:
                    child.facts.update(facts)
                    self._changed.notify_all()
                self._screen.show(self._children)
                if facts.get("ready"):
                    child.restarts.ready(monotonic())
                    if child.restarts.num > 0:
                        log.warning("%s serves again, %.1f s after it was started", child.name, monotonic() - began)
        finally:
            transport.close()

    async def _all_ready(self) -> None:
        """Wait until every process is. Raises `OperatorError` if one ends before."""

        async def ready() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: all(child.facts.get("ready") for child in self._children))

        waiting = asyncio.create_task(ready())
        try:
            done, _ = await asyncio.wait([waiting, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            waiting.cancel()


class _Progress:
    """One line on a terminal that shows how far each process has come; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr is not None and sys.stderr.isatty()  # None: started with it closed

    def show(self, children: Sequence[Child]) -> None:
        if self._on:
            states = "  ".join(f"{child.name} {_describe(child.facts)}" for child in children)
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 119  # 0: unknown
            # Only the row of the cursor can be cleared, so there is one. What others write begins at its left.
            print(f"\033[K{states[: width - 1]}", end="\r", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._on = False


def _describe(facts: dict[str, object]) -> str:
    if facts.get("ready"):
        return "ready"
    if "loaded" in facts:
        return f"loading {facts['loaded']}/{facts['total']}"
    return "starting"


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    named = -code in {each.value for each in signal.Signals}
    return f"signal {signal.Signals(-code).name if named else -code}"


def refuse_variables_of_the_stack(settings: ServeSettings) -> None:
    """Raise `OperatorError` for a variable that would reach no role, or promise what the stack does not wait for."""
    found = [ENV_PREFIX + name for name in _OF_THE_STACK if ENV_PREFIX + name in os.environ]
    if found:
        raise OperatorError(
            f"{', '.join(found)}: baton serve decides these itself (the ranks of a worker by --prefill-tp, --decode-tp)"
        )
    default_s = GatewaySettings.model_fields["shutdown_grace_s"].default
    with contextlib.suppress(ValueError):  # the gateway says so if it is no number
        promised_s = float(os.environ.get(f"{ENV_PREFIX}SHUTDOWN_GRACE_S", default_s))
        if promised_s >= settings.grace_s:
            raise OperatorError(f"--grace-s must be more than the {promised_s:g} s of {ENV_PREFIX}SHUTDOWN_GRACE_S")


def _environment(settings: ServeSettings) -> dict[str, str]:
    """This process's: `BATON_*` reaches the roles too, beneath the options given here. Requests whose worker comes back
    wait for it as long as their own time allows, unless a variable says otherwise. No worker has to start again."""
    defaults = {f"{ENV_PREFIX}PATIENCE_S": _PATIENCE_S} if settings.restart == "always" else {}
    return with_large_pages(defaults | os.environ | {"PYTHONUNBUFFERED": "1"})


def _api_ports(settings: ServeSettings) -> Iterable[tuple[str, int, str]]:
    """Host, port and name of what the gateway listens on."""
    yield settings.host, settings.port, "the API's port "
    yield "127.0.0.1", settings.admin_port, "the admin port "


def _bound(host: str, port: int, what: str) -> socket.socket:
    """A socket at this address, which does not listen. Raises `OperatorError` if the address is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OperatorError(f"cannot bind {what}{host}:{port}: {error.strerror}") from error
    return bound


async def _dismiss(listener: asyncio.Task[None] | None) -> None:
    """Hear no more of a life that is over; somebody whom that process has started may hold its pipe."""
    if listener is not None:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


def _curl(url: str, *, demo: bool, chats: bool) -> str:
    """A question to paste into a shell; as a conversation if the model `chats`: it has a template for them."""
    question = "Say hello."
    if demo:
        question = "The code of Mira is 4817. The code of Otto is 2093. What is the code of Mira?"
    path = "chat/completions" if chats else "completions"
    asked = {"messages": [{"role": "user", "content": question}]} if chats else {"prompt": question, "max_tokens": 32}
    body = json.dumps({**asked, "temperature": 0})
    options = " -k" if url.startswith("https:") else ""
    if f"{ENV_PREFIX}API_KEYS" in os.environ:
        options += ' -H "Authorization: Bearer $KEY"'
    return f"curl -sS{options} {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"


async def serve(settings: ServeSettings, stop: asyncio.Event, *, demo: bool, chats: bool) -> None:
    """Start the stack and keep it until `stop`. `demo`: it serves the bundled model. `chats`: that has a chat template.
    Raises `OperatorError`."""
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
        print(f"ready: {_curl(url, demo=demo, chats=chats)}", flush=True)
        Announcer(settings.announce_fd).say(url=url, ready=True)
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
        refuse_variables_of_the_stack(settings)
        require_worker_packages(settings.transport, settings.device)
        for each in _api_ports(settings):  # before gigabytes are downloaded
            _bound(*each).close()
        folder = resolve_model(settings.model, settings.revision, weights=True)
        chats = settings.chat_template is not None or has_chat_template(folder)
        if is_hub_id(settings.model):  # a process that is restarted must not look up what the hub has by then
            settings = settings.model_copy(update={"revision": folder.name})
        configure_logging(settings.log_level, "baton serve", settings.log_format)
        end_with_parent(settings.end_with_parent)
        run(lambda stop: serve(settings, stop, demo=folder == DEMO_FOLDER, chats=chats))

    exit_on_operator_error(body)


if __name__ == "__main__":
    main()
