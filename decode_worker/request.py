"""A request in the decode worker: the way its KV gets here, then its choices."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from common.contract.block_hashes import BlockChain
from common.contract.ids import Handle, Incarnation, RequestKey
from common.contract.messages import (
    MAX_TOLD_TOKENS,
    Decode,
    FinishReason,
    PromptTimes,
    Timings,
    TokenLogprobs,
    Tokens,
)
from common.engine.grammar import GrammarState
from common.engine.sequence import Sequence
from kv_transfer.pull_times import PullTimes
from kv_transfer.sink import Pull


class Stage(StrEnum):
    """Where a choice is."""

    READY = "ready"
    """Its blocks are here; it waits for a place in the batch."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its blocks were taken away; their contents are in host memory, or will be computed again."""
    RECOMPUTING = "recomputing"
    """It has blocks again, and rides along in chunks until they are filled."""
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Generation:
    """One choice: a sequence, what of it has been sent, and what the scheduler knows of it."""

    request: DecodeRequest
    sequence: Sequence
    chain: BlockChain
    """Names of the sequence's full blocks."""
    order: int
    """When it was let in, as a number: the newest is preempted first, and comes back last."""
    rank: float
    """Its place in the distribution of output lengths, in [0, 1)."""
    handle: Handle
    """The choice's name in `StepTokens`."""
    began: float = 0.0
    """Monotonic seconds at which it had its blocks, and its first token."""
    num_named: int = 0
    """Leading blocks whose names the pool has been told."""
    num_sent: int = 0
    """Tokens of the sequence that the gateway has been sent."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the generated tokens from `first_position` on, when the request asks."""
    first_position: int = 0
    """Position of the first token that this attempt generated."""
    finish_reason: FinishReason | None = None
    stage: Stage = Stage.READY
    due_step: int = 0
    """The step before which a running sequence needs its next block."""
    end_step: int = 0
    """The step at which it is expected to end."""
    host_slots: list[int] = field(default_factory=list)
    """Slots of host memory that hold its leading blocks, from being swapped out to being swapped in."""
    joined_at: float | None = None
    """When it first had a place in the batch, in monotonic seconds."""
    paused_at: float | None = None
    """Since when it has had none again."""
    paused_s: float = 0.0
    """What earlier such pauses have taken."""
    timings: Timings | None = None
    """As last told to the gateway."""
    preempted_at: float = 0.0
    """When it last lost its blocks, in monotonic seconds."""
    num_passed: int = 0
    """Requests of higher tiers that came in since, after it had waited beyond the ageing time."""
    gave_way: bool = False
    """Whether it has lost them to a higher tier: it does so only once."""
    num_put_off: int = 0
    """Times that it was not cut, since it had run ahead of what its sink had read."""
    moved: bool = False
    """Whether another worker goes on with it."""
    num_kept: int = 0
    """Leading blocks that were found in the prefix cache when it came back: they are not swapped in."""

    @property
    def key(self) -> tuple[DecodeRequest, int]:
        """The request and the choice."""
        return self.request, self.sequence.choice

    def joined(self, now: float) -> None:
        """It has a place in the batch."""
        if self.joined_at is None:
            self.joined_at = now
        elif self.paused_at is not None:
            self.paused_s += now - self.paused_at
            self.paused_at = None

    def paused(self, now: float) -> None:
        """It has lost its place, or its blocks, if it had them."""
        if self.joined_at is not None and self.paused_at is None:
            self.paused_at = now

    def append(self, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None) -> None:
        """The next token."""
        assert self.finish_reason is None, self.sequence
        self.sequence.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.finish_reason = finish_reason

    def tokens(self, position: int) -> Tokens:
        """The tokens from `position` on, as a message: at most `MAX_TOLD_TOKENS` of them."""
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
    """Monotonic seconds at which its budget ends."""
    arrived: float
    """Monotonic seconds."""
    chain: BlockChain
    """Names of the full blocks of `work.token_ids`."""
    pull: Pull | None = None
    """None when the prompt is computed here."""
    ahead: PullTimes | None = None
    """Of what was read of a sequence that moves before it stood still."""
    grammar_state: GrammarState | None = None
    """Of what may come first, where the prompt is computed here and there is a grammar."""
    prompt_times: PromptTimes | None = None
    """What its first tokens have taken, here or at its source."""
    started_at: float | None = None
    """When the first chunk of its prompt was planned here, in monotonic seconds."""
    num_cached: int = 0
    """Leading tokens of a prompt that is computed here whose KV the prefix cache had."""
    begun_at: float | None = None
    """When its KV was here, for good, and its choices began."""
    order: int = 0
    """When it was let in, as a number."""
    gave_way: bool = False
    """Whether it has lost its blocks to a higher tier before its choices began: it does so only once."""
    num_passed: int = 0
    """Later requests that came in while this one did not fit."""
    sent_back: bool = False
    """Whether it had to wait again, after it had been let in."""
    num_charged: int = 0
    """Leading tokens whose computation its tenant has been charged for."""
    fork_blocks: list[int] = field(default_factory=list)
    """Blocks for the forks' copies of a partly filled last block, held from the reservation to the fork."""
    generations: list[Generation] = field(default_factory=list)
    """One for each choice, once the KV is here."""

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return self.work.key

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, or moved away."""
        return bool(self.generations) and all(g.finish_reason is not None or g.moved for g in self.generations)

    @property
    def num_new(self) -> int:
        """Tokens beyond those that the request came with, of the choice that has got the fewest."""
        going_on = [g.sequence.num_tokens for g in self.generations if g.finish_reason is None]
        return min(going_on, default=0) - len(self.work.token_ids)


@dataclass(slots=True, eq=False)
class LocalPrompt:
    """Tokens whose KV this worker computes in chunks: a request's own, or those that a preempted choice has lost."""

    request: DecodeRequest
    generation: Generation | None
    """The choice that is recomputed; None for the request's prompt."""
    token_ids: list[int] | tuple[int, ...]
    num_computed: int
    block_table: Seq[int]
    urgency: tuple[int, float, int]
    """(tier's rank, deadline, order): what comes first."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def gave_way(self) -> bool:
        """Whether it has lost its blocks to a higher tier before."""
        return (self.generation or self.request).gave_way

    @gave_way.setter
    def gave_way(self, value: bool) -> None:
        (self.generation or self.request).gave_way = value
