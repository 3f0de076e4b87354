"""The interface of transports, which move blocks between two workers' KV caches, and what their implementations share.

A transport reads (pulls) blocks from a *source* into this worker, the *sink*, and lets other workers read this worker's
blocks. There are an implementation over NIXL and one over plain ZMQ. A transport is used by one thread, the mover's.

The correctness of a pull depends on one rule: a read that has ended, DONE or FAILED, will write nothing any more. So a
read is FAILED only if nothing was started, if the transport itself reports its end, or after the fence: `drop_source`
destroys whatever could still write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NewType, Protocol, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError

from common.contract.errors import TransferError
from common.contract.ids import Incarnation
from kv_transfer.routes import ReadRoute

MAX_METADATA_BYTES = 2**20
"""Largest transport metadata that is accepted, in bytes. It equals the limit of `Welcome.transport_metadata`."""
SLOWEST_READ_BYTES_PER_S = 1e8
"""The slowest rate that is expected of a read: about that of 1 Gbit/s Ethernet. The bounds on the time of a read, and
of a loan that is read, grow with their bytes at this rate."""

_Fields = TypeVar("_Fields")

ReadId = NewType("ReadId", int)
"""Number of a read. The sink numbers its reads, and the mover reports their ends by these numbers."""


class ReadState(StrEnum):
    """The state of a read. All but PENDING are final."""

    PENDING = "pending"
    DONE = "done"
    """Every block is in the sink's region."""
    FAILED = "failed"
    """Some blocks may hold parts of the source's blocks. Nothing will write to them any more."""


class Read:
    """A read of blocks from one source. The mover's thread changes its state; nobody else does."""

    __slots__ = ("error", "source", "state", "waiting")

    def __init__(self, source: Incarnation) -> None:
        self.source = source
        self.state = ReadState.PENDING
        self.waiting = False
        """Whether nothing has begun, because it waits for reads from other sources."""
        self.error = ""
        """Why it FAILED."""

    def finish(self) -> None:
        """PENDING → DONE."""
        assert self.state is ReadState.PENDING, self.state
        self.state = ReadState.DONE

    def fail(self, error: str) -> None:
        """PENDING → FAILED. The caller has made sure that nothing will write any more."""
        assert self.state is ReadState.PENDING, self.state
        assert error
        self.state = ReadState.FAILED
        self.error = error


class Transport(Protocol):
    """Moves blocks. Construction raises `TransferError` where the transport cannot work."""

    @property
    def serves_by_polling(self) -> bool:
        """Whether `poll` must be called for peers to be able to read this worker's blocks."""

    @property
    def num_registrations(self) -> int:
        """How often the region is registered with a device's driver or the kernel. Any thread may read this."""

    @property
    def num_evicted(self) -> int:
        """Number of registrations that had to make room for a read from another source. Any thread may read this."""

    def watch(self, on_died: Callable[[Exception], None]) -> None:
        """Call `on_died`, on whichever thread, when what serves peers has died of a bug. A transport that serves by
        polling raises it from `poll` instead."""

    def metadata(self) -> bytes:
        """What a sink needs in order to read this worker's blocks; at most `MAX_METADATA_BYTES`."""

    def add_source(self, source: Incarnation, metadata: bytes) -> None:
        """Make a worker's blocks readable; inert if they are.

        Raises `TransferError` when the metadata is malformed, not that worker's, or of another block size.
        """

    def start_read(self, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> Read:
        """Start to copy block `source_blocks[i]` of the source into block `sink_blocks[i]` of this worker.

        A sink block may be the target of at most one unfinished read. Raises `TransferError`, with nothing started,
        when the source is unknown or a block id is out of range. If the source turns out to be gone, the read is
        FAILED.
        """

    def drop_read(self, read: Read) -> bool:
        """Make an open read FAILED if nothing of it has begun. Returns whether that is so."""

    def route(self, source: Incarnation) -> ReadRoute:
        """How blocks come from a source, as far as that is known once a read from there has ended."""

    def poll(self) -> None:
        """Make progress, without waiting: update the state of open reads, and serve the reads of peers."""

    def drop_source(self, source: Incarnation) -> None:
        """The fence: forget a source and destroy whatever could still write. Its open reads are FAILED on return."""

    def close(self) -> None:
        """Drop every source, stop serving, and free all resources."""


def pack_metadata(fields: dict[str, object]) -> bytes:
    """Encode a transport's metadata. Raises `TransferError` beyond `MAX_METADATA_BYTES`."""
    blob: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(blob) > MAX_METADATA_BYTES:
        raise TransferError(f"transport metadata of {len(blob)} bytes, at most {MAX_METADATA_BYTES}")
    return blob


def unpack(adapter: TypeAdapter[_Fields], data: bytes | memoryview, what: str, max_bytes: int) -> _Fields:
    """Decode and validate data from a peer. Raises `TransferError`, naming `what`, if it is too large or does not match
    `adapter`."""
    if len(data) > max_bytes:
        raise TransferError(f"{what} of {len(data)} bytes, at most {max_bytes}")
    try:
        return adapter.validate_python(msgpack.unpackb(data, raw=False, strict_map_key=True))
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise TransferError(f"malformed {what}: {_describe(error)}") from error


def unpack_metadata(adapter: TypeAdapter[_Fields], blob: bytes) -> _Fields:
    """Decode and validate a peer's metadata. Raises `TransferError` as `unpack` does."""
    return unpack(adapter, blob, "transport metadata", MAX_METADATA_BYTES)


def require_pairs(
    num_source_blocks: int, source_blocks: Sequence[int], num_sink_blocks: int, sink_blocks: Sequence[int]
) -> None:
    """Raise `TransferError` unless the ids can be read: they must be paired and in range, and no sink block may occur
    twice."""
    if not sink_blocks or len(source_blocks) != len(sink_blocks):
        raise TransferError(f"a read of {len(source_blocks)} blocks into {len(sink_blocks)}")
    if len(set(sink_blocks)) != len(sink_blocks):
        raise TransferError("a read into the same block twice")
    for side, num_blocks, block_ids in (
        ("source", num_source_blocks, source_blocks),
        ("sink", num_sink_blocks, sink_blocks),
    ):
        if min(block_ids) < 0 or max(block_ids) >= num_blocks:
            raise TransferError(f"{side} blocks [{min(block_ids)}, {max(block_ids)}] of a cache of {num_blocks} blocks")


def _describe(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
    return repr(error)
