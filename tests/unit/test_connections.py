"""Connections of clients: how many, how long a head may take, how large it may be, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import functools
import json
import resource
import socket
import ssl
from contextlib import suppress
from typing import Any

import pytest
import trustme
import uvloop
from aiohttp import web
from gateway_fixtures import COMPLETION, COMPLETIONS_PATH, ScriptedGenerator, Server, assert_error, serve, settings

from gateway.access.connections import ConnectionBounds, Listener, allow_connections
from gateway.api_settings import ApiSettings

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
TIMEOUT_S = 30.0


LARGE = {"prompt": ["hello"] * 16, "max_tokens": 200, "n": 16}
"""A request whose answer does not fit into the buffers on the way."""


class Time:
    """Within it, the running loop's time stands still unless it is moved."""

    def __init__(self) -> None:
        self._loop: Any = asyncio.get_running_loop()
        self.now = self.start = self._loop.time()

    def __enter__(self) -> Time:
        self._loop.time = lambda: self.now
        return self

    def __exit__(self, *_: object) -> None:
        del self._loop.time

    async def advance(self, seconds: float) -> None:
        """Let what has been sent arrive, and then what is due in so many seconds happen."""
        await _settle()
        self.now += seconds
        await _settle()


async def _settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def _head(content_length: int) -> bytes:
    return f"POST {COMPLETIONS_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {content_length}\r\n\r\n".encode()


@functools.cache
def _tls() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a server presents, and what its clients trust."""
    authority = trustme.CA()
    presented, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(presented)
    authority.configure_trust(trusted)
    return presented, trusted


over_both = pytest.mark.parametrize("over_tls", [False, True], ids=["http", "https"])


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def _open(server: Server, client: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    trusted = _tls()[1] if server.url.startswith("https") else None
    return await asyncio.open_connection("127.0.0.1", _port(server), local_addr=(client, 0), ssl=trusted)


async def _answer(reader: asyncio.StreamReader, timeout_s: float = TIMEOUT_S) -> tuple[int, dict[str, str], Any]:
    """The next answer of a connection: status, headers, JSON."""
    async with asyncio.timeout(timeout_s):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        return int(head[0].split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


async def _end(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.read()


def _refused(server: Server, reason: str) -> float:
    name = "baton_gateway_connections_refused_total"
    return server.metrics.registry.get_sample_value(name, {"reason": reason}) or 0.0


async def _until_open(server: Server, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while server.metrics.registry.get_sample_value("baton_gateway_connections") != count:
            await asyncio.sleep(0.01)


async def test_connections_beyond_the_bound_are_turned_away() -> None:
    async with serve(ScriptedGenerator(), bounds=ConnectionBounds(max_connections=2)) as server:
        held = [await _open(server) for _ in range(2)]
        await _until_open(server, 2)
        reader, writer = await _open(server)
        status, headers, body = await _answer(reader)
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert_error(body, None, "connections")
        assert await _end(reader) == b""
        writer.close()
        assert _refused(server, "full") == 1
        held[0][1].write(HEALTH)
        assert (await _answer(held[0][0]))[0] == 200
        held[1][1].close()
        await _until_open(server, 1)
        reader, writer = await _open(server)
        writer.write(HEALTH)
        assert (await _answer(reader))[0] == 200
        writer.close()
        held[0][1].close()
        await _until_open(server, 0)


async def test_once_late_heads_are_given_up_there_is_room_again() -> None:
    bounds = ConnectionBounds(max_connections=3, header_timeout_s=10)
    async with serve(ScriptedGenerator(), bounds=bounds) as server:
        with Time() as time:
            late = [await _open(server) for _ in range(3)]
            late[0][1].write(HEALTH[:-2])
            await time.advance(0)
            reader, _ = await _open(server)
            assert (await _answer(reader))[0] == 503
            await time.advance(10.1)
            assert (await _answer(late[0][0]))[0] == 408
            for reader, writer in late:
                assert await _end(reader) == b""
                writer.close()
            reader, writer = await _open(server)
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
            writer.close()
        assert (_refused(server, "full"), _refused(server, "slow_head")) == (1, 3)


async def test_who_has_most_connections_loses_idle_ones_to_those_who_come() -> None:
    """Whoever comes, and none on which a request is being served."""
    one, other = "127.0.0.1", "127.0.0.2"
    generator = ScriptedGenerator()
    async with serve(generator, bounds=ConnectionBounds(max_connections=4)) as server:
        body = json.dumps(LARGE).encode()
        answer, serving = await _open(server, one)
        serving.write(_head(len(body)) + body[:-1])  # the rest of the body is to come
        idle = [await _open(server, one) for _ in range(2)]
        for reader, writer in idle:
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
        newest = await _open(server, one)
        await _until_open(server, 4)
        others = []
        for reader, _ in idle:  # the oldest first
            others.append(await _open(server, other))
            assert await _end(reader) == b""
            others[-1][1].write(HEALTH)
            assert (await _answer(others[-1][0]))[0] == 200
            await _until_open(server, 4)
        assert (_refused(server, "crowded_out"), _refused(server, "full")) == (2, 0)
        last, writer = await _open(server, other)  # with it the other one has most
        assert await _end(others[0][0]) == b""
        writer.write(HEALTH)
        assert (await _answer(last))[0] == 200
        assert (_refused(server, "crowded_out"), _refused(server, "full")) == (3, 0)
        assert not newest[0].at_eof()
        serving.write(body[-1:])
        assert (await _answer(answer))[0] == 200


@pytest.mark.parametrize("newcomer", ["127.0.0.3", "127.0.0.2"])
async def test_idle_connections_keep_nobody_out_though_no_address_has_more_than_another(newcomer: str) -> None:
    """As those of a pool of clients, which keep the kubelet's probes out."""
    async with serve(ScriptedGenerator(), bounds=ConnectionBounds(max_connections=2)) as server:
        held = [await _open(server, client) for client in ("127.0.0.1", "127.0.0.2")]
        for reader, writer in held:
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
        await _until_open(server, 2)
        reader, writer = await _open(server, newcomer)
        writer.write(HEALTH)
        assert (await _answer(reader))[0] == 200
        gone, kept = held if newcomer == "127.0.0.3" else reversed(held)
        assert await _end(gone[0]) == b"", "the oldest one, or that of the address that would have two"
        kept[1].write(HEALTH)
        assert (await _answer(kept[0]))[0] == 200
        assert (_refused(server, "crowded_out"), _refused(server, "full")) == (1, 0)
        for _, each in (*held, (reader, writer)):
            each.close()


_BODILESS = [
    HEALTH.replace(b"Host:", b"Content-Length: 100\r\nHost:"),
    b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n",
    _head(100),
    HEALTH + _head(100),
    HEALTH + HEALTH.replace(b"Host:", b"Connection: upgrade\r\nUpgrade: websocket\r\nHost:") + _head(100),
]
"""What begins a body that never comes, with and without an answer before it is there."""


@pytest.mark.parametrize("sent", _BODILESS)
async def test_bodies_that_do_not_come_keep_nobody_else_out(sent: bytes) -> None:
    async with serve(ScriptedGenerator(), bounds=ConnectionBounds(max_connections=3)) as server:
        idle = [await _open(server, "127.0.0.1") for _ in range(3)]
        for _, writer in idle:
            writer.write(sent)
        for reader, _ in idle:
            for _ in range(sent.count(b"GET")):
                assert (await _answer(reader))[0] == 200
        await _until_open(server, 3)
        await _settle()
        reader, writer = await _open(server, "127.0.0.2")
        writer.write(HEALTH)
        assert (await _answer(reader))[0] == 200
        assert (_refused(server, "crowded_out"), _refused(server, "full")) == (1, 0)
        for _, each in (*idle, (reader, writer)):
            each.close()


async def test_an_idle_connection_gives_way_before_one_whose_refused_body_still_arrives() -> None:
    """Its client would get a reset instead of the answer."""
    async with serve(ScriptedGenerator(), bounds=ConnectionBounds(max_connections=2)) as server:
        late, idle = [await _open(server, client) for client in ("127.0.0.1", "127.0.0.2")]
        for (reader, writer), sent in ((late, _BODILESS[0]), (idle, HEALTH)):
            writer.write(sent)
            assert (await _answer(reader))[0] == 200
        await _until_open(server, 2)
        await _settle()
        reader, writer = await _open(server, "127.0.0.3")
        writer.write(HEALTH)
        assert (await _answer(reader))[0] == 200
        assert await _end(idle[0]) == b""
        assert not late[0].at_eof()
        for _, each in (late, idle, (reader, writer)):
            each.close()


async def test_a_request_that_is_in_flight_gives_way_to_nobody() -> None:
    """Also if the head of another one has come after it, whose body does not."""
    body = json.dumps(COMPLETION).encode()
    generator = ScriptedGenerator(hang=True)
    async with serve(generator, bounds=ConnectionBounds(max_connections=2)) as server:
        held = [await _open(server, "127.0.0.1") for _ in range(2)]
        for number, (_, writer) in enumerate(held):
            writer.write(_head(len(body)) + body + _head(100))
            async with asyncio.timeout(TIMEOUT_S):
                while generator.num_open <= number:
                    await asyncio.sleep(0.01)
        reader, _ = await _open(server, "127.0.0.2")
        assert (await _answer(reader))[0] == 503
        assert generator.num_open == 2
        assert (_refused(server, "crowded_out"), _refused(server, "full")) == (0, 1)
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(TIMEOUT_S):
            while generator.num_open:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "more"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", b"y"),
        (b"GET /", b"x"),
        (b"G", b""),
        (b"\r\n", b"\r\n"),
        (b"POST /tokenize HTTP/1.1", b""),
    ],
)
@pytest.mark.parametrize("served_before", [False, True])
async def test_a_head_that_does_not_come_to_its_end(sent: bytes, more: bytes, served_before: bool) -> None:
    """Also not where a byte comes now and then."""
    async with serve(ScriptedGenerator(), bounds=ConnectionBounds(header_timeout_s=10)) as server:
        reader, writer = await _open(server)
        if served_before:
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
        with Time() as time:
            writer.write(sent)
            await time.advance(0)
            for _ in range(9):
                writer.write(more)
                await time.advance(1)
            assert _refused(server, "slow_head") == 0
            await time.advance(1.1)
            status, headers, body = await _answer(reader)
            assert (status, headers["connection"]) == (408, "close")
            assert_error(body, None)
            assert await _end(reader) == b""
            writer.close()
            assert _refused(server, "slow_head") == 1
            await _until_open(server, 0)


async def test_a_connection_on_which_nothing_comes() -> None:
    async with serve(ScriptedGenerator(), bounds=ConnectionBounds(header_timeout_s=10)) as server:
        reader, writer = await _open(server)
        await _until_open(server, 1)
        with Time() as time:
            await time.advance(10.1)
        assert await _end(reader) == b""
        writer.close()
        assert _refused(server, "slow_head") == 1


@pytest.mark.parametrize("idle_timeout_s", [75, 620])
async def test_an_idle_connection_is_kept_for_longer_than_a_head_may_take(idle_timeout_s: int) -> None:
    bounds = ConnectionBounds(header_timeout_s=10, idle_timeout_s=idle_timeout_s)
    async with serve(ScriptedGenerator(), bounds=bounds) as server:
        with Time() as time:
            reader, writer = await _open(server)
            for _ in range(3):
                writer.write(HEALTH)
                assert (await _answer(reader))[0] == 200
                await time.advance(idle_timeout_s - 1)
                assert not reader.at_eof()
            await time.advance(2)
            assert await _end(reader) == b"", "until the idle timeout"
            writer.close()
            assert _refused(server, "slow_head") == 0


async def test_a_slow_body_and_a_slow_answer_are_no_slow_head() -> None:
    body = json.dumps(COMPLETION).encode()
    generator = ScriptedGenerator(pause_s=100)
    async with serve(generator, bounds=ConnectionBounds(header_timeout_s=1, idle_timeout_s=2)) as server:
        with Time() as time:
            reader, writer = await _open(server)
            writer.write(_head(len(body)))
            for byte in range(0, len(body), 8):
                writer.write(body[byte : byte + 8])
                await time.advance(1.9)
            answer = asyncio.create_task(_answer(reader, 10_000))
            while not answer.done():
                await time.advance(50)
            status, _, whole = await answer
            assert (status, whole["choices"][0]["text"]) == (200, "hello world")
            writer.close()


@pytest.mark.parametrize(
    ("chunk", "pause_s", "lasts_s"), [(b"", 1, 10), (b" ", 1, 10), (b" " * 1000, 1, 41), (b" " * 9000, 1, 60)]
)
async def test_a_body_that_drips_is_given_up(chunk: bytes, pause_s: float, lasts_s: float) -> None:
    """Nothing for 10 s, then less than 1 KiB a second; and never longer than a minute."""
    limits = settings(min_body_bytes_per_s=1310)
    async with serve(ScriptedGenerator(), limits) as server:
        with Time() as time:
            reader, writer = await _open(server)
            writer.write(_head(2**20))
            answer = asyncio.create_task(_answer(reader, 10_000))
            await time.advance(0)
            num_sent = 0
            while not answer.done():
                writer.write(chunk)
                await time.advance(pause_s)
                num_sent += 1
                assert num_sent < 100
            status, _, body = await answer
            assert status == 408
            assert_error(body, None)
            assert abs(num_sent * pause_s - lasts_s) <= 2
            writer.close()


async def test_who_sends_a_head_alone_takes_no_slot() -> None:
    """As many as would fill all of them, and of the others each is served."""
    generator = ScriptedGenerator(hang=True)
    async with serve(generator, settings(max_in_flight=2)) as server:
        idle = [await _open(server) for _ in range(4)]
        for number, (_, writer) in enumerate(idle):
            writer.write(_head(100) + b"{" * number)
            await writer.drain()
        bodies = [json.dumps(COMPLETION).encode()] * 3
        asking = [await _open(server) for _ in bodies]
        for number, ((_, writer), body) in enumerate(zip(asking, bodies, strict=True)):
            writer.write(_head(len(body)) + body)
            if number < 2:
                async with asyncio.timeout(TIMEOUT_S):
                    while generator.num_open <= number:
                        await asyncio.sleep(0.01)
        status, _, answer = await _answer(asking[2][0])
        assert status == 429
        assert_error(answer, None, "capacity")
        assert server.metrics.registry.get_sample_value("baton_gateway_requests_in_flight") == 2
        for _, writer in [*idle, *asking]:
            writer.close()
        async with asyncio.timeout(TIMEOUT_S):
            while server.metrics.registry.get_sample_value("baton_gateway_requests_in_flight"):
                await asyncio.sleep(0.01)


async def test_a_body_that_comes_after_its_answer_is_no_head() -> None:
    """It is refused for its size before it has come, and thrown away as it comes."""
    bounds = ConnectionBounds(header_timeout_s=1, max_head_bytes=1000)
    async with serve(ScriptedGenerator(), settings(max_body_bytes=1000), bounds=bounds) as server:
        with Time() as time:
            reader, writer = await _open(server)
            writer.write(_head(20000))
            assert (await _answer(reader))[0] == 413
            for _ in range(20):
                writer.write(b"x" * 1000)
                await time.advance(0.03)
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
            writer.close()
            assert _refused(server, "large_head") == _refused(server, "slow_head") == 0


@pytest.mark.parametrize("served_before", [False, True])
async def test_a_head_that_is_too_large(served_before: bool) -> None:
    async with serve(ScriptedGenerator()) as server:
        reader, writer = await _open(server)
        if served_before:
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for number in range(10):
            writer.write(b"X-%d: " % number + b"y" * 8000 + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        status, headers, body = await _answer(reader)
        assert (status, headers["connection"]) == (431, "close")
        assert_error(body, None)
        writer.close()
        assert _refused(server, "large_head") == 1


@pytest.mark.parametrize("line", [b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: " + b"y" * 9000])
async def test_a_line_that_is_too_long(line: bytes) -> None:
    async with serve(ScriptedGenerator()) as server:
        reader, writer = await _open(server)
        writer.write(line + b"\r\nHost: x\r\n\r\n")
        status, _, body = await _answer(reader)
        assert status == 431
        assert_error(body, None)
        writer.close()
        assert _refused(server, "malformed") == 1


async def test_an_expectation_that_is_not_known() -> None:
    async with serve(ScriptedGenerator()) as server:
        reader, writer = await _open(server)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n{}")
        status, _, body = await _answer(reader)
        assert status == 417
        assert_error(body, None)
        writer.close()


class SmallClient:
    """A client that holds little of what it has not read; over TLS if it is told whom to trust."""

    def __init__(self, port: int, trusted: ssl.SSLContext | None = None) -> None:
        self.answer = b""
        """All that it has read."""
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = None
        if trusted is not None:
            self._tls = trusted.wrap_bio(self._arrived, self._leaving, server_hostname="127.0.0.1")

    def __enter__(self) -> SmallClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> None:
        if self._tls is None:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
            return
        while True:
            with suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                break
            await self._flush()
            await self._receive(2**14)
        self._tls.write(data)
        await self._flush()

    async def read(self, num_bytes: int) -> bool:
        """Read up to so many bytes of the connection, as soon as there are any. False at its end."""
        part = await self._receive(num_bytes)
        if self._tls is None:
            self.answer += part
        elif part:
            with suppress(ssl.SSLWantReadError):
                while text := self._tls.read(2**16):
                    self.answer += text
                self._tls.unwrap()
                await self._flush()  # the answer to the end of TLS
        return bool(part)

    async def _receive(self, num_bytes: int) -> bytes:
        part = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # 40 ms later it may be a minute, in `Time`
        self._arrived.write(part)
        return part

    async def _flush(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, self._leaving.read())


def _small_client(server: Server) -> SmallClient:
    return SmallClient(_port(server), _tls()[1] if server.url.startswith("https") else None)


def _talkative() -> ScriptedGenerator:
    return ScriptedGenerator(text="hello " * 100, tokens_per_delta=100)


def _slow(
    bounds: ConnectionBounds,
    over_tls: bool,
    api_settings: ApiSettings | None = None,
    send_buffer_bytes: int = 4096,
) -> Any:
    """A server of long answers that the kernel takes little of."""
    tls = _tls()[0] if over_tls else None
    return serve(_talkative(), api_settings, bounds=bounds, tls=tls, send_buffer_bytes=send_buffer_bytes)


@over_both
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_nobody_reads(stream: bool, over_tls: bool) -> None:
    async with _slow(ConnectionBounds(stall_timeout_s=60), over_tls) as server:
        body = json.dumps(LARGE | {"stream": stream}).encode()
        with _small_client(server) as client, Time() as time:
            await client.send(_head(len(body)) + body)
            while not _refused(server, "stalled") and time.now - time.start < 600:
                await time.advance(1)
            assert time.now - time.start >= 60
            assert _refused(server, "stalled") == 1
            await _until_open(server, 0)


@over_both
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send_buffer_bytes", [4096, 2**17])
async def test_a_slow_reader_gets_its_answer(send_buffer_bytes: int, stream: bool, over_tls: bool) -> None:
    """Also where the kernel holds what the client reads in many such times."""
    bounds = ConnectionBounds(stall_timeout_s=60, reading_timeout_s=10_000)
    async with _slow(bounds, over_tls, send_buffer_bytes=send_buffer_bytes) as server:
        body = json.dumps(LARGE | {"prompt": ["hello"] * 24, "stream": stream}).encode()
        with _small_client(server) as client, Time() as time:
            await client.send(_head(len(body)) + body)
            while not client.answer.endswith(b"\r\n0\r\n\r\n" if stream else b"}"):
                assert await client.read(2**14), "cut off"
                await time.advance(50)
        assert len(client.answer) > 2**17
        assert time.now - time.start > 120
        assert _refused(server, "stalled") == 0


@over_both
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_not_kept_for_ever(stream: bool, over_tls: bool) -> None:
    """Its client reads enough not to stall. A stream may take a day, but does not wait so long."""
    async with _slow(ConnectionBounds(stall_timeout_s=60, reading_timeout_s=120), over_tls) as server:
        body = json.dumps(LARGE | {"prompt": ["hello"] * 64, "stream": stream}).encode()
        with _small_client(server) as client, Time() as time:
            await client.send(_head(len(body)) + body)
            with suppress(ConnectionResetError):
                while not _refused(server, "slow_reader") and await client.read(2**12):
                    await time.advance(20)
            assert 120 <= time.now - time.start < 200
        assert (_refused(server, "slow_reader"), _refused(server, "stalled")) == (1, 0)
        await _until_open(server, 0)


def _gauge(server: Server, name: str) -> float | None:
    return server.metrics.registry.get_sample_value(f"baton_gateway_{name}")


def _failed(server: Server) -> float | None:
    return server.metrics.registry.get_sample_value("baton_gateway_requests_failed_total", {"cause": "cancelled"})


@pytest.mark.parametrize("finished", [False, True])
async def test_a_stream_that_is_read_too_slowly_ends_soon_after_its_budget(finished: bool) -> None:
    """Its client reads enough not to stall, while its generations go on or only the end of the answer waits."""
    generator = _talkative()
    bounds = ConnectionBounds(stall_timeout_s=60)
    async with serve(generator, settings(request_budget_s=200), bounds=bounds, send_buffer_bytes=4096) as server:
        body = json.dumps(LARGE | {"prompt": ["hello"] * (8 if finished else 64), "stream": True}).encode()
        with _small_client(server) as client, Time() as time:
            await client.send(_head(len(body)) + body)
            while time.now - time.start < 220:
                assert await client.read(2**14)
                await time.advance(20)
            assert _gauge(server, "requests_in_flight") == 1
            assert (generator.num_open == 0) == finished
            assert (_refused(server, "slow_reader"), _refused(server, "stalled")) == (0, 0)
            with suppress(ConnectionResetError):
                while _gauge(server, "requests_in_flight") and await client.read(2**14):
                    await time.advance(20)
            assert time.now - time.start < 290
            assert _gauge(server, "requests_in_flight") == _gauge(server, "connections") == 0
        assert (_refused(server, "slow_reader"), _refused(server, "stalled")) == (1, 0)
        assert generator.num_open == 0
        assert _failed(server) == 1


async def test_a_stream_that_has_ended_is_not_cut_off_later() -> None:
    async with serve(ScriptedGenerator(), settings(request_budget_s=1), bounds=ConnectionBounds()) as server:
        with Time() as time:
            reader, writer = await _open(server)
            body = json.dumps(COMPLETION | {"stream": True}).encode()
            for _ in range(3):
                writer.write(_head(len(body)) + body)
                assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
                await time.advance(70)
            assert not reader.at_eof()
            writer.close()
        assert _refused(server, "slow_reader") == 0


def _short(connection: str) -> bytes:
    """A request whose answer does not fit into the kernel's buffers, and does not pause writing either."""
    body = json.dumps(LARGE | {"prompt": ["hello"] * 3}).encode()
    return _head(len(body)).replace(b"Host:", b"Connection: %b\r\nHost:" % connection.encode()) + body


async def _until_answered(server: Server) -> None:
    name, labels = "baton_gateway_requests_total", {"endpoint": COMPLETIONS_PATH, "code": "200"}
    for _ in range(100_000):
        if server.metrics.registry.get_sample_value(name, labels):
            return
        await asyncio.sleep(0)
    raise TimeoutError("no answer")


@over_both
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_an_end_of_an_answer_that_nobody_reads(connection: str, over_tls: bool) -> None:
    async with _slow(ConnectionBounds(idle_timeout_s=75, stall_timeout_s=60), over_tls) as server:
        with _small_client(server) as client, Time() as time:
            await client.send(_short(connection))
            await _until_answered(server)
            await time.advance(59)
            assert _gauge(server, "connections") == 1
            while _gauge(server, "connections") and time.now - time.start < 600:
                await time.advance(10)
            assert _gauge(server, "connections") == 0
            assert _refused(server, "stalled") == 1


@over_both
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_an_end_of_an_answer_that_is_read_slowly(connection: str, over_tls: bool) -> None:
    async with _slow(ConnectionBounds(idle_timeout_s=75, stall_timeout_s=60), over_tls) as server:
        with _small_client(server) as client, Time() as time:
            await client.send(_short(connection))
            await _until_answered(server)
            while await client.read(2**13):
                await time.advance(50)
        assert client.answer.endswith(b"}")
        assert len(client.answer) < 2**16
        assert time.now - time.start > 150
        assert _refused(server, "stalled") == 0


@over_both
async def test_an_idle_connection_gives_way_before_one_whose_answer_is_unread(over_tls: bool) -> None:
    async with _slow(ConnectionBounds(max_connections=2), over_tls) as server:
        with _small_client(server) as deaf:
            await deaf.send(_short("keep-alive"))
            await _until_answered(server)
            idle, one = await _open(server, "127.0.0.2")
            one.write(HEALTH)
            assert (await _answer(idle))[0] == 200
            await _settle()
            reader, writer = await _open(server, "127.0.0.3")
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
            assert await _end(idle) == b""
            while not deaf.answer.endswith(b"}"):
                assert await deaf.read(2**14), "cut off"
            for each in (one, writer):
                each.close()
        assert _refused(server, "crowded_out") == 1


async def test_who_is_crowded_out_keeps_no_descriptor_for_what_is_unread() -> None:
    async with _slow(ConnectionBounds(max_connections=2), False) as server:
        with _small_client(server) as deaf, Time() as time:
            await deaf.send(_short("keep-alive"))
            await _until_answered(server)
            _, idle = await _open(server)
            await time.advance(0)
            assert _gauge(server, "connections") == 2
            reader, writer = await _open(server, "127.0.0.2")
            writer.write(HEALTH)
            assert (await _answer(reader))[0] == 200
            assert _refused(server, "crowded_out") == 1
            await time.advance(0)
            with suppress(ConnectionResetError):
                while await deaf.read(2**16):
                    pass
            assert deaf.answer.startswith(b"HTTP/1.1 200")
            assert not deaf.answer.endswith(b"}"), "the rest of the answer was kept for a client that is gone"
            writer.close()
            idle.close()


@over_both
def test_an_end_of_an_answer_that_nobody_reads_on_the_loop_of_a_gateway(over_tls: bool) -> None:
    """The gateway runs on uvloop, whose time cannot be moved."""

    async def body() -> None:
        async with _slow(ConnectionBounds(idle_timeout_s=0.2, stall_timeout_s=0.2), over_tls) as server:
            with _small_client(server) as client:
                await client.send(_short("keep-alive"))
                await _until_answered(server)
                await _until_open(server, 0)
            assert _refused(server, "stalled") == 1

    uvloop.run(body())


@over_both
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_pauses_writing_and_nobody_reads_on_the_loop_of_a_gateway(stream: bool, over_tls: bool) -> None:
    """If it were taken for read, the connection would be kept for the idle timeout first. (Over TLS, the first 256 KiB
    of an answer pause nothing.)"""

    async def body() -> None:
        async with _slow(ConnectionBounds(stall_timeout_s=0.2), over_tls) as server:
            asked = json.dumps(LARGE | {"stream": stream, "prompt": ["hello"] * 64}).encode()
            with _small_client(server) as client:
                await client.send(_head(len(asked)) + asked)
                await _until_open(server, 1)
                await _until_open(server, 0)
            assert _refused(server, "stalled") == 1

    uvloop.run(body())


async def test_a_client_whose_machine_is_silent_is_probed() -> None:
    """Balancers forget a connection without traffic after minutes, and Linux would probe it after two hours."""
    found: list[int] = []

    async def look(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found.append(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        found.extend(connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/health", look)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = Listener(runner, ConnectionBounds())
    try:
        listener.listen(socket.create_server(("127.0.0.1", 0)))
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(HEALTH)
        assert (await _answer(reader))[0] == 200
        writer.close()
    finally:
        await listener.close()
        await runner.cleanup()
    assert found == [1, 60, 15, 4]


async def test_a_listener_that_is_closed_cuts_no_request_off() -> None:
    generator = ScriptedGenerator(pause_s=0.01)
    async with serve(generator, shutdown_timeout_s=TIMEOUT_S) as server:
        reader, writer = await _open(server)
        body = json.dumps(COMPLETION).encode()
        writer.write(_head(len(body)) + body)
        async with asyncio.timeout(TIMEOUT_S):
            while not generator.generations:
                await asyncio.sleep(0.01)
    assert (await _answer(reader))[0] == 200
    writer.close()


def test_descriptors_for_every_connection(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """In a process whose limits are played, since the system may allow fewer."""
    limits = (5000, 8000)

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        nonlocal limits
        limits = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    allow_connections(100)
    assert limits == (5000, 8000)
    allow_connections(1000)
    assert limits == (5352, 8000)
    assert caplog.text == ""
    allow_connections(9000)
    assert limits == (8000, 8000)
    assert "9000 connections need 13352 open files, and the system allows 8000" in caplog.text
