"""In which order the programs of prefill attention start, and how long that keeps a device busy, by a model of it.

The model: a program takes as many units of time as it sees tiles of keys, and a multiprocessor that is free takes the
next program of the grid, whose fast axis is the heads.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest

from common.engine.kernels.prefill_attention import PrefillTiling, query_tiles

GROUP, NUM_KV_HEADS, NUM_PROCESSORS = 4, 8, 132
TILING = PrefillTiling()


def num_key_tiles(tile: tuple[int, int], query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
    """That a program of this tile of queries sees, without a window."""
    slice_index, first = tile
    last = min(first + TILING.num_tokens(GROUP), query_lens[slice_index])
    return -(-(seq_lens[slice_index] - query_lens[slice_index] + last) // TILING.tile)


def efficiency(costs: Sequence[int]) -> float:
    """Least time that programs of these costs, for each KV head, could take, by what they take in this order."""
    free_at = [0] * NUM_PROCESSORS
    for cost in costs:
        for _ in range(NUM_KV_HEADS):
            heapq.heapreplace(free_at, free_at[0] + cost)
    total = sum(costs) * NUM_KV_HEADS
    return max(total / NUM_PROCESSORS, max(costs)) / max(free_at)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "least"),
    [
        ([1024], [1024], 0.96),
        ([2048], [2048], 0.98),
        ([4096], [4096], 0.99),
        ([1500, 300, 700], [1500, 300, 4000], 0.98),
    ],
)
def test_the_last_programs_are_short(query_lens: list[int], seq_lens: list[int], least: float) -> None:
    tiles = query_tiles(query_lens, seq_lens, TILING.num_tokens(GROUP), None)
    assert efficiency([num_key_tiles(tile, query_lens, seq_lens) for tile in tiles]) >= least


def test_tiles_that_see_most_keys_come_first() -> None:
    assert query_tiles([3, 1, 8], [3, 100, 8], 4, None) == [(1, 0), (2, 4), (2, 0), (0, 0)]
    assert query_tiles([3, 1, 8], [90, 100, 8], 4, 5) == [(2, 4), (0, 0), (1, 0), (2, 0)]  # they see 8, 7, 5, 4


def test_tiles_cover_every_token_once() -> None:
    query_lens, num_tokens = [3, 1, 8, 9], 4
    tiles = query_tiles(query_lens, [30, 1, 8, 12], num_tokens, None)
    tokens = [
        (index, token)
        for index, first in tiles
        for token in range(first, min(first + num_tokens, query_lens[index]))
    ]  # fmt: skip
    assert sorted(tokens) == [(index, token) for index, num in enumerate(query_lens) for token in range(num)]
