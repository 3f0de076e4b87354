"""What a body may cost before it is known what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    ScriptedGenerator,
    assert_error,
    post,
    serve,
    settings,
)

from gateway.intake.field_types import MAX_CALLS, MAX_PARTS

MANY = settings().limits.max_body_values + 1
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "body",
    ["[" * MANY, '{"prompt":"' + "," * MANY + '"}', '{"x":[' + "1.5," * MANY + "1]}", '{"x":[' + "{}," * MANY + "1]}"],
    ids=["brackets", "text", "numbers", "objects"],
)
async def test_what_would_take_long_to_decode_is_not_decoded(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        with monkeypatch.context() as patch:
            patch.setattr("gateway.web.request_body._JSON", None)  # nothing can be decoded
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


class Sender:
    """A client with an address of its own, whose bodies may stand still."""

    def __init__(self, url: str, address: str) -> None:
        self._url = url + COMPLETIONS_PATH
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(address, 0), limit=0))
        self.goes_on = asyncio.Event()

    def begin(self, first: bytes, rest: bytes) -> asyncio.Task[tuple[int, Any]]:
        """Send `first`, and the rest when it goes on; status and answer."""

        async def body() -> Any:
            yield first
            await self.goes_on.wait()
            yield rest

        return asyncio.create_task(self.post(body()))

    async def post(self, body: Any) -> tuple[int, Any]:
        async with self.session.post(self._url, data=body) as response:
            return response.status, await response.json()


@asynccontextmanager
async def senders(url: str) -> AsyncIterator[tuple[Sender, Sender]]:
    one, other = Sender(url, "127.0.0.1"), Sender(url, "127.0.0.2")
    async with one.session, other.session:
        yield one, other


PLAIN = json.dumps(COMPLETION).encode()


async def test_beyond_the_bound_who_holds_most_loses_the_largest_of_its_bodies() -> None:
    """Nobody who sends without an end keeps others out."""
    async with (
        serve(ScriptedGenerator(), settings(max_bodies_bytes=4000)) as server,
        senders(server.url) as (one, other),
    ):
        large = one.begin(b" " * 2000, PLAIN)
        small = one.begin(b" " * 1000, PLAIN)
        await asyncio.sleep(0)
        others = other.begin(b" " * 900, PLAIN)
        async with asyncio.timeout(30):
            while not large.done():  # until all of that has arrived
                assert (await other.post(PLAIN + b" " * 200))[0] == 200
        status, answer = await large
        assert status == 429
        assert_error(answer, None, "capacity")
        one.goes_on.set()
        other.goes_on.set()
        assert ((await small)[0], (await others)[0]) == (200, 200)
