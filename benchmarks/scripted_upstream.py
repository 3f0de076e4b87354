"""An HTTP server of scripted event streams: what `benchmarks.scripted_workers` is to a gateway, it is to a forwarder.

Its events are those that a gateway would send for the same tokens, encoded beforehand. It has as many batches as a pool
has decode workers, and they step at the same times.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence as Many
from typing import Any, cast

from benchmarks.scripted_batch import Batch, Script, Sequence
from gateway.answer.chunk_encoder import ChunkEncoder
from gateway.answer.responses import CompletionFormat, Heading, TokenSpeller
from gateway.text.choice_text import Piece

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)


def chunk(data: bytes) -> bytes:
    """One chunk of an HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def encoded_events(texts: Many[str], model: str) -> list[bytes]:
    """For each text of a token, the event of a gateway with this model, in an HTTP chunk of its own."""
    heading = Heading.draw("cmpl", int(time.time()), model, "fp_" + 12 * "0")
    answer = CompletionFormat(heading, cast("TokenSpeller", None), with_logprobs=False)  # only these need spellings
    encoder = ChunkEncoder(answer, usage_follows=False)
    pieces = (Piece(choice=0, text=text, num_tokens=1, reports=(), finish_reason=None) for text in texts)
    return [chunk(b"data: " + encoder.encode(piece, False) + b"\n\n") for piece in pieces]


class ScriptedUpstream:
    """A server whose streams are spread over some batches, whose steps are spread evenly over an interval."""

    def __init__(self, events: Many[bytes], num_batches: int, script: Script) -> None:
        """`events` are those of the script's tokens."""
        self.script = script
        self.events = events
        self.batches: list[Batch[_Connection]] = [Batch(script) for _ in range(num_batches)]
        self._server: asyncio.Server

    async def bind(self) -> str:
        """Listen on a free port; return the URL."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, batch in enumerate(self.batches):
                    tasks.create_task(batch.run_steps(number / len(self.batches)))
        finally:
            self._server.close()

    @property
    def num_sent(self) -> int:
        """Tokens sent by steps."""
        return sum(batch.num_sent for batch in self.batches)

    def sequences(self) -> list[tuple[Batch[Any], Sequence]]:
        """(batch, sequence) of every sequence in a batch."""
        return [(batch, sequence) for batch in self.batches for sequence in batch.sequences.values()]


class _Connection(asyncio.Protocol):
    """A connection with one request, which is answered by a stream. The first token is sent at once."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self._upstream = upstream
        self._request = b""
        self._batch: Batch[_Connection] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the request."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer, once the request is complete."""
        self._request += data
        head, _, body = self._request.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if length is None or len(body) < int(length[1]):
            return
        self._batch = min(self._upstream.batches, key=len)
        self._batch.sequences[self] = Sequence(tuple(json.loads(body)["prompt"]), self._send, num_sent=1)
        self._transport.write(_HEAD)
        self._send(0, 1, False)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        if self._batch is not None:
            self._batch.sequences.pop(self, None)

    def _send(self, start: int, end: int, last: bool) -> None:
        events = self._upstream.events
        data = b"".join(events[index % len(events)] for index in range(start, end))
        self._transport.write(data + _END if last else data)
