"""Sends one request and records the time of each part of its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from benchmarks.load.chunk import Done, Finished, StreamError, Text, Usage, error_text, read_event
from benchmarks.load.record import Outcome
from benchmarks.load.sse import EventDecoder, MalformedStreamError
from common.runtime.clock import Clock

IDLE_CONNECTION_S = 4.0
"""Seconds for which an idle connection is kept: below the 5 s after which uvicorn closes it, so that no request is sent
on a connection that is being closed."""
_READ_BUFFER_BYTES = 2**20
_MAX_ERROR_BYTES = 2**16
_REFUSALS = (429, 503)


@asynccontextmanager
async def open_session(api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session without a limit on connections, and without aiohttp's own time limits, which would end long streams."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "baton-bench"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=_READ_BUFFER_BYTES, trust_env=False
    ) as session:
        yield session


class Exchange:
    """One request and the part of its answer that has arrived so far. Times are those of `clock`."""

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.chunk_s: list[float] = []
        self.texts: list[str] = []
        self.last_s: float | None = None
        self.ended_s = 0.0
        self.usage: Usage | None = None
        self.status: int | None = None
        self.outcome: Outcome | None = None
        """Set when the request has ended."""
        self.detail = ""
        self._complete = False

    def fail(self, outcome: Outcome, detail: str) -> None:
        """End the request as failed; only the first failure counts."""
        if self.outcome is None:
            self.outcome, self.detail = outcome, detail

    def receive(self, now: float, part: Any) -> None:
        """Record a part of the answer that arrived at the time `now`."""
        match part:
            case Text(text, finished):
                self.chunk_s.append(now)
                self.last_s = now
                self.texts.append(text)
                self._complete = self._complete or finished
            case Finished():
                self.last_s = now
                self._complete = True
            case Usage():
                self.usage = part
            case StreamError(message):
                self.fail(Outcome.STREAM_ERROR, message)
            case Done():
                self._complete = True

    def end(self) -> None:
        """The connection has ended without an error."""
        if not self._complete:
            self.fail(Outcome.TRUNCATED, "the stream ended without a finish reason, or [DONE]")
        elif not self.chunk_s:
            self.fail(Outcome.NO_TOKENS, "the stream is complete, and holds no token")
        elif self.outcome is None:
            self.outcome = Outcome.OK


class Client:
    """Sends POST requests to one path of one endpoint."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float, clock: Clock) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s
        self._clock = clock

    async def send(self, body: bytes, exchange: Exchange) -> None:
        """Send `body` and fill `exchange`, which has ended when this returns, or is cancelled. Raises nothing else."""
        exchange.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._session.post(self._url, data=body) as response:
                    exchange.status = response.status
                    await self._read(response, exchange)
        except TimeoutError:
            exchange.fail(Outcome.TIMEOUT, f"not complete after {self._timeout_s:g} s")
        except MalformedStreamError as error:
            exchange.fail(Outcome.MALFORMED, str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome = Outcome.CONNECTION if exchange.status is None else Outcome.TRUNCATED
            exchange.fail(outcome, f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            exchange.fail(Outcome.INTERRUPTED, "the run was interrupted")
            raise
        finally:
            exchange.ended_s = self._clock()

    async def _read(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        if response.status != 200:
            text = (await response.content.read(_MAX_ERROR_BYTES)).decode("utf-8", "replace")
            outcome = Outcome.REFUSED if response.status in _REFUSALS else Outcome.HTTP_ERROR
            exchange.fail(outcome, _error_of(text) or response.reason or "")
            return
        if response.content_type != "text/event-stream":
            exchange.fail(Outcome.MALFORMED, f"the answer is {response.content_type}, not text/event-stream")
            return
        decoder = EventDecoder()
        async for data in response.content.iter_any():
            now = self._clock()
            for event in decoder.feed(data):
                for part in read_event(event):
                    exchange.receive(now, part)
        exchange.end()


def _error_of(text: str) -> str:
    try:
        return error_text(json.loads(text))
    except ValueError:
        return error_text(text)
