"""Transport of blocks over plain ZMQ, for machines without NIXL and for tests. Host memory only.

A read is cut into pieces of at most `PIECE_BYTES`. The sink asks for each piece, and at most `MAX_PIECES_ASKED` are on
their way from one source. This bounds the memory of both sides, and the source keeps no state (`zmq_source`).
Only `poll` copies arrived pieces into the sink's blocks, so closing the socket is a complete fence. A connection is
never repaired: its loss (closed, refused, or 1.5 s without an answer to a heartbeat) fails every read that uses it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from common.contract.errors import TransferError
from common.contract.ids import Incarnation
from common.runtime.channel import MAX_SOCKETS
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import EVERYWHERE, PeerNetworks
from kv_transfer.regions import Region
from kv_transfer.routes import ReadRoute, Way
from kv_transfer.transport import Read, ReadState, pack_metadata, require_pairs, unpack, unpack_metadata
from kv_transfer.zmq_source import (
    ANSWER_HEADER,
    MAX_BLOCKS_PER_PIECE,
    MAX_HEADER_BYTES,
    MAX_PIECES_ASKED,
    METADATA,
    Metadata,
    ZmqServer,
)

PIECE_BYTES = 2**19
"""Most bytes of blocks in one message. A connection on which no message is complete for a second counts as lost, so
this is also the least that must arrive in a second."""
MAX_PIECES_PER_POLL = 32
"""Most pieces copied from one source in one `poll`; this takes about 3 ms."""
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 1000
CONNECT_TIMEOUT_MS = 2000
SINK_TIMEOUT_MS = 10_000
"""A sink that is silent for this long loses its connection, and the source drops the pieces queued for it."""

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events after which a connection is of no more use, because it is never repaired."""

_logger = logging.getLogger(__name__)


class ZmqTransport:
    """The `Transport` over ZMQ, serving on `host` (an IPv4 address that peers reach) and a port of the system's choice.

    Raises `TransferError` for device memory, and when the address cannot be bound.
    """

    serves_by_polling = False
    num_registrations = 0
    num_evicted = 0

    def __init__(
        self,
        region: Region,
        incarnation: Incarnation,
        host: str,
        keys: CurveKeys | None = None,
        peers: PeerNetworks = EVERYWHERE,
    ) -> None:
        self._keys = keys
        self._peers = peers
        if region.device != "cpu":
            raise TransferError("the ZMQ transport moves host memory only")
        self._region = region
        self._incarnation = incarnation
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._sources: dict[Incarnation, Metadata] = {}
        self._links: dict[Incarnation, _Link] = {}
        self._server = ZmqServer(self._context, region, host, keys)

    def watch(self, on_died: Callable[[Exception], None]) -> None:
        """See `Transport.watch`."""
        self._server.on_died = on_died

    def metadata(self) -> bytes:
        """The server's endpoint and token, and the shape of the region."""
        return pack_metadata(
            {
                "incarnation": self._incarnation,
                "endpoint": self._server.endpoint,
                "token": self._server.token,
                "num_blocks": self._region.num_blocks,
                "block_bytes": self._region.block_bytes,
            }
        )

    def add_source(self, source: Incarnation, metadata: bytes) -> None:
        """Connect to `source`; see `Transport.add_source`."""
        if source in self._sources:
            return
        theirs = unpack_metadata(METADATA, metadata)
        if theirs.incarnation != source:
            raise TransferError(f"transport metadata of {theirs.incarnation}, not of {source}")
        if theirs.block_bytes != self._region.block_bytes:
            raise TransferError(f"blocks of {theirs.block_bytes} bytes at {source}, {self._region.block_bytes} here")
        if not 1 <= int(theirs.endpoint.rpartition(":")[2]) < 2**16:
            raise TransferError(f"the metadata of {source} names no port")
        if not self._peers.admit(theirs.endpoint.removeprefix("tcp://").rpartition(":")[0]):
            _logger.warning("the blocks of %s are at %s, not within %s", source, theirs.endpoint, self._peers)
            raise TransferError(f"the blocks of {source} are not within --peer-networks")
        self._links[source] = self._link(theirs)
        self._sources[source] = theirs

    def start_read(self, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> Read:
        """Ask for the first pieces; see `Transport.start_read`."""
        theirs = self._sources.get(source)
        if theirs is None:
            raise TransferError(f"unknown source {source}")
        require_pairs(theirs.num_blocks, source_blocks, self._region.num_blocks, sink_blocks)
        self._poll_link(source)  # it may have broken while nothing was read
        if source not in self._links:
            self._links[source] = self._link(theirs)
        read = Read(source)
        self._links[source].start(read, source_blocks, sink_blocks)
        return read

    def drop_read(self, read: Read) -> bool:
        """Drop a read of which no piece was asked for; see `Transport.drop_read`."""
        link = self._links.get(read.source)
        return link is not None and link.drop(read)

    def route(self, source: Incarnation) -> ReadRoute:
        """Always `Way.ZMQ`."""
        return ReadRoute(way=Way.ZMQ)

    def poll(self) -> None:
        """Copy what has arrived into its blocks and ask for more."""
        for source in list(self._links):
            self._poll_link(source)

    def drop_source(self, source: Incarnation) -> None:
        """Close the connection to `source`."""
        self._sources.pop(source, None)
        self._destroy_link(source, "the source was dropped")

    def close(self) -> None:
        """Close every connection and end the serving thread."""
        for source in list(self._sources):
            self.drop_source(source)
        self._context.term()  # wakes the server, and returns when it has closed its socket
        self._server.join()

    def _link(self, theirs: Metadata) -> _Link:
        """A connection to a source. Raises `TransferError` if there can be none, as without a file descriptor."""
        try:
            return _Link(self._context, self._region, theirs, self._keys)
        except zmq.ZMQError as error:
            raise TransferError(f"no connection to {theirs.incarnation} can be made: {error}") from error

    def _poll_link(self, source: Incarnation) -> None:
        link = self._links.get(source)
        error = None if link is None else link.poll()
        if error is not None:
            self._destroy_link(source, error)

    def _destroy_link(self, source: Incarnation, error: str) -> None:
        link = self._links.pop(source, None)
        for read in () if link is None else link.destroy():
            read.fail(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes `[start, start + length)` of some blocks of a read."""

    read: Read
    source_blocks: Sequence[int]
    sink_blocks: Sequence[int]
    start: int
    length: int

    @property
    def num_bytes(self) -> int:
        return self.length * len(self.sink_blocks)


class _Link:
    """A connection to one source, and the reads that use it. Answers come in the order of the requests."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], region: Region, theirs: Metadata, keys: CurveKeys | None
    ) -> None:
        self._region = region
        self._token = theirs.token
        self._missing_bytes: dict[Read, int] = {}
        self._waiting: OrderedDict[Read, Iterator[_Piece]] = OrderedDict()
        """Reads of which no piece was asked for, and their pieces."""
        self._unasked: Iterator[_Piece] = iter(())
        """The remaining pieces of the read that is being asked for."""
        self._asked: deque[tuple[int, _Piece]] = deque()
        self._num_requests = 0
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, CONNECT_TIMEOUT_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, SINK_TIMEOUT_MS),
            (zmq.MAXMSGSIZE, PIECE_BYTES + MAX_HEADER_BYTES),
        ):
            self._socket.set(option, value)
        if keys is not None:
            keys.client(self._socket)
        try:
            self._events = self._socket.get_monitor_socket(_LOST)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        try:
            self._socket.connect(theirs.endpoint)
        except zmq.ZMQError:
            self.destroy()
            raise

    def start(self, read: Read, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> None:
        """Queue `read` behind the others, and ask for as many pieces as may be on their way."""
        self._missing_bytes[read] = len(sink_blocks) * self._region.block_bytes
        self._waiting[read] = _pieces(read, source_blocks, sink_blocks, self._region.block_bytes)
        self._ask()

    def drop(self, read: Read) -> bool:
        """Make `read` FAILED if no piece of it was asked for. Returns whether that is so."""
        waits = self._waiting.pop(read, None) is not None
        if waits:
            del self._missing_bytes[read]
            read.fail("the read was dropped")
        return waits

    def poll(self) -> str | None:
        """Take pieces and ask for more. Returns what went wrong, if anything; the link must then be destroyed."""
        for _ in range(MAX_PIECES_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            error = self._take([frame.buffer for frame in frames])
            if error is not None:
                return error
            self._ask()
        if self._events.poll(0):
            event = zmq.Event(recv_monitor_message(self._events)["event"])
            return f"the connection to the source was lost: {event.name}"
        return None

    def destroy(self) -> list[Read]:
        """Close the connection. Returns the reads that were open."""
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)
        return list(self._missing_bytes)

    def _ask(self) -> None:
        while len(self._asked) < MAX_PIECES_ASKED:
            piece = next(self._unasked, None)
            if piece is None or piece.read.state is not ReadState.PENDING:
                if not self._waiting:
                    return
                _, self._unasked = self._waiting.popitem(last=False)
                continue
            self._num_requests += 1
            request = {
                "token": self._token,
                "number": self._num_requests,
                "block_ids": list(piece.source_blocks),
                "start": piece.start,
                "length": piece.length,
            }
            self._asked.append((self._num_requests, piece))
            with contextlib.suppress(zmq.Again):  # the connection is lost; the next poll says so
                self._socket.send(msgpack.packb(request), zmq.NOBLOCK)

    def _take(self, frames: list[memoryview]) -> str | None:
        header, *body = frames
        try:
            answer = unpack(ANSWER_HEADER, header, "answer", MAX_HEADER_BYTES)
        except TransferError as error:
            return str(error)
        if not self._asked or self._asked[0][0] != answer.number:
            return "the source answered a request that was not made"
        _, piece = self._asked.popleft()
        if piece.read.state is not ReadState.PENDING:
            return None
        if answer.refused:
            del self._missing_bytes[piece.read]
            piece.read.fail(f"the source refused: {answer.refused}")
            return None
        if len(body) != 1 or len(body[0]) != piece.num_bytes:
            return "the source sent a piece of the wrong size"
        self._copy(piece, body[0])
        return None

    def _copy(self, piece: _Piece, data: memoryview) -> None:
        for index, block_id in enumerate(piece.sink_blocks):
            self._region.write(block_id, piece.start, data[index * piece.length : (index + 1) * piece.length])
        self._missing_bytes[piece.read] -= piece.num_bytes
        if self._missing_bytes[piece.read] == 0:
            del self._missing_bytes[piece.read]
            piece.read.finish()


def _pieces(read: Read, source_blocks: Sequence[int], sink_blocks: Sequence[int], block_bytes: int) -> Iterator[_Piece]:
    """Cut a read into pieces: several whole blocks per piece or, for large blocks, several pieces per block."""
    length = min(block_bytes, PIECE_BYTES)
    step = min(PIECE_BYTES // length, MAX_BLOCKS_PER_PIECE)
    for first in range(0, len(sink_blocks), step):
        for start in range(0, block_bytes, length):
            yield _Piece(
                read=read,
                source_blocks=source_blocks[first : first + step],
                sink_blocks=sink_blocks[first : first + step],
                start=start,
                length=min(length, block_bytes - start),
            )
