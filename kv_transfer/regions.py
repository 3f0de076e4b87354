"""The memory that a transport reads from or into: a KV cache, as addresses.

A worker of several ranks has its cache in as many parts: each holds a range of KV heads of every block. KV heads are
outermost within a block, so a part of a block is one range of its bytes. Where there are more ranks than KV heads, some
parts hold the same range.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.contract.errors import TransferError
from kv_transfer.routes import Way


class RankPart(NamedTuple):
    """Bytes `[start, stop)` of every block, those of one block after another's from `address`."""

    address: int
    start: int
    stop: int
    device_id: int = 0
    """Index of the CUDA device; 0 for host memory."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that it holds, which is the distance from block to block."""
        return self.stop - self.start


class BlockPiece(NamedTuple):
    """Bytes `[start, stop)` of a block, and the parts between which they move."""

    sink: int
    """Index of the sink's part."""
    source: int
    start: int
    stop: int


def pieces(sink: Sequence[RankPart], source: Sequence[RankPart]) -> list[BlockPiece]:
    """The fewest pieces that bring every part of a sink what it holds of a block. Of parts of the source that hold the
    same bytes, the sink's parts that hold the same use different ones, as far as there are any.

    Raises `TransferError` if the source lacks some bytes.
    """
    found: list[BlockPiece] = []
    for index, into in enumerate(sink):
        begin = into.start
        copy = sum(other.start <= begin < other.stop for other in sink[:index])
        while begin < into.stop:
            holders = [number for number, each in enumerate(source) if each.start <= begin < each.stop]
            if not holders:
                raise TransferError(f"no part of the source holds byte {begin} of a block")
            furthest = max(source[number].stop for number in holders)
            longest = [number for number in holders if source[number].stop == furthest]
            end = min(into.stop, furthest)
            found.append(BlockPiece(index, longest[copy % len(longest)], begin, end))
            begin = end
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A KV cache of `num_blocks` blocks of `block_bytes` bytes, in parts that together hold every byte.

    It owns nothing: whoever allocated the memory keeps it alive until every transport over it is closed.
    """

    parts: tuple[RankPart, ...]
    num_blocks: int
    block_bytes: int
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        assert self.num_blocks > 0
        assert self.block_bytes > 0
        assert all(part.address > 0 and part.stop <= self.block_bytes for part in self.parts)
        pieces((RankPart(1, 0, self.block_bytes),), self.parts)

    def bytes_moved(self, way: Way) -> int:
        """Bytes that a source sends for a block: over NIXL those of each part, also where parts hold the same ones."""
        return self.block_bytes if way is Way.ZMQ else sum(part.block_bytes for part in self.parts)

    def views(self, block_id: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, memoryview]]:
        """What the parts hold of bytes `[start, stop)` of a block, writable and without a copy: where it begins in the
        block, and the bytes. In the order of the parts.

        Raises `TransferError` for an id out of range, and for device memory, which has no view.
        """
        if not 0 <= block_id < self.num_blocks:
            raise TransferError(f"block {block_id} of a cache of {self.num_blocks} blocks")
        if self.device != "cpu":
            raise TransferError(f"a {self.device} region cannot be viewed from the host")
        stop = self.block_bytes if stop is None else stop
        for part in self.parts:
            begin, end = max(start, part.start), min(stop, part.stop)
            if begin < end:
                address = part.address + block_id * part.block_bytes + begin - part.start
                yield begin, memoryview((ctypes.c_ubyte * (end - begin)).from_address(address)).cast("B")

    def read(self, block_id: int, start: int, stop: int) -> bytes:
        """A copy of bytes `[start, stop)` of a block. Raises `TransferError` as `views` does."""
        found = []
        for begin, view in self.views(block_id, start, stop):
            if begin == start:  # otherwise another part has held the same
                found.append(view)
                start += len(view)
        return b"".join(found)

    def write(self, block_id: int, start: int, data: memoryview) -> None:
        """Write bytes of a block, from `start` on, to every part that holds them. Raises `TransferError` as `views`
        does."""
        for begin, view in self.views(block_id, start, start + len(data)):
            view[:] = data[begin - start : begin - start + len(view)]

    def crc32(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """CRC-32 of each block's bytes; a wrong one for a block of which two parts hold different bytes. Takes about
        1 ms per MiB; other threads can run meanwhile.

        Raises `TransferError` as `views` does.
        """
        return tuple(map(self._crc32, block_ids))

    def _crc32(self, block_id: int) -> int:
        sums = {0: 0}  # where the bytes end of which a CRC-32 is known → that
        for begin, view in self.views(block_id):
            end, crc = begin + len(view), zlib.crc32(view, sums[begin])
            if sums.setdefault(end, crc) != crc:
                return crc ^ 1
        return sums[self.block_bytes]
