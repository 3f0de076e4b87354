"""How often each token has occurred in a sequence whose parameters have penalties, kept from step to step. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy

from common.contract.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens that matter to the penalties of one sequence, and their occurrences in the output.

    Only the engine's thread counts. The sequence may grow meanwhile, but its existing tokens do not change.
    """

    __slots__ = ("_num_counted", "_places", "_prompt_len", "_start", "_token_ids", "nums", "tokens")

    def __init__(self, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams) -> None:
        self._token_ids = token_ids
        self._prompt_len = prompt_len
        self._start = 0 if sampling.repetition_penalty != 1.0 else prompt_len
        """First token that is counted: only the repetition penalty concerns the prompt."""
        self._num_counted = 0
        self._places: dict[int, int] = {}
        """Token → its index in `tokens`."""
        self.tokens = array("i")
        """Each distinct token once, in the order of first occurrence."""
        self.nums = array("i")
        """Number of occurrences of each of them in the output."""

    def count(self, end: int) -> None:
        """Count tokens `[0, end)` of the sequence. Tokens that were counted before cost nothing."""
        start, self._num_counted = self._num_counted, end
        assert start <= end, f"{start} tokens are counted, {end} are asked for"
        places = self._places
        for token in dict.fromkeys(self._token_ids[max(start, self._start) : end]):
            if token not in places:
                places[token] = len(places)
                self.tokens.append(token)
                self.nums.append(0)
        for token in self._token_ids[max(start, self._prompt_len) : end]:
            self.nums[places[token]] += 1

    def with_draft(self, end: int, draft: Sequence[int]) -> TokenCounts:
        """A copy that has counted tokens `[0, end)` of the sequence, and those of `draft` after them."""
        more = copy(self)
        more._token_ids = (*self._token_ids[:end], *draft)
        more._places, more.tokens, more.nums = self._places.copy(), self.tokens[:], self.nums[:]
        more.count(end + len(draft))
        return more


def token_counts(sampling: SamplingParams, token_ids: Sequence[int], prompt_len: int) -> TokenCounts | None:
    """Counts with nothing counted yet; None if there are no penalties."""
    return TokenCounts(token_ids, prompt_len, sampling) if sampling.penalised else None
