"""Incremental detokenisation that never emits half a character.

A byte-level token can end inside a character; a decoder then writes U+FFFD for the incomplete part. So the text is
taken from a decode of the last few tokens, and its end is held back while it is U+FFFD, until further tokens or the
end of the sequence settle it. The pieces, joined, equal the decode of the whole sequence; but some decoders write
U+FFFD for a whole run of bytes, earlier characters included, once a byte of it fits into none. What was emitted of such
a run stays, and the decode begins anew with that byte.

    window    the tokens that are decoded; everything before them is settled and emitted
    [0, _boundary)  of the window: context only (a decoder may treat its first token specially); its text is emitted
    clean     the text does not end with U+FFFD, so the tokens so far end at a character boundary

`tokenizers.decoders.DecodeStream` does nearly this, but it cannot flush, keeps all tokens while they decode to garbage,
and raises on sequences that a model may well generate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_UNSETTLED = "�"
_WINDOW_TOKENS = 8
"""Most tokens in a clean window before it is cut."""
_GARBAGE_TOKENS = 64
"""Tokens after which a window that is never clean holds garbage, not one incomplete character."""
_CHARACTER_TOKENS = 4
"""Most tokens that one character can span: the bytes of a UTF-8 sequence."""


class TokenDecoder(Protocol):
    """The part of the tokenizer that makes text of a choice's tokens."""

    @property
    def stop_specials(self) -> Collection[int]:
        """Special tokens that have text only because they are stop strings, and are left out where none may end the
        choice."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        ...

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` gives text for this token: it is in the vocabulary, and not special."""
        ...


class SpecialDecoder(TokenDecoder, Protocol):
    """A decoder that can also spell special tokens out."""

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        ...


class Detokenizer:
    """Decodes one growing sequence of tokens."""

    def __init__(self, tokenizer: TokenDecoder, before: Sequence[int] = ()) -> None:
        """If the sequence continues a text, `before` are the tokens of that: some decoders drop the space before the
        first word of a text. They are the window's first context, unless they end inside a character."""
        self._tokenizer = tokenizer
        self._window = [token_id for token_id in before[-_WINDOW_TOKENS:] if tokenizer.has_text(token_id)]
        text = tokenizer.decode(self._window)
        for _ in range(_CHARACTER_TOKENS - 1):
            if text.endswith(_UNSETTLED):  # also if the window begins inside a character
                del self._window[:1]
                text = tokenizer.decode(self._window)
        if text.endswith(_UNSETTLED):
            self._window, text = [], ""
        self._boundary = len(self._window)
        """A clean position within the window, or 0."""
        self._given = len(text)
        """Characters of the window's text that were emitted."""
        self._clean = text
        """The window's text at the boundary."""

    def push(self, token_id: int) -> str:
        """Take the next token, and return the text that it settles: often one word, sometimes nothing."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if self._boundary == len(self._window) - 1 and _UNSETTLED in text and not text.startswith(self._clean):
            self._window, self._boundary, self._given, self._clean = [token_id], 0, 0, ""
            text = self._tokenizer.decode(self._window)
        settled = text.rstrip(_UNSETTLED)
        piece = text[self._given : len(settled)]
        self._given = max(self._given, len(settled))
        if text and len(settled) == len(text):
            self._cut(text)
        elif len(self._window) - self._boundary > _GARBAGE_TOKENS:
            piece += self._give_up_garbage(text)
        return piece

    def flush(self) -> str:
        """End the sequence, and return the rest of its text."""
        rest = self._tokenizer.decode(self._window)[self._given :]
        self._window, self._boundary, self._given, self._clean = [], 0, 0, ""
        return rest

    def _cut(self, text: str) -> None:
        """Note that the window's text ends cleanly; if the window is long, drop the tokens before the previous clean
        position."""
        if len(self._window) > _WINDOW_TOKENS:
            del self._window[: self._boundary]
            text = self._tokenizer.decode(self._window)
            self._given = len(text)
        self._boundary, self._clean = len(self._window), text

    def _give_up_garbage(self, text: str) -> str:
        """Cut a garbage window at a character boundary among its last tokens, and return the text settled by that.

        A position is a boundary exactly if both sides, decoded separately, give the same text; a split character gives
        more.
        """
        for num_right in range(1, _CHARACTER_TOKENS + 1):
            left = self._tokenizer.decode(self._window[:-num_right])
            right = self._tokenizer.decode(self._window[-num_right:])
            if right and left + right == text:
                piece = left[self._given :]
                self._window = self._window[-num_right:]
                self._boundary, self._clean = 0, ""
                self._given = max(0, self._given - len(left))
                return piece
        return ""
