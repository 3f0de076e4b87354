"""The protocol with one rule left out at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handoff_bounds import Bounds, Parts
from handoff_scenarios import TO_DECODE, TWO, only

from common.contract.ids import Incarnation, LeaseId, RequestKey
from common.contract.messages.handoff import AttachSequence, Settle, Settled
from common.engine.block_pool import BlockPool
from common.runtime.fence import AttemptFence
from decode_worker.migration import Departures
from decode_worker.request import DecodeChoice
from decode_worker.sequences import Sequences
from kv_transfer.events import Released, Unpinned
from kv_transfer.lease import Lease
from kv_transfer.lease_table import LeaseTable
from kv_transfer.pull import Pull, PullAction, PullState


class EarlyReuse(LeaseTable):
    """Blocks are free as soon as their time is up, but the epoch ends only later: the lease still settles."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.freed: set[LeaseId] = set()

    def expire(self, now: float) -> list[Any]:
        unpinned = []
        for lease in self._leases.values():
            if self._expiry(lease) <= now and lease.lease not in self.freed:
                self.freed.add(lease.lease)
                unpinned.append(Unpinned(RequestKey(lease.key.request, lease.opened_attempt), lease.block_ids, False))
        return unpinned

    def _end(self, lease: Lease, *, settled: bool = False) -> Any:
        end = super()._end(lease, settled=settled)
        if lease.lease not in self.freed:
            return end
        assert isinstance(end, Unpinned)
        return Unpinned(end.key, (), settled)


class NoSettle(Pull):
    """Admits what it has read as soon as it has read it."""

    def _settle_if_read(self) -> list[PullAction]:
        actions = super()._settle_if_read()
        if self.state is not PullState.SETTLING:
            return actions
        assert self._lease is not None
        assert self.times is not None
        self.times.read_at = 0.0
        lease, epoch = self._lease
        request, attempt = self.key
        valid = Settled(request=request, attempt=attempt, lease=lease, epoch=epoch, valid=True)
        return [*actions, *self.settled(valid)]


class NoLimbo(BlockPool):
    """What is released is free at once, whatever step still names it."""

    def release(self, blocks: Sequence[int]) -> None:
        in_flight, self._in_flight = self._in_flight, {}
        super().release(blocks)
        self._in_flight = in_flight


class NoFence(AttemptFence):
    """Lets every attempt in, late and repeated ones too."""

    def admits(self, key: RequestKey) -> bool:
        return True


class ForgetfulSettle(LeaseTable):
    """Says `valid` once: who has not heard it is told `invalid`."""

    def settle(self, message: Settle, sink: Incarnation) -> list[Any]:
        actions = super().settle(message, sink)
        self._settled.clear()
        return actions


class NoQuarantine(Pull):
    """Gives up all of its blocks at once, those under an unfinished read too."""

    def abandon(self, cause: Any, message: str) -> list[PullAction]:
        actions = super().abandon(cause, message)
        under_read = self.quarantined
        return [Released(under_read), *actions] if actions and under_read else actions

    def read_done(self, start: int, error: str | None) -> list[PullAction]:
        gone = self.state is PullState.ABANDONED
        return [each for each in super().read_done(start, error) if not (gone and isinstance(each, Released))]


class EarlyCut(Departures):
    """Cuts a sequence at once, even while a step computes it."""

    def attach(self, sink: Incarnation, message: AttachSequence, choice: DecodeChoice | None) -> None:
        super().attach(sink, message, choice)
        self.cut()


class NoCut(Sequences):
    """Offers the blocks of a sequence, and goes on generating it."""

    def leave(self, choice: DecodeChoice) -> list[int]:
        blocks = list(choice.sequence.block_table)
        self._pool.share(blocks)
        return blocks


BROKEN: dict[str, tuple[Parts, Bounds, str]] = {
    "reuse before the epoch ends": (Parts(table=EarlyReuse), only("deadline"), "unverified KV"),
    "no settle": (Parts(pull=NoSettle), only("deadline"), "unverified KV"),
    "freed during a step": (Parts(pool=NoLimbo), only("abort"), "two owners: a step in flight"),
    "no attempt fence": (Parts(fence=NoFence), only("replay", links=TO_DECODE), "the request never ends"),
    "settle not idempotent": (Parts(table=ForgetfulSettle), only("lose"), "2 attempts where 1 would have done"),
    "cut during a step": (
        Parts(departures=EarlyCut),
        only("move", **TWO),
        "two owners: a step in flight names a block",
    ),
    "no cut": (Parts(sequences=NoCut), only("move", **TWO), "two owners: a sequence goes on after its cut"),
    "no quarantine": (Parts(pull=NoQuarantine), only("abort"), "two owners: a read under way"),
}
"""What is left out → the parts without it, bounds in which that shows, and what the search finds."""
