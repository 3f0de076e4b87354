"""The blocks in which a draft model keeps the KV of sequences. They are private: nothing is shared, named or moved."""

from __future__ import annotations

from dataclasses import dataclass, field


class DraftCache:
    """The blocks of a draft model's KV cache. Pure state."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = list(range(num_blocks))

    @property
    def num_used(self) -> int:
        """Blocks that sequences have."""
        return self.num_blocks - len(self.free)


@dataclass(slots=True, eq=False)
class DraftTable:
    """What a draft model has of one sequence."""

    cache: DraftCache
    acceptance: float
    """Recent share of the tokens it has drafted that were right, between 0 and 1."""
    judge_at: int = 0
    """Number of tokens of the sequence from which on to ask, once more, whether to compute it."""
    wanted: bool = False
    """Whether it is being computed, in chunks."""
    num_computed: int = 0
    """Leading tokens of the sequence whose KV is in the blocks. What is after them does not count."""
    block_table: list[int] = field(default_factory=list)

    def hold(self, num_tokens: int) -> bool:
        """Take blocks for so many tokens. If there are not enough, give all back and return False: a sequence without
        room for its next tokens cannot be drafted, and its blocks may be what another one lacks."""
        num_lacking = -(-num_tokens // self.cache.block_size) - len(self.block_table)
        if num_lacking > len(self.cache.free):
            self.release()
            return False
        for _ in range(num_lacking):
            self.block_table.append(self.cache.free.pop())
        return True

    def release(self) -> None:
        """Give all blocks back: the sequence has ended or lost its own blocks, or there is no room for it here."""
        self.cache.free += self.block_table
        self.block_table = []
        self.num_computed = 0
        self.wanted = False
