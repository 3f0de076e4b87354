"""A lease: the pin on the blocks that a source offers to a sink, and the messages about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestKey
from common.contract.messages.handoff import BlocksReady, OfferWithdrawn, PrefillDone, Settle, Settled
from common.contract.messages.worker import PromptTimes, Tokens
from common.runtime.state_tables import follow


class LeaseState(StrEnum):
    """The state of a lease."""

    OPEN = "open"
    """Its blocks are pinned, and none can be read yet."""
    GROWING = "growing"
    COMPLETE = "complete"
    """Every block can be read, and the first tokens are known."""
    ENDED = "ended"


class LeaseEvent(StrEnum):
    """What changes the state of a lease."""

    READY = "ready"
    """More blocks can be read."""
    COMPLETE = "complete"
    END = "end"
    """A valid settle, a withdrawal (abort, failure), expiry, reclaim, or a first token that ends the request."""


LEASE_TABLE: Mapping[LeaseState, Mapping[LeaseEvent, LeaseState]] = {
    LeaseState.OPEN: {LeaseEvent.READY: LeaseState.GROWING, LeaseEvent.END: LeaseState.ENDED},
    LeaseState.GROWING: {
        LeaseEvent.READY: LeaseState.GROWING,
        LeaseEvent.COMPLETE: LeaseState.COMPLETE,
        LeaseEvent.END: LeaseState.ENDED,
    },
    LeaseState.COMPLETE: {LeaseEvent.END: LeaseState.ENDED},
    LeaseState.ENDED: {},
}


@dataclass(slots=True)
class Lease:
    """The pin on the blocks of one request, or on a cached prefix."""

    key: RequestKey
    """The request, and the newest attempt that has attached."""
    opened_attempt: int
    lease: LeaseId
    epoch: int
    block_ids: tuple[int, ...]
    deadline: float
    """When the budget of the request ends."""
    unattached_since: float
    num_ready: int = 0
    """Blocks `[0, num_ready)` can be read."""
    checksums: list[int] | None = None
    first_tokens: tuple[Tokens, ...] | None = None
    """Set once the offer is complete; empty for a prefix."""
    times: PromptTimes | None = None
    """How long the first tokens took."""
    sink: Incarnation | None = None
    lent: bool = False
    """Whether this is a cached prefix, pinned for the one sink that asked for it. The lease then ends when that sink
    detaches or is lost."""
    state: LeaseState = LeaseState.OPEN
    story: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every block is ready and the first tokens are known."""
        return self.state is LeaseState.COMPLETE

    def enter(self, event: LeaseEvent, note: str) -> None:
        """Change the state. `note` is for the story."""
        self.state = follow(LEASE_TABLE, self.state, event, self.story)
        self.story.append(note)

    def offer(self, start: int) -> BlocksReady:
        """The message that offers the ready blocks from block `start` on."""
        return BlocksReady(
            request=self.key.request,
            attempt=self.key.attempt,
            lease=self.lease,
            epoch=self.epoch,
            start=start,
            block_ids=self.block_ids[start : self.num_ready],
            num_blocks=len(self.block_ids),
            checksums=None if self.checksums is None else tuple(self.checksums[start:]),
        )

    def done(self) -> PrefillDone:
        """The message that the offer is complete, with the first tokens."""
        assert self.first_tokens
        return PrefillDone(
            request=self.key.request,
            attempt=self.key.attempt,
            lease=self.lease,
            epoch=self.epoch,
            first_tokens=self.first_tokens,
            times=self.times,
        )

    def last_words(self) -> tuple[BlocksReady, PrefillDone]:
        """The messages to a sink that attaches after the first tokens have ended the request: an offer of no blocks,
        and these tokens."""
        return replace(self.offer(self.num_ready), start=0), self.done()


def verdict(asked: Settle, *, valid: bool) -> Settled:
    """The answer to a settle."""
    return Settled(request=asked.request, attempt=asked.attempt, lease=asked.lease, epoch=asked.epoch, valid=valid)


def withdrawn(key: RequestKey, cause: Cause, message: str) -> OfferWithdrawn:
    """The message that there is nothing (more) to read."""
    return OfferWithdrawn(request=key.request, attempt=key.attempt, cause=cause, message=message)
