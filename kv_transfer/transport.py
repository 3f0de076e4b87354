"""What moves blocks between two workers' KV caches: the interface, and what its implementations share.

A transport reads (pulls) blocks from a *source* into this worker, the *sink*, and lets other workers read this worker's
blocks. One NIXL and one plain ZMQ implementation exist. A transport is used from one thread, the mover's.

The rule that everything rests on: a read that has ended, DONE or FAILED, will write nothing any more. So FAILED is
reported only when nothing was started, when the transport itself reports the end, or after the fence: `drop_source`
destroys whatever could still write.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NewType, Protocol, TypeVar

import msgpack
from pydantic import TypeAdapter, ValidationError

from common.contract.errors import TransferError
from common.contract.ids import Incarnation
from kv_transfer.routes import Route

MAX_METADATA_BYTES = 2**20
"""Largest transport metadata that is looked at; the limit of `Welcome.transport_metadata`."""

_Fields = TypeVar("_Fields")

ReadId = NewType("ReadId", int)
"""One read, between the sink (which numbers its reads) and the mover."""


class ReadState(StrEnum):
    """Where a read is. All but PENDING are final."""

    PENDING = "pending"
    DONE = "done"
    """Every block is in the sink's region."""
    FAILED = "failed"
    """Some blocks may hold parts of the source's; nothing will write to them any more."""


class Read:
    """Blocks on their way from one source. The transport moves its state; everyone else looks."""

    __slots__ = ("error", "num_blocks", "source", "state")

    def __init__(self, source: Incarnation, num_blocks: int) -> None:
        self.source = source
        self.num_blocks = num_blocks
        self.state = ReadState.PENDING
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
    def name(self) -> str:
        """`nixl` or `zmq`, as it travels in `Welcome.transport`."""

    @property
    def serves_by_polling(self) -> bool:
        """Whether `poll` must be called for peers to be able to read this worker's blocks."""

    @property
    def num_registrations(self) -> int:
        """How often the region is registered with a device's driver or the kernel. Any thread may ask."""

    @property
    def num_evicted(self) -> int:
        """Registrations that had to make room for a read from another source. Any thread may ask."""

    def metadata(self) -> bytes:
        """What a sink needs in order to read this worker's blocks; at most `MAX_METADATA_BYTES`."""

    def add_source(self, source: Incarnation, metadata: bytes) -> None:
        """Make a worker's blocks readable; adding it again is inert.

        Raises `TransferError` when the metadata is malformed, not that worker's, or of another block size.
        """

    def start_read(self, source: Incarnation, source_blocks: Sequence[int], sink_blocks: Sequence[int]) -> Read:
        """Start to copy block `source_blocks[i]` of the source into block `sink_blocks[i]` of this worker.

        A sink block may be the target of one unfinished read at most. Raises `TransferError`, with nothing started,
        when the source is unknown or a block id is out of range. A source that turns out to be gone gives a FAILED
        read.
        """

    def route(self, source: Incarnation) -> Route:
        """How blocks come from a source, as far as it is known once a read from there has ended."""

    def poll(self) -> None:
        """Make progress, without waiting: move the state of open reads, serve the reads of peers."""

    def drop_source(self, source: Incarnation) -> None:
        """The fence: forget a source and destroy whatever could still write. Its open reads are FAILED on return."""

    def close(self) -> None:
        """Drop every source, stop serving, give everything back."""


def pack_metadata(fields: dict[str, object]) -> bytes:
    """Encode a transport's metadata. Raises `TransferError` beyond `MAX_METADATA_BYTES`."""
    blob: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(blob) > MAX_METADATA_BYTES:
        raise TransferError(f"transport metadata of {len(blob)} bytes, at most {MAX_METADATA_BYTES}")
    return blob


def unpack(adapter: TypeAdapter[_Fields], data: bytes | memoryview, what: str, max_bytes: int) -> _Fields:
    """Decode and validate what a peer sent. Raises `TransferError`, naming `what`, unless it is as `adapter` says."""
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
    """Raise `TransferError` unless the ids can be read: paired, in range, no sink block twice."""
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
