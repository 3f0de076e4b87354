"""Bounds of what one grammar may cost, the same where it is checked and where it is followed."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_LEXER_STATES = 20_000
"""Of one or two KB each, for all texts that follow one grammar."""


def grammar_limits() -> LLParserLimits:
    """About 20 ms to compile a grammar, 15 ms for a token, 40 MB; and messages that quote no text."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
