"""Workers without engines, for measurements of the gateway: a real control channel, and answers at fixed intervals.

A prefill worker answers each Prefill at once with its first token. A decode worker keeps its sequences in a batch and
sends a token of each sequence in each step (`benchmarks.scripted_batch`), as `decode_worker.core` does: one
StepTokens message for all of them, and Tokens for each sequence that begins or ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.scripted_batch import Batch, Script, Sequence
from common.contract.ids import Incarnation, RequestKey, new_incarnation
from common.contract.kv_layout import Fingerprint
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Ack, Decode, Prefill
from common.contract.messages.session import Heartbeat, Hello, Phase, Role, Welcome
from common.contract.messages.worker import Finished, Tokens
from common.runtime.channel import ControlServer
from common.runtime.clock import Pulse, monotonic
from decode_worker.step_tokens import StepReport


@dataclass(slots=True, eq=False)
class ScriptedWorker:
    """One worker (`common.runtime.channel.ServerHandler`)."""

    role: Role
    fingerprint: Fingerprint
    script: Script
    server: ControlServer
    batch: Batch[tuple[Incarnation, RequestKey]] = field(init=False)
    """Its sequences, by (gateway, key of the request)."""
    _report: StepReport = field(default_factory=StepReport)

    def __post_init__(self) -> None:
        self.batch = Batch(self.script, lambda: self._report.send_all(self.server.send))

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
            steps=len(self.batch.step_times),
            running=0,
            waiting=0,
            blocks_used=0,
            blocks_total=2**20,
            phase=Phase.SERVING,
        )

    def on_hello(self, peer: Incarnation, hello: Hello) -> tuple[RequestKey, ...]:
        """A session opens."""
        return tuple(key for gateway, key in self.batch.sequences if gateway == peer)

    def on_open(self, peer: Incarnation, role: Role) -> None:
        """Does nothing: the worker has no cached blocks to report."""

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A gateway has left."""
        for place in [each for each in self.batch.sequences if each[0] == peer]:
            del self.batch.sequences[place]

    def on_message(self, peer: Incarnation, message: Message) -> None:
        """A message from a gateway."""
        match message:
            case Prefill():
                self.server.send(peer, self._tokens(message, 0, 1))
                self.server.send(peer, Finished(request=message.request, attempt=message.attempt))
            case Decode() if self.script.short:
                self._send(peer, message, 0, message.sampling.max_tokens, True)
            case Decode():
                sequence = Sequence(message.token_ids, partial(self._send, peer, message))
                self.batch.sequences[peer, message.key] = sequence
            case Abort():
                self.batch.sequences.pop((peer, message.key), None)
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

    def _send(self, peer: Incarnation, work: Decode, start: int, end: int, last: bool) -> None:
        if start and not last:
            self._report.add(peer, work.handles[0], len(work.token_ids) + start, self.script.token(start))
            return
        tokens = self._tokens(work, start, end)
        if not last:
            self.server.send(peer, tokens)
            return
        self.server.send(peer, replace(tokens, finish_reason="length"))
        self.server.send(peer, Finished(request=work.request, attempt=work.attempt))


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
                    tasks.create_task(worker.batch.run_steps(number / len(self.decode)))
        finally:
            await asyncio.gather(*(worker.server.close() for worker in workers))

    @property
    def num_sent(self) -> int:
        """Tokens sent by steps."""
        return sum(worker.batch.num_sent for worker in self.decode)

    def sequences(self) -> list[tuple[Batch[Any], Sequence]]:
        """(batch, sequence) of every sequence in a batch."""
        return [(worker.batch, sequence) for worker in self.decode for sequence in worker.batch.sequences.values()]
