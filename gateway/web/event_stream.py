"""Server-sent events: the body of a streaming answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import HttpVersion11, web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_FEW_BYTES = 2**14
"""Fewer bytes than this may be held back, and fewer wait in the write buffer of a client that reads. It is not above
the size that pauses writing."""


class _Response(web.StreamResponse):
    """A response whose head leaves together with the first of its body: a system call less."""

    _send_headers_immediately = False


class EventStream:
    """Starts the response with the first event, so that a failure before it still has an HTTP status of its own.

    A client that reads nothing is disconnected by its connection, and one that reads too slowly by `limit`.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._held = b""
        """Events held back until the next one."""
        self._chunked = False
        """Whether the response's head is sent, and its body is sent in chunks (RFC 9112, 7.1)."""

    @property
    def started(self) -> bool:
        """Whether the response has been started, so that its status can no longer change."""
        return self._response is not None

    async def send(self, data: bytes, *, more: bool = False) -> None:
        """Send an event; `data` must not contain a line end. With `more`, the event may be held until the next one or
        `flush`.

        Raises `ConnectionError` if the client is gone.
        """
        await self._write(b"data: " + data + b"\n\n", more=more)

    @contextmanager
    def limit(self, seconds: float, cut_off: Callable[[], None]) -> Iterator[None]:
        """If this context is still open after so many seconds, call `cut_off` and abort the connection, which cancels
        the request's handler as if the client had left."""

        def abort() -> None:
            transport = self._request.transport
            if transport is not None:
                cut_off()
                transport.abort()

        timer = asyncio.get_running_loop().call_later(seconds, abort)
        try:
            yield
        finally:
            timer.cancel()

    @property
    def flows(self) -> bool:
        """Whether an event can be sent at once: the client has read all before it."""
        transport = self._request.transport
        if not self._chunked or self._held or transport is None:
            return False
        return transport.get_write_buffer_size() < _FEW_BYTES and not transport.is_closing()

    def send_now(self, data: bytes) -> None:
        """Send an event, without the coroutines of `send`; the stream must flow. `data` must not contain a line end."""
        assert self._request.transport is not None
        self._request.transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    async def flush(self) -> None:
        """Send held events. Raises as `send` does."""
        if self._held:
            await self._write(b"")

    async def send_done(self) -> None:
        """Send the event that ends a complete stream, held until `close`."""
        await self._write(b"data: [DONE]\n\n", more=True)

    async def close(self) -> web.StreamResponse:
        """Send held events and end the response, which must have been started. Raises as `send` does."""
        assert self._response is not None
        held, self._held = self._held, b""
        await self._response.write_eof(held)
        return self._response

    async def _write(self, event: bytes, *, more: bool = False) -> None:
        event, self._held = self._held + event, b""
        response = self._response
        if response is None:
            response = _Response(headers=_HEADERS)
            if self._request.version < HttpVersion11:
                response.force_close()  # only the connection's end tells the client that nothing follows
            await response.prepare(self._request)
            self._response = response
        if more and len(event) < _FEW_BYTES:
            self._held = event
            return
        await response.write(event)
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
