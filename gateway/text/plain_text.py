"""Makes special tokens that clients spell in their text plain text to the model. Otherwise a client could close its own
turn and open another one.

A chat template puts client text between tokens of its own, into one string that is tokenised as a whole. So each
special token in client text first gets a secret mark inside it; then the string contains only the template's special
tokens. The tokenizer that encodes such strings has the mark as a token without meaning, which is removed afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from string import ascii_letters
from typing import Any, Final

_TOLD_CHARS: Final = 64
"""Leading characters by which special tokens are searched for."""
_MAX_DRAWS: Final = 100
"""Most random marks that are tried; the last is used even if a special token may overlap with it."""
_PIECE_CHARS: Final = 2**16
"""Characters searched at a time; the interpreter lock is held during each search."""


class Marker:
    """Puts marks into special tokens."""

    def __init__(self, special: Collection[str]) -> None:
        """`special` are the spellings of special tokens. One of a single character cannot be marked."""
        spellings = {spelling[:_TOLD_CHARS] for spelling in special if len(spelling) > 1}
        self.mark: Final = _mark(spellings)
        self._longest = max(map(len, spellings), default=0)
        self._pattern = re.compile(_trie_pattern(spellings)) if spellings else None

    def marked(self, value: Any) -> Any:
        """`value`, a JSON value in Python, with a mark in each special token of its strings, member names included."""
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
        """The text without marks."""
        return text.replace(self.mark, "")

    def _marked_text(self, text: str) -> str:
        """The text with a mark after the first character of each special token, including those that overlap."""
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
    """A secret random mark, of which neither end can overlap with a special token."""
    for _ in range(_MAX_DRAWS):
        mark = f"{secrets.choice(ascii_letters)}{secrets.token_hex(16)}{secrets.choice(ascii_letters)}"
        if not any(_touches(spelling, mark) for spelling in special):
            break
    return mark


def _touches(spelling: str, mark: str) -> bool:
    """Whether the two may overlap: one contains the other, or one's suffix is the other's prefix."""
    pairs = ((spelling, mark), (mark, spelling))
    return any(
        one in other or any(one.endswith(other[:size]) for size in range(1, min(len(one), len(other))))
        for one, other in pairs
    )


def _trie_pattern(spellings: Collection[str]) -> str:
    """A regular expression for any of `spellings` that examines each character at most once per start position. There
    may be thousands of spellings with common prefixes."""
    rests: dict[str, set[str]] = {}
    for spelling in spellings:
        rests.setdefault(spelling[:1], set()).add(spelling[1:])
    if "" in rests:  # the shortest is enough
        return ""
    branches = (re.escape(first) + _trie_pattern(others) for first, others in sorted(rests.items()))
    return "(?:" + "|".join(branches) + ")"
