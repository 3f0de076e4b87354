"""The operator's settings of a decode worker, in the form that the scheduler takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from common.contract.messages.session import Profile
from common.contract.tiers import Tier
from common.runtime.config import DecodeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's settings: counts in tokens, sequences or blocks, as named; times in seconds; `memory_reserve` a
    fraction."""

    block_size: int
    max_num_seqs: int
    max_sequence_tokens: int
    token_budget: int = 1024
    prefill_tokens: int | None = None
    """Most prompt tokens of a step with decodes; None: chosen in each step, see `LocalPrompts.budget`."""
    prefill_priority: bool = False
    step_target_s: float | None = None
    """Seconds between tokens that bound the batch; None: only `max_num_seqs` does. See `BatchBound`."""
    runs_ahead: bool = False
    """Whether a step may be planned while the one before it runs."""
    draft_tokens: int = 0
    """Drafted tokens of a sequence; 0: chosen in each step, see `Speculation.plan`."""
    memory_reserve: float = 0.05
    num_host_blocks: int = 0
    preempt_by: Literal["cost", "swap", "recompute"] = "cost"
    ageing_s: float = 30.0
    ttft_target_s: Callable[[Tier], float] = lambda tier: 1.0
    itl_target_s: Callable[[Tier], float] = lambda tier: 0.2

    @classmethod
    def of(cls, settings: DecodeSettings, max_sequence_tokens: int, block_size: int, num_host_blocks: int) -> Policy:
        """The policy of a worker with these settings, and a model of this context and cache."""
        return cls(
            block_size=block_size,
            max_num_seqs=settings.max_num_seqs,
            max_sequence_tokens=max_sequence_tokens,
            token_budget=settings.token_budget,
            prefill_tokens=settings.prefill_tokens or None,
            prefill_priority=settings.prefill_priority,
            step_target_s=settings.interactive_itl_s if settings.profile is Profile.LATENCY else None,
            runs_ahead=settings.runs_ahead,
            draft_tokens=settings.draft_tokens,
            memory_reserve=settings.memory_reserve,
            num_host_blocks=num_host_blocks,
            preempt_by=settings.preempt_by,
            ageing_s=settings.ageing_s,
            ttft_target_s=settings.ttft_target_s,
            itl_target_s=settings.itl_target_s,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)
