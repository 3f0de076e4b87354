"""What repetitions come to, before a library writes them out."""

from __future__ import annotations

import pytest

from gateway.intake.expanded_length import MAX_EXPANDED, expanded_grammar_length, expanded_length
from gateway.intake.structured_output import compile_grammar


@pytest.mark.parametrize(
    ("expression", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("a{7}", 7),
        ("a{7,}b", 8),
        ("a{0,5}b", 2),
        ("(ab){3}", 6),
        ("((a{3}b){2}c){2}", 18),
        ("(?:ab|c){10}", 30),
        (r"[a-z\]{5}]{4}", 4),
        (r"\{5}", 3),
        (r"\p{L}{6}", 6),
        ("a{1000000000}", 10**9),
        ("x|(a{1000}){1000}", 10**6 + 1),
    ],
)
def test_of_an_expression(expression: str, length: int) -> None:
    assert expanded_length(expression) == length


@pytest.mark.parametrize(
    ("grammar", "length"),
    [
        ('start: "abc"', 3),
        ('start: a a\na: "xy"', 4),
        ('start: a{3}\na: "xy" | /z{5}/', 21),
        ('start: a~4\na: "xy"', 8),
        ('start: ("a" "b"){5}', 10),
        ('start: "a" start | ', 2),
        ('root ::= item{4}\nitem ::= "ab"', 8),
    ],
)
def test_of_a_grammar(grammar: str, length: int) -> None:
    assert expanded_grammar_length(grammar) == pytest.approx(length, abs=3)


def test_doubling_rules_are_seen() -> None:
    rules = "\n".join(f"R{number}: R{number + 1} R{number + 1}" for number in range(40))
    assert expanded_grammar_length(f'start: R0\n{rules}\nR40: "a"') > MAX_EXPANDED


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{1000000000}"),
        ("regex", "(x|y)(a{1000}){100000}"),
        ("grammar", "start: /a{1000000000}/"),
        ("grammar", 'start: "x" A\nA: B{10000}\nB: C{10000}\nC: "a"{1000}'),
        ("grammar", "start: R0\n" + "\n".join(f"R{n}: R{n + 1} R{n + 1}" for n in range(40)) + '\nR40: "a"'),
        ("json_schema", '{"type": "string", "pattern": "^a{1000000000}$"}'),
        ("json_schema", '{"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^(ab{9999}){9999}$"}]}'),
    ],
)
def test_what_would_force_too_much_is_refused(kind: str, text: str) -> None:
    _, error = compile_grammar(kind, text)
    assert "written out" in error


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"\d{4}-\d{2}-\d{2}T[0-9:]{8}Z"),
        ("regex", "[a-f0-9]{64}"),
        ("regex", "(a{1,100}){1,100}"),
        ("grammar", 'start: item{3}\nitem: /[a-z]{2,8}/ ","'),
        ("json_schema", '{"type": "string", "pattern": "^[A-Z]{3}-[0-9]{10}$"}'),
    ],
)
def test_what_people_write_is_taken(kind: str, text: str) -> None:
    assert compile_grammar(kind, text)[1] == ""


def test_a_string_that_nobody_could_wait_for_is_refused() -> None:
    _, error = compile_grammar("json_schema", '{"type": "string", "pattern": "^a+$", "minLength": 100000000}')
    assert error.startswith("minLength")


def test_a_repetition_that_takes_a_worker_tens_of_milliseconds_a_token_is_refused() -> None:
    assert "written out" in compile_grammar("regex", "a{99999}")[1]
    assert compile_grammar("regex", f"a{{{MAX_EXPANDED - 100}}}")[1] == ""
