"""A gateway that ends: requests get their time once, and what is left is told why."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop
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
from test_connections import HEALTH, LARGE, SmallClient, Time
from test_gateway_tls import Certificate
from waiting import eventually

import gateway.__main__ as program
from common.runtime.checkpoint import DEMO_FOLDER
from common.runtime.config import GatewaySettings
from gateway.access.connections import ConnectionBounds, Listener
from gateway.api import create_app, create_runner
from gateway.observability.metrics import GatewayMetrics
from gateway.text.tokenizer import ModelTokenizer
from gateway.web.tls import ServerTls

GRACE_S = 600.0
TIMEOUT_S = 20.0


class Gateway:
    """One that is told to end by the test; over TLS if it has a certificate."""

    def __init__(
        self, generator: ScriptedGenerator, grace_s: float = GRACE_S, certificate: Certificate | None = None
    ) -> None:
        self.generator = generator
        self.tls = None if certificate is None else ServerTls(certificate.chain, certificate.key).context
        self.trusting = None if certificate is None else certificate.client()
        """What its clients connect with."""
        self.metrics = GatewayMetrics(MODEL)
        app = create_app(generator, tokenizer(), settings(), self.metrics)
        self.runner = create_runner(app, shutdown_timeout_s=grace_s)
        self.listener: Listener
        self.port = 0

    async def start(self, send_buffer_bytes: int | None = None) -> str:
        await self.runner.setup()
        self.listener = Listener(self.runner, ConnectionBounds(), self.metrics, self.tls)
        place = socket.create_server(("127.0.0.1", 0))
        if send_buffer_bytes is not None:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        self.listener.listen(place)
        self.port = self.listener.port
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}{COMPLETIONS_PATH}"

    async def end(self) -> None:
        await self.listener.close()
        await self.runner.cleanup()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trusting)

    async def begin_to_end(self) -> asyncio.Task[None]:
        """Tell it to end. Returns once it has closed an idle connection, so that its grace period has begun."""
        reader, writer = await self.connect()
        writer.write(HEALTH)
        async with asyncio.timeout(TIMEOUT_S):
            await reader.readuntil(b"}")
        ending = asyncio.create_task(self.end())
        assert await until_closed(reader) == b""
        writer.close()
        return ending

    @property
    def num_refused(self) -> float:
        """Connections whose client was blamed for something."""
        samples = [sample for family in self.metrics.registry.collect() for sample in family.samples]
        return sum(each.value for each in samples if each.name == "baton_gateway_connections_refused_total")


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the gateway closes the connection."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


def head(content_length: int, more: str = "") -> bytes:
    """The head of a request for completions, with `more` fields."""
    return f"POST {COMPLETIONS_PATH} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {content_length}\r\n\r\n".encode()


@asynccontextmanager
async def asked(
    generator: ScriptedGenerator, certificate: Certificate | None = None, **body: Any
) -> AsyncIterator[tuple[Gateway, asyncio.Task[tuple[int, str]]]]:
    """A gateway, and a client that waits for its answer."""
    gateway = Gateway(generator, certificate=certificate)
    url = await gateway.start()

    async def ask() -> tuple[int, str]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session:
            async with session.post(url, json=COMPLETION | body, ssl=gateway.trusting or True) as response:
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
    assert_error(json.loads(last.removeprefix("data: ")), None, "draining")
    assert "[DONE]" not in text
    assert "the client has left" not in caplog.text
    assert "ended in the grace period: 0; cut off: 1" in caplog.text
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


async def test_who_is_done_in_time_is_served_and_then_the_gateway_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
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
    assert "ended in the grace period: 1; cut off: 0" in caplog.text


async def test_a_client_that_left_is_still_said_to_have_left(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(hang=True, num_before=1)
    with caplog.at_level(logging.INFO):
        async with asked(generator, stream=True) as (_, asking):
            asking.cancel()
            async with asyncio.timeout(TIMEOUT_S):
                await generator.closed_early.wait()
    assert "the client has left" in caplog.text


async def test_idle_connections_are_closed_at_once() -> None:
    async with asked(ScriptedGenerator(text=STORY, hang=True, num_before=2), stream=True) as (gateway, asking):
        ending = await gateway.begin_to_end()
        assert not ending.done()
        assert not asking.done()
        asking.cancel()
        async with asyncio.timeout(TIMEOUT_S):
            await ending
    assert gateway.num_refused == 0


@pytest.mark.parametrize("over_tls", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_body_is_arriving_is_served(stream: bool, over_tls: bool, tmp_path: Path) -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(text=STORY, gate=gate, num_before=2)
    generator.hanging.set()
    certificate = Certificate(tmp_path) if over_tls else None
    async with asked(generator, certificate, stream=True) as (gateway, asking):
        await eventually(lambda: generator.num_open == 1)
        body = json.dumps(COMPLETION | {"stream": stream}).encode()
        reader, writer = await gateway.connect()
        writer.write(head(len(body), "Expect: 100-continue\r\n"))
        async with asyncio.timeout(TIMEOUT_S):
            await reader.readuntil(b"100 Continue\r\n\r\n")
        writer.write(body[:10])
        ending = await gateway.begin_to_end()
        with pytest.raises(ConnectionRefusedError):
            await gateway.connect()
        writer.write(body[10:])
        await eventually(lambda: generator.num_open == 2)
        gate.set()
        answer = await until_closed(reader)
        async with asyncio.timeout(TIMEOUT_S):
            status, text = await asking
            await ending
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
    assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
    assert gateway.num_refused == 0


@pytest.mark.parametrize("num_sent", [0, 1, len(HEALTH) - 1])
async def test_a_request_whose_head_is_arriving_is_served_though_no_other_is_open(num_sent: int) -> None:
    gateway = Gateway(ScriptedGenerator())
    await gateway.start()
    reader, writer = await gateway.connect()
    writer.write(HEALTH[:num_sent])
    ending = await gateway.begin_to_end()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not ending.done()
    writer.write(HEALTH[num_sent:])
    answer = await until_closed(reader)
    async with asyncio.timeout(TIMEOUT_S):
        await ending
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nConnection: close\r\n" in answer
    assert gateway.num_refused == 0


@pytest.mark.parametrize("sent", [b"", b"GET /health"])
async def test_a_head_that_does_not_come_gets_as_much_time_as_ever(sent: bytes) -> None:
    gateway = Gateway(ScriptedGenerator())
    await gateway.start()
    reader, writer = await gateway.connect()
    with Time() as time:
        writer.write(sent)
        ending = await gateway.begin_to_end()
        await time.advance(ConnectionBounds().header_timeout_s - 1)
        assert not ending.done()
        await time.advance(2)
        answer = await until_closed(reader)
        async with asyncio.timeout(TIMEOUT_S):
            await ending
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 " if sent else b"")
    assert gateway.num_refused == 1


async def test_once_its_grace_is_over_a_gateway_waits_for_no_head() -> None:
    gateway = Gateway(ScriptedGenerator(), grace_s=1.0)
    await gateway.start()
    reader, writer = await gateway.connect()
    with Time() as time:
        ending = await gateway.begin_to_end()
        await time.advance(1.1)
        await time.advance(0)
        assert ending.done()
        assert await until_closed(reader) == b""
    writer.close()
    assert gateway.num_refused == 0


async def test_requests_in_a_row_are_answered_and_the_last_answer_says_that_it_is_the_last() -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(text=STORY, gate=gate, num_before=2)
    gateway = Gateway(generator)
    await gateway.start()
    body = json.dumps(COMPLETION).encode()
    reader, writer = await gateway.connect()
    writer.write(head(len(body)) + body + HEALTH)
    await eventually(lambda: generator.num_open == 1)
    ending = await gateway.begin_to_end()
    gate.set()
    answer = await until_closed(reader)
    async with asyncio.timeout(TIMEOUT_S):
        await ending
    writer.close()
    first, last = answer.split(b"HTTP/1.1 200 ")[1:]
    assert b"\r\nConnection: close\r\n" not in first
    assert b"\r\nConnection: close\r\n" in last


@pytest.mark.parametrize("over_tls", [False, True], ids=["http", "https"])
async def test_a_gateway_does_not_end_before_its_last_answers_are_read(over_tls: bool, tmp_path: Path) -> None:
    """The kernel takes a part of this answer, and the process holds the rest."""
    certificate = Certificate(tmp_path) if over_tls else None
    gateway = Gateway(ScriptedGenerator(text="hello " * 100, tokens_per_delta=100), certificate=certificate)
    await gateway.start(send_buffer_bytes=4096)
    body = json.dumps(LARGE | {"prompt": ["hello"] * 3}).encode()
    with SmallClient(gateway.port, gateway.trusting) as client:
        await client.send(head(len(body)) + body)
        name, labels = "baton_gateway_requests_total", {"endpoint": COMPLETIONS_PATH, "code": "200"}
        await eventually(lambda: bool(gateway.metrics.registry.get_sample_value(name, labels)))
        ending = await gateway.begin_to_end()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not ending.done()
        async with asyncio.timeout(TIMEOUT_S):
            while await client.read(2**16):
                pass
            await ending
    assert client.answer.endswith(b"}")
    assert gateway.num_refused == 0


async def test_a_stream_whose_end_is_unread_after_the_grace_gets_no_second_answer() -> None:
    """All of it is written, and its handler waits for the client."""
    gateway = Gateway(ScriptedGenerator(text="hello " * 100, tokens_per_delta=100), grace_s=1.0)
    await gateway.start(send_buffer_bytes=4096)
    body = json.dumps(LARGE | {"prompt": ["hello"] * 6, "stream": True}).encode()
    sample = gateway.metrics.registry.get_sample_value
    with SmallClient(gateway.port) as client:
        await client.send(head(len(body)) + body)
        await eventually(lambda: sample("vllm:e2e_request_latency_seconds_count", {"model_name": MODEL}) == 1)
        with Time() as time:
            ending = asyncio.create_task(gateway.end())
            await time.advance(0)
            assert sample("baton_gateway_requests_in_flight") == 1
            for _ in range(6):
                await time.advance(1.1)
            assert ending.done()
        async with asyncio.timeout(TIMEOUT_S):
            while await client.read(2**16):
                pass
    assert client.answer.startswith(b"HTTP/1.1 200 ")
    assert client.answer.count(b"HTTP/1.1 ") == 1
    assert client.answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


ON_UVLOOP: dict[str, Callable[[Path], Coroutine[Any, Any, None]]] = {
    "idle": lambda _: test_idle_connections_are_closed_at_once(),
    "unread, http": partial(test_a_gateway_does_not_end_before_its_last_answers_are_read, False),
    "unread, https": partial(test_a_gateway_does_not_end_before_its_last_answers_are_read, True),
    "body, http": partial(test_a_request_whose_body_is_arriving_is_served, False, False),
    "body, https": partial(test_a_request_whose_body_is_arriving_is_served, False, True),
    "body, https, stream": partial(test_a_request_whose_body_is_arriving_is_served, True, True),
}


@pytest.mark.parametrize("test", ON_UVLOOP.values(), ids=ON_UVLOOP)
def test_connections_end_alike_on_the_loop_of_a_gateway(
    test: Callable[[Path], Coroutine[Any, Any, None]], tmp_path: Path
) -> None:
    """The gateway runs on uvloop."""
    uvloop.run(test(tmp_path))


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


def takes_connections(url: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    with socket.socket() as made:
        return made.connect_ex((parts.hostname, parts.port)) == 0


@pytest.mark.usefixtures("limit_of_files_restored")
@pytest.mark.parametrize("stops", [False, True], ids=["serving", "ending"])
async def test_a_gateway_whose_links_fail_gives_open_streams_no_grace(
    stops: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No token comes any more, and what restarts the gateway waits for its end."""
    dispatcher, stop = FragileDispatcher(), asyncio.Event()
    monkeypatch.setattr(program, "_dispatcher", lambda *_: dispatcher)
    monkeypatch.setattr(ModelTokenizer, "load", lambda *_: tokenizer())
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
        assert_error(json.loads(last.removeprefix("data: ")), None, "draining")
        await asyncio.wait([serving])
    assert isinstance(serving.exception(), type(None) if stops else RuntimeError)
