"""Bounds of what one grammar may cost, the same where it is checked and where it is followed, and on every machine."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

MAX_ITEMS = 5_000
"""Of the parser, for one token. 300 optional properties, their values numbers, stay below it, and 400 do not always; an
ambiguous grammar takes any number, and more time for each: some 30 ms for a mask with as many as this, and half of that
to read a token, which the library does without letting go of the interpreter."""
MAX_LEXER_STATES = 20_000
"""Of one or two KB each: for all texts that follow one compiled grammar, and once more for one that finds it full."""
MAX_GRAMMAR_SIZE = 20_000
"""Symbols of its rules: a schema of 800 properties, but not the product of many choices."""
OWN_BOUNDS: Final = ("items", "possibilities")
"""Those of `exceeded` that depend on a text alone, whatever it shares with others."""
_EXCEEDED: Final = (
    ("too many items", "items", f"one token takes more than {MAX_ITEMS} items of the parser"),
    ("current row has", "possibilities", "too many rules could go on at once"),
    ("too many states", "states", f"its expressions take more than {MAX_LEXER_STATES} states"),
    ("too many expressions", "expressions", "its expressions take too much work for one token"),
)
"""(what the library's message has, name of the bound, what that means)."""


def grammar_limits() -> LLParserLimits:
    """What bounds the time and memory of a grammar, and messages that quote no text."""
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=MAX_ITEMS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def exceeded(error: str) -> tuple[str, str] | None:
    """(name, what that means) of the bound that the library's message is about; None if it is about something else.

    The message itself may quote the grammar and the text, which are the client's.
    """
    lower = error.lower()
    return next(((name, meaning) for needle, name, meaning in _EXCEEDED if needle in lower), None)
