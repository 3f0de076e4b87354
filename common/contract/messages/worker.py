"""Messages of workers to gateways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from common.contract.block_hashes import SHORT_NAME_BYTES
from common.contract.errors import Cause
from common.contract.ids import Handle
from common.contract.messages.fields import (
    MAX_STEP_TOKENS,
    MAX_TOLD_TOKENS,
    Choice,
    Count,
    FinishReason,
    Flag,
    LinkMessage,
    Message,
    OpenRequests,
    Real,
    RequestMessage,
    Seconds,
    ShortNames,
    Text,
    WireData,
)
from common.contract.packed import packed_longs, packed_numbers, packed_reals
from common.contract.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents(LinkMessage):
    """Worker to gateway: blocks that were added to, and removed from, the worker's prefix cache."""

    begins: Flag
    """True in the first message of a full listing: the gateway discards what earlier messages said."""
    stored: ShortNames
    removed: ShortNames

    def __post_init__(self) -> None:
        if len(self.stored) % SHORT_NAME_BYTES or len(self.removed) % SHORT_NAME_BYTES:
            raise ValueError(f"names of {SHORT_NAME_BYTES} bytes each, not {len(self.stored)} and {len(self.removed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs(WireData):
    """Natural-log probabilities at one position, before temperature, after penalties."""

    logprob: Real
    """Log probability of the token that was chosen."""
    top: Annotated[tuple[tuple[Count, Real], ...], Field(max_length=MAX_LOGPROBS)]
    """(token id, log probability) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(RequestMessage):
    """Generated tokens of one choice, `[position, position + len(token_ids))` of the whole sequence."""

    choice: Choice
    position: Count
    token_ids: Annotated[tuple[int, ...], packed_numbers(1, MAX_TOLD_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprobs, ...], Field(max_length=MAX_TOLD_TOKENS, fail_fast=True)] | None = None
    """One entry for each token, if the request asked for log probabilities."""
    finish_reason: FinishReason | None = None
    """Set when the last of these tokens is the choice's last."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log probabilities for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens(Message):
    """The tokens of one step, as columns: of sequences of one gateway that go on, and of whose tokens nothing else is
    to be told. A sequence has one, or several in order. All other tokens travel as `Tokens`."""

    handles: Annotated[tuple[Handle, ...], packed_longs(1, MAX_STEP_TOKENS)]
    """The choice of each token, by the handle in its `Decode`."""
    positions: Annotated[tuple[int, ...], packed_numbers(1, MAX_STEP_TOKENS)]
    """The position of each token in its whole sequence."""
    token_ids: Annotated[tuple[int, ...], packed_numbers(1, MAX_STEP_TOKENS)]

    def __post_init__(self) -> None:
        if not len(self.handles) == len(self.positions) == len(self.token_ids):
            raise ValueError(
                f"{len(self.handles)} handles, {len(self.positions)} positions, {len(self.token_ids)} tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores(WireData):
    """Log probabilities of given tokens (those of a prompt), as columns, because one message may hold many.

    A log probability below `LEAST_LOGPROB` is reported as `LEAST_LOGPROB`.
    """

    logprobs: Annotated[tuple[float, ...], packed_reals(0, MAX_TOLD_TOKENS)] = ()
    ranks: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOLD_TOKENS)] = ()
    """For each token, the number of tokens at least as likely as it, itself included: 1 for the most likely token."""
    top_token_ids: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOLD_TOKENS * MAX_LOGPROBS)] = ()
    """The most likely tokens, best first: `num_alternatives` of the first token, then of the second, and so on."""
    top_logprobs: Annotated[tuple[float, ...], packed_reals(0, MAX_TOLD_TOKENS * MAX_LOGPROBS)] = ()

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self):
            raise ValueError(f"{len(self.ranks)} ranks for {len(self)} tokens")
        num_top = len(self.top_token_ids)
        if num_top != len(self.top_logprobs) or num_top != len(self) * self.num_alternatives:
            raise ValueError(f"{num_top} alternatives with {len(self.top_logprobs)} values for {len(self)} tokens")
        if self.num_alternatives > MAX_LOGPROBS:
            raise ValueError(f"{self.num_alternatives} alternatives for each token")

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def num_alternatives(self) -> int:
        """Number of the most likely tokens that are reported with each token."""
        return len(self.top_token_ids) // len(self.logprobs) if self.logprobs else 0

    def part(self, start: int, stop: int | None = None) -> TokenScores:
        """The scores of tokens `[start, stop)`."""
        tokens = slice(*slice(start, stop).indices(len(self)))
        top = slice(tokens.start * self.num_alternatives, tokens.stop * self.num_alternatives)
        return TokenScores(
            logprobs=self.logprobs[tokens],
            ranks=self.ranks[tokens],
            top_token_ids=self.top_token_ids[top],
            top_logprobs=self.top_logprobs[top],
        )

    def each(self) -> list[TokenLogprobs]:
        """The same data as one `TokenLogprobs` for each token; ranks are left out."""
        pairs = list(zip(self.top_token_ids, self.top_logprobs, strict=True))
        num = self.num_alternatives
        return [
            TokenLogprobs(logprob=logprob, top=tuple(pairs[index * num : (index + 1) * num]))
            for index, logprob in enumerate(self.logprobs)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs(RequestMessage):
    """Log probabilities of the prompt's tokens `[position, position + len(scores))`, each given the tokens before it.

    The first token of a prompt has none. The messages start at position 1, come chunk by chunk, and cover the whole
    prompt before any `Tokens`.
    """

    position: Annotated[Count, Field(ge=1)]
    scores: TokenScores

    def __post_init__(self) -> None:
        if not len(self.scores):
            raise ValueError("log probabilities of no token")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes(WireData):
    """Durations of the stages until the first tokens of a prompt, by the clock of the worker that computed it; and the
    number of its tokens that were not computed."""

    queue_s: Seconds
    """From receipt to the first chunk, less `prefix_pull_s`."""
    prefix_pull_s: Seconds
    """Wait for the prompt's prefix from another worker."""
    prefill_s: Seconds
    """From the first chunk to the sending of the first tokens."""
    num_cached: Count = 0
    """Number of tokens whose KV was not computed for this prompt: this worker's prefix cache had it, or got it in
    time, or it was pulled from another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes(WireData):
    """Durations of a choice's stages at its decode worker, by that worker's clock; and what was drafted of it there.

    The stages from `reserve_s` to `preempted_s` add up to the time from the arrival of the first tokens at the worker
    to the sending of this message. What concerns the pull is 0 if the prompt was computed here.
    """

    wait_s: Seconds = 0.0
    """From receipt until the first tokens arrived from the source."""
    reserve_s: Seconds = 0.0
    """From the end of `wait_s` until blocks were reserved."""
    pull_s: Seconds = 0.0
    """From the end of `reserve_s` until every block was read: the part of the pull that overlaps with nothing."""
    settle_s: Seconds = 0.0
    """From the end of `pull_s` until the source had answered that the blocks read are valid."""
    queue_s: Seconds = 0.0
    """From the end of `settle_s`, or from the first token if it was computed here, to the choice's first step."""
    decode_s: Seconds = 0.0
    """From the end of `queue_s` on, less `preempted_s`."""
    preempted_s: Seconds = 0.0
    """Time out of the running batch after having been in it."""
    read_s: Seconds = 0.0
    """Time with at least one read of its blocks under way, hidden or not."""
    hidden_read_s: Seconds = 0.0
    """The part of `read_s` before the arrival of the first tokens."""
    pull_bytes: Count = 0
    """Bytes read from the source."""
    num_drafted: Count = 0
    """Tokens that were drafted of the choice."""
    num_accepted: Count = 0
    """Drafted tokens that were right."""

    def __post_init__(self) -> None:
        if self.num_accepted > self.num_drafted:
            raise ValueError(f"num_accepted: {self.num_accepted} of {self.num_drafted} drafted tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings(RequestMessage):
    """The durations behind the next Tokens of a choice, as far as this worker knows them.

    A worker sends it before the first and before the last Tokens of each choice. If it is lost, only the reported
    durations are less exact.
    """

    choice: Choice | None
    """None: the durations apply to every choice of the attempt."""
    prompt: PromptTimes | None
    """As measured here, or as received from the source."""
    decode: DecodeTimes | None
    """None from a prefill worker, and before there is anything to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(RequestMessage):
    """Terminal: every choice has ended and its tokens have been sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(RequestMessage):
    """Terminal: the worker gave the request up."""

    cause: Cause
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(LinkMessage):
    """From here on the engine's steps compute only `num_requests` suspected requests (0: only unsuspected ones)."""

    num_requests: Count
    """Suspected requests on trial, of all gateways."""
    requests: OpenRequests
    """Suspected requests on trial that belong to the receiving gateway."""

    def __post_init__(self) -> None:
        if len(self.requests) > self.num_requests:
            raise ValueError(f"{len(self.requests)} requests of {self.num_requests}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(RequestMessage):
    """A migrating choice has stopped: this worker has generated it up to `position` and generates no more of it."""

    choice: Choice
    position: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(RequestMessage):
    """Terminal for a choice: another worker has settled its blocks, or none has after its `Cut` for so long that they
    are given up while other choices go on. Everything that it held here is free."""

    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(RequestMessage):
    """Terminal: the answer to an `Abort` of a known request; everything that it held is free, or in quarantine."""
