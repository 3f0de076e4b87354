"""Tokens to text, piece by piece, never half a character.

A byte-level token can end inside a character, and a decoder then writes U+FFFD for the part that it has. So the text
is taken from a decode of the last few tokens, and its end is held back while it is U+FFFD, until more tokens or the
end of the sequence settle what it is. The pieces, joined, are what decoding the whole sequence at once gives.

    window    the tokens that are decoded; before it, everything is settled and given out
    [0, _boundary)  of the window: context only (a decoder may treat its first token specially); its text is given out
    clean     the text does not end with U+FFFD, so the tokens so far end at the end of a character

`tokenizers.decoders.DecodeStream` does nearly this, but it has no way to flush, never lets go of its tokens while
they decode to garbage, and raises on sequences that a model may well generate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNSETTLED = "�"
_WINDOW_TOKENS = 8
"""Tokens after which a clean window is cut."""
_GARBAGE_TOKENS = 64
"""Tokens after which a window that is never clean cannot be waiting for one character: it decodes to garbage."""
_CHARACTER_TOKENS = 4
"""Most tokens that one character is spread over: the bytes of a UTF-8 sequence."""


class TokenDecoder(Protocol):
    """The part of the tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        ...

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` gives something for this token: it is in the vocabulary, and not special."""
        ...


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._boundary = 0
        """A clean end within the window, or 0."""
        self._given = 0
        """Characters of the window's text that are given out."""

    def push(self, token_id: int) -> str:
        """Take the next token; the text that is settled with it, often one word, sometimes nothing."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        settled = text.rstrip(_UNSETTLED)
        piece = text[self._given : len(settled)]
        self._given = max(self._given, len(settled))
        if text and len(settled) == len(text):
            self._cut()
        elif len(self._window) - self._boundary > _GARBAGE_TOKENS:
            piece += self._give_up_garbage(text)
        return piece

    def flush(self) -> str:
        """The sequence is over: the rest of its text."""
        rest = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._boundary, self._given = [], 0, 0
        return rest

    def _cut(self) -> None:
        """The window's text ends cleanly: drop what is before the clean end before this one, if that is much."""
        if len(self._window) > _WINDOW_TOKENS:
            del self._window[: self._boundary]
            self._given = len(self._tokenizer.decode(self._window))
        self._boundary = len(self._window)

    def _give_up_garbage(self, text: str) -> str:
        """Find an end of a character among the last tokens; the text up to there is settled, garbage or not.

        A cut is at such an end exactly if both sides, decoded by themselves, give the same text: a character that is
        cut in two gives more.
        """
        for num_right in range(1, _CHARACTER_TOKENS + 1):
            left = self._tokenizer.decode(self._window[:-num_right])
            right = self._tokenizer.decode(self._window[-num_right:])
            if right and left + right == text:
                piece = left[self._given :]
                self._window = self._window[-num_right:]
                self._boundary = 0
                self._given = max(0, self._given - len(left))
                return piece
        return ""
