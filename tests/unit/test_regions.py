"""Caches in parts, one for each rank, between which blocks move whatever the numbers of ranks at both sides."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from transport_source import END_BOUND_S, POISON, make_transport

from common.contract.errors import TransferError
from common.contract.ids import new_incarnation
from common.engine.shard import Shard
from kv_transfer.regions import RankPart, Region, pieces
from kv_transfer.transport import ReadState

WIDTHS = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8)
HEAD_BYTES = 24
NUM_BLOCKS = 6
OF_HEADS = [
    (heads, widths)
    for heads in HEADS
    for widths in itertools.product(WIDTHS, repeat=2)
    if all(heads % width == 0 or width % heads == 0 for width in widths)
]


def parts_of(heads: int, width: int, address: int = 1) -> list[RankPart]:
    """The parts of a worker of `width` ranks."""
    shards = [Shard(rank, width).kv_heads(heads) for rank in range(width)]
    return [RankPart(address, each.start * HEAD_BYTES, each.stop * HEAD_BYTES) for each in shards]


class Ranks:
    """A cache in host memory, in one part for each rank."""

    def __init__(self, heads: int, width: int, block_bytes: int, seed: int | None = None) -> None:
        self.blocks_NB = np.full((NUM_BLOCKS, block_bytes), POISON, dtype=np.uint8)
        if seed is not None:
            self.blocks_NB[:] = np.random.default_rng(seed).integers(0, POISON, self.blocks_NB.shape, dtype=np.uint8)
        head_bytes = block_bytes // heads
        self.held = [Shard(rank, width).kv_heads(heads) for rank in range(width)]
        self.bounds = [(each.start * head_bytes, each.stop * head_bytes) for each in self.held]
        self.memory = [self.blocks_NB[:, start:stop].copy() for start, stop in self.bounds]
        each = zip(self.memory, self.bounds, strict=True)
        self.region = Region(
            parts=tuple(RankPart(memory.ctypes.data, start, stop) for memory, (start, stop) in each),
            num_blocks=NUM_BLOCKS,
            block_bytes=block_bytes,
        )

    def holds(self, block: int, expected: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
        """Whether every rank has its part of these bytes of a block."""
        each = zip(self.memory, self.bounds, strict=True)
        return all((memory[block] == expected[start:stop]).all() for memory, (start, stop) in each)


@pytest.mark.parametrize(("heads", "widths"), OF_HEADS)
def test_every_rank_gets_every_byte_of_its_heads_once(heads: int, widths: tuple[int, int]) -> None:
    from_width, to_width = widths
    source, sink = parts_of(heads, from_width), parts_of(heads, to_width)
    found = pieces(sink, source)
    for index, part in enumerate(sink):
        got = sorted(byte for each in found if each.sink == index for byte in range(each.start, each.stop))
        assert got == list(range(part.start, part.stop))
    for each in found:
        assert source[each.source].start <= each.start < each.stop <= source[each.source].stop
    assert len(found) == max(to_width, min(from_width, heads)), "each is a descriptor of every block"


@pytest.mark.parametrize("heads", [1, 2])
def test_ranks_with_the_same_heads_read_from_different_ranks(heads: int) -> None:
    found = pieces(parts_of(heads, 4), parts_of(heads, 4))
    assert sorted(each.source for each in found) == [0, 1, 2, 3]
    assert {each.source for each in pieces(parts_of(heads, 1), parts_of(heads, 4))} == set(range(0, 4, 4 // heads))


def test_a_source_that_lacks_bytes_is_refused() -> None:
    with pytest.raises(TransferError, match="byte 10 of a block"):
        pieces([RankPart(1, 0, 20)], [RankPart(1, 0, 10), RankPart(1, 11, 20)])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_bytes_of_a_block_are_read_and_written_wherever_they_are_held(width: int) -> None:
    ranks, whole = Ranks(2, width, 96, seed=1), Ranks(2, 1, 96, seed=1)
    assert ranks.region.crc32(range(NUM_BLOCKS)) == whole.region.crc32(range(NUM_BLOCKS))
    for start, stop in ((0, 96), (5, 17), (40, 60), (48, 96), (95, 96)):
        assert ranks.region.read(3, start, stop) == whole.region.read(3, start, stop)
        ranks.region.write(4, start, memoryview(bytes(range(start, stop))))
    assert ranks.holds(4, np.arange(96, dtype=np.uint8))
    assert ranks.holds(5, whole.blocks_NB[5])


def test_a_head_of_which_ranks_have_different_bytes_has_a_wrong_checksum() -> None:
    ranks = Ranks(2, 4, 96, seed=1)
    [before] = ranks.region.crc32([2])
    for rank in range(4):
        ranks.memory[rank][2, 7] ^= 1
        [spoiled] = ranks.region.crc32([2])
        assert spoiled != before
        ranks.memory[rank][2, 7] ^= 1
    assert ranks.region.crc32([2]) == (before,)


@pytest.mark.parametrize("kind", ["nixl", "zmq"])
@pytest.mark.parametrize(("from_width", "to_width"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("heads", [2, 8])
def test_blocks_move_between_workers_of_any_widths(kind: str, heads: int, from_width: int, to_width: int) -> None:
    block_bytes = 8 * 300_000  # more than a piece of the ZMQ transport
    source, sink = Ranks(heads, from_width, block_bytes, seed=5), Ranks(heads, to_width, block_bytes)
    incarnation = new_incarnation()
    serving = make_transport(kind, source.region, incarnation)
    reading = make_transport(kind, sink.region, new_incarnation())
    try:
        reading.add_source(incarnation, serving.metadata())
        read = reading.start_read(incarnation, [5, 0, 3], [1, 4, 2])
        give_up_s = time.monotonic() + END_BOUND_S
        while read.state is ReadState.PENDING:
            assert time.monotonic() < give_up_s
            serving.poll()
            reading.poll()
        assert read.state is ReadState.DONE, read.error
        for block, expected in ((1, source.blocks_NB[5]), (4, source.blocks_NB[0]), (2, source.blocks_NB[3])):
            assert sink.holds(block, expected)
        assert sink.region.crc32([1, 4, 2]) == source.region.crc32([5, 0, 3])
        assert all((memory[[0, 3, 5]] == POISON).all() for memory in sink.memory)
    finally:
        reading.close()
        serving.close()
