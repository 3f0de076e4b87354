"""Workers without engines, for measurements of the gateway: a real control channel, and answers at fixed intervals.

A prefill worker answers each Prefill at once with its first token. A decode worker keeps its sequences in a batch and
sends a token of each sequence in each step, as `decode_worker.worker` does: one StepTokens message for all of them,
and Tokens for each sequence that begins or ends. It records the time of each step, so that the time of a token from
worker to client can be measured.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from common.contract.ids import Incarnation, RequestId, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint
from common.contract.messages import (
    Abort,
    Ack,
    Decode,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Phase,
    Prefill,
    Role,
    Tokens,
    Welcome,
)
from common.runtime.channel import ControlServer
from common.runtime.clock import Pulse, monotonic
from decode_worker.step_tokens import StepReport

MAX_STEPS_AT_ONCE = 64
"""Most overdue steps that a late worker takes in one turn."""
SHORTEST_PAUSE_S = 0.001
"""Shortest pause between two turns; with a shorter step interval, one turn takes several steps."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a decode worker's batch."""

    work: Decode
    gateway: Incarnation
    num_sent: int = 0
    """Output tokens sent, including the first one."""
    first_step: int = 0
    """Number of the step that brought its second token."""


@dataclass(slots=True)
class Script:
    """The behaviour of a pool's workers; it may change while they run."""

    token_ids: tuple[int, ...]
    """The tokens of every answer, repeated."""
    interval_s: float | None = None
    """Seconds between the steps of a worker; None: it takes no steps."""
    short: bool = False
    """If true, a request is answered completely as soon as it arrives."""
    last_step: bool = False
    """If true, every sequence ends with its next token."""

    def token(self, index: int) -> int:
        """The output token at this index."""
        return self.token_ids[index % len(self.token_ids)]


@dataclass(slots=True, eq=False)
class ScriptedWorker:
    """One worker (`common.runtime.channel.ServerHandler`)."""

    role: Role
    fingerprint: Fingerprint
    script: Script
    server: ControlServer
    batch: dict[RequestId, Sequence] = field(default_factory=dict)
    step_times: list[float] = field(default_factory=list)
    num_sent: int = 0
    """Tokens sent by steps."""
    _report: StepReport = field(default_factory=StepReport)

    def bind(self) -> str:
        """Bind to a free port; return the control address."""
        return f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}"

    def welcome(self) -> Welcome:
        """This worker's Welcome."""
        return Welcome(
            role=self.role,
            fingerprint=self.fingerprint,
            max_sequence_tokens=2**20,
            transport="none",
            transport_metadata=b"",
            open_requests=(),
        )

    def heartbeat(self, number: int) -> Heartbeat:
        """The present load."""
        return Heartbeat(
            number=number,
            steps=len(self.step_times),
            running=0,
            waiting=0,
            blocks_used=0,
            blocks_total=2**20,
            phase=Phase.SERVING,
        )

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens."""
        return tuple(sequence.work.key for sequence in self.batch.values() if sequence.gateway == peer)

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """Does nothing: the worker has no cached blocks to report."""

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A gateway has left."""
        self.batch = {request: each for request, each in self.batch.items() if each.gateway != peer}

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message from a gateway."""
        match message:
            case Prefill():
                self.server.send(peer, self._tokens(message, 0, 1))
                self.server.send(peer, Finished(request=message.request, attempt=message.attempt))
            case Decode() if self.script.short:
                num_tokens = message.sampling.max_tokens
                self.server.send(peer, replace(self._tokens(message, 0, num_tokens), finish_reason="length"))
                self.server.send(peer, Finished(request=message.request, attempt=message.attempt))
            case Decode():
                self.batch[message.request] = Sequence(message, peer)
            case Abort():
                self.batch.pop(message.request, None)
            case Ack():
                pass
            case _:
                raise AssertionError(f"a gateway that has lost nothing has no reason to send {message}")

    def _tokens(self, work: Prefill | Decode, start: int, end: int) -> Tokens:
        """Output tokens `[start, end)`."""
        return Tokens(
            request=work.request,
            attempt=work.attempt,
            choice=0,
            position=len(work.token_ids) + start,
            token_ids=tuple(self.script.token(index) for index in range(start, end)),
        )

    # --- a decode worker's steps ---------------------------------------------------------------------------------

    async def run_steps(self, phase: float) -> None:
        """Take a step each interval, until cancelled; the steps are shifted by `phase`, a share of the interval."""
        due: float | None = None
        while True:
            interval_s = self.script.interval_s
            if interval_s is None:
                due = None
                await asyncio.sleep(0.005)
                continue
            now = monotonic()
            if due is None:
                due = now + phase * interval_s
            for _ in range(MAX_STEPS_AT_ONCE):
                if due > now:
                    break
                self._step()
                due += interval_s
            await asyncio.sleep(max(SHORTEST_PAUSE_S, due - monotonic()))

    def _step(self) -> None:
        self.step_times.append(monotonic())
        self.num_sent += len(self.batch)
        for sequence in list(self.batch.values()):
            work, start, end = sequence.work, sequence.num_sent, max(2, sequence.num_sent + 1)
            if start and not self.script.last_step:
                position = len(work.token_ids) + start
                self._report.add(sequence.gateway, work.handles[0], position, self.script.token(start))
                sequence.num_sent = end
                continue
            tokens = self._tokens(work, start, end)
            if start == 0:
                sequence.first_step = len(self.step_times) - 1
            sequence.num_sent = end
            if self.script.last_step:
                del self.batch[sequence.work.request]
                tokens = replace(tokens, finish_reason="length")
            self.server.send(sequence.gateway, tokens)
            if tokens.finish_reason is not None:
                self.server.send(sequence.gateway, Finished(request=tokens.request, attempt=tokens.attempt))
        self._report.send_all(self.server.send)


class ScriptedPool:
    """A prefill worker and some decode workers, whose steps are spread evenly over an interval."""

    def __init__(self, fingerprint: Fingerprint, num_decode: int, script: Script, pulse: Pulse) -> None:
        def worker(role: Role) -> ScriptedWorker:
            return ScriptedWorker(role, fingerprint, script, ControlServer(new_incarnation(), monotonic, pulse))

        self.script = script
        self.prefill = worker(Role.PREFILL)
        self.decode = [worker(Role.DECODE) for _ in range(num_decode)]

    async def run(self) -> None:
        """Serve until cancelled."""
        workers = (self.prefill, *self.decode)
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in workers:
                    tasks.create_task(worker.server.run(worker))
                for number, worker in enumerate(self.decode):
                    tasks.create_task(worker.run_steps(number / len(self.decode)))
        finally:
            await asyncio.gather(*(worker.server.close() for worker in workers))

    @property
    def num_sent(self) -> int:
        """Tokens sent by steps."""
        return sum(worker.num_sent for worker in self.decode)

    def sequences(self) -> list[tuple[ScriptedWorker, Sequence]]:
        """(worker, sequence) of every sequence in a batch."""
        return [(worker, sequence) for worker in self.decode for sequence in worker.batch.values()]
