"""A gateway that ends: requests get their time once, and what is left is told why."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    COMPLETION,
    COMPLETIONS_PATH,
    MODEL,
    STORY,
    ScriptedGenerator,
    assert_error,
    settings,
    tokenizer,
)
from test_connections import Time

from gateway.access.connections import ConnectionBounds, Listener
from gateway.api import create_app, create_runner
from gateway.observability.metrics import GatewayMetrics

GRACE_S = 600.0
TIMEOUT_S = 20.0


class Gateway:
    """One that is told to end by the test."""

    def __init__(self, generator: ScriptedGenerator) -> None:
        self.generator = generator
        metrics = GatewayMetrics(MODEL)
        app = create_app(generator, tokenizer(), settings(), metrics)
        self.runner = create_runner(app, shutdown_timeout_s=GRACE_S)
        self.listener: Listener

    async def start(self) -> str:
        await self.runner.setup()
        self.listener = Listener(self.runner, ConnectionBounds())
        await self.listener.bind("127.0.0.1", 0)
        return f"http://127.0.0.1:{self.listener.port}{COMPLETIONS_PATH}"

    async def end(self) -> None:
        await self.listener.close()
        await self.runner.cleanup()


@asynccontextmanager
async def asked(
    generator: ScriptedGenerator, **body: Any
) -> AsyncIterator[tuple[Gateway, asyncio.Task[tuple[int, str]]]]:
    """A gateway, and a client that waits for its answer."""
    gateway = Gateway(generator)
    url = await gateway.start()

    async def ask() -> tuple[int, str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
            async with session.post(url, json=COMPLETION | body) as response:
                return response.status, await response.text()  # raises if it breaks off

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(TIMEOUT_S):
        await generator.hanging.wait()
    yield gateway, asking
    await gateway.end()
    assert generator.num_open == 0


async def _told_after_its_grace(gateway: Gateway, asking: asyncio.Task[tuple[int, str]]) -> tuple[int, str]:
    with Time() as time:
        ending = asyncio.create_task(gateway.end())
        for _ in range(20):
            await time.advance(GRACE_S / 20 - 0.1)
        assert not asking.done(), "it has all of its time"
        assert not ending.done()
        await time.advance(3)
        for _ in range(100):
            await time.advance(0)
            if asking.done() and ending.done():
                break
        assert ending.done(), "and no more than that"
    async with asyncio.timeout(TIMEOUT_S):
        return await asking


async def test_a_stream_that_is_cut_ends_with_an_error_and_in_order(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(text=STORY, hang=True, num_before=2)
    with caplog.at_level(logging.INFO):
        async with asked(generator, stream=True) as (gateway, asking):
            status, text = await _told_after_its_grace(gateway, asking)
    assert status == 200
    *events, last, rest = text.split("\n\n")
    assert events
    assert rest == ""
    name, data = last.split("\n")
    assert name == "event: error"
    assert_error(json.loads(data.removeprefix("data: ")), None, "draining")
    assert "[DONE]" not in text
    assert "the client has left" not in caplog.text
    (told,) = [each.getMessage() for each in caplog.records if " failed: " in each.getMessage()]
    assert "draining: this gateway ends" in told


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_nothing_to_show_yet_is_a_503(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with asked(ScriptedGenerator(hang=True), stream=stream) as (gateway, asking):
            status, text = await _told_after_its_grace(gateway, asking)
    assert status == 503
    assert_error(json.loads(text), None, "draining")
    assert "the client has left" not in caplog.text


async def test_who_is_done_in_time_is_served_and_then_the_gateway_is_gone() -> None:
    generator = ScriptedGenerator(pause_s=1, hang=False)
    generator.hanging.set()
    async with asked(generator, stream=True) as (gateway, asking):
        async with asyncio.timeout(TIMEOUT_S):
            while not generator.num_open:
                await asyncio.sleep(0.01)
        with Time() as time:
            ending = asyncio.create_task(gateway.end())
            for _ in range(30):
                await time.advance(1)
            assert ending.done()
        async with asyncio.timeout(TIMEOUT_S):
            status, text = await asking
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")


async def test_a_client_that_left_is_still_said_to_have_left(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(hang=True, num_before=1)
    with caplog.at_level(logging.INFO):
        async with asked(generator, stream=True) as (_, asking):
            asking.cancel()
            async with asyncio.timeout(TIMEOUT_S):
                await generator.closed_early.wait()
    assert "the client has left" in caplog.text
