"""The operator's settings of a decode worker, in the form that the scheduler takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.contract.tiers import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's settings: counts in tokens, sequences or blocks, as named; times in seconds; `memory_reserve` a
    fraction."""

    block_size: int
    max_num_seqs: int
    max_sequence_tokens: int
    token_budget: int = 1024
    prefill_tokens: int = 128
    prefill_priority: bool = False
    memory_reserve: float = 0.05
    num_host_blocks: int = 0
    preempt_by: Literal["cost", "swap", "recompute"] = "cost"
    ageing_s: float = 30.0
    ttft_target_s: Callable[[Tier], float] = lambda tier: 1.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)
