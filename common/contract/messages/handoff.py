"""Messages between two workers, of which one, the sink, reads blocks of the other, the source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from common.contract.block_hashes import HASH_BYTES, BlockHash
from common.contract.errors import Cause
from common.contract.ids import ATTEMPT, HANDLE, LeaseId, RequestKey
from common.contract.messages.fields import (
    MAX_PREFIX_BLOCKS,
    MAX_TOKENS,
    MAX_TOLD_TOKENS,
    Choice,
    Count,
    Flag,
    RequestMessage,
    Text,
)
from common.contract.messages.worker import PromptTimes, Tokens
from common.contract.packed import packed_names, packed_numbers
from common.contract.sampling import MAX_CHOICES

# --- sink to source ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(RequestMessage):
    """Subscribe to the offer of a request, from its first block; parked, within a bound, until its Prefill arrives."""

    offered: Annotated[int, ATTEMPT]
    """The attempt number of the Prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSequence(RequestMessage):
    """Stop generating a choice and offer me all of its blocks, under this request and attempt."""

    sequence: RequestKey
    """The key of the sequence at the source."""
    choice: Choice
    position: Annotated[Count, Field(ge=1)]
    """Number of its tokens that the sink has; `PrefillDone` brings the tokens from this position on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPrefix(RequestMessage):
    """Offer me the leading blocks of this list that you hold: all at once, and without a `PrefillDone`."""

    block_hashes: Annotated[tuple[BlockHash, ...], packed_names(HASH_BYTES, 1, MAX_PREFIX_BLOCKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle(RequestMessage):
    """My reads have ended: was the lease held, in this epoch, until now? Idempotent."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(RequestMessage):
    """I give my pull up, and its reads have ended; a lease that is still held stays for another sink."""


# --- source to sink ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksReady(RequestMessage):
    """Blocks `[start, start + len(block_ids))` of the sequence can be read. Empty when the offer is only opened."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count
    start: Count
    block_ids: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOKENS)]
    """Block ids in the source's cache."""
    num_blocks: Count
    """Blocks of the whole offer."""
    checksums: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOKENS)] | None = None
    """CRC-32 of each block's bytes, if the deployment runs with checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone(RequestMessage):
    """Every block is ready, and these are the first tokens: the sink never recomputes them."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count
    first_tokens: Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=MAX_CHOICES)]
    """One for each choice, as sent to the gateway; a `finish_reason` says that the choice has ended."""
    times: PromptTimes | None = None
    """Durations until the first tokens; the sink passes them on. None for a sequence that migrates."""

    def __post_init__(self) -> None:
        num_tokens = sum(len(tokens.token_ids) for tokens in self.first_tokens)
        if num_tokens > MAX_TOLD_TOKENS:
            raise ValueError(f"{num_tokens} first tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(RequestMessage):
    """The answer to `Settle`. The sink may use the blocks that it read only if `valid` is true."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count
    valid: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferWithdrawn(RequestMessage):
    """No (more) blocks can be read: the offer failed, was aborted or expired at the source."""

    cause: Cause
    message: Text
