"""A request in the prefill worker: its prompt, and the states that it goes through."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.contract.block_hashes import BlockHash
from common.contract.ids import Incarnation, RequestKey
from common.contract.messages.gateway import Prefill
from common.contract.messages.worker import PromptTimes
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.engine.grammar import GrammarState
from common.runtime.state_tables import follow
from common.scheduling.chunked_prefill import Urgency
from common.scheduling.turns import MAX_PASSED


class PromptState(StrEnum):
    """The state of a request in the prefill worker."""

    ARRIVED = "arrived"
    MASKING = "masking"
    """The mask of its grammar's first tokens is being made."""
    WAITING = "waiting"
    """It has no blocks yet."""
    RUNNING = "running"
    """It has every block that it needs; chunks of it are computed. Its blocks are offered under a lease."""
    ON_HOLD = "on_hold"
    """It has blocks; its beginning is being pulled from another worker, and nothing is offered or computed."""
    COMPUTED = "computed"
    """Its first tokens are sent; only its lease holds its blocks."""
    ENDED = "ended"


class PromptEvent(StrEnum):
    """What changes the state of a request in the prefill worker."""

    MASK = "mask"
    ENQUEUE = "enqueue"
    ADMIT = "admit"
    HOLD = "hold"
    RESUME = "resume"
    """The pull of its beginning is over: pulled, or given up."""
    REQUEUE = "requeue"
    """The pull was given up, and a read may still write to its blocks."""
    COMPUTE = "compute"
    """Its last chunk is computed."""
    END = "end"
    """Its lease has ended; or it was aborted, has failed, or its time was up."""


PROMPT_TABLE: Mapping[PromptState, Mapping[PromptEvent, PromptState]] = {
    PromptState.ARRIVED: {PromptEvent.MASK: PromptState.MASKING, PromptEvent.ENQUEUE: PromptState.WAITING},
    PromptState.MASKING: {PromptEvent.ENQUEUE: PromptState.WAITING, PromptEvent.END: PromptState.ENDED},
    PromptState.WAITING: {PromptEvent.ADMIT: PromptState.RUNNING, PromptEvent.END: PromptState.ENDED},
    PromptState.RUNNING: {
        PromptEvent.HOLD: PromptState.ON_HOLD,
        PromptEvent.COMPUTE: PromptState.COMPUTED,
        PromptEvent.END: PromptState.ENDED,
    },
    PromptState.ON_HOLD: {
        PromptEvent.RESUME: PromptState.RUNNING,
        PromptEvent.REQUEUE: PromptState.WAITING,
        PromptEvent.END: PromptState.ENDED,
    },
    PromptState.COMPUTED: {PromptEvent.END: PromptState.ENDED},
    PromptState.ENDED: {},
}


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A prompt in this worker."""

    work: Prefill
    gateway: Incarnation
    arrived: float
    """Monotonic seconds."""
    deadline: float
    """Monotonic seconds at which the request's budget ends."""
    grammar_state: GrammarState | None = None
    """The grammar's state before the first token; None without a grammar."""
    state: PromptState = PromptState.ARRIVED
    story: list[str] = field(default_factory=list)
    """The states that it has had."""
    urgency: Urgency = (0, 0.0, 0)
    """Set at admission: (rank of the tier, monotonic seconds by which the first token is due, admission number)."""
    length: int = 0
    """Uncomputed tokens when the request was last looked up while it waited, admitted or resumed."""
    block_hashes: Sequence[BlockHash] = ()
    """Names of the prompt's full blocks."""
    num_cached: int = 0
    """Leading tokens that were computed for other requests: cached here at admission, or pulled since. Before
    admission, those that the prefix cache had when last asked."""
    matched: list[int] = field(default_factory=list)
    """While the request waits: blocks of its beginning that the prefix cache had when last asked."""
    matched_at: int = 0
    """The pool's count of lost names when `matched` was last reset."""
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose KV is in `block_table`."""
    num_coming: int = 0
    """Leading tokens that are here once a pull under way has ended; 0 without one. While the request waits, those that
    were expected when `num_cached` was found: from a pull, or from prompts that compute what both begin with."""
    num_passed: int = 0
    """Later requests that were admitted while this one did not fit."""
    started_at: float | None = None
    """Monotonic seconds at which the first chunk was planned."""
    held_s: float = 0.0
    """Seconds that the request waited for prefixes to be pulled."""
    prefix_tried: bool = False
    """Whether the worker has already decided on a pull of the prefix."""

    def enter(self, event: PromptEvent) -> None:
        """Change the state."""
        self.state = follow(PROMPT_TABLE, self.state, event, (self.key, self.story))
        self.story.append(self.state)

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return self.work.key

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt."""
        return self.work.token_ids

    @property
    def allowed(self) -> bytes | None:
        """Mask of the tokens that the grammar allows first; None without a grammar."""
        return None if self.grammar_state is None else self.grammar_state.allowed

    @property
    def tier(self) -> Tier:
        """The request's service class."""
        return self.work.tier

    @property
    def tenant(self) -> str:
        """The request's tenant."""
        return self.work.tenant

    def times(self, now: float) -> PromptTimes:
        """How long the stages of this prompt took, if its first tokens are sent at `now`."""
        assert self.started_at is not None, self.key
        queue_s = self.started_at - self.arrived - self.held_s
        return PromptTimes(
            queue_s=queue_s,
            prefix_pull_s=self.held_s,
            prefill_s=now - self.started_at,
            num_cached=self.num_cached,
        )

    def cached(self, pool: BlockPool, block_size: int) -> list[int]:
        """Cached blocks of the prompt's beginning. The last token is always computed, for its logits; so is every token
        if all are to be scored.

        Earlier matches stay valid until a block loses its name.
        """
        if self.work.prompt_logprobs is not None:
            return []
        if self.matched_at != pool.num_names_lost:
            self.matched, self.matched_at = [], pool.num_names_lost
        unmatched = range(len(self.matched), (len(self.token_ids) - 1) // block_size)
        self.matched += pool.match(self.block_hashes[index] for index in unmatched)
        return self.matched

    def num_alike(self, other: PrefillRequest, start: int) -> int:
        """Number of full blocks, from block `start` on, up to which this prompt and `other` are the same."""
        ours, theirs = self.block_hashes, other.block_hashes
        blocks = range(start, min(len(ours), len(theirs)))
        if not blocks or ours[start] != theirs[start]:
            return 0
        return bisect_left(blocks, True, key=lambda block: ours[block] != theirs[block])

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed. While the request waits, those that were not cached, to be pulled, or to be
        computed for another prompt, when it was last looked up."""
        start, end = self.uncomputed
        return end - start

    @property
    def uncomputed(self) -> tuple[int, int]:
        """These tokens: `[start, end)`."""
        return max(self.num_computed, self.num_cached, self.num_coming), len(self.work.token_ids)

    def check_invariants(self, pool: BlockPool, block_size: int) -> None:
        """Assert what must hold between any two events while the scheduler has the request."""
        if self.state is PromptState.WAITING:
            assert not self.block_table, self.story
            assert self.num_computed == 0
            assert self.num_passed <= MAX_PASSED
            assert self.length == self.num_uncomputed
            if self.matched_at == pool.num_names_lost:
                assert self.matched == pool.match(self.block_hashes[: len(self.matched)])
        else:
            assert len(self.block_table) == -(-len(self.token_ids) // block_size), self.story
            assert 0 <= self.num_cached <= self.num_computed < len(self.token_ids)
            assert all(pool.ref_count(block) > 0 for block in self.block_table)
            assert self.state is PromptState.ON_HOLD or not self.num_coming
