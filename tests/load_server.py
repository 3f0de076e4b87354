"""An endpoint that does what a test says, byte for byte: HTTP written by hand, so that it can be wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

Script = Callable[["Connection", dict[str, Any]], Awaitable[None]]


def event(body: object, name: str = "") -> bytes:
    """One server-sent event."""
    text = body if isinstance(body, str) else json.dumps(body)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def token(text: str = "x", finish: str | None = None) -> bytes:
    """A chunk of a completion."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})


def delta(finish: str | None = None, **fields: object) -> bytes:
    """A chunk of a chat."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    """A usage chunk."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event("[DONE]")


@dataclass
class Connection:
    """A client's connection, to write answers on."""

    writer: asyncio.StreamWriter

    async def begin(self) -> None:
        """The head of a stream."""
        await self.raw(STREAM_HEAD)

    async def write(self, data: bytes) -> None:
        """One piece of the stream."""
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        """The stream's end."""
        await self.raw(b"0\r\n\r\n")

    async def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: str, body: object, headers: str = "") -> None:
        """A whole response with a JSON body."""
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(data)}\r\n\r\n"
        await self.raw(head.encode() + data)

    def cut(self) -> None:
        """Break the connection."""
        self.writer.transport.abort()


async def obedient(connection: Connection, body: dict[str, Any]) -> None:
    """As many tokens as asked for, and usage, all at once."""
    num_prompt = len(body["prompt"]) if "prompt" in body else 1
    count = body["max_tokens"]
    chunk = token() if "prompt" in body else delta(content="x")
    last = token(finish="length") if "prompt" in body else delta(content="x", finish="length")
    await connection.begin()
    await connection.write(chunk * (count - 1) + last + usage(num_prompt, count) + DONE)
    await connection.end()


@dataclass
class ScriptedServer:
    """Answers /v1/models itself and every other request by its script."""

    script: Script = obedient
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    """Of all requests, in the order of arrival."""
    heads: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    """Requests at one time."""

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The bodies, decoded."""
        return [json.loads(body) for body in self.bodies]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if head.startswith("GET"):
                    await connection.answer("200 OK", {"data": [{"id": "m", "max_model_len": 9}]}, "Server: script\r\n")
                    continue
                lengths = [line for line in head.splitlines() if line.lower().startswith("content-length:")]
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(lengths[0].split(":")[1])))
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    await self.script(connection, json.loads(self.bodies[-1]))
                finally:
                    self.num_open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(script: Script = obedient) -> AsyncIterator[ScriptedServer]:
    """Such an endpoint on a free port."""
    server = ScriptedServer(script)
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await server._serve(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            handlers.discard(task)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
