"""The source's half of the transport over plain ZMQ: what a sink may ask for, and the thread that answers.

The source keeps no state of its sinks. Each request names the bytes that it wants, and is answered at once.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgpack
import zmq
from pydantic import Field, TypeAdapter

from common.contract.errors import TransferError
from common.contract.messages.fields import WireData
from common.runtime.curve import CurveKeys
from kv_transfer.regions import Region
from kv_transfer.transport import unpack

MAX_PIECE_BYTES = 2**20
"""Most bytes that a source answers with at once."""
MAX_BLOCKS_PER_PIECE = 4096
MAX_PIECES_ASKED = 16
"""Most pieces on their way from one source to one sink."""
MAX_ANSWERS_QUEUED = 4 * MAX_PIECES_ASKED
"""Most answers queued for one sink, as ZeroMQ counts them; further ones are dropped. ZeroMQ subtracts answers that have
left in batches of half this number. So the count stays below that half plus `MAX_PIECES_ASKED`."""
MAX_HEADER_BYTES = 2**16
"""Most bytes of a request, and of the header of an answer."""

_logger = logging.getLogger(__name__)

_Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]
_Size = Annotated[int, Field(strict=True, ge=1, le=2**40)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata(WireData):
    """What a source tells its sinks."""

    incarnation: Annotated[str, Field(strict=True, min_length=1, max_length=64)]
    # An address, not a name: a name that does not resolve would never connect, and ZMQ would not say so.
    endpoint: Annotated[
        str, Field(strict=True, max_length=64, pattern=r"^tcp://([0-9]{1,3}(\.[0-9]{1,3}){3}):[0-9]{1,5}$")
    ]
    token: Annotated[bytes, Field(strict=True, min_length=16, max_length=64)]
    num_blocks: _Size
    block_bytes: _Size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request(WireData):
    """The request for bytes `[start, start + length)` of each of these blocks."""

    token: Annotated[bytes, Field(strict=True, max_length=64)]
    number: _Count
    block_ids: Annotated[list[_Count], Field(min_length=1, max_length=MAX_BLOCKS_PER_PIECE)]
    start: _Count
    length: _Size


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerHeader(WireData):
    """The header before the bytes of a piece. If the request is refused, it stands alone and says why."""

    number: _Count
    refused: Annotated[str, Field(strict=True, max_length=1024)]


METADATA = TypeAdapter(Metadata)
_REQUEST = TypeAdapter(_Request)
ANSWER_HEADER = TypeAdapter(_AnswerHeader)


class ZmqServer:
    """The thread that answers sinks. It sleeps in `recv` until a sink asks."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], region: Region, host: str, keys: CurveKeys | None = None
    ) -> None:
        self.token = secrets.token_bytes(32)
        """What every request must bear."""
        self.on_died: Callable[[Exception], None] | None = None
        """Called in the thread with the bug that has ended it."""
        self._region = region
        self._socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, MAX_HEADER_BYTES),
            (zmq.SNDHWM, MAX_ANSWERS_QUEUED),
        ):
            self._socket.set(option, value)
        if keys is not None:
            keys.server(self._socket)
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransferError(f"the ZMQ transport cannot bind to {host}: {error}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="zmq-transport", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread, after the context has been terminated."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                sink, *frames = self._socket.recv_multipart()
                self._answer(sink, frames)
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            _logger.exception("the ZMQ transport serves no more: its sinks lose their connections")
            if self.on_died is not None:
                self.on_died(error)
        finally:
            self._socket.close()

    def _answer(self, sink: bytes, frames: list[bytes]) -> None:
        try:
            request = unpack(_REQUEST, b"".join(frames), "request", MAX_HEADER_BYTES)
        except TransferError:
            return  # not answered, because it has no number
        piece: list[bytes] = []
        refused = ""
        try:
            piece.append(self._read(request))
        except TransferError as error:
            refused = str(error)
        header: bytes = msgpack.packb({"number": request.number, "refused": refused})
        self._socket.get(zmq.EVENTS)  # counts what has left; a send alone does so about once a millisecond
        try:
            self._socket.send_multipart([sink, header, *piece], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass  # the sink asks for more at once than it may
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:  # the sink has gone
                raise

    def _read(self, request: _Request) -> bytes:
        """A copy of the bytes of a piece. Raises `TransferError` if they may not be read."""
        if not hmac.compare_digest(request.token, self.token):
            raise TransferError("wrong token")
        stop = request.start + request.length
        if stop > self._region.block_bytes or request.length * len(request.block_ids) > MAX_PIECE_BYTES:
            raise TransferError(f"bytes [{request.start}, {stop}) of {len(request.block_ids)} blocks")
        return b"".join(self._region.read(block_id, request.start, stop) for block_id in request.block_ids)
