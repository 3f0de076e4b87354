"""Text of clients in which special tokens are spelt: to the model it must be text, or a client could close its own turn
and open another's.

A chat template puts such text between tokens of its own, into one string that is tokenised whole. So each special token
in a client's text gets a mark inside it before, which nobody else knows; then only the template's are found in that
string. The mark is a token of the tokenizer that encodes such strings, without a meaning, and is taken out again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from string import ascii_letters
from typing import Any, Final

_TOLD_CHARS: Final = 64
"""By so many a special token is told from other text."""
_MAX_DRAWS: Final = 100
"""Of marks; the last one is taken though a special token may overlap with it, as those of one letter must."""
_PIECE_CHARS: Final = 2**16
"""Searched at a time: the interpreter lock is held meanwhile."""


class Marker:
    """Puts marks into special tokens."""

    def __init__(self, special: Collection[str]) -> None:
        """`special` are the spellings; one of a single character cannot be marked inside."""
        spellings = {spelling[:_TOLD_CHARS] for spelling in special if len(spelling) > 1}
        self.mark: Final = _mark(spellings)
        self._longest = max(map(len, spellings), default=0)
        self._pattern = re.compile(_trie_pattern(spellings)) if spellings else None

    def marked(self, value: Any) -> Any:
        """`value`, JSON as Python has it, with a mark in each special token of its texts, names included."""
        match value:
            case str():
                return self._marked_text(value)
            case Mapping():
                return {self.marked(name): self.marked(each) for name, each in value.items()}
            case Sequence():
                return [self.marked(each) for each in value]
            case _:
                return value

    def unmarked(self, text: str) -> str:
        """The text as it was."""
        return text.replace(self.mark, "")

    def _marked_text(self, text: str) -> str:
        """With a mark after the first character of each special token, those that overlap included."""
        if self._pattern is None:
            return text
        parts: list[str] = []
        done = 0
        for start in range(0, len(text), _PIECE_CHARS):
            at, last = max(start, done), start + _PIECE_CHARS
            while found := self._pattern.search(text, at, last + self._longest):
                at = found.start() + 1
                if at > last:
                    break
                parts += (text[done:at], self.mark)
                done = at
        return "".join((*parts, text[done:])) if parts else text


def _mark(special: Collection[str]) -> str:
    """A text that nobody knows, of which no special token is a part, whatever stands before and behind it."""
    for _ in range(_MAX_DRAWS):
        mark = f"{secrets.choice(ascii_letters)}{secrets.token_hex(16)}{secrets.choice(ascii_letters)}"
        if not any(_touches(spelling, mark) for spelling in special):
            break
    return mark


def _touches(spelling: str, mark: str) -> bool:
    """Whether they may overlap: one within the other, or the end of one as the beginning of the other."""
    pairs = ((spelling, mark), (mark, spelling))
    return any(
        one in other or any(one.endswith(other[:size]) for size in range(1, min(len(one), len(other))))
        for one, other in pairs
    )


def _trie_pattern(spellings: Collection[str]) -> str:
    """An expression for any of them, that looks at no character of a text twice from the same place: there may be
    thousands, which begin alike."""
    rests: dict[str, set[str]] = {}
    for spelling in spellings:
        rests.setdefault(spelling[:1], set()).add(spelling[1:])
    if "" in rests:  # the shortest is enough
        return ""
    branches = (re.escape(first) + _trie_pattern(others) for first, others in sorted(rests.items()))
    return "(?:" + "|".join(branches) + ")"
