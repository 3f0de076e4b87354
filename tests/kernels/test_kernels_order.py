"""In which order the programs of prefill attention start, and how long that keeps a device busy, by a model of it.

The model: a program takes as many units of time as its run has tiles of keys, and where one has ended the next program
of the grid starts, whose fast axis is the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.engine.kernels.backend import TritonBackend
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.query_runs import (
    NO_PLACE,
    WHOLE,
    QueryRuns,
    QueryTile,
    busy_for,
    longest_run,
    query_runs,
    query_tiles,
)
from common.engine.kernels.tuning import Tuning

GROUP, NUM_KV_HEADS, NUM_PROCESSORS = 4, 8, 132
SHAPE = {"head_dim": 128, "itemsize": 2, "block_size": 64, "group": GROUP}
PLAIN, COPIED = (Tuning("", 0, copy_engine=copied).prefill(**SHAPE) for copied in (False, True))
NUM_PROGRAMS = {PLAIN: NUM_PROCESSORS, COPIED: 2 * NUM_PROCESSORS}
"""Tiling → programs that an H200 has room for."""


def tiles_of(query_lens: Sequence[int], seq_lens: Sequence[int], tiling: PrefillTiling) -> list[QueryTile]:
    """Of a model with 32 heads, without a window."""
    return query_tiles(query_lens, seq_lens, tiling.num_tokens(GROUP), tiling.tile, None)


def cut(tiles: Sequence[QueryTile], tiling: PrefillTiling, num_kv_heads: int = NUM_KV_HEADS) -> QueryRuns:
    """As the backend does it."""
    return query_runs(tiles, longest_run(tiles, num_kv_heads, NUM_PROCESSORS * tiling.programs, tiling.least_tiles))


def efficiency(runs: QueryRuns, tiling: PrefillTiling, num_kv_heads: int = NUM_KV_HEADS) -> float:
    """Least time in which the device could compute the runs, by what it takes in this order."""
    costs = [end - begin for _, _, begin, end, _ in runs.runs for _ in range(num_kv_heads)]
    return max(sum(costs) / NUM_PROGRAMS[tiling], 1) / busy_for(costs, NUM_PROGRAMS[tiling])


@pytest.mark.parametrize(
    ("tiling", "query_lens", "seq_lens", "least"),
    [
        (PLAIN, [1024], [1024], 0.96),
        (PLAIN, [2048], [2048], 0.98),
        (PLAIN, [4096], [4096], 0.99),
        (PLAIN, [1500, 300, 700], [1500, 300, 4000], 0.98),
        (COPIED, [1024], [8192], 0.9),
        (COPIED, [2048], [2048], 0.98),
        (COPIED, [4096], [4096], 0.99),
        (COPIED, [1500, 300, 700], [1500, 300, 4000], 0.9),
    ],
)
def test_the_last_programs_are_short(
    tiling: PrefillTiling, query_lens: list[int], seq_lens: list[int], least: float
) -> None:
    runs = cut(tiles_of(query_lens, seq_lens, tiling), tiling)
    assert not runs.splits
    assert efficiency(runs, tiling) >= least


@pytest.mark.parametrize("tiling", [PLAIN, COPIED])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([33], [32768]),
        ([64], [32768]),
        ([256], [16384]),
        ([640], [32768]),
        ([40, 2000], [32768, 2000]),
    ],
)
def test_a_short_chunk_of_a_long_context_has_the_whole_device(
    tiling: PrefillTiling, query_lens: list[int], seq_lens: list[int]
) -> None:
    tiles = tiles_of(query_lens, seq_lens, tiling)
    assert efficiency(query_runs(tiles, WHOLE), tiling) < 0.65
    runs = cut(tiles, tiling)
    assert efficiency(runs, tiling) >= (0.9 if tiling == PLAIN else 0.85)
    assert runs.num_places == sum(num for _, _, _, num in runs.splits)


@pytest.mark.parametrize(
    ("num_kv_heads", "query_len", "seq_len"), [(8, 512, 8192), (4, 1024, 8192), (2, 2048, 8192), (2, 2048, 32768)]
)
def test_no_place_is_empty_where_a_multiprocessor_has_room_for_two(
    num_kv_heads: int, query_len: int, seq_len: int
) -> None:
    """The longer chunks are those of a model whose heads several GPUs share."""
    runs = cut(tiles_of([query_len], [seq_len], COPIED), COPIED, num_kv_heads)
    assert efficiency(runs, COPIED, num_kv_heads) >= 0.85


def test_the_backend_cuts_for_all_programs_of_every_multiprocessor() -> None:
    backend = TritonBackend(torch.device("cpu"))
    backend._num_processors = NUM_PROCESSORS
    batch: Any = SimpleNamespace(query_lens=(512,), seq_lens=(8192,), query_start_B1=torch.zeros(2))
    for tiling in NUM_PROGRAMS:
        _, [(runs_R5, _, _)] = backend._cut(batch, tiling, SHAPE, NUM_KV_HEADS, None)
        assert len(runs_R5) == len(cut(tiles_of([512], [8192], tiling), tiling).runs)


@pytest.mark.parametrize("tiling", [PLAIN, COPIED])
def test_what_is_short_is_not_cut(tiling: PrefillTiling) -> None:
    for query_lens, seq_lens in (([64], [64]), ([300], [300]), ([17], [500])):
        runs = cut(tiles_of(query_lens, seq_lens, tiling), tiling)
        assert (runs.splits, runs.num_places) == ([], 0)
        assert {place for _, _, _, _, place in runs.runs} == {NO_PLACE}


def test_tiles_that_see_most_keys_come_first() -> None:
    def order(query_lens: list[int], seq_lens: list[int], window: int | None) -> list[tuple[int, int]]:
        return [(tile.slice_index, tile.first) for tile in query_tiles(query_lens, seq_lens, 4, 1, window)]

    assert order([3, 1, 8], [3, 100, 8], None) == [(1, 0), (2, 4), (2, 0), (0, 0)]
    assert order([3, 1, 8], [90, 100, 8], 5) == [(2, 4), (0, 0), (1, 0), (2, 0)]  # they see 8, 7, 5, 4


def test_tiles_cover_every_token_once() -> None:
    query_lens, skipped = [1, 3, 1, 8, 9], 1
    tiles = query_tiles(query_lens, [50, 30, 1, 8, 12], 4, 16, None, skipped)
    tokens = [(tile.slice_index, tile.first + index) for tile in tiles for index in range(tile.num_tokens)]
    assert sorted(tokens) == [(row, each) for row in range(skipped, len(query_lens)) for each in range(query_lens[row])]
    assert sorted(tile.token + index for tile in tiles for index in range(tile.num_tokens)) == list(range(1, 22))


def test_the_runs_of_a_tile_cover_its_keys_and_have_places_side_by_side() -> None:
    tiles = query_tiles([9, 4], [700, 150], 4, 16, 600)
    runs = query_runs(tiles, 5)
    for tile in tiles:
        ours = sorted(run[2:] for run in runs.runs if run[:2] == (tile.slice_index, tile.first))
        assert [begin for begin, _, _ in ours] == [tile.begin, *(end for _, end, _ in ours[:-1])]
        assert ours[-1][1] == tile.end
        assert all(0 < end - begin <= 5 for begin, end, _ in ours)
        places = [place for _, _, place in ours]
        assert places == list(range(places[0], places[0] + len(ours)))
        assert (tile.token, tile.num_tokens, places[0], len(ours)) in runs.splits
    assert sorted(place for *_, place in runs.runs) == list(range(runs.num_places))
