"""The work of prefill attention as a list of runs: which program computes which queries over which keys, in which
order.

A tile of queries is some tokens of one slice, with all the query heads that share a KV head. One program per KV head
computes it. Where the tiles are too few for the device, a tile is cut along its keys into runs, whose results are
combined. The lists are plain integers, made on the host once per step and window.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WHOLE = 2**31 - 1
"""A length of runs, in tiles of keys, at which nothing is cut."""
NO_PLACE = -1
_PARTS = (1, 2, 3, 4)
"""Numbers of runs for each program that runs at a time, which are tried."""
_RUN_COST = 1
"""Cost of storing the partial result of a run, in the time that a tile of keys takes."""
_COMBINE_COST = 5
"""Cost of starting the kernel that combines partial results, and of waiting for it, in the same unit."""


class QueryTile(NamedTuple):
    """Tokens `[first, first + num_tokens)` of a slice, and the tiles of keys `[begin, end)` that they see."""

    slice_index: int
    first: int
    num_tokens: int
    token: int
    """Place of token `first` in the batch."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRuns:
    """The lists that the kernels read as 32-bit integers."""

    runs: list[tuple[int, int, int, int, int]]
    """(slice, first token within it, first tile of keys, one past the last, place of the partial result), the longest
    run first.

    The place is NO_PLACE for a tile of queries that is not cut.
    """
    splits: list[tuple[int, int, int, int]]
    """(first token in the batch, tokens, first place, places) of each tile of queries that is cut."""
    num_places: int


def query_tiles(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_tokens: int,
    key_tile: int,
    window: int | None,
    skipped: int = 0,
) -> list[QueryTile]:
    """Cut every slice but the first `skipped` into tiles of up to `num_tokens` tokens. The tiles that see most keys
    come first.

    These take longest, and the tiles that start last should be short.
    """
    tiles, token = [], sum(query_lens[:skipped])
    for index in range(skipped, len(query_lens)):
        query_len, seq_len = query_lens[index], seq_lens[index]
        for first in range(0, query_len, num_tokens):
            num = min(num_tokens, query_len - first)
            lowest = seq_len - query_len + first
            begin = 0 if window is None else max(0, lowest - window + 1) // key_tile
            tiles.append(QueryTile(index, first, num, token + first, begin, -(-(lowest + num) // key_tile)))
        token += query_len
    tiles.sort(key=lambda tile: tile.begin - tile.end)
    return tiles


def longest_run(tiles: Sequence[QueryTile], num_kv_heads: int, num_programs: int, least_tiles: int) -> int:
    """Most tiles of keys that a run should have, at least `least_tiles`; WHOLE if cutting costs more than it gains.

    It is found by a model of the device: it runs `num_programs` programs at a time, on each multiprocessor as many as
    that has room for, and starts the next one when one has ended. The model does not know that a program may be faster
    when it has a multiprocessor for itself. All KV heads cost the same, so each has its share of the programs.
    """
    num = max(1, num_programs // num_kv_heads)
    costs = [tile.end - tile.begin for tile in tiles]
    total = sum(costs)
    best, least_cost = WHOLE, busy_for(costs, num)
    if least_cost - total / num <= _COMBINE_COST:
        return WHOLE
    for parts in _PARTS:
        longest = max(least_tiles, -(-total // (parts * num)))
        cut = [cost for tile in tiles for cost in _costs(tile, longest)]
        cost = busy_for(sorted(cut, reverse=True), num) + _COMBINE_COST
        if cost < least_cost:
            best, least_cost = longest, cost
    return best


def busy_for(costs: Sequence[int], num_programs: int) -> int:
    """The time at which the last program ends, if `num_programs` run at a time. Programs start in the order of `costs`,
    each as soon as one has ended."""
    free_at = [0] * num_programs
    for cost in costs:
        heapq.heapreplace(free_at, free_at[0] + cost)
    return max(free_at)


def query_runs(tiles: Sequence[QueryTile], longest: int) -> QueryRuns:
    """Cut `tiles` into runs of at most `longest` tiles of keys each."""
    return _runs_at(tiles, [list(range(tile.begin, tile.end, _run_size(tile, longest))) for tile in tiles])


def aligned_runs(tiles: Sequence[QueryTile], size: int, most_places: int) -> list[QueryRuns]:
    """Cut `tiles` at the multiples of `size` tiles of keys: so runs do not depend on what else there is to compute.

    They are several lists, to be computed one after another, if one would have more than `most_places` places; a list
    has more than that only for a single tile of queries.
    """
    begins = [[tile.begin, *range((tile.begin // size + 1) * size, tile.end, size)] for tile in tiles]
    made, first, num_places = [], 0, 0
    for index, of_tile in enumerate(begins):
        places = len(of_tile) if len(of_tile) > 1 else 0
        if num_places + places > most_places and index > first:
            made.append(_runs_at(tiles[first:index], begins[first:index]))
            first, num_places = index, 0
        num_places += places
    return [*made, _runs_at(tiles[first:], begins[first:])]


def _runs_at(tiles: Sequence[QueryTile], begins_of: Sequence[Sequence[int]]) -> QueryRuns:
    """Cut each tile where its runs begin."""
    runs, splits, place = [], [], 0
    for tile, begins in zip(tiles, begins_of, strict=True):
        if len(begins) == 1:
            runs.append((tile.slice_index, tile.first, tile.begin, tile.end, NO_PLACE))
            continue
        splits.append((tile.token, tile.num_tokens, place, len(begins)))
        for begin, end in zip(begins, [*begins[1:], tile.end], strict=True):
            runs.append((tile.slice_index, tile.first, begin, end, place))
            place += 1
    runs.sort(key=lambda run: run[2] - run[3])
    return QueryRuns(runs=runs, splits=splits, num_places=place)


def _run_size(tile: QueryTile, longest: int) -> int:
    """Tiles of keys per run. The last run of a tile has about as many as the others."""
    num_keys = tile.end - tile.begin
    return -(-num_keys // -(-num_keys // longest))


def _costs(tile: QueryTile, longest: int) -> list[int]:
    """Costs of the runs of a tile."""
    num_keys = tile.end - tile.begin
    if num_keys <= longest:
        return [num_keys]
    size = _run_size(tile, longest)
    return [min(size, num_keys - begin) + _RUN_COST for begin in range(0, num_keys, size)]
