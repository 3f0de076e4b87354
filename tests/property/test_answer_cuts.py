"""Calls and reasoning are found wherever the text is cut, and what is neither comes out as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.call_grammars import ARGUMENTS, read_on
from gateway.text.call_parser import CallParser, Event
from gateway.text.reasoning import CLOSING, OPENING, Part, ReasoningSplitter
from gateway.text.tool_parsers import HermesParser, Llama3Parser, MistralParser

NAMES = ("f", "get_weather")
KINDS = (HermesParser, Llama3Parser, MistralParser)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=6), values, max_size=3)
words = st.text(st.sampled_from("ab é日\n {}[]\"':,;<>/|_\\19"), max_size=12)
fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", "; ", "\n"),
        *('{"name": "f", ', '"arguments": {"a": [1, "x"]}}', '"parameters": {}}', '{"name": "f"}', 'f{"a": 1}', "f"),
        *(
            '{"arguments": {"b": -1.5e3}, "name": "get_weather"}',
            '{"name": "g"}',
            '"id": "1"',
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
            '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
            "}",
            '{"',
            "<tool",
            "ll>",
        ),
        *(OPENING, CLOSING, "<thi", "nk>", "</"),
    ]
)
garbage = st.lists(fragments | words, max_size=14).map("".join)


def cut(text: str, ends: Sequence[int]) -> list[str]:
    places = sorted({min(end, len(text)) for end in ends} | {0, len(text)})
    return [text[start:end] for start, end in zip(places, [*places[1:], len(text)], strict=True)]


cuts = st.lists(st.integers(0, 150), max_size=30)


def joined(events: Sequence[Event]) -> tuple[str, list[list[str]], str]:
    """Text, calls, and the order in which both came, a letter for each part of either. All of it can be sent."""
    text, order = "", ""
    calls: list[list[str]] = []
    for event in events:
        (event if isinstance(event, str) else event.arguments).encode()
        if isinstance(event, str):
            assert event
            text += event
            order += "t"
        elif event.id is not None:
            assert (event.index, event.arguments) == (len(calls), "")
            calls.append([event.name or "", ""])
            order += "c"
        else:
            assert event.name is None
            assert event.arguments
            assert event.index == len(calls) - 1
            calls[-1][1] += event.arguments
    return text, calls, "".join(char for i, char in enumerate(order) if char == "c" or order[i - 1 : i] != "t")


def parse(kind: type[CallParser], pieces: Sequence[str]) -> tuple[Any, tuple[int, int, int]]:
    parser = kind(NAMES)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    return joined(events), (parser.num_begun, parser.num_complete, parser.num_malformed)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=garbage, ends=cuts)
def test_any_cut_gives_the_same_calls(kind: type[CallParser], text: str, ends: list[int]) -> None:
    whole = parse(kind, [text])
    assert parse(kind, cut(text, ends)) == whole
    assert parse(kind, list(text)) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=garbage)
def test_nothing_is_lost(kind: type[CallParser], text: str) -> None:
    """Text comes out as it is where no call is; beside calls, what is missing is theirs."""
    (rest, calls, _), (num_begun, num_complete, _) = parse(kind, [text])
    if not num_begun:
        assert rest == text
    for number, (name, arguments) in enumerate(calls):
        assert name in NAMES
        assert arguments in text or arguments == "{}"
        if number < num_complete and num_complete == num_begun:
            assert isinstance(json.loads(arguments), dict)
    letters = iter(text)
    assert all(letter in letters for letter in rest), "text comes out in order, and only once"


def hermes(calls: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in calls)


def llama3(calls: Sequence[tuple[str, str]]) -> str:
    return "<|python_tag|>" + "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)


def mistral_array(calls: Sequence[tuple[str, str]]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


def mistral_named(calls: Sequence[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{a}" for n, a in calls)


@pytest.mark.parametrize(
    ("kind", "write"),
    [(HermesParser, hermes), (Llama3Parser, llama3), (MistralParser, mistral_array), (MistralParser, mistral_named)],
)
@settings(deadline=None)
@given(
    before=st.text(st.sampled_from("ab é日\n:,.'-1"), max_size=12),
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.tuples(objects, st.booleans(), st.sampled_from([None, 1]))),
        min_size=1,
        max_size=3,
    ),
    ends=cuts,
)
def test_calls_come_out_as_they_were_made(kind: Any, write: Any, before: str, calls: Any, ends: list[int]) -> None:
    written = [(name, json.dumps(value, ensure_ascii=ascii, indent=indent)) for name, (value, ascii, indent) in calls]
    (rest, found, _), counts = parse(kind, cut(before + write(written), ends))
    assert found == [list(call) for call in written]
    assert counts == (len(calls), len(calls), 0)
    assert rest == ("" if not before.strip() else before)


@settings(deadline=None)
@given(value=objects, ascii=st.booleans(), indent=st.sampled_from([None, 2]), more=st.text(max_size=3))
def test_arguments_end_where_the_object_does(value: Any, ascii: bool, indent: int | None, more: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)[1:]
    matcher = ARGUMENTS.deep_copy()
    assert read_on(matcher, text + more) == (text, more)
    assert matcher.is_stopped()
    by_character = ARGUMENTS.deep_copy()
    for char in text:
        assert not by_character.is_stopped()
        assert read_on(by_character, char) == (char, "")
    assert by_character.is_stopped()


@settings(deadline=None)
@given(
    value=objects,
    at=st.integers(0, 200),
    instead=st.text(st.sampled_from('{}[]":,\\u019.eE+-tfn \n\t\x01'), max_size=2),
)
def test_arguments_are_what_json_takes(value: Any, at: int, instead: str) -> None:
    text = json.dumps(value)
    text = text[: at % len(text)] + instead + text[at % len(text) + 1 :]
    matcher = ARGUMENTS.deep_copy()
    valid = text[:1] == "{" and read_on(matcher, text[1:])[1] == "" and matcher.is_stopped()
    try:
        loaded = isinstance(json.loads(text, parse_constant=lambda name: [][0]), dict) and text[0] == "{"
    except (ValueError, IndexError):
        loaded = False
    assert valid == (loaded and text.rstrip(" \n\t") == text)


def split(pieces: Sequence[str], opened: bool, formatted: bool, within: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened, formatted, within)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    assert all(text for _, text in parts)
    kinds = [part for part, _ in parts]
    assert kinds == sorted(kinds, key=[Part.REASONING, Part.ANSWER].index)
    return tuple("".join(text for part, text in parts if part is each) for each in (Part.REASONING, Part.ANSWER))  # type: ignore[return-value]


blanks = st.text(st.sampled_from(" \n\t"), max_size=3) | st.sampled_from(["\n\n", "\n\n\n"])
thoughts = st.tuples(
    blanks,
    st.sampled_from([OPENING, "<think", ""]),
    blanks,
    words | garbage,
    blanks,
    st.sampled_from([CLOSING, "</think", ""]),
    blanks,
    words,
).map("".join)


@settings(deadline=None)
@given(text=thoughts | garbage, ends=cuts, opened=st.booleans(), formatted=st.booleans())
def test_any_cut_gives_the_same_reasoning(text: str, ends: list[int], opened: bool, formatted: bool) -> None:
    whole = split([text], opened, formatted)
    assert split(cut(text, ends), opened, formatted) == whole
    assert split(list(text), opened, formatted) == whole
    start = text.lstrip()
    if opened or start.startswith(OPENING):
        thought, closing, answer = start.removeprefix(OPENING).lstrip().partition(CLOSING)
        if opened and len(start) < len(OPENING) and OPENING.startswith(start):
            assert whole == (text, "")
        else:
            kept = answer.removeprefix("\n").removeprefix("\n") if formatted else answer.lstrip()
            assert whole == (thought.rstrip() if closing else thought, kept)
    else:
        assert whole == ("", text)


@settings(deadline=None)
@given(text=thoughts | garbage, ends=cuts, formatted=st.booleans())
def test_reasoning_that_is_continued_keeps_the_space_that_it_goes_on_with(
    text: str, ends: list[int], formatted: bool
) -> None:
    for pieces in ([text], cut(text, ends), list(text)):
        thought, closing, answer = text.partition(CLOSING)
        kept = answer.removeprefix("\n").removeprefix("\n") if formatted else answer.lstrip()
        expected = (thought.rstrip() if closing else thought, kept)
        assert split(pieces, opened=True, formatted=formatted, within=True) == expected
