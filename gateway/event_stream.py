"""Server-sent events: the body of a streaming answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class EventStream:
    """Starts the response with the first event: until then, a failure still has an HTTP status of its own."""

    def __init__(self, request: web.Request, stall_timeout_s: float) -> None:
        """A client that takes nothing for `stall_timeout_s` is disconnected."""
        self._request = request
        self._stall_timeout_s = stall_timeout_s
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """Whether the client has been told that the request succeeds."""
        return self._response is not None

    async def send(self, payload: Mapping[str, object]) -> None:
        """Send a data event. Raises `ConnectionError` if the client is gone, or takes nothing."""
        await self._write(b"data: " + _encode(payload) + b"\n\n")

    async def send_error(self, payload: Mapping[str, object]) -> None:
        """Send an error event: the last one, nothing else ends the stream."""
        await self._write(b"event: error\ndata: " + _encode(payload) + b"\n\n")

    async def send_done(self) -> None:
        """Send the event that ends a stream that is complete."""
        await self._write(b"data: [DONE]\n\n")

    async def close(self) -> web.StreamResponse:
        """End the response, which has been started."""
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _write(self, event: bytes) -> None:
        if self._response is None:
            response = web.StreamResponse(headers=_HEADERS)
            await response.prepare(self._request)
            self._response = response
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._response.write(event)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError(f"the client has read nothing for {self._stall_timeout_s} s") from None


def _encode(payload: Mapping[str, object]) -> bytes:
    return _JSON.encode(payload).encode()
