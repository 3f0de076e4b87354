"""Splits a model's reasoning from its answer as the text arrives, however it is cut into pieces.

    <think>\\n  reasoning  \\n</think>\\n\\n  answer

The opening tag is the first text that the model writes, or the prompt has it: at its end, or with part of the
reasoning. Without it the whole text is the answer; so is anything later that looks like reasoning. White space around
both tags belongs to the tags; but of an answer that follows a grammar only the line ends that the grammar puts before
it.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

OPENING: Final = "<think>"
CLOSING: Final = "</think>"
GAP_LINE_ENDS: Final = 2
"""Most line ends between the closing tag and an answer that follows a grammar."""


def is_within(text: str) -> bool:
    """Whether a text that is to be continued ends within its reasoning, of which it has at least a word."""
    start = text.strip()
    return start.startswith(OPENING) and start != OPENING and CLOSING not in start


class Part(StrEnum):
    """Kinds of text."""

    REASONING = "reasoning"
    ANSWER = "answer"


class _State(StrEnum):
    BEFORE = "before"
    """Only white space so far, and perhaps part of the opening tag."""
    LEADING = "leading"
    """After the opening tag: white space."""
    REASONING = "reasoning"
    TRAILING = "trailing"
    """After the closing tag: white space that belongs to it."""
    ANSWER = "answer"


class ReasoningSplitter:
    """Splits the text of one choice."""

    def __init__(self, opened: bool, formatted: bool = False, within: bool = False) -> None:
        """`opened`: the prompt has the opening tag. `formatted`: the answer follows a grammar, which counts its white
        space. `within`: the prompt has part of the reasoning, too, so that white space belongs to that."""
        self.num_reasoning_chars: float = 0
        """Leading characters of the text known to be reasoning, both tags included; infinite if all of the text is."""
        self.reasoning_over = False
        """Whether no further text is reasoning."""
        self._num_chars = 0
        self._opened = opened
        self._gap_left = GAP_LINE_ENDS if formatted else None
        """Line ends that may still precede the answer; None for any white space."""
        self._state = _State.REASONING if within else _State.BEFORE
        self._space: list[str] = []
        """White space held back until the text after it is known."""
        self._tail = ""
        """Text after that white space that might be the beginning of a tag."""

    def push(self, text: str) -> list[tuple[Part, str]]:
        """Take more text, and return the parts settled with it, in order and without empty ones."""
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
            text = self._trailing(text)
        if self._state is _State.ANSWER:
            parts.append((Part.ANSWER, text))
        return [(part, words) for part, words in parts if words]

    def finish(self) -> list[tuple[Part, str]]:
        """End the text: what was held back is no tag. Returns it as a part, if there is any."""
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
        """Settle reasoning. Returns it, and the text that follows the closing tag."""
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

    def _trailing(self, text: str) -> str:
        """Leave out what belongs to the closing tag. Returns the beginning of the answer, if there is any."""
        if self._gap_left is None:
            answer = text.lstrip()
        else:
            answer = text[: self._gap_left].lstrip("\n") + text[self._gap_left :]
            self._gap_left -= len(text) - len(answer)
        if answer or self._gap_left == 0:
            self._state = _State.ANSWER
        return answer

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space
