"""A model's reasoning, split from its answer as both come in, wherever the pieces are cut.

    <think>\\n  reasoning  \\n</think>\\n\\n  answer

The opening is the first thing that the model writes, or the prompt has ended with it; without it everything is the
answer, and so is whatever looks like reasoning later on. The white space around both tags is theirs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class Part(StrEnum):
    """What a text is."""

    REASONING = "reasoning"
    ANSWER = "answer"


class _State(StrEnum):
    BEFORE = "before"
    """Nothing but white space and perhaps half of the opening."""
    LEADING = "leading"
    """Behind the opening: white space."""
    REASONING = "reasoning"
    TRAILING = "trailing"
    """Behind the closing: white space."""
    ANSWER = "answer"


class ReasoningSplitter:
    """The text of one choice."""

    def __init__(self, opened: bool) -> None:
        """`opened`: the prompt ends with the opening."""
        self._opened = opened
        self._state = _State.BEFORE
        self._held = ""

    def push(self, text: str) -> list[tuple[Part, str]]:
        """Take more text; what is settled with it, in order, none of it empty."""
        parts: list[tuple[Part, str]] = []
        text, self._held = self._held + text, ""
        if self._state is _State.BEFORE:
            text = self._before(text)
        if self._state is _State.LEADING:
            text = text.lstrip()
            self._state = _State.REASONING if text else self._state
        if self._state is _State.REASONING:
            reasoning, text = self._reasoning(text)
            parts.append((Part.REASONING, reasoning))
        if self._state is _State.TRAILING:
            text = text.lstrip()
            self._state = _State.ANSWER if text else self._state
        if self._state is _State.ANSWER:
            parts.append((Part.ANSWER, text))
        return [(part, words) for part, words in parts if words]

    def finish(self) -> list[tuple[Part, str]]:
        """The text is over: what was held back is no tag after all."""
        held, self._held = self._held, ""
        unopened = self._state is _State.BEFORE and not self._opened
        return [(Part.ANSWER if unopened else Part.REASONING, held)] if held else []

    def _before(self, text: str) -> str:
        start = text.lstrip()
        if OPENING.startswith(start):
            if start == OPENING:
                self._state = _State.LEADING
                return ""
            self._held = text
            return ""
        if start.startswith(OPENING):
            self._state = _State.LEADING
            return start[len(OPENING) :]
        self._state = _State.LEADING if self._opened else _State.ANSWER
        return text

    def _reasoning(self, text: str) -> tuple[str, str]:
        """The reasoning that is settled, and what follows the closing. White space waits for what comes after it."""
        end = text.find(CLOSING)
        if end >= 0:
            self._state = _State.TRAILING
            return text[:end].rstrip(), text[end + len(CLOSING) :]
        length = max((length for length in range(1, len(CLOSING)) if text.endswith(CLOSING[:length])), default=0)
        settled = text[: len(text) - length].rstrip()
        self._held = text[len(settled) :]
        return settled, ""
