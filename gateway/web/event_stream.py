"""Server-sent events: the body of a streaming answer."""

from __future__ import annotations

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_MAX_HELD_BYTES = 2**14
"""Events of more bytes than this are sent, and not held back."""


class _Response(web.StreamResponse):
    """A response whose head leaves together with the first of its body: a system call less."""

    _send_headers_immediately = False


class EventStream:
    """Starts the response with the first event, so that a failure before it still has an HTTP status of its own.

    A client that reads nothing is disconnected by its connection.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._held = b""
        """Events held back until the next one."""

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

    async def flush(self) -> None:
        """Send held events. Raises as `send` does."""
        if self._held:
            await self._write(b"")

    async def send_error(self, data: bytes) -> None:
        """Send an error event, which is the last event of its stream."""
        await self._write(b"event: error\ndata: " + data + b"\n\n")

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
            await response.prepare(self._request)
            self._response = response
        if more and len(event) <= _MAX_HELD_BYTES:
            self._held = event
        else:
            await response.write(event)
