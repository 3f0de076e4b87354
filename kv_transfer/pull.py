"""The sink's half of a pull of blocks, from the attach to the settle.

The life cycle of a pull is `PULL_TABLE`. It ends as `settled` (its blocks are the sequence's) or `abandoned` (its
blocks are free, or in quarantine). `offered`: the source has allocated every block, so the sink may reserve its own.
`pulling`: blocks are reserved, and read as they become ready. `settling`: every read has ended, and the source is asked
whether the lease was held until now.

Blocks that the sink already holds, from its own prefix cache, are not read. Everything else is as above: the first
tokens, and the end of the source's lease, depend on the settle even when nothing is left to read.

A *prefix pull* names blocks by their hashes, not a request that is being computed. The source offers the leading ones
that it has, all at once, and no first tokens.

A block under an unfinished read belongs to nobody. When a pull is abandoned, such a block is released only when its
read has ended (done or failed: `transport.ReadState`), never before. When the last read has ended, the source is told
(Detach); until then the source gives these reads progress.

Pure state: events in, actions out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.contract.errors import Cause
from common.contract.ids import LeaseId
from common.contract.messages.fields import MAX_PREFIX_BLOCKS, Message
from common.contract.messages.gateway import Source
from common.contract.messages.handoff import (
    Attach,
    AttachPrefix,
    AttachSequence,
    BlocksReady,
    Detach,
    OfferWithdrawn,
    PrefillDone,
    Settle,
    Settled,
)
from common.contract.messages.worker import PromptTimes, Tokens
from common.runtime.state_tables import follow
from kv_transfer.events import Pulled, PullFailed, PullOffered, Released, SendToSource
from kv_transfer.pull_times import PullTimes

MAX_GAPS = 64
"""Times that blocks may be missing of an offer that does not grow: at most as many messages as are on their way."""
_OF_THE_SOURCE = {
    Cause.DRAINING: Cause.LEASE_LOST,
    Cause.TOO_LARGE: Cause.LEASE_LOST,
    Cause.CAPACITY: Cause.WORKER_LOST,
    Cause.INTERNAL: Cause.WORKER_LOST,
}
"""Causes that concern the source alone, and what a sink gives instead: as its own they would be held against it. What
the source cannot do is held against the source."""


class PullState(StrEnum):
    """The state of a pull."""

    ATTACHING = "attaching"
    OFFERED = "offered"
    PULLING = "pulling"
    SETTLING = "settling"
    SETTLED = "settled"
    ABANDONED = "abandoned"


class PullEvent(StrEnum):
    """What changes the state of a pull."""

    OFFER = "offer"
    """The source has allocated every block."""
    RESERVE = "reserve"
    REVOKE = "revoke"
    READ = "read"
    """Every read has ended, and the first tokens are known."""
    VALID = "valid"
    """The source confirms that the lease was held until now."""
    ABANDON = "abandon"


PULL_TABLE: Mapping[PullState, Mapping[PullEvent, PullState]] = {
    PullState.ATTACHING: {PullEvent.OFFER: PullState.OFFERED, PullEvent.ABANDON: PullState.ABANDONED},
    PullState.OFFERED: {PullEvent.RESERVE: PullState.PULLING, PullEvent.ABANDON: PullState.ABANDONED},
    PullState.PULLING: {
        PullEvent.REVOKE: PullState.OFFERED,
        PullEvent.READ: PullState.SETTLING,
        PullEvent.ABANDON: PullState.ABANDONED,
    },
    PullState.SETTLING: {PullEvent.VALID: PullState.SETTLED, PullEvent.ABANDON: PullState.ABANDONED},
    PullState.SETTLED: {},
    PullState.ABANDONED: {},
}


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Read blocks `[start, start + len(source_blocks))` of the sequence; report `read_done(start, …)`."""

    start: int
    source_blocks: tuple[int, ...]
    sink_blocks: tuple[int, ...]
    checksums: tuple[int, ...] | None


PullAction = SendToSource | ReadBlocks | PullOffered | Pulled | Released | PullFailed


class Pull:
    """The pull of blocks from a source, which `wanted` asks for.

    `Attach` asks for the request's own prompt, `AttachSequence` for a running sequence. With `AttachPrefix` it is a
    prefix pull, of the leading ones of these blocks that the source has.
    """

    def __init__(self, source: Source, wanted: Attach | AttachPrefix | AttachSequence) -> None:
        self._wanted = wanted
        self.key = wanted.key
        self.source = source
        names = self.block_hashes = wanted.block_hashes if isinstance(wanted, AttachPrefix) else None
        assert names is None or 1 <= len(names) <= MAX_PREFIX_BLOCKS, "a prefix that no message names"
        self.state = PullState.ATTACHING
        self.num_blocks: int | None = None
        """Blocks of the whole offer, once it is known."""
        self.story: list[str] = []
        self._lease: tuple[LeaseId, int] | None = None
        self._offered: list[int] = []
        self._checksums: list[int] = []
        self._with_checksums = False
        self._sink_blocks: tuple[int, ...] = ()
        self._num_held = 0
        self._num_requested = 0
        """Blocks `[0, num_requested)` were held, or their reads have begun."""
        self._open_reads: dict[int, int] = {}
        """Reads under way: first block of the sequence → one past the last."""
        self._first_tokens: tuple[Tokens, ...] | None = self._no_first_tokens()
        """The first tokens; None until they are known."""
        self.ended_with: tuple[Tokens, ...] = ()
        """The first tokens if they ended every choice, otherwise empty."""
        self.prompt_times: PromptTimes | None = None
        """How long the first tokens took, once the source has told."""
        self.times = PullTimes()
        """Times of this pull. `Pulls` keeps them, because it has a clock."""
        self._attached = False
        self._num_gaps = 0
        """Times, since the offer has grown, that blocks were missing of it."""

    @property
    def quarantined(self) -> tuple[int, ...]:
        """Blocks of an abandoned pull that an unfinished read may still write to."""
        return self._reading() if self.state is PullState.ABANDONED else ()

    @property
    def revocable(self) -> bool:
        """Whether its blocks are reserved, and no read into them has begun."""
        return self.state is PullState.PULLING and self._num_requested == self._num_held

    @property
    def told(self) -> bool:
        """Whether the first tokens are known."""
        return self._first_tokens is not None

    @property
    def over(self) -> bool:
        """Whether nothing of this pull is left to wait for."""
        return self.state is PullState.SETTLED or (self.state is PullState.ABANDONED and not self._open_reads)

    # --- events --------------------------------------------------------------------------------------------------

    def attach(self) -> list[PullAction]:
        """Subscribe to the offer. Call this again after lost messages: the source then tells everything again."""
        self.story.append("attach")
        if self.state in (PullState.SETTLED, PullState.ABANDONED):
            return []
        if self.state is PullState.SETTLING and self.block_hashes is not None:
            return [self._settle()]  # a lent prefix ends with its sink's session; an attach would lend it anew
        self._attached = True
        attach = self._send(self._wanted)
        if self.state is PullState.SETTLING:
            return [attach, self._settle()]  # a source that has lost only this sink still holds the lease
        return [attach]

    def blocks_ready(self, message: BlocksReady) -> list[PullAction]:
        """The source offers more blocks, or, after an attach, all of them again."""
        if self.state not in (PullState.ATTACHING, PullState.OFFERED, PullState.PULLING):
            return []
        if self.block_hashes is not None and not _is_whole(message, len(self.block_hashes)):
            return self.abandon(Cause.TRANSFER, "the source offers something else than leading blocks of the prefix")
        if self._lease is None:
            self._lease = (message.lease, message.epoch)
            self.num_blocks = message.num_blocks
            self._with_checksums = message.checksums is not None
        elif self._lease != (message.lease, message.epoch):
            if self.state is not PullState.OFFERED or (message.start, message.num_blocks) != (0, self.num_blocks):
                return self.abandon(Cause.LEASE_LOST, "the source holds another lease by now")
            self._lease = (message.lease, message.epoch)  # nothing was read under the other lease
            self._with_checksums = message.checksums is not None
            self._offered, self._checksums, self._first_tokens = [], [], self._no_first_tokens()
        known = len(self._offered)
        end = message.start + len(message.block_ids)
        checksums = message.checksums if message.checksums is not None else ()
        if end > message.num_blocks or message.num_blocks != self.num_blocks:
            return self.abandon(Cause.TRANSFER, "the source offers more blocks than it announced")
        if (message.checksums is not None) != self._with_checksums or (
            self._with_checksums and len(checksums) != len(message.block_ids)
        ):
            return self.abandon(Cause.TRANSFER, "the source sent checksums of some blocks only")
        if message.start > known:
            return self._attach_again()
        self._num_gaps = 0 if end > known else self._num_gaps
        self.story.append(f"ready {end}")
        self._offered.extend(message.block_ids[known - message.start :])
        self._checksums.extend(checksums[known - message.start :])
        if self.state is PullState.ATTACHING:
            self._enter(PullEvent.OFFER)
            return [PullOffered(self, message.num_blocks)]
        return self._read_more()

    def reserve(self, block_ids: Sequence[int], num_held: int = 0) -> list[PullAction]:
        """Reserve one block for each block of the offer, and begin to read those that are announced. The first
        `num_held` are valid already, and are not read."""
        assert len(block_ids) == self.num_blocks, self.story
        assert 0 <= num_held <= len(block_ids), (num_held, self.story)
        self._enter(PullEvent.RESERVE)
        self._sink_blocks = tuple(block_ids)
        self._num_held = self._num_requested = num_held
        return self._read_more() + self._settle_if_read()

    def revoke(self) -> None:
        """Give the reserved blocks, none of which has been read into, back to the caller. `reserve` may be called
        again."""
        assert self.revocable, self.story
        self._enter(PullEvent.REVOKE)
        self._sink_blocks = ()
        self._num_held = self._num_requested = 0

    def read_done(self, start: int, error: str | None) -> list[PullAction]:
        """The read that began at block `start` has ended; `error` says why, if it failed."""
        end = self._open_reads.pop(start)
        self.story.append(f"read [{start}, {end}) {error or 'done'}")
        if self.state is PullState.ABANDONED:
            return [Released(self._sink_blocks[start:end]), *self._detach_if_over()]
        if error is None:
            return self._settle_if_read()
        return self.abandon(Cause.TRANSFER, f"a read failed: {error}")

    def prefill_done(self, message: PrefillDone) -> list[PullAction]:
        """The first tokens are known, and every block has been announced."""
        if self.state not in (PullState.OFFERED, PullState.PULLING) or self.block_hashes is not None:
            return []
        if self._lease != (message.lease, message.epoch):
            return self.abandon(Cause.LEASE_LOST, "the source holds another lease by now")
        self.prompt_times = message.times
        if all(tokens.finish_reason is not None for tokens in message.first_tokens):
            self.ended_with = message.first_tokens
            return self.abandon(None, "the first token ended the request")
        self._first_tokens = message.first_tokens
        if max(len(self._offered), self._num_requested) < (self.num_blocks or 0):
            return self._attach_again()
        return self._settle_if_read()

    def settled(self, message: Settled) -> list[PullAction]:
        """The source's verdict. Only `valid`, for our lease and epoch, admits what was read."""
        if self.state is not PullState.SETTLING or self._lease != (message.lease, message.epoch):
            return []
        if not message.valid:
            return self.abandon(Cause.LEASE_LOST, "the source could not prove that what was read is valid")
        self._enter(PullEvent.VALID)
        assert self._first_tokens is not None
        return [Pulled(self, self._sink_blocks, self._first_tokens)]

    def withdrawn(self, message: OfferWithdrawn) -> list[PullAction]:
        """The source has nothing (more) to offer. For a prefix pull its cause is kept: no gateway is told that one."""
        why = f"the source withdrew its offer: {message.message}"
        return self.refused(message.cause, why) if self.block_hashes is None else self.abandon(message.cause, why)

    def refused(self, cause: Cause, message: str) -> list[PullAction]:
        """The source gives nothing, or is lost. A cause that concerns it alone is not passed on as the sink's own."""
        return self.abandon(_OF_THE_SOURCE.get(cause, cause), message)

    def abandon(self, cause: Cause | None, message: str) -> list[PullAction]:
        """Give up; inert if the pull has ended."""
        if self.state in (PullState.SETTLED, PullState.ABANDONED):
            return []
        self._enter(PullEvent.ABANDON)
        reading = set(self._reading())
        free = tuple(block for block in self._sink_blocks if block not in reading)
        actions: list[PullAction] = [Released(free)] if free else []
        return [*actions, *self._detach_if_over(), PullFailed(self, cause, message)]

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert self._num_held <= self._num_requested <= max(len(self._offered), self._num_held), self.story
        assert self.num_blocks is None or len(self._offered) <= self.num_blocks, self.story
        ranges = sorted(self._open_reads.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), self.story
        assert all(self._num_held <= start < end <= self._num_requested for start, end in ranges), self.story
        if self.state in (PullState.SETTLING, PullState.SETTLED):
            assert not self._open_reads, self.story
            assert self._num_requested == self.num_blocks, self.story
            assert self._first_tokens is not None, self.story
        if self.state in (PullState.ATTACHING, PullState.OFFERED):
            assert not self._sink_blocks, self.story

    # --- internal steps ------------------------------------------------------------------------------------------

    def _enter(self, event: PullEvent) -> None:
        self.state = follow(PULL_TABLE, self.state, event, self.story)
        self.story.append(f"→ {self.state}")

    def _no_first_tokens(self) -> tuple[Tokens, ...] | None:
        """The first tokens at the beginning: a prefix pull has none, and those of other pulls are not known yet."""
        return None if self.block_hashes is None else ()

    def _reading(self) -> tuple[int, ...]:
        return tuple(block for start, end in self._open_reads.items() for block in self._sink_blocks[start:end])

    def _read_more(self) -> list[PullAction]:
        start, end = self._num_requested, len(self._offered)
        if self.state is not PullState.PULLING or start >= end:
            return []
        self._num_requested = end
        self._open_reads[start] = end
        return [
            ReadBlocks(
                start=start,
                source_blocks=tuple(self._offered[start:end]),
                sink_blocks=self._sink_blocks[start:end],
                checksums=tuple(self._checksums[start:end]) if self._with_checksums else None,
            )
        ]

    def _settle_if_read(self) -> list[PullAction]:
        if (
            self.state is not PullState.PULLING
            or self._first_tokens is None
            or self._open_reads
            or self._num_requested != self.num_blocks
        ):
            return []
        self._enter(PullEvent.READ)
        return [self._settle()]

    def _detach_if_over(self) -> list[PullAction]:
        if not self._attached or self._open_reads:
            return []
        return [self._send(Detach(request=self.key.request, attempt=self.key.attempt))]

    def _attach_again(self) -> list[PullAction]:
        """Blocks are missing, since messages were lost. A source that leaves them out whenever it is asked is not
        asked for ever."""
        self._num_gaps += 1
        if self._num_gaps > MAX_GAPS:
            return self.abandon(Cause.TRANSFER, "the source leaves blocks out")
        return self.attach()

    def _settle(self) -> SendToSource:
        assert self._lease is not None
        lease, epoch = self._lease
        return self._send(Settle(request=self.key.request, attempt=self.key.attempt, lease=lease, epoch=epoch))

    def _send(self, message: Message) -> SendToSource:
        return SendToSource(self.source.address, message)


def _is_whole(offer: BlocksReady, most: int) -> bool:
    """Whether one offer contains all its blocks: at least one, and at most `most`."""
    return offer.start == 0 and 1 <= len(offer.block_ids) == offer.num_blocks <= most
