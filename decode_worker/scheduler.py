"""Who is in the running batch, and who may come in: continuous batching with reservations.

Every step takes one token of every running sequence; sequences that end leave at once and settled ones join at the
next step. A request is let in (its blocks reserved, its pull begun) only when everything it could ever need is free
and promised to nobody else, so a running sequence never lacks a block.

Pure state: requests and finished steps in, decisions out.

Life cycle of a request here:

    waiting ──► reserved ──► ready ──► running ──► ended
    (for room)  (pulling)    (for a place in the batch)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from common.contract.messages import Decode, Tokens
from common.engine.block_pool import BlockPool
from common.engine.sequence import Sequence
from decode_worker.request import DecodeRequest, Generation


class DecodeScheduler:
    """First come, first served."""

    def __init__(self, pool: BlockPool, *, block_size: int, max_num_seqs: int, max_sequence_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_sequence_tokens = max_sequence_tokens
        self._waiting: deque[tuple[DecodeRequest, int]] = deque()
        """Requests whose offer is open, with the blocks to pull, waiting for room."""
        self._reserved: dict[DecodeRequest, int] = {}
        """Requests that pull → blocks promised for their growth."""
        self._ready: dict[Generation, None] = {}
        self._running: dict[Generation, None] = {}
        self._promised = 0
        """Blocks promised and not yet allocated, of all requests."""
        self._copies: list[tuple[int, int]] = []
        """Block copies, for forks, that the next step must make first."""

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for room, and sequences waiting for a place in the batch."""
        return len(self._waiting) + len(self._ready)

    @property
    def num_pulling(self) -> int:
        """Requests with a reservation whose blocks are on their way."""
        return len(self._reserved)

    @property
    def num_promised(self) -> int:
        """Blocks promised for growth and not allocated yet."""
        return self._promised

    def blocks_needed(self, work: Decode) -> int:
        """The most blocks that a request can ever hold: shared full prompt blocks once, the rest for each choice."""
        shared = len(work.token_ids) // self._block_size
        return shared + len(work.choices) * (self._blocks_at_end(work) - shared)

    def fits(self, work: Decode) -> bool:
        """Whether the request could run if it were alone."""
        return self.blocks_needed(work) <= self._pool.num_blocks

    # --- the way in ----------------------------------------------------------------------------------------------

    def want(self, request: DecodeRequest, num_blocks: int) -> None:
        """The request's offer is open: it waits for room for `num_blocks` and its growth."""
        self._waiting.append((request, num_blocks))

    def reserve(self) -> list[tuple[DecodeRequest, list[int]]]:
        """Let waiting requests in, in order, while there is room: (request, blocks to pull into)."""
        admitted = []
        while self._waiting:
            request, num_blocks = self._waiting[0]
            needed = max(self.blocks_needed(request.work), num_blocks)
            if self._pool.num_free - self._promised < needed:
                break
            self._waiting.popleft()
            self._reserved[request] = needed - num_blocks
            self._promised += needed - num_blocks
            admitted.append((request, self._pool.allocate(num_blocks)))
        return admitted

    def admit(self, request: DecodeRequest, block_ids: Seq[int], first_tokens: Seq[Tokens]) -> None:
        """The request's blocks are settled: its choices go on after their first tokens, sharing the full blocks."""
        work = request.work
        num_tokens = len(work.token_ids)
        spare = self._reserved.pop(request)
        full = num_tokens // self._block_size
        growth = self._blocks_at_end(work) - len(block_ids)
        for index, first in enumerate(first_tokens):
            table = list(block_ids)
            if index > 0:
                self._pool.share(block_ids[:full])
                copies = self._pool.allocate(len(block_ids) - full)
                self._copies += zip(block_ids[full:], copies, strict=True)
                self._pool.share([*block_ids[full:], *copies])
                spare -= len(copies)
                self._promised -= len(copies)
                table[full:] = copies
            sequence = Sequence(
                request.key, first.choice, list(work.token_ids), work.prompt_len, work.sampling, num_tokens, table
            )
            generation = Generation(request, sequence, growth, num_tokens, first_position=num_tokens)
            spare -= growth
            generation.append(
                first.token_ids[0], first.logprobs[0] if first.logprobs is not None else None, first.finish_reason
            )
            request.generations.append(generation)
            self._ready[generation] = None
        self._promised -= spare
        assert spare == 0, (spare, work)
        for generation in request.generations:
            if generation.finish_reason is not None:
                self.remove(generation)

    # --- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Generation], list[tuple[int, int]]]:
        """The next step: the sequences to advance by one token, each with room for it, and copies to make before.

        To be called after the pool's `step_started`: the blocks of a copy are held until that step has finished, even
        if both sequences end before it.
        """
        while self._ready and len(self._running) < self._max_num_seqs:
            generation = next(iter(self._ready))
            del self._ready[generation]
            self._running[generation] = None
        for generation in self._running:
            self._grow(generation)
        copies, self._copies = self._copies, []
        for copy in copies:
            self._pool.release(copy)
        return list(self._running), copies

    def is_running(self, generation: Generation) -> bool:
        """Whether the sequence is (still) in the batch."""
        return generation in self._running

    def remove(self, generation: Generation) -> None:
        """A sequence has ended, or is given up: its blocks and what was promised to it are free again."""
        if generation not in self._ready and generation not in self._running:
            return
        self._ready.pop(generation, None)
        self._running.pop(generation, None)
        self._promised -= generation.promised
        generation.promised = 0
        self._pool.release(generation.sequence.block_table)
        generation.sequence.block_table = []

    def forget(self, request: DecodeRequest) -> None:
        """Give the request up, wherever it is; blocks that a pull holds are the pull's to release."""
        self._waiting = deque(item for item in self._waiting if item[0] is not request)
        self._promised -= self._reserved.pop(request, 0)
        for generation in request.generations:
            self.remove(generation)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        assert len(self._running) <= self._max_num_seqs
        assert not self._ready.keys() & self._running.keys()
        assert self._promised == sum(self._reserved.values()) + sum(
            generation.promised for group in (self._ready, self._running) for generation in group
        ), "promises do not add up"
        assert self._promised <= self._pool.num_free, "more is promised than is free"
        for group in (self._ready, self._running):
            for generation in group:
                assert generation.promised >= 0, generation.sequence
                assert generation.finish_reason is None, generation.sequence
                assert all(self._pool.ref_count(block) > 0 for block in generation.sequence.block_table)

    def _blocks_at_end(self, work: Decode) -> int:
        """Blocks of one choice at its longest. Its last token is never computed, hence never stored."""
        remaining = work.sampling.max_tokens - (len(work.token_ids) - work.prompt_len)
        stored = min(len(work.token_ids) + remaining, self._max_sequence_tokens) - 1
        return -(-max(stored, len(work.token_ids)) // self._block_size)

    def _grow(self, generation: Generation) -> None:
        sequence = generation.sequence
        missing = -(-sequence.num_tokens // self._block_size) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self._pool.allocate(missing)
            generation.promised -= missing
            self._promised -= missing
