"""Prompt lookup: proposes the tokens that followed the last ones where these occurred before in the same text, or in
the one that the client expects for an answer.

The method is that of "Prompt Lookup Decoding" (A. Saxena, 2023) and "Inference with Reference" (arXiv:2304.04487).
Nothing is drafted to learn how often it is right: each token that comes is compared with the one that was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BITS = 21
"""Bits of a token in a key. Three tokens fit into an int64."""
_KEY = (1 << 3 * _BITS) - 1
_MOST_TOKENS = 2**15
"""Most tokens of a text that are read at its begin: the last ones. A token takes 100 bytes."""
_OWN_WEIGHT, _COMMON_WEIGHT = 0.15, 0.02
"""Weights of the last expected token in how often those of a text, and those of all texts, were right."""


@dataclass(slots=True)
class CommonAcceptance:
    """How often expected tokens came true, over many texts: what a new text starts from."""

    acceptance: float


class Lookup:
    """A growing text, and what is expected next in it."""

    __slots__ = ("_common", "_index", "_key", "_num_read", "_place", "_text", "_token_ids", "acceptance")

    def __init__(
        self,
        token_ids: Sequence[int],
        common: CommonAcceptance,
        prompt_len: int = 0,
        prediction: Sequence[int] = (),
    ) -> None:
        """The present tokens are read; those that come after them are compared with what was expected. `prediction` is
        what the client expects after the first `prompt_len` tokens."""
        self._token_ids = token_ids
        self._common = common
        self.acceptance = common.acceptance
        """Recent share of expected tokens that came, between 0 and 1."""
        self._num_read = len(token_ids)
        self._text = [*token_ids[:prompt_len], *prediction, *token_ids[prompt_len:]]
        """Where expected tokens are looked up. The prediction comes before the output, as if it had been said once."""
        start = max(0, len(self._text) - _MOST_TOKENS)
        tail = np.array(self._text[start:], np.int64)
        keys = tail.copy()
        keys[1:] |= tail[:-1] << _BITS
        keys[2:] |= tail[:-2] << 2 * _BITS
        *earlier, self._key = (keys & _KEY).tolist()
        self._index: dict[int, int] = dict(zip(earlier, range(start + 1, len(self._text)), strict=True))
        """Key of three tokens in a row → index of the token after their last occurrence."""
        self._place = self._enter(len(self._text))
        """Index of the token that is expected to come next, once more; None if nothing is expected."""
        output = token_ids[prompt_len:]
        if len(output) < len(prediction) and [*prediction[: len(output)]] == [*output]:
            self._place = prompt_len + len(output)

    @property
    def expects(self) -> bool:
        """Whether there is anything to propose."""
        return self._place is not None

    def read(self) -> None:
        """Read the tokens that have come since."""
        text = self._text
        for token in self._token_ids[self._num_read :]:
            place = self._place
            if place is not None:
                right = text[place] == token
                self.acceptance += _OWN_WEIGHT * (right - self.acceptance)
                self._common.acceptance += _COMMON_WEIGHT * (right - self._common.acceptance)
                self._place = place + 1 if right else None
            text.append(token)
            self._key = (self._key << _BITS | token) & _KEY
            occurred = self._enter(len(text))
            if self._place is None:
                self._place = occurred
        self._num_read = len(self._token_ids)

    def propose(self, num: int) -> list[int]:
        """The next `num` tokens, if the text goes on as before. A text that repeats its end goes on repeating it."""
        if self._place is None:
            return []
        text, place = self._text, self._place
        period = len(text) - place
        return [text[place + index % period] for index in range(num)]

    def _enter(self, end: int) -> int | None:
        """Note that the last three tokens end before index `end`. Returns the same of their last occurrence."""
        occurred = self._index.get(self._key)
        self._index[self._key] = end
        return occurred
