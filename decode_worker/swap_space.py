"""The host memory to which preempted sequences are swapped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.scheduling.costs import Costs
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice


class SwapSpace:
    """Slots of host memory, each for the contents of one block. Pure state."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self._policy = policy
        self._costs = costs
        self._free = list(range(policy.num_host_blocks))
        self._arriving: set[DecodeChoice] = set()
        """Sequences whose blocks are being swapped in by the last step that was planned."""
        self.num_swapped = 0
        """Preemptions by swap."""

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self._policy.num_host_blocks - len(self._free)

    def holds(self, choice: DecodeChoice) -> bool:
        """Whether contents of the sequence's blocks are, or may still be, in host memory alone."""
        return bool(choice.host_slots) or choice in self._arriving

    def takes(self, num_content: int, start: int, end: int) -> bool:
        """Whether a sequence is swapped to host memory rather than computed again. `num_content` of its blocks have
        contents; its tokens `[start, end)` would be computed again."""
        if self._policy.preempt_by == "recompute" or num_content > len(self._free) or num_content == 0:
            return False
        if self._policy.preempt_by == "swap":
            return True
        return self._costs.swap_s(num_content) <= self._costs.compute_s(start, end)

    def swap_out(self, choice: DecodeChoice, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Reserve slots for the contents of `blocks`; returns (block, slot) pairs."""
        choice.host_slots = [self._free.pop() for _ in blocks]
        return list(zip(blocks, choice.host_slots, strict=True))

    def swap_in(self, choice: DecodeChoice) -> list[tuple[int, int]]:
        """Give the sequence's contents back to its blocks; returns (slot, block) pairs."""
        kept, slots = choice.num_kept, choice.host_slots
        pairs = list(zip(slots[kept:], choice.sequence.block_table[kept : len(slots)], strict=True))
        self.give_back(choice)
        self._arriving.add(choice)
        return pairs

    def give_back(self, choice: DecodeChoice) -> None:
        """Free the sequence's slots."""
        self._free += choice.host_slots
        choice.host_slots = []

    def next_step(self) -> None:
        """A step is planned: what the step before swapped in has arrived by then."""
        self._arriving.clear()

    def check_invariants(self, sequences: Iterable[DecodeChoice]) -> None:
        """Assert that each slot is free or belongs to one of `sequences`, which are all that live."""
        owned = [slot for choice in sequences for slot in choice.host_slots]
        assert sorted([*owned, *self._free]) == list(range(self._policy.num_host_blocks)), "a host slot is lost"
