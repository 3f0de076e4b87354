"""Bounds of what one grammar may cost, the same where it is checked and where it is followed."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_LEXER_STATES = 20_000
"""Of one or two KB each: for all texts that follow one compiled grammar, and once more for one that finds it full."""
MAX_GRAMMAR_SIZE = 20_000
"""Symbols of its rules: a schema of 800 properties, but not the product of many choices."""


def grammar_limits() -> LLParserLimits:
    """What bounds the time and memory of a grammar, and messages that quote no text."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
