"""The messages of the control protocol: frozen, validated on receipt, bounded.

Who sends what to whom is told in docs/protocol.md; in short, for one request:

    gateway → P   Prefill            P → gateway   Timings, Tokens (the first), Finished | Failed | Cancelled
    gateway → D   Decode             D → gateway   Timings, Tokens …, Finished | Failed | Cancelled
                                     who computes the prompt → gateway   PromptLogprobs …, if asked, before any Tokens
    D → P         Attach, Settle, Detach
    P → D         BlocksReady …, PrefillDone, Settled | OfferWithdrawn

A prefill worker that lacks a prefix pulls it from whoever has it, as a sink, under a request id of its own:

    P → any       AttachPrefix, Settle, Detach
    any → P       BlocksReady, Settled | OfferWithdrawn

Lists of token ids, of block ids and of names travel as bytes (`packed`).
A message about a request carries (request, attempt); its frame carries the sender's incarnation (see `codec`); tokens
and blocks carry their position. Times never travel, since clocks differ; durations do: a budget, what something took.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from common.contract.block_hashes import HASH_BYTES, SHORT_NAME_BYTES, BlockHash
from common.contract.errors import Cause
from common.contract.ids import ATTEMPT, HANDLE, Incarnation, LeaseId, RequestId, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.packed import packed_names, packed_numbers, packed_reals
from common.contract.sampling import MAX_CHOICES, MAX_LOGPROBS, NumLogprobs, SamplingParams
from common.contract.tiers import Tier

ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
"""`host:port`, the host a name or an IP address."""
MAX_TOKENS = 2**20
"""Most tokens of one sequence."""
MAX_TOLD_TOKENS = 2**11
"""Most tokens that one message tells of: each may have log probabilities with it."""
LEAST_LOGPROB = -9999.0
"""What the log probability of a token is told as that cannot come, where it is told."""
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
"""One for each tier, the most urgent first."""
Name = Annotated[str, Field(strict=True, max_length=256)]
Choice = Annotated[int, Field(strict=True, ge=0, lt=MAX_CHOICES)]
FinishReason = Literal["stop", "length"]


ShortNames = Annotated[bytes, Field(strict=True, max_length=MAX_CACHE_EVENTS * SHORT_NAME_BYTES)]
"""The leading bytes of the names of blocks, one after the other."""


class Role(StrEnum):
    """What a process does."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Anything that travels on a control channel."""

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
    """Client to worker: opens a session, or opens it again after a loss; the worker aborts what is not listed."""

    number: Count = 0
    """Drawn by the link: the answer to an earlier Hello than the last is not an answer to this one."""
    role: Role
    fingerprint: Fingerprint | None
    """None from a gateway, which holds no KV."""
    open_requests: OpenRequests
    """A gateway's requests at this worker; a sink's pulls from it that are not over."""


class Phase(StrEnum):
    """Whether a worker takes new work."""

    SERVING = "serving"
    DRAINING = "draining"
    """It takes none; what it has goes on, or moves to others."""
    DRAINED = "drained"
    """It holds nothing any more: it can go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Worker to client: the session is open. The client gives up what is not in `open_requests`."""

    number: Count = 0
    """Of the Hello that this answers."""
    role: Role
    fingerprint: Fingerprint
    max_sequence_tokens: Count
    """Most tokens, prompt and output together, that this worker takes in one sequence."""
    transport: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    """Name of the data transport."""
    transport_metadata: Annotated[bytes, Field(strict=True, max_length=2**20)]
    """What a sink's transport needs in order to read this worker's blocks."""
    open_requests: OpenRequests
    phase: Phase = Phase.SERVING
    """As in the heartbeats that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRefused(Message):
    """Worker to client: no session, and why (both values, for a fingerprint)."""

    cause: Cause
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequired(Message):
    """Worker to client: you spoke before your Hello, or I have restarted since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye(Message):
    """Either side leaves on purpose; a client's open requests are aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Worker to client, at a fixed interval. Shows a dead worker, a wedged engine and lost frames."""

    number: Count
    sent: Count = 0
    """Messages sent to this client in this session before this one; a client that received fewer says Hello again."""
    steps: Count
    """Engine steps finished since start."""
    running: Count
    """Sequences that the engine works on: the running batch, and prompts that are being computed."""
    waiting: Count
    """Requests accepted but not yet running (queued, pulling)."""
    blocks_used: Count
    """Of a decode worker: the most that it expects to use."""
    blocks_total: Count
    phase: Phase
    queued_tokens: ByTier = (0, 0, 0)
    """Prompt tokens still to be computed here."""
    sequences: ByTier = (0, 0, 0)
    """Sequences that a decode worker has accepted, and that have not ended."""
    places: Count = 0
    """Sequences like those it has now that a decode worker can hold at once; 0 of a prefill worker."""
    token_s: Seconds = 0.0
    """What computing a prompt token takes, as measured."""
    pulled_token_s: Seconds = 0.0
    """What a prefill worker takes to pull one instead, as measured."""
    sequence_s: Seconds = 0.0
    """What a decode worker's sequences have lately taken, from their first token to their last; 0 for not known."""
    prompt_tokens: Count = 0
    """Prompt tokens computed since start."""
    output_tokens: Count = 0
    """Tokens that a decode worker has generated since start, first ones where it computed the prompt itself."""
    received: Count = 0
    """Messages received from this client in this session: what they brought is included."""
    echoed: Count = 0
    """Number of the last heartbeat whose echo came; a client sees by it that what it sends does not arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatEcho(Message):
    """Client to worker: the answer to `Heartbeat`, so that a cut in one direction shows too."""

    number: Count
    sent: Count
    """Messages sent to the worker in this session before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvents(Message):
    """Worker to gateway: blocks that can be found by name here now, and such as cannot any more."""

    begins: Flag
    """Whether what was told before is void: the first of those that tell everything."""
    stored: ShortNames
    removed: ShortNames

    def __post_init__(self) -> None:
        if len(self.stored) % SHORT_NAME_BYTES or len(self.removed) % SHORT_NAME_BYTES:
            raise ValueError(f"names of {SHORT_NAME_BYTES} bytes each, not {len(self.stored)} and {len(self.removed)}")


# --- gateway to worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Take no new work; let what there is finish, or move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Message):
    """Take work again."""


class Suspicion(StrEnum):
    """How the first steps of a request are to be computed, which may have crashed a worker."""

    NONE = "none"
    """With everybody else's: it is not suspected."""
    GROUP = "group"
    """With those of all suspects of this level."""
    ALONE = "alone"
    """Apart from everything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work(RequestMessage):
    token_ids: Annotated[tuple[int, ...], packed_numbers(1, MAX_TOKENS)]
    """The prompt, followed on a retry by the tokens that the client already has (a forced prefix)."""
    prompt_len: Annotated[Count, Field(ge=1)]
    """Leading tokens of `token_ids` that are the prompt; the rest counts as output for penalties and limits."""
    choices: Annotated[tuple[Choice, ...], Field(min_length=1, max_length=MAX_CHOICES)]
    """Indices of the choices to generate; more than one only when `token_ids` is the bare prompt."""
    sampling: SamplingParams
    budget_s: Annotated[Real, Field(gt=0, le=10**6)]
    """Seconds that the request may still take, from receipt."""
    tier: Tier = Tier.STANDARD
    tenant: Name = ""
    """Whose request it is: tenants of one tier share a worker evenly."""
    cache_salt: Name = ""
    """Requests share cached prefixes only under the same salt."""
    admitted: Flag = False
    """Whether it was let in before, here or elsewhere: it is not refused for those that wait already."""
    suspicion: Suspicion = Suspicion.NONE
    """Whether it may have crashed a worker: `Trial` says when its first steps are computed."""
    prompt_logprobs: NumLogprobs | None = None
    """Tell log probabilities of the prompt's tokens, with this many alternatives (`PromptLogprobs`): then every one of
    them is computed, whatever caches hold. None tells none."""

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None and self.prompt_len < len(self.token_ids):
            raise ValueError("prompt_logprobs of a sequence that goes on: its prompt has been told")
        if self.prompt_len > len(self.token_ids):
            raise ValueError(f"prompt_len {self.prompt_len} of a sequence of {len(self.token_ids)} tokens")
        if len(set(self.choices)) != len(self.choices):
            raise ValueError("choices names one twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The worker whose blocks are to be read."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    address: Address
    """Control address, `host:port`."""
    incarnation: Annotated[Incarnation, HANDLE]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHint:
    """Where the KV of a prompt's beginning probably is. A hint: that worker says what it really holds."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    source: Source
    num_tokens: Annotated[Count, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill(_Work):
    """Compute the KV of `token_ids`, sample the next token of each choice, and offer the blocks."""

    prefix: PrefixHint | None = None
    """A worker to pull the prompt's beginning from, should that be cheaper than computing it."""

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        if self.prefix is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs of a prompt that is not all computed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(_Work):
    """Get the KV of `token_ids` and generate every choice to its end."""

    source: Source | None
    """Pull the KV from there; None: compute it, in chunks that ride with the decodes."""
    offered: RequestKey | None = None
    """What the source knows it by; None without a source."""
    moving: Flag = False
    """The source is a decode worker that is to stop generating the one choice, and to hand it over as it then is."""

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        if (self.source is None) != (self.offered is None):
            raise ValueError("source and offered go together")
        if self.moving and (self.source is None or len(self.choices) != 1):
            raise ValueError("one choice moves, from a source")
        if self.source is not None and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are told by who computes the prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(RequestMessage):
    """Give the request up and free what it holds; inert when unknown."""


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
    """Of the token that was taken."""
    top: Annotated[tuple[tuple[Count, Real], ...], Field(max_length=MAX_LOGPROBS)]
    """(token id, log probability) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(RequestMessage):
    """Generated tokens of one choice, `[position, position + len(token_ids))` of the whole sequence."""

    choice: Choice
    position: Count
    token_ids: Annotated[tuple[int, ...], packed_numbers(1, MAX_TOLD_TOKENS)]
    logprobs: Annotated[tuple[TokenLogprobs, ...], Field(max_length=MAX_TOLD_TOKENS, fail_fast=True)] | None = None
    """One for each token, when the request asked."""
    finish_reason: FinishReason | None = None
    """Set when the last of these tokens is the choice's last."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log probabilities for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """How likely tokens were that nobody has chosen, in columns: there may be many at once. What is less likely than
    `LEAST_LOGPROB` is told as that."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    logprobs: Annotated[tuple[float, ...], packed_reals(0, MAX_TOLD_TOKENS)] = ()
    ranks: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOLD_TOKENS)] = ()
    """How many tokens were at least as likely, each one itself included: 1 for the most likely one."""
    top_token_ids: Annotated[tuple[int, ...], packed_numbers(0, MAX_TOLD_TOKENS * MAX_LOGPROBS)] = ()
    """The most likely tokens, best first: as many for each, one after the other."""
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
        """How many of the most likely tokens are told with each."""
        return len(self.top_token_ids) // len(self.logprobs) if self.logprobs else 0

    def part(self, start: int, stop: int | None = None) -> TokenScores:
        """Of tokens `[start, stop)` of these."""
        tokens = slice(*slice(start, stop).indices(len(self)))
        top = slice(tokens.start * self.num_alternatives, tokens.stop * self.num_alternatives)
        return TokenScores(
            logprobs=self.logprobs[tokens],
            ranks=self.ranks[tokens],
            top_token_ids=self.top_token_ids[top],
            top_logprobs=self.top_logprobs[top],
        )

    def each(self) -> list[TokenLogprobs]:
        """One for each token."""
        pairs = list(zip(self.top_token_ids, self.top_logprobs, strict=True))
        num = self.num_alternatives
        return [
            TokenLogprobs(logprob=logprob, top=tuple(pairs[index * num : (index + 1) * num]))
            for index, logprob in enumerate(self.logprobs)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs(RequestMessage):
    """How likely the prompt's tokens `[position, position + len(scores))` were, each after those before it; the first
    one comes after none. Told from position 1 on, chunk by chunk, and to its end before any `Tokens`."""

    position: Annotated[Count, Field(ge=1)]
    scores: TokenScores

    def __post_init__(self) -> None:
        if not len(self.scores):
            raise ValueError("log probabilities of no token")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """What became of the time until the first tokens of a prompt, at the worker that computed it, by its clock; and how
    much of it was not computed."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    queue_s: Seconds
    """From receipt to the first chunk, less `prefix_pull_s`."""
    prefix_pull_s: Seconds
    """Waiting for the prompt's beginning from another worker."""
    prefill_s: Seconds
    """From the first chunk to the sending of the first tokens."""
    num_cached: Count = 0
    """Leading tokens whose KV a prefix cache had: this worker's own, or the one that they were pulled from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """What became of a choice's time at its decode worker, by its clock. The stages from `reserve_s` to `preempted_s`
    follow each other: together they last from the first tokens' arrival there to the sending of this message."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    wait_s: Seconds
    """From receipt until the source's first tokens were there; 0 where the prompt was computed here."""
    reserve_s: Seconds
    """From then until there was room for the blocks."""
    pull_s: Seconds
    """From then until every block was read: the part of the pull that nothing else hides."""
    settle_s: Seconds
    """From then until the source had answered that what was read is valid."""
    queue_s: Seconds
    """From then, or from the local first token, to the first step with the choice."""
    decode_s: Seconds
    """From then on, less `preempted_s`."""
    preempted_s: Seconds
    """Out of the running batch, having been in it."""
    read_s: Seconds
    """While at least one read of its blocks was under way, hidden or not."""
    hidden_read_s: Seconds
    """Of that, before the first tokens' arrival."""
    pull_bytes: Count
    """Read from its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings(RequestMessage):
    """What the next Tokens of a choice have taken, as far as this worker knows. It goes before a worker's first Tokens
    of each choice and before the last; if it is lost, only the account of the time is less exact."""

    choice: Choice | None
    """None: of every choice of the attempt."""
    prompt: PromptTimes | None
    """As measured here, or as the source has told."""
    decode: DecodeTimes | None
    """None from a prefill worker, and before there is anything to tell."""


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
    """Whose the engine's steps are from here on: those of so many suspects, or, with none, everybody else's."""

    num_requests: Count
    """Of all gateways."""
    requests: OpenRequests
    """Those of this gateway."""

    def __post_init__(self) -> None:
        if len(self.requests) > self.num_requests:
            raise ValueError(f"{len(self.requests)} requests of {self.num_requests}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(RequestMessage):
    """A choice that moves has stopped: this worker has generated it up to `position`, and will not go on with it."""

    choice: Choice
    position: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(RequestMessage):
    """Terminal for a choice: another worker has proved that it has it; everything it held here is free."""

    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(RequestMessage):
    """Terminal: the answer to an `Abort` of a known request; everything it held is free, or in quarantine."""


# --- sink to source ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(RequestMessage):
    """Subscribe to the offer of a request, from its first block; parked, within a bound, if its Prefill is not here."""

    offered: Annotated[int, ATTEMPT]
    """The attempt of the Prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSequence(RequestMessage):
    """Stop generating a choice and offer me all of its blocks, under this request and attempt."""

    sequence: RequestKey
    """What you know it by."""
    choice: Choice
    position: Annotated[Count, Field(ge=1)]
    """Tokens of it that I have: `PrefillDone` is to bring those from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPrefix(RequestMessage):
    """Offer me the leading blocks of these that you hold: all at once, and without a `PrefillDone`."""

    block_hashes: Annotated[tuple[BlockHash, ...], packed_names(HASH_BYTES, 1, MAX_PREFIX_BLOCKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle(RequestMessage):
    """My reads have ended: was the lease held, in this epoch, until now? Idempotent."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(RequestMessage):
    """My pull is given up and its reads have ended; a lease that still stands stays for another sink."""


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
    """CRC-32 of each block's bytes, where the deployment runs with checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone(RequestMessage):
    """Every block is ready, and these are the first tokens: the sink never recomputes them."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count
    first_tokens: Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=MAX_CHOICES)]
    """One for each choice, as sent to the gateway; a `finish_reason` says that the choice has ended with it."""
    times: PromptTimes | None = None
    """What they took; the sink passes it on. None of a running sequence."""

    def __post_init__(self) -> None:
        num_tokens = sum(len(tokens.token_ids) for tokens in self.first_tokens)
        if num_tokens > MAX_TOLD_TOKENS:
            raise ValueError(f"{num_tokens} first tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(RequestMessage):
    """The answer to `Settle`. Only `valid` admits what was read."""

    lease: Annotated[LeaseId, HANDLE]
    epoch: Count
    valid: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferWithdrawn(RequestMessage):
    """There is nothing (more) to read: the source failed, aborted or expired the offer."""

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
