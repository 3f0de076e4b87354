"""Bodies within all bounds that would hold the event loop for long: their parts are bounded, and they take turns."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
from gateway_fixtures import settings

import gateway.__main__ as program
from gateway.intake import tool_schemas
from gateway.intake.field_types import MAX_ARGUMENTS_CHARS
from gateway.intake.schemas import ChatRequest, parse
from gateway.web import request_body
from gateway.web.http_errors import ApiError
from gateway.web.request_body import BodyReader

TURN_BYTES = 2**18


def read(text: str) -> Any:
    return request_body._decode(bytearray(text.encode()), 100_000)


def test_the_gateway_reads_integers_of_at_most_640_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "exit_on_operator_error", lambda _: None)
    monkeypatch.setattr(program, "leave", lambda *_: None)
    before = sys.get_int_max_str_digits()
    try:
        program.main()
        assert read(f'{{"a": {"9" * 640}}}') == {"a": 10**640 - 1}
        with pytest.raises(ApiError) as refused:
            read(f'{{"a": {"9" * 641}}}')
        assert refused.value.code == "invalid_json"
        assert tool_schemas._arguments(arguments := f'{{"a": {"9" * 641}}}') == arguments
    finally:
        sys.set_int_max_str_digits(before)


# --- arguments of calls ---------------------------------------------------------------------------------------------


def conversation(*arguments: str) -> dict[str, Any]:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
    return {"messages": [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "a"}]}


def test_the_arguments_of_a_call_are_written_once_to_see_whether_they_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    dumps, dumped = json.dumps, list[object]()

    def counted(value: object, **options: Any) -> str:
        dumped.append(value)
        return dumps(value, **options)

    monkeypatch.setattr(json, "dumps", counted)
    form = parse(ChatRequest, conversation('{"a": [1]}', "[1]", ""))
    assert form.messages[0].tool_calls is not None
    assert [call.function.arguments for call in form.messages[0].tool_calls] == [{"a": [1]}, "[1]", {}]
    assert dumped == [{"a": [1]}, "[1]", {}]


def test_the_arguments_of_all_calls_are_bounded_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = '{"a": ""}'
    half = '{"a": "' + "x" * (MAX_ARGUMENTS_CHARS // 2 - len(empty)) + '"}'
    assert parse(ChatRequest, conversation(half, half)).messages
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("they are read"))
    with pytest.raises(ApiError, match="arguments in all") as refused:
        parse(ChatRequest, conversation(half, half, "{}"))
    assert (refused.value.status, refused.value.param) == (400, "messages")


# --- bodies that are complete at once -------------------------------------------------------------------------------


class Request:
    """A request of a client, all of which has come."""

    headers: dict[str, str] = {}  # noqa: RUF012
    content_length = None

    def __init__(self, body: bytes, client: str = "", *, is_eof: bool = True) -> None:
        self.client = client
        self.content = self
        self._chunks = [body, b""]
        self._is_eof = is_eof

    def is_eof(self) -> bool:
        return self._is_eof

    async def readany(self) -> bytes:
        return self._chunks.pop(0)


def reader_of(**limits: Any) -> Any:
    return BodyReader(settings(**limits).limits, attrgetter("client"))


@contextmanager
def turns_of_decoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Turn of the event loop → bytes decoded in it."""
    loop, decode = asyncio.get_running_loop(), request_body._decode
    turn, num_bytes, goes_on = 0, Counter[int](), True

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if goes_on:
            loop.call_soon(next_turn)

    def counted(body: bytearray, max_values: int) -> object:
        num_bytes[turn] += len(body)
        return decode(body, max_values)

    monkeypatch.setattr(request_body, "_decode", counted)
    next_turn()
    try:
        yield num_bytes
    finally:
        goes_on = False


@pytest.mark.parametrize("ending", [b'"', b""], ids=["valid", "invalid"])
@pytest.mark.parametrize("size", [2**13, 2**16, 2**20])
async def test_bodies_that_are_complete_at_once_take_turns(
    size: int, ending: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = 2**22 // size
    body = b'"' + b"x" * (size - 2) + ending
    reader = reader_of()
    with turns_of_decoding(monkeypatch) as num_bytes:
        found = await asyncio.gather(*(reader.read_json(Request(body)) for _ in range(num)), return_exceptions=True)
    assert {type(each) for each in found} == {str if ending else ApiError}
    assert num_bytes.total() == num * len(body)
    assert max(num_bytes.values()) < TURN_BYTES + size


async def test_others_go_on_between_the_decoding_of_a_large_body_and_the_check_of_its_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    decode = request_body._decode

    def noted(body: bytearray, max_values: int) -> object:
        asyncio.get_running_loop().call_soon(order.append, "others")
        return decode(body, max_values)

    monkeypatch.setattr(request_body, "_decode", noted)
    await reader_of().read_json(Request(b'"' + b"x" * TURN_BYTES + b'"'))
    order.append("form")
    assert order == ["others", "form"]


async def test_a_body_may_be_given_up_while_it_waits_for_its_turn() -> None:
    reader = reader_of(max_bodies_bytes=2 * TURN_BYTES)
    await reader.read_json(Request(b'"' + b"x" * TURN_BYTES + b'"'))  # the next one waits for a turn
    most, last = b" " * (TURN_BYTES * 3 // 2) + b"1", b" " * TURN_BYTES + b"2"
    refused, decoded = await asyncio.gather(
        *(reader.read_json(Request(body, client, is_eof=False)) for client, body in (("most", most), ("last", last))),
        return_exceptions=True,
    )
    assert isinstance(refused, ApiError)
    assert refused.status == 429
    assert decoded == 2
    assert (reader._num_bytes, reader._reading) == (0, set())


async def test_a_body_that_is_given_up_before_its_turn_takes_no_memory_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = reader_of(max_bodies_bytes=TURN_BYTES * 13 // 5)
    await reader.read_json(Request(b'"' + b"x" * TURN_BYTES + b'"'))  # the next one waits for a turn
    decode, held = request_body._decode, []

    def noted(body: bytearray, max_values: int) -> object:
        held.append(reader._num_bytes)
        return decode(body, max_values)

    monkeypatch.setattr(request_body, "_decode", noted)
    bodies = (b" " * TURN_BYTES + b"1", b" " * (TURN_BYTES * 3 // 2) + b"2", b" " * (TURN_BYTES // 2) + b"3")
    requests = [Request(body, client, is_eof=False) for client, body in zip("abc", bodies, strict=True)]
    first, refused, last = await asyncio.gather(*map(reader.read_json, requests), return_exceptions=True)
    assert (first, last) == (1, 3)
    assert isinstance(refused, ApiError)
    assert held[0] == len(bodies[0]) + len(bodies[2])
    assert (reader._num_bytes, reader._reading) == (0, set())


# --- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_in_lists_are_made_whole_without_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    integral, num_calls = request_body._integral, 0

    def counted(*arguments: Any) -> object:
        nonlocal num_calls
        num_calls += 1
        return integral(*arguments)

    monkeypatch.setattr(request_body, "_integral", counted)
    numbers = [2.0] * 1000
    assert repr(read(json.dumps({"a": numbers, "b": [numbers, *numbers]}))) == repr(
        {"a": [2] * 1000, "b": [[2] * 1000, *[2] * 1000]}
    )
    assert num_calls == 3


def test_which_numbers_are_made_whole() -> None:
    found = read('{"a": [2.0, -0.0, 2.5, 9007199254740992.0, -9007199254740994.0, 1e400, 3, true, "2.0", [[4.0]]]}')
    assert repr(found["a"]) == "[2, 0, 2.5, 9007199254740992, -9007199254740994.0, inf, 3, True, '2.0', [[4.0]]]"
