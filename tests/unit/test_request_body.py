"""What a body may cost before it is known what it says."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    ScriptedGenerator,
    assert_error,
    post,
    serve,
    settings,
    tokenizer,
)

from gateway.intake.field_types import MAX_CALLS, MAX_PARTS
from gateway.web import request_body

MANY = settings().limits.max_body_values + 1
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "body",
    ["[" * MANY, '{"prompt":"' + "," * MANY + '"}', '{"x":[' + "1.5," * MANY + "1]}", '{"x":[' + "{}," * MANY + "1]}"],
    ids=["brackets", "text", "numbers", "objects"],
)
async def test_what_would_take_long_to_decode_is_not_decoded(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object, **__: object) -> None:
        raise AssertionError("it is decoded")

    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        with monkeypatch.context() as patch:
            patch.setattr(request_body.json, "loads", decode)
            async with session.post(server.url + COMPLETIONS_PATH, data=body) as response:
                text = await response.text()
        assert response.status == 413
        assert_error(json.loads(text), None, "body_too_large")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "tool_calls": [CALL] * 128}] * (MAX_CALLS // 128 + 1),
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_PARTS + 1)}],
    ],
    ids=["calls", "parts"],
)
async def test_a_conversation_has_so_many_calls_and_parts(messages: list[Any]) -> None:
    status, answer, _ = await post(CHAT_PATH, {"messages": messages})
    assert status == 400
    assert_error(answer, "messages", "invalid_value")
    assert "in all" in answer["error"]["message"]


@pytest.mark.parametrize("num_messages", [1, 33])
async def test_a_conversation_is_put_into_its_template_in_a_thread(
    num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template may have no end."""
    kind = type(tokenizer())
    render, threads = kind.render_chat, []

    def noted(*args: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args)

    monkeypatch.setattr(kind, "render_chat", noted)
    status, _, _ = await post(CHAT_PATH, {"messages": CHAT["messages"] * num_messages})
    assert status == 200
    assert [thread is not threading.main_thread() for thread in threads] == [True]


async def test_bodies_on_their_way_hold_so_much_together() -> None:
    """One that stalls does not let others in when they would be too much; when it has gone, they are."""
    limits = settings(max_bodies_bytes=1000)
    async with serve(ScriptedGenerator(), limits) as server, aiohttp.ClientSession() as session:
        held = asyncio.Event()

        async def stalls() -> Any:
            yield b" " * 950
            await held.wait()
            yield json.dumps(COMPLETION).encode()

        async def send() -> int:
            async with session.post(server.url + COMPLETIONS_PATH, data=stalls()) as response:
                await response.read()
                return response.status

        async def ask() -> tuple[int, Any]:
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION | {"user": "u" * 60}) as response:
                return response.status, await response.json()

        first = asyncio.create_task(send())
        status = 200
        async with asyncio.timeout(30):
            while status == 200:  # until that much has arrived
                status, answer = await ask()
        assert status == 429
        assert_error(answer, None, "capacity")
        held.set()
        assert await first == 200
        assert (await ask())[0] == 200
