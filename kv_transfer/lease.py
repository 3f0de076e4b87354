"""A lease: the pin on the blocks that a source offers to a sink, and what the sink is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestKey
from common.contract.messages import BlocksReady, OfferWithdrawn, PrefillDone, PromptTimes, Settle, Settled, Tokens


@dataclass(slots=True)
class Lease:
    """One pin on the blocks of one request, or on a cached prefix."""

    key: RequestKey
    """The request, and the newest attempt that has attached."""
    opened_attempt: int
    lease: LeaseId
    epoch: int
    block_ids: tuple[int, ...]
    deadline: float
    """When the request's own budget ends."""
    unattached_since: float
    num_ready: int = 0
    """Blocks `[0, num_ready)` can be read."""
    checksums: list[int] | None = None
    first_tokens: tuple[Tokens, ...] | None = None
    """Set once the offer is complete; empty for a prefix."""
    times: PromptTimes | None = None
    """What the first tokens took."""
    sink: Incarnation | None = None
    lent: bool = False
    """A cached prefix, pinned for the one sink that has asked: it ends with that sink's interest."""
    story: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every block is ready and the first tokens are known."""
        return self.first_tokens is not None

    def offer(self, start: int) -> BlocksReady:
        """What can be read, from block `start` on."""
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
        """That the offer is complete, with the first tokens."""
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
        """To who attaches when the first tokens have ended everything: an offer of nothing, and these tokens."""
        return replace(self.offer(self.num_ready), start=0), self.done()


def verdict(asked: Settle, *, valid: bool) -> Settled:
    """The answer to a settle."""
    return Settled(request=asked.request, attempt=asked.attempt, lease=asked.lease, epoch=asked.epoch, valid=valid)


def withdrawn(key: RequestKey, cause: Cause, message: str) -> OfferWithdrawn:
    """That there is nothing (more) to read."""
    return OfferWithdrawn(request=key.request, attempt=key.attempt, cause=cause, message=message)
