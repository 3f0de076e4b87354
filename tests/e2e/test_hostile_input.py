"""Hostile inputs against a gateway's process: each ends in a clean answer, or a closed connection; the next client is
served as if nothing had been; nothing is left in flight; and memory does not grow."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile_inputs import CHAT, COMPLETIONS, TABLES, Hostile, head, post
from hostile_server import TIMEOUT_S as SERVER_TIMEOUT_S

TIMEOUT_S = 60.0
"""For anything to happen, on a machine that is busy with something else."""
GROWTH_BYTES = 32 * 2**20
"""By which memory may grow in a round of all inputs, after two in which caches and arenas fill."""
AT_ONCE = 8
FINE = {"prompt": "hello", "max_tokens": 4}


@dataclass
class Gateway:
    """The process, and the ports that it serves at."""

    process: subprocess.Popen[str]
    open: int
    keyed: int

    @property
    def resident_bytes(self) -> int:
        """Memory that the process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    command = [sys.executable, str(Path(__file__).parent.parent / "hostile_server.py"), str(os.getpid())]
    paths = os.pathsep.join([os.getcwd(), str(Path(__file__).parent.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2"}
    log_file = tmp_path_factory.mktemp("hostile") / "log"
    with log_file.open("w") as stream:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log_file.read_text()[-3000:]
    yield Gateway(process, **json.loads(line))
    process.send_signal(signal.SIGTERM)
    process.wait(TIMEOUT_S)
    log = log_file.read_text()
    assert process.returncode == 0, log[-3000:]
    assert "Traceback" not in log, log[log.index("Traceback") :][:3000]
    assert " ERROR" not in log
    assert "ERROR:" not in log


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


def answers_in(raw: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each whole answer of a connection, interim ones left out."""
    found = []
    while raw:
        top, end, raw = raw.partition(b"\r\n\r\n")
        assert end, f"no head: {top[:200]!r}"
        status = int(top.split()[1])
        if status == 100:
            continue
        if match := re.search(rb"(?i)\r\ncontent-length: (\d+)", top):
            body, raw = raw[: int(match[1])], raw[int(match[1]) :]
            found.append((status, body))
        else:
            found.append((status, raw))
            raw = b""
    return found


def check_answer(status: int, body: bytes) -> None:
    """An error has the shape of an error, and nothing of the inside."""
    assert status < 500 or status == 503, (status, body)
    assert b"Traceback" not in body
    if status >= 400 and body:
        error = json.loads(body)
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert error["error"]["message"]
        assert len(body) < 20_000


async def send(port: int, data: bytes, *, half_close: bool = False, may_be_late: bool = False) -> bytes:
    """Everything that comes back until the server closes. Data that may not be late are sent again if the server only
    says, after its timeout, that they were: on a busy machine they can be."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            began = time.monotonic()
            reader, writer = await connect(port)
            raw = b""
            try:
                try:
                    for start in range(0, len(data), 2**16):
                        writer.write(data[start : start + 2**16])
                        await writer.drain()
                    if half_close:
                        writer.write_eof()
                except (ConnectionError, OSError):
                    pass  # what was answered before is read below
                while chunk := await reader.read(2**16):
                    raw += chunk
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()
            was_late = time.monotonic() - began >= SERVER_TIMEOUT_S and (not raw or raw.startswith(b"HTTP/1.1 408"))
            if may_be_late or not was_late:
                return raw


async def attack(gateway: Gateway, hostile: Hostile) -> None:
    """Send one input, and look at what comes back."""
    port = gateway.keyed if hostile.keyed else gateway.open
    may_be_late = hostile.may_close or 408 in hostile.expected
    raw = await send(port, hostile.data, half_close=hostile.half_close, may_be_late=may_be_late)
    found = answers_in(raw)
    assert found or hostile.may_close, "closed without an answer"
    assert len(found) <= hostile.num_answers
    for status, body in found:
        check_answer(status, body)
    if found:
        # While others' grammars take long to check, one that is not looked at is no worse than it was.
        waits = {429} if b"too many grammars" in found[0][1] else set()
        assert found[0][0] in hostile.expected | waits, found[0]
        assert all(400 <= status < 500 for status, _ in found[1:]), found


async def attack_with_all(gateway: Gateway, table: Iterable[Hostile], *, asking: bool = True) -> None:
    """Several inputs at once, but each once, and each followed, if `asking`, by a client that means well; fails with
    the names of all that did not end well."""
    waiting = asyncio.Semaphore(AT_ONCE)

    async def one(hostile: Hostile) -> str:
        async with waiting:
            try:
                await attack(gateway, hostile)
                if asking:
                    await ask(gateway)
            except (AssertionError, ValueError, TimeoutError) as error:
                return f"{hostile.name}: {str(error)[:300] or type(error).__name__}"
        return ""

    failed = [each for each in await asyncio.gather(*map(one, table)) if each]
    assert not failed, "\n".join(failed)


async def ask(gateway: Gateway) -> None:
    """What a client that means well asks, and gets."""
    ((status, body),) = answers_in(await send(gateway.open, post(COMPLETIONS, json.dumps(FINE).encode())))
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == 4


async def check_nothing_is_left(gateway: Gateway) -> None:
    """Nothing stays in flight."""
    for port in (gateway.open, gateway.keyed):
        async with asyncio.timeout(TIMEOUT_S):
            while await gauge(port, "baton_gateway_requests_in_flight"):
                await asyncio.sleep(0.02)


async def gauge(port: int, name: str) -> float:
    ((_, body),) = answers_in(await send(port, head("GET", "/metrics")))
    return float(re.search(rf"^{name} (\S+)$", body.decode(), re.MULTILINE)[1])  # type: ignore[index]


def test_there_are_many_and_all_differ() -> None:
    inputs = [hostile for table in TABLES.values() for hostile in table]
    assert len(inputs) >= 400
    assert len({hostile.name for hostile in inputs}) == len(inputs)
    assert len({(hostile.data, hostile.keyed) for hostile in inputs}) == len(inputs)


_TRIED: set[str] = set()
"""Tables of which the gateway has had all inputs."""


@pytest.mark.parametrize("table", TABLES)
async def test_inputs(gateway: Gateway, table: str) -> None:
    await attack_with_all(gateway, TABLES[table])
    _TRIED.add(table)
    await check_nothing_is_left(gateway)


# --- clients that do more than send -----------------------------------------------------------------------------------

LONG = json.dumps({"prompt": "hello", "max_tokens": 200, "n": 16, "stream": True}).encode()


async def _leave_midway(gateway: Gateway) -> None:
    """Reset the connection in the middle of a stream."""
    reader, writer = await connect(gateway.open)
    writer.write(post(COMPLETIONS, LONG))
    await reader.readuntil(b"data: ")
    client = writer.get_extra_info("socket")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _leave_at_once(gateway: Gateway) -> None:
    for size in (0, 1, 30, 200):
        _, writer = await connect(gateway.open)
        writer.write(post(COMPLETIONS, LONG)[:size])
        writer.transport.abort()


async def _promise_a_body_and_stop(gateway: Gateway) -> None:
    raw = await send(
        gateway.open, head("POST", COMPLETIONS, "Content-Length: 1000") + b"{", half_close=True, may_be_late=True
    )
    for status, body in answers_in(raw):
        assert status in (400, 408)
        check_answer(status, body)


async def _read_nothing(gateway: Gateway) -> None:
    """Of a stream that does not fit into the buffers on the way: until it is cut off."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", gateway.open))
        body = json.dumps({"prompt": ["hello"] * 64, "max_tokens": 200, "n": 16, "stream": True}).encode()
        await loop.sock_sendall(client, post(COMPLETIONS, body))
        async with asyncio.timeout(60):
            while await gauge(gateway.open, "baton_gateway_requests_in_flight") == 0:
                await asyncio.sleep(0.02)
            while await gauge(gateway.open, "baton_gateway_requests_in_flight") != 0:
                await asyncio.sleep(0.1)


async def _pipeline(gateway: Gateway) -> None:
    """A thousand requests at once: all are answered, in their order, and never many held."""
    request = b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\n\r\n"
    raw = await send(gateway.open, b"".join(request % i for i in range(1000)) + head("GET", "/health"))
    found = answers_in(raw)
    assert [status for status, _ in found] == [404] * 1000 + [200]
    for number, (_, body) in enumerate(found[:-1]):
        assert f"the model {number} " in json.loads(body)["error"]["message"]


async def _pipeline_generations(gateway: Gateway) -> None:
    body = json.dumps(FINE).encode()
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    found = answers_in(await send(gateway.open, request * 200 + head("GET", "/health")))
    assert [status for status, _ in found] == [200] * 201


async def _pipeline_garbage_behind_a_request(gateway: Gateway) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    found = answers_in(await send(gateway.open, request * 3 + b"\0" * 1000))
    assert found[-1][0] == 400
    assert {status for status, _ in found[:-1]} <= {200}
    check_answer(*found[-1])


async def _be_asked_to_continue(gateway: Gateway) -> None:
    body = json.dumps(FINE).encode()
    reader, writer = await connect(gateway.open)
    writer.write(head("POST", COMPLETIONS, f"Content-Length: {len(body)}", "Expect: 100-continue"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    ((status, _),) = answers_in(await reader.read())
    assert status == 200
    writer.close()


async def _expect_to_continue_and_leave(gateway: Gateway) -> None:
    reader, writer = await connect(gateway.open)
    writer.write(head("POST", CHAT, "Content-Length: 1000", "Expect: 100-continue"))
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def _upgrade_and_go_on(gateway: Gateway) -> None:
    """What follows an upgrade that is not taken is the next request."""
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    found = answers_in(await send(gateway.open, upgrade + head("GET", "/health")))
    assert [status for status, _ in found] == [200, 200]


async def _upgrade_and_flood(gateway: Gateway) -> None:
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    found = answers_in(await send(gateway.open, upgrade + b"\xff" * 2**20))
    assert {status for status, _ in found} <= {200, 400, 431}, "closing may cost the client the answer"
    for answer in found:
        check_answer(*answer)


INTERACTIVE: dict[str, Callable[[Gateway], Awaitable[None]]] = {
    each.__name__[1:].replace("_", " "): each
    for each in (
        _leave_midway,
        _leave_at_once,
        _promise_a_body_and_stop,
        _read_nothing,
        _pipeline,
        _pipeline_generations,
        _pipeline_garbage_behind_a_request,
        _be_asked_to_continue,
        _expect_to_continue_and_leave,
        _upgrade_and_go_on,
        _upgrade_and_flood,
    )
}


@pytest.mark.parametrize("name", INTERACTIVE)
async def test_a_client(gateway: Gateway, name: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await INTERACTIVE[name](gateway)
    await ask(gateway)
    await check_nothing_is_left(gateway)


async def test_memory_stays_where_it_is(gateway: Gateway) -> None:
    used = []
    for number in range(3):
        for name, table in TABLES.items():
            if number or name not in _TRIED:  # the first round was the tests of all inputs
                await attack_with_all(gateway, table, asking=False)
        await check_nothing_is_left(gateway)
        used.append(gateway.resident_bytes)
    assert used[2] - used[1] < GROWTH_BYTES, [f"{each >> 20} MiB" for each in used]
