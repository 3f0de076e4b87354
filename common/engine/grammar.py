"""Structured output: the tokens with which a text that must follow a grammar may go on.

Grammars are `llguidance`'s; the gateway makes them of JSON schemas, regular expressions and the like. How far a choice
has got is never told to anybody: whoever goes on with it reads the tokens that it has.

What is here takes time, so it belongs to the threads of `masks`. Matchers of one compiled grammar share the states of
its lexer, behind a lock for which the library waits with the interpreter's own: only one thread at a time may be in
one grammar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from common.runtime.grammar_limits import OWN_BOUNDS, exceeded, grammar_limits

_log = logging.getLogger(__name__)


class GrammarState:
    """How far one sequence has got, and what may follow there."""

    __slots__ = ("allowed", "late", "matcher", "num_read", "shared")

    def __init__(self) -> None:
        self.allowed: bytes | None = None
        """A bit for each token, the first in the lowest bit of the first byte; None until it is known."""
        self.late = True
        """Whether the last one took long, or there was none yet: no step waits for the next one."""
        self.matcher: LLMatcher | None = None
        self.num_read = 0
        """Leading tokens of the output that the matcher has seen."""
        self.shared: LLMatcher | None = None
        """What the matcher is a copy of, with which it shares the states that it has seen; None if it stands alone."""


class Unread(Enum):
    """Why there is no mask yet."""

    TIME = "time"
    """There are more tokens to read than there was time for."""
    FULL = "full"
    """What the matcher shares is full, perhaps of others' states: it is to read again, with a matcher of its own."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Nothing can follow, or a bound was reached."""

    bound: str
    """Its name, or "none"."""
    why: str


class Grammars:
    """What grammars allow, for one model's tokens."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars | None:
        """For the tokenizer of a checkpoint; None, and a line in the log, where there is none that can be used."""
        file = folder / "tokenizer.json"
        ends = sorted(token for token in eos_token_ids if 0 <= token < vocab_size)
        try:
            if not ends:
                raise ValueError("the model has no token that ends a sequence")
            return cls(LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=ends))
        except (OSError, ValueError) as error:
            _log.warning("no structured output: %s cannot be used: %s", file, error)
            return None

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher that has read nothing, to be copied, and knows what may come first; perhaps it gave up at that."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammar_limits())
        matcher.compute_bitmask()
        return matcher

    def read(
        self, compiled: LLMatcher | None, state: GrammarState, output: Sequence[int], time_is_up: Callable[[], bool]
    ) -> bytes | Unread | GaveUp:
        """What may follow `output`: where the grammar may end, that is the ends of a sequence too.

        `state` is left where the reading stopped. It has a matcher already, or gets a copy of `compiled`.
        """
        if state.matcher is None:
            assert compiled is not None, "it was compiled for those that need it"
            state.matcher, state.num_read = compiled.deep_copy(), 0
            state.shared = None if compiled.is_error() else compiled
        matcher = state.matcher
        for token in output[state.num_read :]:
            matcher.consume_token(token)
            state.num_read += 1
            if time_is_up() and state.num_read < len(output):
                return Unread.TIME
        bits = matcher.compute_bitmask()
        if not matcher.is_error():
            return bits
        bound = exceeded(matcher.get_error())
        if state.shared is not None and (bound is None or bound[0] not in OWN_BOUNDS):
            state.matcher = state.shared = None
            return Unread.FULL
        name, why = bound or ("none", "no token goes on within it")
        _log.warning("a grammar gave up after %d tokens: %s", len(output), why)
        return GaveUp(name, f"the grammar cannot be followed beyond {len(output)} tokens: {why}")
