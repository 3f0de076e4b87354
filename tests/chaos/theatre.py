"""Two prefill and two decode workers on hosts of their own, that stop where a test says, and what may befall them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from stack import BASELINE_TIMEOUT_S, BLOCK_SIZE, Process, Workers, ranks_of, wait_until

from chaos.net import HERE, Host, hosts
from common.contract.messages.session import Role
from common.engine.ranks import EXIT_RANK_LOST
from common.runtime.clock import Pulse
from gateway.dispatch.dispatcher import Dispatcher
from gateway.workers.registry import Registry

_UCX_ABORT = re.compile(r"^\[[^\]]+:\d+ *:\d+(:\d+)?\]\s+\w+\.(c|inl):\d+\s+(Assertion |Fatal: )")

PULSE = ("--heartbeat-interval-s", "0.25", "--heartbeat-timeout-s", "3")
CHUNK = 64
Connection = socket.socket


def says_that_ucx_aborts(line: str) -> bool:
    """True for what UCX prints before it ends its process."""
    return _UCX_ABORT.search(line) is not None


@dataclass
class Actor:
    """One worker on a host of its own, started again under the same address when it has died."""

    role: Role
    host: Host
    options: Sequence[str]
    env: dict[str, str]
    socket: Path
    process: Process = field(init=False)
    partner: Actor = field(init=False)
    """The one of the other role that it works with in the tests."""
    control_port: int = 0
    closed: set[str] = field(default_factory=set)
    """Gates that a test has closed."""
    _stage: Connection | None = None

    def start(self) -> None:
        """Start, or start again, without waiting."""
        options = list(self.options)
        if self.control_port:
            options += ["--control-port", str(self.control_port)]
        self.socket.unlink(missing_ok=True)
        self._stage = None
        self.closed.clear()
        self.process = Process(
            "chaos.staged_worker",
            [*options, "--block-size", str(BLOCK_SIZE), "--host", self.host.address, "--expose-memory-over-tcp"],
            self.env | {"STAGE_SOCKET": str(self.socket), "PYTHONPATH": str(Path(__file__).parents[1])},
            namespace=self.host.name,
        )

    @property
    def address(self) -> str:
        """Its control address."""
        return str(self.process.fact("control"))

    def aborted_by_ucx(self) -> bool:
        """True if UCX has ended the process: it found a connection of its own broken, in a state that it does not
        expect (docs/log.md)."""
        if self.process.popen.poll() != -signal.SIGABRT:
            return False
        self.process.wait()  # until what it has written is read
        return any(map(says_that_ucx_aborts, self.process.log))

    def ready(self) -> None:
        """Wait until it is."""
        self.process.fact("ready")
        self.control_port = int(self.address.rpartition(":")[2])

    def command(self, **command: Any) -> Any:
        """Tell the stage something; its answer."""
        if self._stage is None:
            self._stage = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._stage.settimeout(30)
            self._stage.connect(str(self.socket))
        self._stage.sendall(json.dumps(command).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._stage.recv(4096)
        return json.loads(answer)

    def close(self, gate: str, skip: int = 0) -> None:
        """Whoever comes to this gate waits there, but for the next `skip`."""
        self.closed.add(gate)
        self.command(close=gate, skip=skip)

    def open(self, gate: str) -> None:
        """Let everybody go on."""
        self.closed.discard(gate)
        self.command(open=gate)

    def waiting(self, gate: str) -> int:
        """How many wait there."""
        return int(self.command(waiting=gate))

    def crc(self) -> list[int]:
        """CRC-32 of every block of its KV cache."""
        return list(self.command(crc=True))

    def state(self) -> dict[str, Any]:
        """What its `/ready` says, whatever the status."""
        state = self.process.get("/ready")
        assert isinstance(state, dict)
        return state


def staged(role: Role, folder: Path, scratch: Path, *options: str) -> Actor:
    """A worker on this host that stops at gates, on its way to being ready."""
    options = (role.value, "--model", str(folder), "--num-threads", "1", *options)
    actor = Actor(role, HERE, options, {}, scratch / "stage")
    actor.start()
    return actor


class Theatre:
    """The workers, P1 P2 D1 D2, and one prompt's reference answers."""

    def __init__(self, folder: Path, actors: Sequence[Actor], transport: str) -> None:
        self.folder = folder
        self.transport = transport
        self.actors = list(actors)
        self.befallen = False
        """Whether the fault of the test that runs has begun."""
        self.p1, self.p2, self.d1, self.d2 = self.actors
        for one, other in ((self.p1, self.d1), (self.p2, self.d2)):
            one.partner, other.partner = other, one

    def registry(self) -> Registry:
        """What a gateway is told of the workers."""
        return self.workers().registry()

    def workers(self) -> Workers:
        """The workers that are alive."""
        pools: dict[Role, list[Process]] = {Role.PREFILL: [], Role.DECODE: []}
        for actor in self.actors:
            pools[actor.role].append(actor.process)
        return Workers(self.folder, pools[Role.PREFILL], pools[Role.DECODE])

    def wait_for_baseline(self, timeout_s: float = BASELINE_TIMEOUT_S) -> None:
        """Wait until no worker holds anything. One that does not answer must have died of UCX, which may end it some
        time after a fault: it is started again."""
        while True:
            try:
                self.workers().wait_for_baseline(timeout_s)
                return
            except OSError:
                wait_until(
                    lambda: any(a.process.popen.poll() is not None for a in self.actors), "it lives, and is silent"
                )
                self.revive()  # fails if it has died of anything else

    def revive(self) -> None:
        """Mend every wire, open every gate, start again who has died. Not to be called on a thread: a process ends with
        the thread that started it."""
        for actor in self.actors:
            actor.host.heal()
            if actor.process.popen.poll() is None:
                for gate in actor.closed.copy():
                    actor.open(gate)
        dead = [actor for actor in self.actors if actor.process.popen.poll() is not None]
        unexpected = self.unexpected_deaths()
        for actor in dead:
            actor.start()
        for actor in dead:
            actor.ready()
        assert not unexpected, unexpected  # told once: the tests that follow have all their workers

    def collapsed(self) -> bool:
        """True if UCX has ended a worker and no fault has begun: what befell the worker before shows only now."""
        return not self.befallen and self.transport != "zmq" and any(actor.aborted_by_ucx() for actor in self.actors)

    def unexpected_deaths(self) -> list[tuple[str, int, list[str]]]:
        """(address, exit code, end of the log) of each worker that has died of neither a test nor UCX."""
        found = []
        for actor in self.actors:
            code = actor.process.popen.poll()
            if code is None or actor.process.killed:
                continue
            if self.transport != "zmq" and actor.aborted_by_ucx():
                print(f"{actor.role.value} at {actor.address} was aborted by UCX")
            else:
                found.append((actor.address, code, actor.process.log[-50:]))
        return found

    @asynccontextmanager
    async def dispatcher(self, **options: Any) -> AsyncIterator[tuple[Dispatcher, Registry]]:
        """A gateway's dispatcher in this process. A worker that dies late of what befell it before is started again. A
        worker that a failed test has left draining serves again. A worker that is silent by chance is lost after 10 s
        only: see `lose_if_silent`."""
        async with AsyncExitStack() as stack:
            for last_try in (False, False, True):
                self.revive()
                registry = self.registry()
                connected = self.workers().dispatcher(registry, timeout_s=1.5, resume=True, **options)
                try:
                    dispatcher = await stack.enter_async_context(connected)
                    break
                except TimeoutError:
                    if last_try:
                        raise
            for link in dispatcher.links._links.values():
                link._pulse = Pulse(timeout_s=10.0)
            yield dispatcher, registry


MAX_COLLAPSES = 2
"""Times that a test begins anew."""


def begun_anew_if_collapsed(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Run a test, which first revives the stage, again if the stage has collapsed before the test's fault."""

    @wraps(test)
    async def run(stage: Theatre, **given: Any) -> None:
        for _ in range(MAX_COLLAPSES):
            stage.befallen = False
            try:
                return await test(stage=stage, **given)
            except Exception:
                if not stage.collapsed():
                    raise
        return await test(stage=stage, **given)

    return run


@contextmanager
def theatre(
    folder: Path,
    scratch: Path,
    transport: str,
    *,
    options: Sequence[str] = (),
    poison: Mapping[Role, int] | None = None,
    poison_how: Literal["kill", "raise"] = "kill",
) -> Iterator[Theatre]:
    """Start the workers. `transport`: nixl (same host), nixl-tcp or zmq, or nixl-ranks: workers of two ranks. `poison`:
    the first token of sequences that end those of a role, by SIGKILL or by an exception in a step."""
    wide = ("--tensor-parallel", "2") if transport == "nixl-ranks" else ()
    wire = ("--transport", "zmq") if transport == "zmq" else ()
    env = {"UCX_TLS": "^sm,ib"} if transport == "nixl-tcp" else {}
    bounds = ("--read-bound-s", "5")
    common = ["--model", str(folder), "--num-threads", "1", "--checksums", *PULSE, *bounds, *wire, *wide, *options]
    with ExitStack() as stack:
        actors = []
        for index, host in enumerate(stack.enter_context(hosts(4))):
            role = Role.PREFILL if index < 2 else Role.DECODE
            own = ["--chunk-size", str(CHUNK), "--token-budget", str(CHUNK)] if role is Role.PREFILL else []
            bad = {}
            if poison and role in poison:
                bad = {"STAGE_POISON": str(poison[role]), "STAGE_POISON_HOW": poison_how}
            actor = Actor(role, host, [*common, *own], env | bad, scratch / f"stage{index}")
            actor.options = [role.value, *actor.options]
            actors.append(actor)
        try:
            for actor in actors:
                actor.start()
            for actor in actors:
                actor.ready()
            made = Theatre(folder, actors, transport)
            yield made
            if not poison:
                unexpected = made.unexpected_deaths()
                assert not unexpected, unexpected
        finally:
            for actor in actors:
                actor.host.heal()
                if actor.process.popen.poll() is None:
                    actor.process.popen.send_signal(signal.SIGCONT)
                    actor.process.popen.kill()
                    actor.process.popen.wait()


class Fault:
    """Something that happens to a worker, and how one can tell that it has."""

    name = ""
    silences = True
    """Whether gateways lose the worker."""

    def begin(self, actor: Actor) -> None:
        """Let it happen; fails if it did not."""

    def end(self, actor: Actor) -> None:
        """Undo it, if that is possible."""


class Kill(Fault):
    """kill -9."""

    name = "kill"

    def begin(self, actor: Actor) -> None:
        actor.process.kill()
        assert actor.process.popen.returncode == -signal.SIGKILL


class Freeze(Fault):
    """SIGSTOP, and later SIGCONT, with stale state."""

    name = "freeze"

    def begin(self, actor: Actor) -> None:
        actor.process.popen.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{actor.process.popen.pid}/stat")
        deadline = time.monotonic() + 30
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "the process goes on running"

    def end(self, actor: Actor) -> None:
        actor.process.popen.send_signal(signal.SIGCONT)


class LoseRank(Fault):
    """A process of the worker's other ranks is lost, which ends the worker."""

    number: signal.Signals

    def begin(self, actor: Actor) -> None:
        [rank] = ranks_of(actor.process.popen.pid)
        actor.process.killed = True
        os.kill(rank, self.number)

    def end(self, actor: Actor) -> None:
        assert actor.process.popen.wait(30) == EXIT_RANK_LOST


class KillRank(LoseRank):
    """kill -9."""

    name = "kill-rank"
    number = signal.SIGKILL


class FreezeRank(LoseRank):
    """SIGSTOP."""

    name = "freeze-rank"
    number = signal.SIGSTOP


class Cut(Fault):
    """Every packet, in both directions, is dropped."""

    name = "cut"

    def begin(self, actor: Actor) -> None:
        actor.host.cut()

    def end(self, actor: Actor) -> None:
        actor.host.heal()


class CutOut(Cut):
    """What the worker sends to gateways is dropped."""

    name = "cut-out"

    def begin(self, actor: Actor) -> None:
        actor.host.cut_out()


class CutIn(Cut):
    """What gateways send to the worker is dropped."""

    name = "cut-in"

    def begin(self, actor: Actor) -> None:
        actor.host.cut_in()


class Assignment(Cut):
    """What the worker sends to its partner is dropped; gateways reach both."""

    name = "part"
    silences = False

    def begin(self, actor: Actor) -> None:
        there = actor.partner.host
        assert actor.host.reaches(there)
        actor.host.cut_from(there)
        assert not actor.host.reaches(there), "packets go there still"


class Reset(Fault):
    """Every TCP connection of the worker breaks."""

    name = "reset"
    silences = False

    def begin(self, actor: Actor) -> None:
        assert actor.host.reset() > 0, "there was no connection to break"


class Slow(Fault):
    """The process runs a tenth of the time."""

    name = "slow"
    silences = False

    def begin(self, actor: Actor) -> None:
        self._over = threading.Event()
        self.num_stops = 0
        self._thread = threading.Thread(target=self._slow_down, args=(actor.process.popen.pid,), daemon=True)
        self._thread.start()
        wait_until(lambda: self.num_stops > 3, "it is not slowed down")

    def end(self, actor: Actor) -> None:
        self._over.set()
        self._thread.join()

    def _slow_down(self, pid: int) -> None:
        while not self._over.is_set():
            os.kill(pid, signal.SIGSTOP)
            self._over.wait(0.09)
            os.kill(pid, signal.SIGCONT)
            self.num_stops += 1
            self._over.wait(0.01)


FAULTS: dict[str, Callable[[], Fault]] = {
    fault.name: fault for fault in (Kill, Freeze, Cut, CutOut, CutIn, Assignment, Reset, Slow)
}
RANK_FAULTS: dict[str, Callable[[], Fault]] = {fault.name: fault for fault in (KillRank, FreezeRank)}
"""Those of workers of two ranks."""


def lose_if_silent(dispatcher: Dispatcher, actor: Actor) -> None:
    """From now on a gateway in this process loses this worker after as long a silence as gateways do by default."""
    link = dispatcher.links._links[actor.address]
    link._pulse = Pulse()
    link._greets.set()  # it sleeps until the longer silence would be over
