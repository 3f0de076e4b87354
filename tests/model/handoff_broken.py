"""The protocol with one rule left out at a time, and the protocol with a look at the states that it goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handoff_scenarios import only
from handoff_world import Bounds, Parts

from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages import PromptTimes, Settle, Settled, Tokens
from common.engine.block_pool import BlockPool
from common.runtime.fence import AttemptFence
from kv_transfer import sink as pulls
from kv_transfer.events import Unpinned
from kv_transfer.lease import Lease
from kv_transfer.sink import Pull, PullEvent, PullState
from kv_transfer.source import LeaseTable

# --- what the leases and pulls of a right world go through ---------------------------------------------------------

LEASE_STEPS: set[tuple[str, str]] = set()
PULL_STEPS: set[tuple[str, str]] = set()


def state_of(lease: Lease) -> str:
    """Where a lease is, in the words of `kv_transfer.source`."""
    if lease.complete:
        return "complete"
    return "growing" if lease.num_ready else "open"


class WatchedTable(LeaseTable):
    """Notes every step of every lease."""

    def blocks_ready(self, request: Any, num_ready: int, checksums: Sequence[int] = (), *, now: float) -> list[Any]:
        lease = self._leases[request]
        before = state_of(lease)
        actions = super().blocks_ready(request, num_ready, checksums, now=now)
        _note(before, state_of(lease))
        return actions

    def complete(
        self, request: RequestId, first_tokens: Sequence[Tokens], times: PromptTimes | None = None
    ) -> list[Any]:
        lease = self._leases[request]
        before = state_of(lease)
        actions = super().complete(request, first_tokens, times)
        _note(before, state_of(lease))
        return actions

    def _end(self, lease: Lease, *, settled: bool = False) -> Any:
        _note(state_of(lease), "settled" if settled else "ended")
        return super()._end(lease, settled=settled)


def _note(before: str, after: str) -> None:
    if before != after:
        LEASE_STEPS.add((before, after))


class WatchedPull(Pull):
    """Notes every step of every pull."""

    def _enter(self, event: PullEvent) -> None:
        PULL_STEPS.add((self.state.value, event.value))
        super()._enter(event)


WATCHED = Parts(table=WatchedTable, pull=WatchedPull)

# --- one rule less -------------------------------------------------------------------------------------------------


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

    def _settle_if_read(self) -> list[pulls.Action]:
        actions = super()._settle_if_read()
        if self.state is not PullState.SETTLING:
            return actions
        assert self._lease is not None
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

    def abandon(self, cause: Any, message: str) -> list[pulls.Action]:
        actions = super().abandon(cause, message)
        under_read = self.quarantined
        return [pulls.Release(under_read), *actions] if actions and under_read else actions

    def read_done(self, start: int, error: str | None) -> list[pulls.Action]:
        gone = self.state is PullState.ABANDONED
        return [each for each in super().read_done(start, error) if not (gone and isinstance(each, pulls.Release))]


BROKEN: dict[str, tuple[Parts, Bounds, str]] = {
    "reuse before the epoch ends": (Parts(table=EarlyReuse), only("deadline"), "unverified KV"),
    "no settle": (Parts(pull=NoSettle), only("deadline"), "unverified KV"),
    "freed during a step": (Parts(pool=NoLimbo), only("abort"), "two owners: a step in flight"),
    "no attempt fence": (Parts(fence=NoFence), only("replay"), "the request never ends"),
    "settle not idempotent": (Parts(table=ForgetfulSettle), only("lose"), "2 attempts where 1 would have done"),
    "no quarantine": (Parts(pull=NoQuarantine), only("abort"), "two owners: a read under way"),
}
"""What is left out → the parts without it, bounds in which that shows, and what the search finds."""
