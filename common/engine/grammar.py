"""Structured output: computes the tokens that may come next in a text that must follow a grammar.

Grammars are those of `llguidance`; the gateway makes them from JSON schemas, regular expressions and the like. The
state of a choice within its grammar is never sent: a worker that continues the choice reads its tokens again.

The methods here take time, so they run on the threads of `masks`. Matchers of one compiled grammar share the states of
its lexer, behind a lock. The library holds the interpreter's lock while it waits for that lock. So only one thread at a
time may work on one grammar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from common.contract.errors import Cause
from common.runtime.grammar_limits import OWN_BOUNDS, exceeded, grammar_limits

_log = logging.getLogger(__name__)


class GrammarState:
    """The state of one sequence within its grammar, and the tokens that may come next."""

    __slots__ = ("allowed", "late", "matcher", "num_read", "shared")

    def __init__(self) -> None:
        self.allowed: bytes | None = None
        """One bit per token, the first token in the lowest bit of the first byte; None until it is known."""
        self.late = True
        """Whether the last mask took long, or there was none yet. No step waits for the next one then."""
        self.matcher: LLMatcher | None = None
        self.num_read = 0
        """Leading tokens of the output that the matcher has read."""
        self.shared: LLMatcher | None = None
        """The matcher that `matcher` is a copy of, or was until that was full, and with which it shares lexer states;
        None if it shares none."""


class Unread(Enum):
    """Why there is no mask yet."""

    TIME = "time"
    """The time was up before all tokens were read."""
    FULL = "full"
    """The states that the matcher shares have reached a bound, perhaps because of other sequences. The output must be
    read again with a matcher that shares nothing."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The text cannot go on: no token may follow, or a bound was reached."""

    bound: str
    """Name of the bound, or "none"."""
    why: str
    cause: Cause = Cause.INVALID
    """Why the request fails; the grammar's own fault, unless said otherwise."""


class Grammars:
    """Compiles grammars and computes masks, for one model's tokens."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars | None:
        """Load the tokenizer of a checkpoint. Returns None, and logs a warning, if it cannot be used."""
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
        """A matcher that has read nothing, to be copied. It has computed the first mask, and may have given up at
        that."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammar_limits())
        matcher.compute_bitmask()
        return matcher

    def read(
        self,
        compiled: LLMatcher | None,
        state: GrammarState,
        token_ids: Sequence[int],
        prompt_len: int,
        time_is_up: Callable[[], bool],
    ) -> bytes | Unread | GaveUp:
        """Compute the tokens that may follow `token_ids`, whose output begins at `prompt_len`: a mask as in
        `GrammarState.allowed`. Where the grammar may end, the mask includes the end-of-sequence tokens.

        `state` keeps its place if the reading stops early. It must have a matcher already, or it gets a copy of
        `compiled`.
        """
        if state.matcher is None:
            assert compiled is not None, "it was compiled for those that need it"
            state.matcher, state.num_read = compiled.deep_copy(), 0
            state.shared = None if compiled.is_error() else compiled
        matcher, num_output = state.matcher, len(token_ids) - prompt_len
        for token in token_ids[prompt_len + state.num_read :]:
            matcher.consume_token(token)
            state.num_read += 1
            if time_is_up() and state.num_read < num_output:
                return Unread.TIME
        bits = matcher.compute_bitmask()
        if not matcher.is_error():
            return bits
        bound = exceeded(matcher.get_error())
        if state.shared is not None and (bound is None or bound[0] not in OWN_BOUNDS):
            state.matcher = None
            return Unread.FULL
        name, why = bound or ("none", "no token goes on within it")
        _log.warning("a grammar gave up after %d tokens: %s", num_output, why)
        return GaveUp(name, f"the grammar cannot be followed beyond {num_output} tokens: {why}")
