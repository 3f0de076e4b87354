"""Clients of streamed answers that use as little processor time as possible: they only count events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from common.runtime.clock import monotonic

_EVENT_END = b"}\n\n"
"""The end of every event except the last, which is not a JSON object."""


def post(path: str, body: Mapping[str, Any]) -> bytes:
    """An HTTP request."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


class EventClient(asyncio.Protocol):
    """One connection: it sends a request and counts the events of the answer."""

    def __init__(self, request: bytes, *, again: bool = False) -> None:
        """`again`: send the same request again whenever an answer is complete."""
        self.num_events = 0
        self.num_answers = 0
        self.arrivals: list[tuple[float, int]] | None = None
        """If set to a list: (time, events so far) is appended at each receipt of data."""
        self.first = asyncio.get_running_loop().create_future()
        """Done when the answer has begun."""
        self.ended = asyncio.get_running_loop().create_future()
        """Done when the first answer is complete."""
        self._request = request
        self._again = again
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events in the data."""
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
        """The connection has ended: fail the futures that are not done."""
        for waiting in (self.first, self.ended):
            if not waiting.done():
                waiting.set_exception(exc or ConnectionError("the gateway has closed the connection"))
                waiting.exception()  # marks it as retrieved: perhaps nothing awaits it any more

    def close(self) -> None:
        """Close the connection."""
        self._again = False
        self._transport.close()

    def _answered(self) -> None:
        self.num_answers += 1
        if not self.ended.done():
            self.ended.set_result(None)
        if self._again:
            self._transport.write(self._request)
