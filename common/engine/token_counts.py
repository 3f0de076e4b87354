"""How often each token has occurred in a sequence whose parameters have penalties, kept from step to step. No torch."""

from __future__ import annotations

from array import array
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from copy import copy

from common.contract.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens that matter to the penalties of one sequence, and their occurrences in the output.

    Only the engine's thread counts. The sequence may grow meanwhile, but its existing tokens do not change.
    """

    __slots__ = ("_num_counted", "_places", "_prompt_len", "_shared", "_start", "_token_ids", "nums", "tokens")

    def __init__(
        self, token_ids: Sequence[int], prompt_len: int, sampling: SamplingParams, shared: TokenCounts | None = None
    ) -> None:
        """`shared` counts leading tokens, for all sequences that begin with them. At least one more token is known."""
        self._token_ids = token_ids
        self._prompt_len = prompt_len
        self._start = 0 if sampling.repetition_penalty != 1.0 else prompt_len
        """First token that is counted: only the repetition penalty concerns the prompt."""
        self._shared = shared
        """None once its counts are copied."""
        self._num_counted = 0
        self._places: MutableMapping[int, int] = {}
        """Token → its index in `tokens`."""
        self.tokens = array("i")
        """Each distinct token once, in the order of first occurrence."""
        self.nums = array("i")
        """Number of occurrences of each of them in the output."""

    def count(self, end: int) -> None:
        """Count tokens `[0, end)` of the sequence. Tokens that were counted before cost nothing."""
        self._copy_shared()
        start, self._num_counted = self._num_counted, end
        assert start <= end, f"{start} tokens are counted, {end} are asked for"
        self._add(self._token_ids[start:end], start)

    def with_draft(self, end: int, draft: Sequence[int]) -> TokenCounts:
        """Counts of tokens `[0, end)` of the sequence, and of `draft` after them, to be read only. Those of the
        sequence stay as they are."""
        self._copy_shared()
        more = copy(self)
        more._places, more.tokens, more.nums = ChainMap({}, self._places), self.tokens[:], self.nums[:]
        more._add((*self._token_ids[self._num_counted : end], *draft), self._num_counted)
        return more

    def _copy_shared(self) -> None:
        """Begin with the shared counts. The first sequence that needs them has the tokens counted."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.count(len(shared._token_ids))
            self._num_counted = shared._num_counted
            self._places, self.tokens, self.nums = dict(shared._places), shared.tokens[:], shared.nums[:]

    def _add(self, token_ids: Sequence[int], start: int) -> None:
        """Count `token_ids`, which are those from position `start` on."""
        places = self._places
        for token in dict.fromkeys(token_ids[max(0, self._start - start) :]):
            if token not in places:
                places[token] = len(self.tokens)
                self.tokens.append(token)
                self.nums.append(0)
        for token in token_ids[max(0, self._prompt_len - start) :]:
            self.nums[places[token]] += 1


def token_counts(
    sampling: SamplingParams, token_ids: Sequence[int], prompt_len: int, shared: TokenCounts | None = None
) -> TokenCounts | None:
    """Counts with nothing counted yet; None if there are no penalties. For `shared` see `TokenCounts`."""
    return TokenCounts(token_ids, prompt_len, sampling, shared) if sampling.penalised else None
