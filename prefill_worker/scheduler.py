"""Which tokens of which prompts are computed in the next step: chunked prefill under a token budget.

Pure state: requests and finished steps in, chunks out. A request gets every block that its prompt needs when it is
admitted, so that an admitted prefill always ends without waiting for anyone: that is what keeps the pools free of
deadlock (a decode worker reserves only after this).

Life cycle of a request here:

    waiting ──► running ──► done        (its blocks are then held by its lease alone)
       └───────────┴──────► removed     (abort, deadline)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import Prefill
from common.engine.block_pool import BlockPool


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """A prompt on its way through this worker."""

    work: Prefill
    gateway: Incarnation
    deadline: float
    """Monotonic seconds at which its budget ends."""
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in the cache."""

    @property
    def key(self) -> RequestKey:
        """(request, attempt)."""
        return self.work.key

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed."""
        return len(self.work.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, end)` of a request, computed in one step."""

    request: PrefillRequest
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.end == len(self.request.work.token_ids)


class PrefillScheduler:
    """First come, first served; several prompts share a step."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, chunk_size: int, token_budget: int, max_waiting: int
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chunk_size = chunk_size
        self._token_budget = token_budget
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[RequestId, PrefillRequest] = OrderedDict()
        self._running: OrderedDict[RequestId, PrefillRequest] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks and tokens still to compute."""
        return len(self._running)

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed, of all requests."""
        return sum(r.num_uncomputed for group in (self._waiting, self._running) for r in group.values())

    @property
    def full(self) -> bool:
        """Whether one more request must be refused."""
        return len(self._waiting) >= self._max_waiting

    def get(self, request: RequestId) -> PrefillRequest | None:
        """The request, if it is waiting or running."""
        return self._waiting.get(request) or self._running.get(request)

    def requests(self) -> list[PrefillRequest]:
        """Every waiting and running request."""
        return [*self._waiting.values(), *self._running.values()]

    def blocks_for(self, request: PrefillRequest) -> int:
        """Blocks that the request's prompt needs."""
        return -(-len(request.work.token_ids) // self._block_size)

    def add(self, request: PrefillRequest) -> None:
        """Enqueue a request, which must fit into the pool."""
        assert not self.full
        assert self.blocks_for(request) <= self._pool.num_blocks
        self._waiting[request.key.request] = request

    def admit(self) -> list[PrefillRequest]:
        """Give blocks to waiting requests, in order, while there are enough; returns those admitted."""
        admitted = []
        while self._waiting:
            request = next(iter(self._waiting.values()))
            if self.blocks_for(request) > self._pool.num_free:
                break
            del self._waiting[request.key.request]
            request.block_table = self._pool.allocate(self.blocks_for(request))
            self._running[request.key.request] = request
            admitted.append(request)
        return admitted

    def blocks_missing(self) -> int:
        """Blocks that the first waiting request lacks; 0 when none waits."""
        first = next(iter(self._waiting.values()), None)
        return 0 if first is None else max(0, self.blocks_for(first) - self._pool.num_free)

    def schedule(self) -> list[Chunk]:
        """The next step: chunks of running prompts, in order, within the budget."""
        budget = self._token_budget
        chunks = []
        for request in self._running.values():
            size = min(request.num_uncomputed, self._chunk_size, budget)
            if size == 0:
                break
            chunks.append(Chunk(request, request.num_computed, request.num_computed + size))
            budget -= size
        return chunks

    def step_done(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Account for a finished step; returns its chunks of requests that are still here.

        A request whose last chunk is done leaves, and drops its own references on its blocks: its lease has others.
        """
        live = [chunk for chunk in chunks if self._running.get(chunk.request.key.request) is chunk.request]
        for chunk in live:
            chunk.request.num_computed = chunk.end
            if chunk.last:
                self.remove(chunk.request)
        return live

    def remove(self, request: PrefillRequest) -> None:
        """Forget a waiting or running request and release its blocks."""
        self._waiting.pop(request.key.request, None)
        self._running.pop(request.key.request, None)
        self._pool.release(request.block_table)
        request.block_table = []

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert len(self._waiting) <= self._max_waiting
        assert not self._waiting.keys() & self._running.keys()
        for request in self._waiting.values():
            assert not request.block_table
            assert request.num_computed == 0
        for request in self._running.values():
            assert len(request.block_table) == self.blocks_for(request)
            assert 0 <= request.num_computed < len(request.work.token_ids)
            assert all(self._pool.ref_count(block) > 0 for block in request.block_table)
