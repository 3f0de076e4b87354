"""A request in the decode worker: how its KV arrives, then its choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.contract.block_hashes import BlockChain
from common.contract.ids import Handle, Incarnation, RequestKey
from common.contract.messages.fields import MAX_TOLD_TOKENS, FinishReason
from common.contract.messages.gateway import Decode
from common.contract.messages.worker import PromptTimes, Timings, TokenLogprobs, Tokens
from common.engine.grammar import GrammarState
from common.engine.sequence import TokenSequence
from common.runtime.state_tables import follow
from decode_worker.draft_cache import DraftTable
from decode_worker.lookup import Lookup
from kv_transfer.pull import Pull
from kv_transfer.pull_times import PullTimes


class RequestState(StrEnum):
    """The state of a request in the decode worker."""

    ARRIVED = "arrived"
    MASKING = "masking"
    """Its prompt is to be computed here, and the mask of its grammar's first tokens is being made."""
    ATTACHING = "attaching"
    """Its source has not opened the offer yet."""
    WAITING = "waiting"
    """It waits for room."""
    RESERVED = "reserved"
    """It has blocks, into which its KV is pulled."""
    COMPUTING = "computing"
    """It has blocks, and its prompt is computed here."""
    RUNNING = "running"
    """Its choices have begun; each has a stage of its own."""
    FINISHED = "finished"
    """Every choice has ended; the tokens are kept until the gateway has acknowledged them."""
    ENDED = "ended"


class RequestEvent(StrEnum):
    """What changes the state of a request in the decode worker."""

    MASK = "mask"
    ATTACH = "attach"
    WANT = "want"
    """Room is wanted: the offer is open, the mask is known, or the blocks were taken back."""
    RESERVE = "reserve"
    COMPUTE = "compute"
    BEGIN = "begin"
    """All KV is here and valid, and the first tokens are known."""
    FINISH = "finish"
    END = "end"
    """It was acknowledged, aborted, has failed, or its sequences have moved away."""


REQUEST_TABLE: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    RequestState.ARRIVED: {
        RequestEvent.MASK: RequestState.MASKING,
        RequestEvent.ATTACH: RequestState.ATTACHING,
        RequestEvent.WANT: RequestState.WAITING,
    },
    RequestState.MASKING: {RequestEvent.WANT: RequestState.WAITING, RequestEvent.END: RequestState.ENDED},
    RequestState.ATTACHING: {RequestEvent.WANT: RequestState.WAITING, RequestEvent.END: RequestState.ENDED},
    RequestState.WAITING: {
        RequestEvent.RESERVE: RequestState.RESERVED,
        RequestEvent.COMPUTE: RequestState.COMPUTING,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.RESERVED: {
        RequestEvent.WANT: RequestState.WAITING,
        RequestEvent.BEGIN: RequestState.RUNNING,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.COMPUTING: {
        RequestEvent.WANT: RequestState.WAITING,
        RequestEvent.BEGIN: RequestState.RUNNING,
        RequestEvent.END: RequestState.ENDED,
    },
    RequestState.RUNNING: {RequestEvent.FINISH: RequestState.FINISHED, RequestEvent.END: RequestState.ENDED},
    RequestState.FINISHED: {RequestEvent.END: RequestState.ENDED},
    RequestState.ENDED: {},
}


class ChoiceStage(StrEnum):
    """The state of a choice."""

    BEGUN = "begun"
    READY = "ready"
    """Its blocks are here; it waits for a place in the batch."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It has lost its blocks. Their contents are in host memory, or will be computed again."""
    RECOMPUTING = "recomputing"
    """It has blocks again, which are being computed in chunks."""
    ENDED = "ended"


class StageEvent(StrEnum):
    """What changes the state of a choice."""

    READY = "ready"
    """It has its blocks, with their contents or with slots of host memory that hold them."""
    JOIN = "join"
    """It has got a place in the batch."""
    STEP_ASIDE = "step_aside"
    """It has given its place to a higher tier; it keeps its blocks."""
    PREEMPT = "preempt"
    """It has lost its blocks, or there were none for its beginning."""
    RECOMPUTE = "recompute"
    END = "end"
    """It has ended, was given up, or has moved to another worker."""


STAGE_TABLE: Mapping[ChoiceStage, Mapping[StageEvent, ChoiceStage]] = {
    ChoiceStage.BEGUN: {StageEvent.READY: ChoiceStage.READY, StageEvent.PREEMPT: ChoiceStage.PREEMPTED},
    ChoiceStage.READY: {
        StageEvent.JOIN: ChoiceStage.RUNNING,
        StageEvent.PREEMPT: ChoiceStage.PREEMPTED,
        StageEvent.END: ChoiceStage.ENDED,
    },
    ChoiceStage.RUNNING: {
        StageEvent.STEP_ASIDE: ChoiceStage.READY,
        StageEvent.PREEMPT: ChoiceStage.PREEMPTED,
        StageEvent.END: ChoiceStage.ENDED,
    },
    ChoiceStage.PREEMPTED: {
        StageEvent.READY: ChoiceStage.READY,
        StageEvent.RECOMPUTE: ChoiceStage.RECOMPUTING,
        StageEvent.END: ChoiceStage.ENDED,
    },
    ChoiceStage.RECOMPUTING: {
        StageEvent.READY: ChoiceStage.READY,
        StageEvent.PREEMPT: ChoiceStage.PREEMPTED,
        StageEvent.END: ChoiceStage.ENDED,
    },
    ChoiceStage.ENDED: {},
}


@dataclass(slots=True, eq=False)
class DecodeChoice:
    """One choice: a sequence, what was sent of it, and the scheduler's data on it."""

    request: DecodeRequest
    sequence: TokenSequence
    chain: BlockChain
    """Names of the sequence's full blocks."""
    order: int
    """Number by which sequences were admitted. The one with the highest number is preempted first, and comes back
    last."""
    quantile: float
    """The sequence's place in the distribution of output lengths, in [0, 1)."""
    handle: Handle
    """Name of the choice in `StepTokens`."""
    began: float = 0.0
    """Monotonic seconds at which it had its blocks and its first token."""
    num_named: int = 0
    """Leading blocks whose names were given to the pool."""
    num_sent: int = 0
    """Tokens of the sequence that were sent to the gateway."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the generated tokens from `first_position` on, if the request asks for them."""
    first_position: int = 0
    """Position of the first token that this attempt generated."""
    finish_reason: FinishReason | None = None
    stage: ChoiceStage = ChoiceStage.BEGUN
    host_slots: list[int] = field(default_factory=list)
    """Host memory slots of its leading blocks, from swap-out to swap-in."""
    joined_at: float | None = None
    """Monotonic seconds at which it first had a place in the batch."""
    paused_at: float | None = None
    """Monotonic seconds since which it has no place again; None if it has one."""
    paused_s: float = 0.0
    """Total seconds of earlier pauses."""
    timings: Timings | None = None
    """The timings last sent to the gateway."""
    preempted_at: float = 0.0
    """Monotonic seconds at which it last lost its blocks."""
    num_passed: int = 0
    """Requests of higher tiers admitted since it has waited longer than the ageing time."""
    gave_way: bool = False
    """Whether it has lost its blocks to a higher tier. It does so only once."""
    num_put_off: int = 0
    """Times that it was not cut because it had run too far ahead of what its sink had read."""
    moved: bool = False
    """Whether another worker continues it, or nobody took it over after it was cut."""
    given_up: bool = False
    """Whether its client needs no more of it."""
    lookup: Lookup | None = None
    """What is expected next of its text; None before it was first asked for."""
    draft: DraftTable | None = None
    """What the draft model has of it; None before it was first asked for."""
    num_drafted: int = 0
    """Tokens that were drafted of it."""
    num_accepted: int = 0
    """Drafted tokens that were right."""
    num_kept: int = 0
    """Leading blocks that were found in the prefix cache when it came back. They are not swapped in."""

    @property
    def key(self) -> tuple[DecodeRequest, int]:
        """(request, choice)."""
        return self.request, self.sequence.choice

    @property
    def goes_on(self) -> bool:
        """Whether this worker has more to generate of it, as far as is known."""
        return self.finish_reason is None and not self.moved and not self.given_up

    def enter(self, event: StageEvent) -> None:
        """Change the stage."""
        self.stage = follow(STAGE_TABLE, self.stage, event, self.sequence)

    def joined(self, now: float) -> None:
        """It has got a place in the batch."""
        if self.joined_at is None:
            self.joined_at = now
        elif self.paused_at is not None:
            self.paused_s += now - self.paused_at
            self.paused_at = None

    def paused(self, now: float) -> None:
        """It has lost its place or its blocks. Does nothing if it had no place."""
        if self.joined_at is not None and self.paused_at is None:
            self.paused_at = now

    def append(self, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None) -> None:
        """Append the next token."""
        assert self.finish_reason is None, self.sequence
        self.sequence.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.finish_reason = finish_reason

    def tokens(self, position: int) -> Tokens:
        """A message with the tokens from `position` on, at most `MAX_TOLD_TOKENS` of them."""
        sequence = self.sequence
        position = min(max(position, self.first_position), sequence.num_tokens)
        end = min(position + MAX_TOLD_TOKENS, sequence.num_tokens)
        asked = sequence.sampling.logprobs is not None
        told = slice(position - self.first_position, end - self.first_position)
        return Tokens(
            request=sequence.key.request,
            attempt=sequence.key.attempt,
            choice=sequence.choice,
            position=position,
            token_ids=tuple(sequence.token_ids[position:end]),
            logprobs=tuple(self.logprobs[told]) if asked else None,
            finish_reason=self.finish_reason if end == sequence.num_tokens else None,
        )


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One attempt at a request, from its arrival until the gateway has acknowledged its end."""

    work: Decode
    gateway: Incarnation
    deadline: float
    """Monotonic seconds at which the request's budget ends."""
    arrived: float
    """Monotonic seconds."""
    chain: BlockChain
    """Names of the full blocks of `work.token_ids`."""
    pull: Pull | None = None
    """The pull of the KV; None if the prompt is computed here."""
    state: RequestState = RequestState.ARRIVED
    story: list[str] = field(default_factory=list)
    """The states that it has had."""
    ahead: PullTimes | None = None
    """If a sequence moves here: times and bytes of the reads made before it was cut."""
    grammar_state: GrammarState | None = None
    """State of the grammar after `work.token_ids`; None without a grammar. If there is a pull, it becomes the state of
    the first choice's sequence."""
    prompt_times: PromptTimes | None = None
    """How long the first tokens took, here or at the source."""
    started_at: float | None = None
    """Monotonic seconds at which the first chunk of the prompt was planned here."""
    num_cached: int = 0
    """Tokens whose KV the prefix cache had when they were last looked up. If the prompt is computed here, also those
    that it has got since, before they were computed."""
    begun_at: float | None = None
    """Monotonic seconds at which all KV was valid here and the choices began."""
    order: int = 0
    """Number by which requests were admitted."""
    gave_way: bool = False
    """Whether it has lost its blocks to a higher tier before its choices began. It does so only once."""
    num_passed: int = 0
    """Later requests that were admitted while this one did not fit."""
    sent_back: bool = False
    """Whether it had to wait again after it had been admitted."""
    num_charged: int = 0
    """Leading tokens whose computation was charged to the tenant."""
    fork_blocks: list[int] = field(default_factory=list)
    """Blocks for the forks' copies of a partly filled last block, held from the reservation to the fork."""
    choices: list[DecodeChoice] = field(default_factory=list)
    """One for each choice, once the KV is here."""

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return self.work.key

    def enter(self, event: RequestEvent) -> None:
        """Change the state."""
        self.state = follow(REQUEST_TABLE, self.state, event, (self.key, self.story))
        self.story.append(self.state)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, moved away or was given up."""
        return bool(self.choices) and not any(each.goes_on for each in self.choices)

    @property
    def num_going_on(self) -> int:
        """Sequences that have not ended, moved away or been given up. Before they have begun all of them count."""
        return sum(each.goes_on for each in self.choices) if self.choices else len(self.work.choices)

    @property
    def num_new(self) -> int:
        """Smallest number of new tokens, beyond those that the request came with, among the choices that have not
        finished."""
        going_on = [each.sequence.num_tokens for each in self.choices if each.goes_on]
        return min(going_on, default=0) - len(self.work.token_ids)


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """Tokens whose KV this worker computes in chunks: a request's prompt, or the tokens of a preempted choice."""

    request: DecodeRequest
    choice: DecodeChoice | None
    """The choice that is recomputed; None for the request's prompt."""
    token_ids: list[int] | tuple[int, ...]
    num_computed: int
    block_table: Sequence[int]
    urgency: tuple[int, float, int]
    """(rank of the tier, deadline, order). The smallest comes first."""
    ages_from: float
    """Monotonic seconds from which it ages."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def gave_way(self) -> bool:
        """Whether it has already lost its blocks to a higher tier."""
        return (self.choice or self.request).gave_way

    @gave_way.setter
    def gave_way(self, value: bool) -> None:
        (self.choice or self.request).gave_way = value


def rows_of(decodes: Sequence[DecodeChoice]) -> tuple[int, int]:
    """(rows of a step without drafts, tokens that they attend to in all)."""
    return len(decodes), sum(choice.sequence.num_tokens for choice in decodes)
