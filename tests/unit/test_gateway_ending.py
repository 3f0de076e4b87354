"""A gateway that ends: requests get their time once, and what is left is told why."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

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
from prometheus_client.metrics_core import Metric
from test_connections import Time
from waiting import eventually

import gateway.__main__ as program
from common.runtime.checkpoint import DEMO_FOLDER
from common.runtime.config import GatewaySettings
from gateway.access.connections import ConnectionBounds, Listener
from gateway.api import create_app, create_runner
from gateway.observability.metrics import GatewayMetrics
from gateway.text.tokenizer import ModelTokenizer

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


class FragileLinks:
    """The links of a gateway to its workers, which fail when a test says so."""

    def __init__(self) -> None:
        self.failing = asyncio.Event()

    async def run(self) -> None:
        await self.failing.wait()
        raise RuntimeError("a link has died of a bug")

    async def wait_usable(self) -> None: ...


class FragileDispatcher(ScriptedGenerator):
    """A dispatcher with such links, whose streams get two tokens."""

    def __init__(self) -> None:
        super().__init__(text=STORY, hang=True, num_before=2)
        self.links = FragileLinks()

    def __hash__(self) -> int:
        return id(self)

    def collect(self) -> Iterable[Metric]:
        return ()


@pytest.mark.usefixtures("no_settings")
def takes_connections(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    with socket.socket() as made:
        return made.connect_ex((parts.hostname, parts.port)) == 0


@pytest.mark.parametrize("stops", [False, True], ids=["serving", "ending"])
async def test_a_gateway_whose_links_fail_gives_open_streams_no_grace(
    stops: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No token comes any more, and what restarts the gateway waits for its end."""
    dispatcher, stop = FragileDispatcher(), asyncio.Event()
    monkeypatch.setattr(program, "_dispatcher", lambda *_: dispatcher)
    monkeypatch.setattr(ModelTokenizer, "load", lambda _: tokenizer())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    caplog.set_level(logging.INFO)
    given = GatewaySettings(
        decode_workers=("127.0.0.1:1",),
        served_model_name=(MODEL,),
        port=0,
        dashboard="off",
        shutdown_grace_s=GRACE_S,
    )
    serving = asyncio.create_task(program.serve(given, DEMO_FOLDER, stop))

    def urls() -> list[str]:
        return [each.getMessage().removeprefix("HTTP on ") for each in caplog.records if "HTTP on " in each.msg]

    async def ask(session: aiohttp.ClientSession) -> str:
        async with session.post(f"{urls()[0]}{COMPLETIONS_PATH}", json=COMPLETION | {"stream": True}) as response:
            return await response.text()

    async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession() as session:
        await eventually(lambda: bool(urls()))
        asking = asyncio.create_task(ask(session))
        await dispatcher.hanging.wait()
        if stops:
            stop.set()
            await eventually(lambda: not takes_connections(urls()[0]))  # the grace period has begun
            assert not serving.done()
        dispatcher.links.failing.set()
        *_, last, _ = (await asking).split("\n\n")
        name, data = last.split("\n")
        assert name == "event: error"
        assert_error(json.loads(data.removeprefix("data: ")), None, "draining")
        await asyncio.wait([serving])
    assert isinstance(serving.exception(), type(None) if stops else RuntimeError)
