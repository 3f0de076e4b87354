"""Clients of streamed answers that cost as little as they can: they count events, and look at nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from common.runtime.clock import monotonic

_EVENT_END = b"}\n\n"
"""Ends every event but the last one, which is no object."""


def post(path: str, body: Mapping[str, Any]) -> bytes:
    """An HTTP request."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


class EventClient(asyncio.Protocol):
    """One connection: a request, and its answer's events as they come."""

    def __init__(self, request: bytes, *, again: bool = False) -> None:
        """`again`: when an answer is complete, the same is asked once more."""
        self.num_events = 0
        self.num_answers = 0
        self.arrivals: list[tuple[float, int]] | None = None
        """Once it is a list: (when, events so far) of whatever is received."""
        self.first = asyncio.get_running_loop().create_future()
        """The answer has begun."""
        self.ended = asyncio.get_running_loop().create_future()
        """The first answer is complete."""
        self._request = request
        self._again = again
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        now = monotonic()
        self.num_events += data.count(_EVENT_END) + (self._tail + data[:2]).count(_EVENT_END)
        self._tail = (self._tail + data[-2:])[-2:]
        if self.arrivals is not None:
            self.arrivals.append((now, self.num_events))
        if not self.first.done():
            if not data.startswith(b"HTTP/1.1 200 "):
                self.first.set_exception(RuntimeError(data[:1000].decode()))
                return
            self.first.set_result(None)
        if data.endswith(b"0\r\n\r\n"):
            self._answered()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, which is not expected before the answer's."""
        for waiting in (self.first, self.ended):
            if not waiting.done():
                waiting.set_exception(exc or ConnectionError("the gateway has closed the connection"))
                waiting.exception()  # it may be that nobody waits any more

    def close(self) -> None:
        """Leave."""
        self._again = False
        self._transport.close()

    def _answered(self) -> None:
        self.num_answers += 1
        if not self.ended.done():
            self.ended.set_result(None)
        if self._again:
            self._transport.write(self._request)
