"""Structured output: the tokens with which a text that must follow a grammar may go on.

Grammars are `llguidance`'s; the gateway makes them of JSON schemas, regular expressions and the like. How far a choice
has got is never told to anybody: whoever goes on with it reads the tokens that it has.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from common.runtime.grammar_limits import grammar_limits

_log = logging.getLogger(__name__)

_MAX_KEPT = 32
"""Compiled grammars that are kept for the next request."""


class GrammarState:
    """How far one sequence has got. Belongs to `Grammars`; a sequence only keeps it between two steps."""

    __slots__ = ("matcher", "num_read", "shared")

    def __init__(self) -> None:
        self.matcher: LLMatcher | None = None
        self.num_read = 0
        """Leading tokens of the output that the matcher has seen."""
        self.shared: LLMatcher | None = None
        """What the matcher is a copy of, with which it shares the states that it has seen; None if it stands alone."""


class Grammars:
    """What grammars allow, for one model's tokens. Called by the engine's thread alone."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

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

    def allowed(self, grammar: str, state: GrammarState, output: Sequence[int]) -> bytes:
        """A bit for each token, the first in the lowest bit of the first byte, whether `output` may go on with it.

        Where the grammar may end, that is the ends of a sequence too. None may where the grammar, or its length, is
        beyond the bounds of the library.
        """
        if state.matcher is None:
            state.matcher, state.shared = self._copy(grammar)
        matcher = state.matcher
        bits = _read(matcher, output[state.num_read :])
        if matcher.is_error() and state.shared is not None:
            # Perhaps what is full is what it shares. Its own text may fill as much again.
            if self._compiled.get(grammar) is state.shared:
                del self._compiled[grammar]
            matcher = state.matcher = self._compile(grammar)
            state.shared = None
            bits = _read(matcher, output)
        state.num_read = len(output)
        if matcher.is_error():
            # Its message quotes the grammar and the text, which are the client's.
            _log.warning("a grammar gave up after %d tokens: %s", len(output), matcher.stop_reason())
            return bytes(len(bits))
        return bits

    def _copy(self, grammar: str) -> tuple[LLMatcher, LLMatcher | None]:
        """A matcher that has read nothing, and what it shares states with. What gives up at once is kept as well."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile(grammar)
            compiled.compute_bitmask()
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled.deep_copy(), None if compiled.is_error() else compiled

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammar_limits())


def _read(matcher: LLMatcher, tokens: Sequence[int]) -> bytes:
    """What may follow, for a matcher that has read all before `tokens`."""
    matcher.consume_tokens(list(tokens))
    return matcher.compute_bitmask()
