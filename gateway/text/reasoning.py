"""A model's reasoning, split from its answer as both come in, wherever the pieces are cut.

    <think>\\n  reasoning  \\n</think>\\n\\n  answer

The opening is the first thing that the model writes, or the prompt has ended with it; without it everything is the
answer, and so is whatever looks like reasoning later on. The white space around both tags is theirs.
"""

from __future__ import annotations

import math
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
        self.num_reasoning_chars: float = 0
        """Characters at the beginning of the text that are reasoning, both tags included, as far as that is known."""
        self.reasoning_over = False
        """Whether no more of the text is."""
        self._num_chars = 0
        self._opened = opened
        self._state = _State.BEFORE
        self._space: list[str] = []
        """White space that waits for what comes after it."""
        self._tail = ""
        """What comes after that, and might be the beginning of a tag."""

    def push(self, text: str) -> list[tuple[Part, str]]:
        """Take more text; what is settled with it, in order, none of it empty."""
        parts: list[tuple[Part, str]] = []
        self._num_chars += len(text)
        text, self._tail = self._tail + text, ""
        if self._state is _State.BEFORE:
            text = self._before(text)
        if self._state is _State.LEADING:
            text = text.lstrip()
            self._state = _State.REASONING if text else self._state
        if self._state in (_State.LEADING, _State.REASONING):
            self.num_reasoning_chars = self._num_chars
        if self._state is _State.REASONING:
            reasoning, text = self._reasoning(text)
            parts.append((Part.REASONING, reasoning))
        self.reasoning_over = self._state in (_State.TRAILING, _State.ANSWER)
        if self._state is _State.TRAILING:
            text = text.lstrip()
            self._state = _State.ANSWER if text else self._state
        if self._state is _State.ANSWER:
            parts.append((Part.ANSWER, text))
        return [(part, words) for part, words in parts if words]

    def finish(self) -> list[tuple[Part, str]]:
        """The text is over: what was held back is no tag after all."""
        held, self._tail = self._take_space() + self._tail, ""
        unopened = self._state is _State.BEFORE and not self._opened
        if not (unopened or self.reasoning_over):
            self.num_reasoning_chars = math.inf
        self.reasoning_over = True
        return [(Part.ANSWER if unopened else Part.REASONING, held)] if held else []

    def _before(self, text: str) -> str:
        start = text.lstrip()
        self._space.append(text[: len(text) - len(start)])
        if len(start) < len(OPENING) and OPENING.startswith(start):
            self._tail = start
            return ""
        space = self._take_space()
        if start.startswith(OPENING):
            self._state = _State.LEADING
            return start[len(OPENING) :]
        self._state = _State.LEADING if self._opened else _State.ANSWER
        return space + start

    def _reasoning(self, text: str) -> tuple[str, str]:
        """The reasoning that is settled, and what follows the closing."""
        thought, closing, rest = text.partition(CLOSING)
        if not closing:
            length = max((length for length in range(1, len(CLOSING)) if text.endswith(CLOSING[:length])), default=0)
            thought, self._tail = text[: len(text) - length], text[len(text) - length :]
        settled = thought.rstrip()
        words = self._take_space() + settled if settled else ""
        self._space.append(thought[len(settled) :])
        if closing:
            self.num_reasoning_chars = self._num_chars - len(rest)
            self._state = _State.TRAILING
            self._space.clear()
        return words, rest

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space
