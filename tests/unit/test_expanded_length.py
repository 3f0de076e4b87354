"""What repetitions come to, before a library writes them out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.intake.expanded_length import MAX_EXPANDED, expanded_grammar_length, expanded_length
from gateway.intake.json_schemas import refuse_unenforceable
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
        ("(?:ab){ 3 }", 6),
        ("(?P<name>a{4}:){5}", 25),
        ("([[a])]b){3}", 6),
        (r"[[:alpha:]\]]{4}x", 5),
        ("a[b", 2),
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
        ("start: a{2}\na: b\nb: X | a\nX: /x{30}/", 64),
        ("b: X | a\na: b\nstart: a{2}\nX: /x{30}/", 64),
        ("X: /x{30}/\na: b\nb: c\nc: a | X\nstart: b{2}", 66),
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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?P<name>a{1000000000}:)"),
        ("regex", "([[a])]b{200}){200}"),
        ("regex", "a{ 1000000000}"),
        ("grammar", "start: /x\n.{1000000000}/"),
        ("grammar", 'start: "a"~1"b"{1000000000}'),
        ("grammar", 'start: a{200}\na[stop="]"]: "x"{200}'),
        ("grammar", 'start: aB{200}\na: "y"\nB: "x"{200}'),
        ("grammar", 'start: "a" # "\n  | A{200} # "\nA: "x"{200}'),
        ("grammar", 'root ::= [/] big{200} [/]\nbig ::= "x"{200}'),
        ("grammar", "start: a{2000}\na: b\nb: X | a\nX: /x{19000}/"),
        ("grammar", "start: R0{200}\n" + "\n".join(f"R{n}: R{n + 1}" for n in range(300)) + '\nR300: "x"{200}'),
    ],
)
def test_no_notation_hides_a_repetition(kind: str, text: str) -> None:
    assert "written out" in compile_grammar(kind, text)[1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(?x) a{1000000000} # ["),
        ("regex", "(?ix:a )b"),
        ("grammar", "start: /a{1000000000} # [/x"),
        ("json_schema", '{"type": "string", "pattern": "(?x)a"}'),
    ],
)
def test_white_space_and_comments_in_an_expression_are_refused(kind: str, text: str) -> None:
    assert "flag x" in compile_grammar(kind, text)[1]


@contextmanager
def linear() -> Iterator[None]:
    """Fails if the body takes more than 5 s of this thread; reading the rest again and again would take minutes."""
    before = time.thread_time()
    yield
    assert time.thread_time() - before < 5


@pytest.mark.parametrize("part", ["[", "[^", "[]", "[[:a", "(?", "(?P<", "(?a", "{1", "{ ", r"\p{", r"\\"])
@pytest.mark.parametrize("end", ["", "\\", "|" * 2**15], ids=["alone", "escape", "bars"])
def test_what_an_expression_does_not_close_is_read_once(part: str, end: str) -> None:
    with linear():
        expanded_length(part * (2**16 // len(part)) + end)


@pytest.mark.parametrize(
    ("beginning", "part"),
    [
        ('start: "', r"\""),
        ("start: /", r"\/"),
        ("start: ", '"\n'),
        ("start: ", "/["),
        ("start: ", "a["),
        ("start: ", "{1"),
        ("start: ", "{ "),
        ("start: ", "a<"),
        ("start: ", "a: "),
        ("start: ", "a:a\n"),
    ],
)
def test_what_a_grammar_does_not_close_is_read_once(beginning: str, part: str) -> None:
    with linear():
        expanded_grammar_length(beginning + part * (2**16 // len(part)))


@pytest.mark.parametrize(
    "text",
    ["\n" * 2**16, "root ::= a\na ::= b\n" * 3000, "start" + " " * 2**16],
    ids=["blank lines", "many rules", "spaces"],
)
def test_what_notation_a_grammar_is_in_is_found_at_once(text: str) -> None:
    with linear():
        assert compile_grammar("grammar", text)[1]


@pytest.mark.parametrize(
    "pattern",
    ["[" * 20_000 + "|" * 40_000, "[a" * 30_000, "[-" * 30_000, "[^a-" * 15_000],
    ids=["bars", "one", "dash", "others"],
)
def test_sets_of_a_pattern_are_read_once(pattern: str) -> None:
    with linear():
        refuse_unenforceable({"type": "string", "pattern": pattern})
