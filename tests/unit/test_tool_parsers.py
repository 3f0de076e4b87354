"""Calls in each format, and what only looks like one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher

from gateway.text import call_parser
from gateway.text.call_grammars import ARGUMENTS, MAX_DEPTH, read_on
from gateway.text.call_parser import CallDelta, CallParser, Event
from gateway.text.tool_parsers import HermesParser, Llama3Parser, MistralParser

NAMES = {"get_weather", "is-noon"}
WEATHER = '{"city": "Oslo", "days": [1, 2.5e3, {"x": "}\\"</tool_call>"}]}'


def joined(events: Sequence[Event]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and each call's name and arguments."""
    text = ""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, str):
            text += event
        elif event.id is not None:
            assert event.index == len(calls)
            assert event.arguments == ""
            calls.append((event.name or "", ""))
        else:
            assert event.index == len(calls) - 1
            assert event.name is None
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return text, calls


def parse(parser: CallParser, text: str) -> tuple[str, list[tuple[str, str]]]:
    events = [event for char in text for event in parser.push(char)]
    return joined([*events, *parser.finish()])


def hermes(name: str = "get_weather", arguments: str = WEATHER) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALL = ("get_weather", WEATHER)
NOON = ("is-noon", "{}")
WELL_FORMED: list[tuple[type[CallParser], str, str, list[tuple[str, str]]]] = [
    (HermesParser, hermes(), "", [CALL]),
    (HermesParser, "Let me see.\n" + hermes(), "Let me see.\n", [CALL]),
    (HermesParser, hermes() + "\n" + hermes("is-noon", "{}") + "\n", "", [CALL, NOON]),
    (HermesParser, hermes() + hermes() + "\n\nDone. ", "\n\nDone. ", [CALL, CALL]),
    (HermesParser, " \n" + hermes(), "", [CALL]),
    (HermesParser, f'<tool_call>{{"arguments":{WEATHER},"name":"get_weather"}}</tool_call>', "", [CALL]),
    (HermesParser, '<tool_call>{"name": "is-noon"}</tool_call>', "", [NOON]),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": null}</tool_call>', "", [NOON]),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": "{}"}</tool_call>', "", [NOON]),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": ""}</tool_call>', "", [NOON]),
    (HermesParser, f'<tool_call>{{"name": "get_weather", "x": "y", "n" : -1.5e3, "arguments": {WEATHER}}}', "", [CALL]),
    (HermesParser, f'<tool_call>{{"arguments": {WEATHER}, "x": null, "name": "get_weather", "y":true}}', "", [CALL]),
    (HermesParser, hermes().replace("}\n</tool_call>", ', "more": 5}\n</tool_call>'), "", [CALL]),
    (HermesParser, '<tool_call>{"id": "1", "type": "function", "name": "is-noon"}</tool_call>', "", [NOON]),
    (HermesParser, '<tool_call>{"name": "is\\u002dnoon"}</tool_call>', "", [NOON]),
    (HermesParser, hermes().removesuffix("\n</tool_call>") + "\n" + hermes("is-noon", "{}"), "", [CALL, NOON]),
    (HermesParser, hermes().removesuffix("l_call>"), "", [CALL]),
    (HermesParser, hermes().removesuffix("}\n</tool_call>"), "", [CALL]),
    (Llama3Parser, f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    (Llama3Parser, f'\n {{"type": "function", "name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    (Llama3Parser, f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    (Llama3Parser, f'Hm. <|python_tag|> {{"name": "get_weather", "arguments": {WEATHER}}} ', "Hm. ", [CALL]),
    (
        Llama3Parser,
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "is-noon", "parameters": {{}}}}',
        "",
        [CALL, NOON],
    ),
    (Llama3Parser, '{"name": "is-noon", "parameters": {}}\n{"name": "is-noon"}', "", [NOON, NOON]),
    (Llama3Parser, '{"name": "is-noon", "parameters": {}} and so on', " and so on", [NOON]),
    (MistralParser, f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    (
        MistralParser,
        f'[TOOL_CALLS][{{"name":"get_weather","arguments":{WEATHER},"id":"abcdefghi"}}, {{"name":"is-noon"}} ]\n',
        "",
        [CALL, NOON],
    ),
    (MistralParser, f"So:[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]is-noon[ARGS]{{}}", "So:", [CALL, NOON]),
    (MistralParser, f"[TOOL_CALLS]get_weather{WEATHER}", "", [CALL]),
    (MistralParser, f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{WEATHER}", "", [CALL]),
    (MistralParser, f"[TOOL_CALLS] get_weather[ARGS] {WEATHER} indeed", " indeed", [CALL]),
]


@pytest.mark.parametrize(("kind", "text", "rest", "calls"), WELL_FORMED, ids=lambda value: repr(value)[:40])
def test_calls_are_found(kind: type[CallParser], text: str, rest: str, calls: list[tuple[str, str]]) -> None:
    parser = kind(NAMES)
    assert parse(parser, text) == (rest, calls)
    assert (parser.num_begun, parser.num_complete, parser.num_malformed) == (len(calls), len(calls), 0)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


NO_CALLS: list[tuple[type[CallParser], str]] = [
    (HermesParser, "  no calls at all\n"),
    (HermesParser, " \n"),
    (HermesParser, ""),
    (HermesParser, "a < b <tool_cal <tool_calling> </tool_call>"),
    (HermesParser, "<tool_call"),
    (HermesParser, "<tool_call>"),
    (HermesParser, "<tool_call>\n{"),
    (HermesParser, "<tool_call>get_weather</tool_call>"),
    (HermesParser, "<tool_call>{}</tool_call>"),
    (HermesParser, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": 5}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": true}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "x": 1, "x": 1}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": [1]}</tool_call>'),
    *(
        (HermesParser, f'<tool_call>{{"name": "is-noon", "arguments": "{{\\"a\\": {number}}}"}}</tool_call>')
        for number in ("NaN", "Infinity", "-Infinity")
    ),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": nul}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": "[1]"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": "{"}</tool_call>'),
    (HermesParser, f'<tool_call>{{"name": "is-noon", "arguments": "{"[" * 9999}"}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "more": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "name": "is-noon"}</tool_call>'),
    (HermesParser, '<tool_call>{"name" "is-noon"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon";}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is\nnoon"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon\\x"}</tool_call>'),
    (HermesParser, '<tool_call>{"' + "n" * 300 + '": "is-noon"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": "' + "\\" * 9),
    (HermesParser, '<tool_call>{"name": "is-noon", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    (HermesParser, '<tool_call>{"type": "x", "name": 5}</tool_call>'),
    (Llama3Parser, '{"answer": 5}'),
    (Llama3Parser, '{"name": "Bob", "parameters": {"age": 5}}'),
    (Llama3Parser, 'Well: {"name": "is-noon", "parameters": {}}'),
    (Llama3Parser, '<|python_tag|>brave_search.call(query="x")'),
    (Llama3Parser, "<|python_tag|>"),
    (Llama3Parser, "  {"),
    (Llama3Parser, '[{"name": "is-noon"}]'),
    (MistralParser, "[TOOL_CALLS]"),
    (MistralParser, "[TOOL_CALLS][]"),
    (MistralParser, "[TOOL_CALLS][5]"),
    (MistralParser, '[TOOL_CALLS] [{"name": "unknown"}]'),
    (MistralParser, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS]is-noon"),
    (MistralParser, "[TOOL_CALLS]is-noon[ARG"),
    (MistralParser, "[TOOL_CALLS]is-noon[WRONG_TAG]{}"),
    (MistralParser, "[TOOL_CALLS]is-noon[CALL_ID]a1[NO]{}"),
    (MistralParser, "[TOOL_CALLS]is-noon[CALL_ID]" + "a" * 300),
    (MistralParser, "[TOOL_CALLS]is-noon[ARGS][]"),
    (MistralParser, "[TOOL_CALLS]" + "a" * 300 + "{}"),
    (MistralParser, "TOOL_CALLS] [TOOL_[TOOL"),
]


@pytest.mark.parametrize(("kind", "text"), NO_CALLS, ids=lambda value: repr(value)[:40])
def test_what_is_no_call_is_text_to_the_last_character(kind: type[CallParser], text: str) -> None:
    parser = kind(NAMES)
    assert parse(parser, text) == (text, [])
    assert (parser.num_begun, parser.num_complete) == (0, 0)
    openings = re.findall(r"<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|^\s*\{", text)
    assert parser.num_malformed == len(openings)


def test_a_call_behind_one_that_is_none() -> None:
    assert parse(HermesParser(NAMES), "<tool_call> <tool_call>" + hermes()) == ("<tool_call> <tool_call>", [CALL])
    broken = '<tool_call>{"name": "unknown"}</tool_call>'
    parser = HermesParser(NAMES)
    assert parse(parser, broken + hermes() + broken) == (broken + broken, [CALL])
    assert parser.num_malformed == 2
    inside = '<tool_call>{"name": "<tool_call>{"name": "is-noon"}</tool_call>'
    assert parse(HermesParser(NAMES), inside) == ('<tool_call>{"name": "', [NOON])
    second = '[TOOL_CALLS][{"name": "is-noon"}, {"name": "unknown"}]'
    assert parse(MistralParser(NAMES), second) == (', {"name": "unknown"}]', [NOON])
    assert parse(Llama3Parser(NAMES), '{"name": "is-noon"}; {"na') == ('; {"na', [NOON])
    assert parse(Llama3Parser(NAMES), '{"x": 1}<|python_tag|>{"name": "is-noon"}') == ('{"x": 1}', [NOON])


@pytest.mark.parametrize(
    ("arguments", "read", "rest"),
    [
        ('{"city": Oslo}}', '{"city": ', "Oslo}}"),
        ('{"city": "a\nb"}}', '{"city": "a', '\nb"}}'),
        ('{"city": "Oslo",}}', '{"city": "Oslo",', "}}"),
        ('{"city": "Os', '{"city": "Os', ""),
        ("{", "{", ""),
    ],
)
def test_a_call_that_has_begun_is_cut_where_its_arguments_are_no_json(arguments: str, read: str, rest: str) -> None:
    parser = HermesParser(NAMES)
    assert parse(parser, f'<tool_call>{{"name": "get_weather", "arguments": {arguments}') == (
        rest,
        [("get_weather", read)],
    )
    assert (parser.num_begun, parser.num_complete, parser.num_malformed) == (1, 0, int(bool(rest)))


def test_what_follows_arguments_and_belongs_to_no_call_is_text() -> None:
    extra = hermes().replace("}\n</tool_call>", ', "more": {}}\n</tool_call>')
    parser = HermesParser(NAMES)
    assert parse(parser, extra) == (', "more": {}}\n</tool_call>', [CALL])
    assert (parser.num_complete, parser.num_malformed) == (1, 0)


def test_deltas_come_as_the_text_does() -> None:
    parser = HermesParser(NAMES)
    assert parser.push("One mo") == ["One mo"]
    assert parser.push("ment <tool") == ["ment "]
    assert parser.push('_call>{"name": "get_w') == []
    assert parser.push('eather", "argum') == []
    first, second = parser.push('ents": {"ci')
    assert isinstance(first, CallDelta)
    assert re.fullmatch("call_[0-9a-f]{24}", first.id or "")
    assert first == CallDelta(index=0, id=first.id, name="get_weather")
    assert second == CallDelta(index=0, arguments='{"ci')
    assert parser.push('ty": 1}}\n') == [CallDelta(index=0, arguments='ty": 1}')]
    assert parser.push("</tool_call>\nx") == ["\nx"]
    assert parser.finish() == []


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = Llama3Parser(NAMES)
    assert parser.push('{"name": "Bob", ') == []
    assert parser.push('"age": 5, "bio": "lo') == ['{"name": "Bob", "age": 5, "bio": "lo']


def test_ids_are_drawn() -> None:
    for kind, pattern in [(HermesParser, "call_[0-9a-f]{24}"), (MistralParser, "[a-zA-Z0-9]{9}")]:
        ids = {kind(NAMES).draw_id() for _ in range(50)}
        assert len(ids) == 50
        assert all(re.fullmatch(pattern, each) for each in ids)


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_calls_than_there_may_be(most: int) -> None:
    parser = HermesParser(NAMES, most)
    assert parse(parser, "a" + "\n".join([hermes()] * 4) + "b") == ("a", [CALL] * most)
    assert parser.full
    assert not HermesParser(NAMES).full


def test_a_long_answer_is_read_in_time_that_grows_with_its_length() -> None:
    """What is held back is read again, but not again and again."""
    for text in ['<tool_call>{"name": "' * 3000, '<tool_call>{"arguments": {"a' + '<tool_call>{"' * 5000]:
        parser = HermesParser(NAMES)
        num_read = 0
        read = parser._read

        def counted(text: str, read: Any = read) -> None:
            nonlocal num_read
            num_read += len(text)
            read(text)

        parser._read = counted  # type: ignore[method-assign]
        assert parse(parser, text) == (text, [])
        assert num_read < 4 * len(text)


def test_each_character_of_a_long_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def counted(matcher: LLMatcher, text: str) -> tuple[str, str]:
        nonlocal num_read
        num_read += len(text)
        return read_on(matcher, text)

    monkeypatch.setattr(call_parser, "read_on", counted)
    arguments = json.dumps({"content": "a line\n" * 10_000})
    for text in (hermes(arguments=arguments), f'<tool_call>{{"arguments": {arguments}, "name": "get_weather"}}'):
        num_read = 0
        parser = HermesParser(NAMES)
        events = [event for at in range(0, len(text), 4) for event in parser.push(text[at : at + 4])]
        assert joined([*events, *parser.finish()]) == ("", [("get_weather", arguments)])
        assert num_read < len(text) + 20


def test_the_digits_of_a_number_are_not_bounded() -> None:
    arguments = '{"a": ' + "1" * 10_000 + "}"
    for call in (hermes(arguments=arguments), f'<tool_call>{{"arguments": {arguments}, "name": "get_weather"}}'):
        assert parse(HermesParser(NAMES), call) == ("", [("get_weather", arguments)])


def test_what_is_read_again_is_not_copied_with_each_opening() -> None:
    nums_copied = []
    for num_openings in (1000, 2000):
        parser = HermesParser(NAMES)
        num_copied = 0
        for name, read in [("_outside", parser._outside), ("_inside", parser._inside)]:

            def counted(text: str, read: Any = read) -> Any:
                nonlocal num_copied
                num_copied += len(text)
                return read(text)

            setattr(parser, name, counted)
        text = '<tool_call>{"name": "is-noon", "arguments": "' + "<tool_call>" * num_openings + '"'
        assert parse(parser, text) == (text, [])
        nums_copied.append(num_copied)
    assert nums_copied[1] < 2.2 * nums_copied[0]


@pytest.mark.parametrize(
    ("before", "more", "after"),
    [
        ("", "\n\n", "x"),
        (hermes(), "\n\n", "x"),
        ("<tool_call>", "  ", "x"),
        ('<tool_call>{"arguments": {"a": "', "xy", '"}, "name": "unknown"}'),
        ('<tool_call>{"name": "is-noon", "arguments": "{', "  ", ']"}'),
        (hermes().removesuffix("</tool_call>"), "  ", "x"),
    ],
)
def test_what_is_held_back_is_not_copied_with_each_delta(before: str, more: str, after: str) -> None:
    """A string that grew would be: what is held is in pieces."""
    parser = HermesParser(NAMES)
    events = parser.push(before)
    for _ in range(1000):
        events += parser.push(more)
        assert all(len(value) < 100 for value in vars(parser).values() if isinstance(value, str))
    events += parser.push(after) + parser.finish()
    text, calls = joined(events)
    assert calls == ([CALL] if before.startswith(hermes()[:40]) else [])
    assert text.strip() == (after if calls else before + more * 1000 + after).strip()


def taken(text: str) -> bool:
    """Whether all of `text` is read as arguments, and nothing can follow."""
    matcher = ARGUMENTS.deep_copy()
    return text[0] == "{" and read_on(matcher, text[1:]) == (text[1:], "") and matcher.is_stopped()


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("{}", True),
        ("{ \t\r\n}", True),
        ('{"a": [ ], "b": [1, -0, 0.5, -1e+9, 2E-1], "c": {"d": null, "e": true, "f": false}}', True),
        ('{"\\u00e9\\"\\\\\\/\\b\\f\\n\\r\\t": "日本"}', True),
        ('{"a" : {"b" :1 } , "c":[ 1 ,2 ] }', True),
        ("[]", False),
        ("{,}", False),
        ('{"a"}', False),
        ('{"a": }', False),
        ('{"a": 01}', False),
        ('{"a": -}', False),
        ('{"a": 1.}', False),
        ('{"a": 1e}', False),
        ('{"a": .5}', False),
        ('{"a": +1}', False),
        ('{"a": NaN}', False),
        ('{"a": truth}', False),
        ('{"a": "\\u00g0"}', False),
        ('{"a": "\\x"}', False),
        ('{"a": "\t"}', False),
        ('{"a": [1,]}', False),
        ('{"a": [1}', False),
        ('{"a": 1 2}', False),
        ("{'a': 1}", False),
        ('{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}", True),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", False),
    ],
)
def test_arguments_are_a_json_object_and_nothing_else(text: str, valid: bool) -> None:
    assert taken(text) is valid


def test_what_does_not_fit_is_told_from_the_first_character_on() -> None:
    matcher = ARGUMENTS.deep_copy()
    assert read_on(matcher, '"é": tr') == ('"é": tr', "")
    assert read_on(matcher, "u日") == ("u", "日")
    assert not matcher.is_stopped()
    ended = ARGUMENTS.deep_copy()
    assert read_on(ended, '"a": 1 } é') == ('"a": 1 }', " é")
    assert ended.is_stopped()
