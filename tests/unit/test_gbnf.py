"""Grammars in GBNF."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.runtime.grammar_limits import grammar_limits
from gateway.intake.structured_output import compile_grammar


def takes(grammar: str, text: str) -> bool:
    """Whether the text is a whole answer."""
    compiled, error = compile_grammar("grammar", grammar)
    assert not error
    matcher = LLMatcher(LLTokenizer("byte"), compiled, log_level=0, limits=grammar_limits())
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "text", "taken"),
    [
        (r'root ::= "\u00fcber"', "über", True),
        (r'root ::= "\u00fcber"', "\ufcbeer", False),
        (r"root ::= [\u00e4bc]", "ä", True),
        (r"root ::= [\u00e4bc]", "b", True),
        (r"root ::= [\u0400-\u04FF]", "ж", True),
        (r"root ::= [\u0041-\u005a]", "M", True),
        (r"root ::= [\u0041-\u005a]", "m", False),
        (r"root ::= [\u005b-\u005d]+", "[\\]", True),
        (r'root ::= "\u0022\u000a"', '"\n', True),
        (r'root ::= "\\u00fc"', r"\u00fc", True),
        (r'root ::= "\U0001F600\xe9"', "\N{GRINNING FACE}é", True),
    ],
)
def test_numeric_escapes(grammar: str, text: str, taken: bool) -> None:
    assert takes(grammar, text) == taken


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= a "x"\na ::= "x"{1000000000}', "characters"),
        (r'root ::= "\ud83d"', ""),
        ('root ::= "x', "neither"),
        ('root ::= a\nb ::= "x"', "neither"),
        ('a ::= "x"', "neither"),
    ],
)
def test_what_is_refused(grammar: str, reason: str) -> None:
    _, error = compile_grammar("grammar", grammar)
    assert error
    assert reason in error
