"""The messages of the control protocol: frozen, validated on receipt, bounded.

docs/protocol.md says who sends which message to whom; in short, for one request:

    gateway → P   Prefill            P → gateway   Timings, Tokens (the first), Finished | Failed | Cancelled
    gateway → D   Decode             D → gateway   Timings, Tokens, StepTokens …, Tokens (the last),
                                                   Finished | Failed | Cancelled
                    the worker that computes the prompt → gateway   PromptLogprobs …, if asked, before any Tokens
    D → P         Attach, Settle, Detach
    P → D         BlocksReady …, PrefillDone, Settled | OfferWithdrawn

A prefill worker that lacks a prefix pulls it, as a sink, from a worker that has it, under a request id of its own:

    P → any       AttachPrefix, Settle, Detach
    any → P       BlocksReady, Settled | OfferWithdrawn

Lists of token ids, of block ids and of names travel as bytes (`packed`).
A message about a request carries (request, attempt); its frame carries the sender's incarnation (see `codec`); tokens
and blocks carry their position. Messages never carry points in time, since clocks differ; they carry durations (a
time budget, the time that a stage took).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from common.contract.block_hashes import HASH_BYTES, SHORT_NAME_BYTES, BlockHash
from common.contract.errors import Cause
from common.contract.ids import ATTEMPT, HANDLE, Handle, Incarnation, LeaseId, RequestId, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.packed import packed_longs, packed_names, packed_numbers, packed_reals
from common.contract.sampling import MAX_CHOICES, MAX_LOGPROBS, NumLogprobs, SamplingParams
from common.contract.tiers import Tier

ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
"""`host:port`; the host is a name or an IP address."""
MAX_TOKENS = 2**20
"""Most tokens of one sequence."""
MAX_TOLD_TOKENS = 2**11
"""Most tokens in one message: each token may carry log probabilities."""
MAX_STEP_TOKENS = 2**16
"""Most sequences in one `StepTokens`."""
LEAST_LOGPROB = -9999.0
"""The log probability that is reported for a token that cannot occur."""
MAX_PREFIX_BLOCKS = 2**16
"""Most blocks that one `AttachPrefix` asks for."""
MAX_CACHE_EVENTS = 2**14
"""Most blocks of each kind in one `CacheEvents`."""
MAX_OPEN_REQUESTS = 2**16
"""Most requests that one peer may have open at once."""

Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]
Address = Annotated[str, Field(strict=True, max_length=256, pattern=ADDRESS_PATTERN)]
Text = Annotated[str, Field(strict=True, max_length=4096)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, le=10**6, allow_inf_nan=False)]
ByTier = tuple[Count, Count, Count]
"""One count for each tier, the most urgent tier first."""
Name = Annotated[str, Field(strict=True, max_length=256)]
Choice = Annotated[int, Field(strict=True, ge=0, lt=MAX_CHOICES)]
FinishReason = Literal["stop", "length"]


ShortNames = Annotated[bytes, Field(strict=True, max_length=MAX_CACHE_EVENTS * SHORT_NAME_BYTES)]
"""The leading `SHORT_NAME_BYTES` bytes of each block's name, concatenated."""


class Role(StrEnum):
    """The role of a process."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of every message on a control channel."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMessage(Message):
    """A message about one attempt at one request."""

    request: Annotated[RequestId, HANDLE]
    attempt: Annotated[int, ATTEMPT]

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return RequestKey(self.request, self.attempt)


# --- the link itself ---------------------------------------------------------------------------------------------


OpenRequests = Annotated[tuple[RequestKey, ...], Field(max_length=MAX_OPEN_REQUESTS, fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Client to worker: opens a session, or opens it again after a loss; the worker aborts requests not listed."""

    number: Count = 0
    """Number of this Hello on the link; the client ignores a Welcome that answers an earlier Hello."""
    role: Role
    fingerprint: Fingerprint | None
    """None from a gateway, which holds no KV."""
    open_requests: OpenRequests
    """The requests of a gateway at this worker, or the unfinished pulls of a sink from this worker."""


class Phase(StrEnum):
    """Whether a worker accepts new work."""

    SERVING = "serving"
    DRAINING = "draining"
    """The worker accepts no new work; the work that it has continues, or moves to other workers."""
    DRAINED = "drained"
    """The worker holds nothing any more, so it can exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Worker to client: the session is open. The client gives up its requests that are not in `open_requests`."""

    number: Count = 0
    """Number of the Hello that this answers."""
    role: Role
    fingerprint: Fingerprint
    max_sequence_tokens: Count
    """Most tokens, prompt and output together, that this worker accepts in one sequence."""
    transport: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    """Name of the data transport."""
    transport_metadata: Annotated[bytes, Field(strict=True, max_length=2**20)]
    """The data that a sink's transport needs in order to read this worker's blocks."""
    open_requests: OpenRequests
    phase: Phase = Phase.SERVING
    """The worker's phase now; later heartbeats update it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRefused(Message):
    """Worker to client: the session is refused, and why (a fingerprint mismatch names both values)."""

    cause: Cause
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequired(Message):
    """Worker to client: send Hello (again). You have no session here, or I have restarted, or messages were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """Either side ends the session on purpose; the client's open requests are aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Worker to client, at a fixed interval. Lets the client detect a dead worker, a wedged engine and lost frames."""

    number: Count
    sent: Count = 0
    """Messages sent to this client in this session before this one; a client that received fewer says Hello again."""
    steps: Count
    """Engine steps finished since start."""
    running: Count
    """Sequences in the engine: the running batch, and prompts that are being computed."""
    waiting: Count
    """Requests accepted but not yet running (queued, pulling)."""
    blocks_used: Count
    """Blocks in use; from a decode worker, the peak that it forecasts."""
    blocks_total: Count
    phase: Phase
    queued_tokens: ByTier = (0, 0, 0)
    """Prompt tokens that this worker has still to compute."""
    sequences: ByTier = (0, 0, 0)
    """Sequences that a decode worker has accepted and that have not ended."""
    places: Count = 0
    """Most sequences, of the size of the present ones, that a decode worker can hold at once; 0 from a prefill
    worker."""
    token_s: Seconds = 0.0
    """Measured seconds to compute one prompt token."""
    pulled_token_s: Seconds = 0.0
    """Measured seconds for a prefill worker to pull the KV of one token instead."""
    sequence_s: Seconds = 0.0
    """EWMA of the seconds from first to last token of a decode worker's sequences; 0 if not known."""
    prompt_tokens: Count = 0
    """Prompt tokens computed since start."""
    output_tokens: Count = 0
    """Tokens that a decode worker has generated since start, including first tokens of prompts that it computed."""
    received: Count = 0
    """Messages received from this client in this session; the other fields include their effects."""
    echoed: Count = 0
    """Number of the last heartbeat whose echo arrived; it tells a client that its own messages do not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatEcho(Message):
    """Client to worker: the answer to `Heartbeat`, so that a link broken in one direction is detected, too."""

    number: Count
    sent: Count
    """Messages sent to the worker in this session before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents(Message):
    """Worker to gateway: blocks that were added to, and removed from, the worker's prefix cache."""

    begins: Flag
    """True in the first message of a full listing: the gateway discards what earlier messages said."""
    stored: ShortNames
    removed: ShortNames

    def __post_init__(self) -> None:
        if len(self.stored) % SHORT_NAME_BYTES or len(self.removed) % SHORT_NAME_BYTES:
            raise ValueError(f"names of {SHORT_NAME_BYTES} bytes each, not {len(self.stored)} and {len(self.removed)}")


# --- gateway to worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Accept no new work; let the present work finish, or move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Message):
    """Accept work again."""


class Suspicion(StrEnum):
    """With which other requests the first steps of a request may be computed, given that it may crash a worker."""

    NONE = "none"
    """Not suspected: with all other requests."""
    GROUP = "group"
    """Only with other requests of this level."""
    ALONE = "alone"
    """With no other request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work(RequestMessage):
    token_ids: Annotated[tuple[int, ...], packed_numbers(1, MAX_TOKENS)]
    """The prompt, followed on a retry by the tokens that the client already has (a forced prefix)."""
    prompt_len: Annotated[Count, Field(ge=1)]
    """Number of leading tokens of `token_ids` that are the prompt; the rest counts as output for penalties and
    limits."""
    choices: Annotated[tuple[Choice, ...], Field(min_length=1, max_length=MAX_CHOICES)]
    """Indices of the choices to generate; more than one only when `token_ids` is the bare prompt."""
    sampling: SamplingParams
    budget_s: Annotated[Real, Field(gt=0, le=10**6)]
    """Seconds, from receipt, that the request may still take."""
    tier: Tier = Tier.STANDARD
    tenant: Name = ""
    """The tenant that sent the request: tenants of one tier share a worker evenly."""
    cache_salt: Name = ""
    """Requests share cached prefixes only under the same salt."""
    admitted: Flag = False
    """Whether a worker admitted this request before: it is then not refused because of the requests that wait."""
    suspicion: Suspicion = Suspicion.NONE
    """Whether the request may have crashed a worker; `Trial` says when its first steps are computed."""
    prompt_logprobs: NumLogprobs | None = None
    """Report log probabilities of the prompt's tokens, with this many alternatives (`PromptLogprobs`); every token of
    the prompt is then computed, even if a cache holds it. None reports none."""

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None and self.prompt_len < len(self.token_ids):
            raise ValueError("prompt_logprobs of a sequence that goes on: its prompt has been told")
        if self.prompt_len > len(self.token_ids):
            raise ValueError(f"prompt_len {self.prompt_len} of a sequence of {len(self.token_ids)} tokens")
        if len(set(self.choices)) != len(self.choices):
            raise ValueError("choices names one twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The worker from which blocks are read."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    address: Address
    """Control address, `host:port`."""
    incarnation: Annotated[Incarnation, HANDLE]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHint:
    """A worker that probably holds the KV of a prompt's prefix. Only a hint: the worker itself says what it holds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    source: Source
    num_tokens: Annotated[Count, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(_Work):
    """Compute the KV of `token_ids`, sample the next token of each choice, and offer the blocks."""

    prefix: PrefixHint | None = None
    """A worker from which to pull the prompt's prefix, if that is cheaper than computing it."""

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        if self.prefix is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs of a prompt that is not all computed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(_Work):
    """Get the KV of `token_ids` and generate every choice to its end."""

    source: Source | None
    """The worker from which to pull the KV; None: compute it here, in chunks that share steps with the decodes."""
    offered: RequestKey | None = None
    """The key under which the source offers the blocks; None without a source."""
    moving: Flag = False
    """True for a migration: the source is a decode worker that stops generating the one choice and hands it over."""
    handles: Annotated[tuple[Handle, ...], packed_longs(1, MAX_CHOICES)]
    """Names of the choices, in their order, in `StepTokens`; the gateway uses none of them again."""

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        if len(self.handles) != len(self.choices):
            raise ValueError(f"{len(self.handles)} handles for {len(self.choices)} choices")
        if (self.source is None) != (self.offered is None):
            raise ValueError("source and offered go together")
        if self.moving and (self.source is None or len(self.choices) != 1):
            raise ValueError("one choice moves, from a source")
        if self.source is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are told by who computes the prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(RequestMessage):
    """Give the request up and free everything that it holds; no effect if the request is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend(RequestMessage):
    """Send the tokens of a choice again, from `position` (in the whole sequence)."""

    choice: Choice
    position: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(RequestMessage):
    """The terminal message arrived: the worker may forget the request's tokens."""


# --- worker to gateway -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, before temperature, after penalties."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

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
    """The tokens of one step, one for each sequence, as columns: sequences of one gateway that go on, and of whose
    tokens nothing else is to be told. All other tokens travel as `Tokens`."""

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
class TokenScores:
    """Log probabilities of given tokens (those of a prompt), as columns, because one message may hold many.

    A log probability below `LEAST_LOGPROB` is reported as `LEAST_LOGPROB`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

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
class PromptTimes:
    """Durations of the stages until the first tokens of a prompt, by the clock of the worker that computed it; and the
    number of its tokens that were not computed."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    queue_s: Seconds
    """From receipt to the first chunk, less `prefix_pull_s`."""
    prefix_pull_s: Seconds
    """Wait for the prompt's prefix from another worker."""
    prefill_s: Seconds
    """From the first chunk to the sending of the first tokens."""
    num_cached: Count = 0
    """Number of leading tokens whose KV came from a prefix cache: this worker's own, or another worker's by a pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """Durations of a choice's stages at its decode worker, by that worker's clock.

    The stages from `reserve_s` to `preempted_s` add up to the time from the arrival of the first tokens at the worker
    to the sending of this message.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    wait_s: Seconds
    """From receipt until the first tokens arrived from the source; 0 if the prompt was computed here."""
    reserve_s: Seconds
    """From the end of `wait_s` until blocks were reserved."""
    pull_s: Seconds
    """From the end of `reserve_s` until every block was read: the part of the pull that overlaps with nothing."""
    settle_s: Seconds
    """From the end of `pull_s` until the source had answered that the blocks read are valid."""
    queue_s: Seconds
    """From the end of `settle_s`, or from the first token if it was computed here, to the choice's first step."""
    decode_s: Seconds
    """From the end of `queue_s` on, less `preempted_s`."""
    preempted_s: Seconds
    """Time out of the running batch after having been in it."""
    read_s: Seconds
    """Time with at least one read of its blocks under way, hidden or not."""
    hidden_read_s: Seconds
    """The part of `read_s` before the arrival of the first tokens."""
    pull_bytes: Count
    """Bytes read from the source."""


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
class Trial(Message):
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
    """Terminal for a choice: another worker has settled its blocks; everything that it held here is free."""

    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(RequestMessage):
    """Terminal: the answer to an `Abort` of a known request; everything that it held is free, or in quarantine."""


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


MESSAGES: tuple[type[Message], ...] = (
    Hello,
    Welcome,
    HelloRefused,
    HelloRequired,
    Goodbye,
    Heartbeat,
    HeartbeatEcho,
    CacheEvents,
    Drain,
    Resume,
    Prefill,
    Decode,
    Abort,
    Resend,
    Ack,
    Timings,
    PromptLogprobs,
    Tokens,
    StepTokens,
    Finished,
    Failed,
    Trial,
    Cut,
    Moved,
    Cancelled,
    Attach,
    AttachSequence,
    AttachPrefix,
    Settle,
    Detach,
    BlocksReady,
    PrefillDone,
    Settled,
    OfferWithdrawn,
)
"""Every message of the protocol."""
