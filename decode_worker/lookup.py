"""Prompt lookup: proposes the tokens that followed the last ones where these occurred before in the same text, or in
the one that the client expects for an answer.

The method is that of "Prompt Lookup Decoding" (A. Saxena, 2023) and "Inference with Reference" (arXiv:2304.04487).
Nothing is drafted to learn how often it is right: each token that comes is compared with the one that was expected.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sys import byteorder

LEAST_CHANCE = 0.1
"""Least chance of a token that is drafted."""
_TOKENS = "i"
_TOKEN_BYTES = 4
_KEY_BYTES = 3 * _TOKEN_BYTES
_MOST_BYTES = 2**15 * _TOKEN_BYTES
"""Most bytes of a text that are searched: the last ones, and if they do not have it as many around the place at which
the output follows the prediction. A thousand tokens take one or two microseconds, far less than attention to them."""
_HOPE = 16
"""Tokens after which nobody expects a text to go on as before, if it has not."""
_OWN_WEIGHT, _COMMON_WEIGHT = 0.15, 0.02
"""Weights of the last expected token in how often those of a text, and those of all texts, were right."""


@dataclass(slots=True)
class CommonAcceptance:
    """How often expected tokens came true, over many texts: what a new text starts from."""

    acceptance: float


class Lookup:
    """A growing text, and what is expected next in it."""

    __slots__ = ("_common", "_num_read", "_num_since", "_place", "_predicted", "_text", "_token_ids", "acceptance")

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
        self._num_since = _HOPE
        """Tokens since one was right that was expected, or more."""
        output = token_ids[prompt_len:]
        self._text = bytearray(_bytes_of([*token_ids[:prompt_len], *prediction, *output]))
        """Where expected tokens are looked up, 4 bytes a token, because bytes are searched quickly. The prediction
        comes before the output, as if it had been said once."""
        self._predicted = _TOKEN_BYTES * len(prediction)
        """Bytes of the prediction. The output follows it at about this distance from the end."""
        self._place = self._find()
        """Where the token that is expected to come next begins; None if nothing is expected."""
        if len(output) < len(prediction) and [*prediction[: len(output)]] == [*output]:
            self._place = _TOKEN_BYTES * (prompt_len + len(output))

    @property
    def expects(self) -> bool:
        """Whether there is anything to propose."""
        return self._place is not None

    @property
    def hopeful(self) -> bool:
        """Whether there is something to propose that is right now and then, or was until a few tokens ago."""
        return self.acceptance >= LEAST_CHANCE and (self._place is not None or self._num_since < _HOPE)

    def read(self) -> None:
        """Read the tokens that have come since. If they are not what was expected, what comes next is looked up."""
        text, place = self._text, self._place
        for token in self._token_ids[self._num_read :]:
            coming = token.to_bytes(_TOKEN_BYTES, byteorder)
            self._num_since += 1
            if place is not None:
                right = text[place : place + _TOKEN_BYTES] == coming
                self.acceptance += _OWN_WEIGHT * (right - self.acceptance)
                self._common.acceptance += _COMMON_WEIGHT * (right - self._common.acceptance)
                place = place + _TOKEN_BYTES if right else None
                if right:
                    self._num_since = 0
            text += coming
        self._num_read = len(self._token_ids)
        self._place = self._find() if place is None else place

    def propose(self, num: int) -> list[int]:
        """The next `num` tokens, if the text goes on as before. A text that repeats its end goes on repeating it."""
        if self._place is None:
            return []
        followed = array(_TOKENS, bytes(self._text[self._place : self._place + _TOKEN_BYTES * num])).tolist()
        return [followed[index % len(followed)] for index in range(num)]

    def _find(self) -> int | None:
        """Where the token after the last earlier occurrence of the last three tokens begins."""
        end = len(self._text)
        if end <= _KEY_BYTES:
            return None
        least, middle, half = max(0, end - _MOST_BYTES), end - self._predicted, _MOST_BYTES // 2
        place = self._last(least, end - _TOKEN_BYTES)
        if place is None and least:
            place = self._last(max(0, middle - half), min(middle + half, least + _KEY_BYTES - 1))
        return place

    def _last(self, start: int, end: int) -> int | None:
        """The end of the last occurrence of the last three tokens in bytes `[start, end)`."""
        text, key = self._text, self._text[-_KEY_BYTES:]
        at = text.rfind(key, start, end)
        while at % _TOKEN_BYTES and at >= 0:  # it is between tokens
            at = text.rfind(key, start, at + _KEY_BYTES - 1)
        return at + _KEY_BYTES if at >= 0 else None


def _bytes_of(token_ids: Iterable[int]) -> bytes:
    return array(_TOKENS, token_ids).tobytes()
