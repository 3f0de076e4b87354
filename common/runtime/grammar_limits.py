"""Bounds on the cost of one grammar. The gateway checks and the workers enforce the same values, on every machine."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

MAX_ITEMS = 5_000
"""Most parser items for one token. A schema of 300 optional number properties stays below it; one of 400 does not
always. An ambiguous grammar can need any number of items, and more time for each: with this many, a mask takes about
30 ms, and reading a token about 15 ms, during which the library holds the interpreter's lock."""
MAX_LEXER_STATES = 20_000
"""Most lexer states, of 1 to 2 KB each. All texts that follow one compiled grammar share them; a text that finds them
used up gets as many once more."""
MAX_GRAMMAR_SIZE = 20_000
"""Most symbols in a grammar's rules: enough for a schema of 800 properties, but not for the product of many choices."""
STACK_BYTES: Final = 2**28
"""Stack of each thread that compiles or follows a grammar. The library follows references from rule to rule, or from
schema to schema, by recursion: in 8 MiB a chain of 1,200, which fits into 44,000 characters, ended the process. Only
what is used of a stack takes memory."""
OWN_BOUNDS: Final = ("items", "possibilities")
"""The bounds named by `exceeded` that depend on one text only, not on the lexer states that it shares with others."""
_EXCEEDED: Final = (
    ("too many items", "items", f"one token takes more than {MAX_ITEMS} items of the parser"),
    ("current row has", "possibilities", "too many rules could go on at once"),
    ("too many states", "states", f"its expressions take more than {MAX_LEXER_STATES} states"),
    ("too many expressions", "expressions", "its expressions take too much work for one token"),
)
"""(part of the library's error message, name of the bound, explanation)."""


def grammar_limits() -> LLParserLimits:
    """The library's limits on time and memory of a grammar; its error messages quote no text (`verbose_errors`)."""
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
    """(name, explanation) of the bound that the library's error message reports; None if it reports something else.

    The message itself is not passed on: it may quote the client's grammar and text.
    """
    lower = error.lower()
    return next(((name, meaning) for needle, name, meaning in _EXCEEDED if needle in lower), None)
