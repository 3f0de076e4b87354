"""Runs a plan against an endpoint: open loop, or with a cap on requests in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.load.client import Client, Exchange
from benchmarks.load.encode import BodyEncoder, TurnBody, answer_message
from benchmarks.load.lag import loop_lag
from benchmarks.load.plan import Plan, PlannedConversation, PlannedTurn
from benchmarks.load.record import Outcome, Record
from common.runtime.clock import Clock


class Room:
    """Places for requests in flight, first come, first served; unlimited if `most` is None."""

    def __init__(self, most: int | None) -> None:
        self._places = None if most is None else asyncio.Semaphore(most)
        self._free_since: deque[float] = deque([0.0] * (most or 0))

    async def enter(self, wanted_s: float) -> float:
        """Wait for a place; return the time from which on the request could be sent: `wanted_s`, or the time at which
        the place became free."""
        if self._places is None:
            return wanted_s
        await self._places.acquire()
        return max(wanted_s, self._free_since.popleft())

    def leave(self, now: float) -> None:
        """Give the place back."""
        if self._places is not None:
            self._free_since.append(now)
            self._places.release()


@dataclass(slots=True)
class Recording:
    """The raw results of a run."""

    records: list[Record] = field(default_factory=list)
    loop_lag_s: list[float] = field(default_factory=list)
    interrupted: bool = False


class LoadRunner:
    """One run of one plan. `clock` gives seconds from the start of this run."""

    def __init__(
        self,
        client: Client,
        encoder: BodyEncoder,
        clock: Clock,
        *,
        concurrency: int | None = None,
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._client = client
        self._encoder = encoder
        self._clock = clock
        self._room = Room(concurrency)
        self._on_record = on_record
        self._recording = Recording()

    async def run(self, plan: Plan, stop: asyncio.Event) -> Recording:
        """Send all requests and wait until they have ended, or until `stop`, which ends those in flight. The records
        are sorted."""
        bodies = [self._encoder.encode(conversation.turns) for conversation in plan.conversations]
        start_s = self._clock()
        stopping = asyncio.create_task(stop.wait())
        sending = asyncio.create_task(self._send_all(plan.conversations, bodies, start_s))
        try:
            async with loop_lag(self._clock, self._recording.loop_lag_s):
                await asyncio.wait([stopping, sending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._recording.interrupted = not sending.done()
            stopping.cancel()
            sending.cancel()
            await asyncio.gather(stopping, sending, return_exceptions=True)
        if not self._recording.interrupted:
            sending.result()
        self._recording.records.sort(key=lambda record: (record.index, record.turn))
        return self._recording

    async def _send_all(
        self, conversations: Sequence[PlannedConversation], bodies: Sequence[list[TurnBody]], start_s: float
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for index, (conversation, turns) in enumerate(zip(conversations, bodies, strict=True)):
                planned_s = start_s + conversation.time_s
                await self._until(planned_s)
                group.create_task(self._converse(index, planned_s, conversation, turns))

    async def _converse(
        self, index: int, planned_s: float, conversation: PlannedConversation, bodies: Sequence[TurnBody]
    ) -> None:
        said: list[bytes] = []
        broken = False
        for number, (turn, body) in enumerate(zip(conversation.turns, bodies, strict=True)):
            if broken:
                self._abandon(index, number, turn, planned_s)
                continue
            if number:
                planned_s += turn.think_s
                await self._until(planned_s)
            exchange = await self._exchange(index, number, turn, planned_s, body.bytes(said))
            planned_s = exchange.ended_s
            broken = exchange.outcome is not Outcome.OK
            if number + 1 < len(bodies):
                said += [body.new, answer_message("".join(exchange.texts))]

    async def _until(self, moment_s: float) -> None:
        """Sleep until `moment_s`, never shorter: timers use the event loop's time, which may lag behind the clock."""
        while (wait_s := moment_s - self._clock()) > 0:
            await asyncio.sleep(wait_s)

    async def _exchange(self, index: int, number: int, turn: PlannedTurn, planned_s: float, body: bytes) -> Exchange:
        due_s = await self._room.enter(planned_s)
        exchange = Exchange()
        try:
            await self._client.send(body, exchange)
        finally:
            self._room.leave(exchange.ended_s)
            self._keep(index, number, turn, planned_s, due_s, exchange)
        return exchange

    def _abandon(self, index: int, number: int, turn: PlannedTurn, planned_s: float) -> None:
        never = Exchange()
        never.sent_s = never.ended_s = planned_s
        never.fail(Outcome.ABANDONED, "an earlier turn failed")
        self._keep(index, number, turn, planned_s, planned_s, never)

    def _keep(
        self, index: int, number: int, turn: PlannedTurn, planned_s: float, due_s: float, exchange: Exchange
    ) -> None:
        record = Record(
            index=index,
            turn=number,
            planned_s=planned_s,
            due_s=due_s,
            sent_s=exchange.sent_s,
            chunk_s=tuple(exchange.chunk_s),
            last_s=exchange.last_s,
            ended_s=exchange.ended_s,
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
            prompt_tokens=exchange.usage.prompt_tokens if exchange.usage else None,
            completion_tokens=exchange.usage.completion_tokens if exchange.usage else None,
            outcome=exchange.outcome or Outcome.INTERRUPTED,
            status=exchange.status,
            detail=exchange.detail,
        )
        self._recording.records.append(record)
        self._on_record(record)
