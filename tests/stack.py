"""Real worker processes for tests: started, watched for their announcements, checked for leftovers, ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq.asyncio
from checkpoints import VOCAB_SIZE
from fork_server import ForkedProcess, fork_server
from step_tokens import Reader

from common.contract.ids import new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.session import Hello, Role, Welcome
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.channel import ControlClient
from common.runtime.checkpoint import config_hash
from common.runtime.clock import Pulse, monotonic
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta, Generation
from gateway.workers.registry import Registry
from gateway.workers.worker_view import Given

START_TIMEOUT_S = 120.0
BASELINE_TIMEOUT_S = 30.0
WAIT_TIMEOUT_S = 30.0
MODEL = "tiny"
"""What the gateway of the main pool calls its checkpoint."""
BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
"""Of the tiny llama: layers, keys and values, heads, slots, head size, float32."""
KV_CACHE = ("--kv-cache-bytes", str(64 * 2**20))
"""Of a worker that is told nothing else."""
FEW = tuple((token, 100.0) for token in (40, 50, 60))
"""Tokens besides which none is sampled: every three of them have occurred, and what follows them is seldom the same."""
_ZERO_AT_REST = (
    "blocks_used",
    "blocks_limbo",
    "blocks_quarantined",
    "host_blocks_used",
    "waiting",
    "pulling",
    "computing",
    "running",
    "preempted",
    "reads",
    "leases",
    "parked",
    "readers",
    "requests",
    "unacknowledged",
)


def leftovers_in(state: Mapping[str, Any]) -> dict[str, int]:
    """The counts of a worker's `/ready` that are zero at rest and are not zero."""
    return {name: state[name] for name in _ZERO_AT_REST if state.get(name)}


def wait_until(condition: Callable[[], bool], otherwise: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Wait for `condition`; fails with what is the case `otherwise`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01 if deadline - time.monotonic() > timeout_s - 0.5 else 0.05)


async def until(condition: Callable[[], bool], otherwise: str, timeout_s: float = WAIT_TIMEOUT_S) -> None:
    """Wait for `condition`, asked outside the event loop, which goes on; fails with what is the case `otherwise`."""
    await asyncio.to_thread(wait_until, condition, otherwise, timeout_s)


class Process:
    """One process of Baton and what it has announced."""

    def __init__(
        self,
        module: str,
        options: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        namespace: str = "",
    ) -> None:
        """With variables of its own, and in the network namespace of that name."""
        reader, writer = os.pipe()
        server = fork_server("gateway" if module == "gateway" else "worker")
        supervision = ["--announce-fd", str(writer), "--end-with-parent", str(server.pid)]
        self.popen = ForkedProcess(server, module, [*options, *supervision], writer, env or {}, namespace)
        os.close(writer)
        self.killed = False
        self.facts: dict[str, Any] = {}
        self.log: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()
        self._logger = threading.Thread(target=self._collect_log, daemon=True)
        self._logger.start()

    def fact(self, name: str, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Wait until the process has announced `name`."""
        with self._changed:
            found = self._changed.wait_for(lambda: name in self.facts or "ended" in self.facts, timeout_s)
        announced = found and name in self.facts
        assert announced, f"no {name!r} from {self.popen.args!r}:\n" + "\n".join(self.log[-30:])
        return self.facts[name]

    def get(self, path: str) -> Any:
        """The JSON (or text, for /metrics) that a worker's probe port, or a gateway, answers, ready or not."""
        url = self.facts.get("url") or f"http://{self.fact('http')}"
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=10) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            text = error.read().decode()
        return text if path == "/metrics" else json.loads(text)

    def leftovers(self) -> dict[str, int]:
        """What a worker at rest should not hold."""
        return leftovers_in(self.get("/ready"))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over its labels, but for those that are given."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith((name + " ", name + "{"))]
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in lines if all(each in line for each in wanted)]
        assert lines, f"no metric {name} with {labels}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def signal(self) -> None:
        """Ask the process to end."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process without a word to anybody."""
        self.killed = True
        self.popen.kill()
        self.popen.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The process stands still."""
        self.popen.send_signal(signal.SIGSTOP)
        try:
            status = Path(f"/proc/{self.popen.pid}/stat")
            wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "the process goes on running")
            yield
        finally:
            self.popen.send_signal(signal.SIGCONT)

    def wait(self, timeout_s: float = 90.0) -> int:
        """Its exit code, once it has ended; dozens that end at once on two cores take their time."""
        try:
            code = self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise
        self._logger.join(5)
        return code

    def _listen(self, fd: int) -> None:
        with os.fdopen(fd) as lines:
            for line in lines:
                with self._changed:
                    self.facts.update(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self.facts["ended"] = True
            self._changed.notify_all()

    def _collect_log(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log.append(line.rstrip())


def run_forked(
    module: str, options: Sequence[str], variables: Mapping[str, str] | None = None, *, kind: str = "gateway"
) -> subprocess.CompletedProcess[str]:
    """Run a module to its end, forked by the server of a kind; a worker that refuses to start needs no torch. What it
    prints must fit into a pipe. After `START_TIMEOUT_S` it is killed."""
    reader, writer = os.pipe()
    process = ForkedProcess(fork_server(kind), module, options, writer, variables or {}, number=1)
    os.close(writer)
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    try:
        with process.stderr, os.fdopen(reader) as output:
            said, printed = process.stderr.read(), output.read()
    finally:
        killer.cancel()
    return subprocess.CompletedProcess(process.args, process.wait(60), printed, said)


def ranks_of(worker: int) -> list[int]:
    """The processes of the other ranks of a worker."""
    tasks = Path(f"/proc/{worker}/task").iterdir()
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid for pid in found if b"common.engine.ranks" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@dataclass
class Workers:
    """Prefill and decode workers of one model."""

    folder: Path
    prefill: list[Process] = field(default_factory=list)
    decode: list[Process] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        options: Sequence[str] = (),
        prefill_options: Sequence[str] = ("--chunk-size", "64"),
        decode_options: Sequence[str] | Sequence[Sequence[str]] = (),
        env: Mapping[str, str] | None = None,
    ) -> Workers:
        """Start the processes and wait until all are ready. Decode workers may each have options of their own."""
        common = ["--model", str(folder), "--num-threads", "1", "--block-size", str(BLOCK_SIZE)]
        common += [*KV_CACHE, *options]
        workers = cls(folder)
        workers.prefill = [Process("prefill_worker", [*common, *prefill_options], env) for _ in range(prefill)]
        shared = [option for option in decode_options if isinstance(option, str)]
        each = [options for options in decode_options if not isinstance(options, str)] or [shared] * decode
        assert len(each) == decode
        workers.decode = [Process("decode_worker", [*common, *mine], env) for mine in each]
        for process in workers.all:
            process.fact("ready")
        return workers

    @property
    def all(self) -> list[Process]:
        """Every process, but those that were killed."""
        return [process for process in (*self.prefill, *self.decode) if not process.killed]

    def wait_for_baseline(self, timeout_s: float = BASELINE_TIMEOUT_S) -> None:
        """Wait until no worker holds anything; fails, naming what is left."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = {p.facts["control"]: p.leftovers() for p in self.all}
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, f"left behind after {timeout_s} s: {left}"
            time.sleep(0.05)

    @contextmanager
    def gateway(self, *options: str) -> Iterator[Process]:
        """A gateway process in front of the workers, which must end cleanly, if it is not killed."""
        places = [",".join(p.facts["control"] for p in pool) for pool in (self.prefill, self.decode)]
        workers = ["--prefill-workers", places[0], "--decode-workers", places[1]]
        gateway = Process("gateway", ["--model", str(self.folder), "--port", "0", *workers, *options])
        try:
            gateway.fact("ready")
            yield gateway
        finally:
            gateway.signal()
            code = gateway.wait()
        assert code == (-signal.SIGKILL if gateway.killed else 0), gateway.log

    def signal(self) -> None:
        """Ask every process to end."""
        for process in self.all:
            process.signal()

    def wait(self) -> None:
        """Wait for every process; each must end cleanly."""
        codes = [process.wait() for process in self.all]
        logs = "\n".join(line for process in self.all for line in process.log[-15:])
        assert codes == [0] * len(codes), f"exit codes {codes}\n{logs}"

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the workers and its labels, but for those that are given."""
        return sum(process.metric(name, **labels) for process in self.all)

    def registry(self, registry_type: type[Registry] = Registry) -> Registry:
        """What a gateway knows of the workers when it starts."""
        return registry_type(
            tuple(p.facts["control"] for p in self.prefill),
            tuple(p.facts["control"] for p in self.decode),
            config_hash(self.folder),
        )

    @asynccontextmanager
    async def dispatcher(
        self, registry: Registry | None = None, *, timeout_s: float = 30.0, resume: bool = False, **options: Any
    ) -> AsyncIterator[Dispatcher]:
        """A gateway's dispatcher in this process, connected to the workers; they are lost after `timeout_s`. With
        `resume`, workers that drain are told to serve again."""
        registry = registry or self.registry()
        dispatcher = Dispatcher(new_incarnation(), registry, monotonic, Pulse(timeout_s=timeout_s), **options)
        running = asyncio.create_task(dispatcher.links.run())
        usable = asyncio.create_task(dispatcher.links.wait_usable())
        try:
            await asyncio.wait([running, usable], return_when=asyncio.FIRST_COMPLETED, timeout=30)
            if running.done():
                running.result()
            async with asyncio.timeout(15):
                while not all_usable(dispatcher):
                    for address in registry.workers if resume else ():
                        dispatcher.links.tell(address, drain=False)
                    await asyncio.sleep(0.1 if resume else 0.01)
            yield dispatcher
        finally:
            usable.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def all_usable(dispatcher: Dispatcher) -> bool:
    """True if every worker that the dispatcher knows can be given work."""
    workers: Any = dispatcher.ready().details()["workers"]
    return all(worker["usable"] for worker in workers)


class Gateway:
    """What a gateway hears from one worker."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.reader = Reader()
        self.changed = asyncio.Condition()

    def hello(self, link: ControlClient) -> Hello:
        return Hello(role=Role.GATEWAY, fingerprint=None, open_requests=())

    def on_open(self, link: ControlClient, welcome: Welcome) -> None:
        self.on_message(link, welcome)

    def on_message(self, link: ControlClient, message: Message) -> None:
        self.heard += self.reader.read(message)
        asyncio.ensure_future(self._notify())  # noqa: RUF006 (done before the test goes on: `until` waits for it)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, kind: type[Message], count: int = 1) -> Any:
        """Wait for the `count`-th message of a kind from now on."""
        start = len(self.heard)
        async with self.changed, asyncio.timeout(20):
            await self.changed.wait_for(lambda: sum(isinstance(m, kind) for m in self.heard[start:]) >= count)
        return [message for message in self.heard[start:] if isinstance(message, kind)][count - 1]


@asynccontextmanager
async def gateway_of(address: str) -> AsyncIterator[tuple[Gateway, ControlClient]]:
    """A session with one worker, in which the test says what it likes."""
    context = zmq.asyncio.Context()
    gateway = Gateway()
    link = ControlClient(context, address, new_incarnation(), gateway, monotonic, Pulse(timeout_s=30))  # type: ignore[arg-type]
    send = link.send

    def noted(message: Message) -> None:
        gateway.reader.sent(message)
        send(message)

    link.send = noted  # type: ignore[method-assign]
    running = asyncio.create_task(link.run())
    try:
        await gateway.until(Welcome)
        yield gateway, link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        context.destroy(linger=0)


BUSY = Given(number=2**62, tier=Tier.INTERACTIVE, num_tokens=2**30, num_sequences=2**30, num_blocks=2**30)
"""More than a worker can do, and which it never reports."""


class Busy(deque[Given]):
    """What a worker was given, with work that stays although its session opens again."""

    def clear(self) -> None:
        super().clear()
        self.append(BUSY)


@contextmanager
def avoided(registry: Registry, *processes: Process) -> Iterator[None]:
    """As if requests of others kept these workers busy: new ones go elsewhere."""
    lives = [registry.workers[process.facts["control"]].life for process in processes]
    for life in lives:
        registry.workers[life.address].unseen = Busy(registry.workers[life.address].unseen)
        registry.took(life.address, BUSY)
    try:
        yield
    finally:
        for life in lives:
            worker = registry.workers[life.address]
            worker.unseen = deque(given for given in worker.unseen if given is not BUSY)
            registry.left(life.address, life.incarnation)


@dataclass
class Answer:
    """What came of a generation: for each choice its tokens and why it ended; and every delta."""

    tokens: list[list[int]]
    reasons: list[str | None]
    deltas: list[Delta]


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens, none of them special: prompts of different seeds have no beginning in common."""
    draw = random.Random(seed)
    return [draw.randrange(8, VOCAB_SIZE) for _ in range(length)]


def generation(
    token_ids: Sequence[int], *, n: int = 1, budget_s: float = 120.0, cache_salt: str = "", **sampling: Any
) -> Generation:
    """A generation; greedy unless told otherwise."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | sampling))
    return Generation(
        token_ids=tuple(token_ids), num_choices=n, sampling=params, budget_s=budget_s, cache_salt=cache_salt
    )


async def answer(dispatcher: Dispatcher, work: Generation) -> Answer:
    """Run a generation to its end."""
    result = Answer([[] for _ in range(work.num_choices)], [None] * work.num_choices, [])
    async for delta in dispatcher.generate(work):
        assert isinstance(delta, Delta)
        result.tokens[delta.choice].extend(delta.token_ids)
        result.reasons[delta.choice] = delta.finish_reason
        result.deltas.append(delta)
    return result


def logprobs_of(each: Answer) -> list[float]:
    """The log probabilities of an answer's first choice: of each token, and of the most likely ones."""
    reports = [report for delta in each.deltas for report in delta.logprobs or () if delta.choice == 0]
    return [value for report in reports for value in (report.logprob, *(value for _, value in report.top))]
