"""The work of decode attention as a list of runs. The list is made on the device, once per step.

A run is a range of key tiles of one sequence. The length of the runs follows from the lengths of all sequences, so that
every multiprocessor gets its share. Then a long sequence among short ones does not keep a few multiprocessors busy
while the others wait. The list, and with it the grid of a captured graph, has room for the greatest possible number of
runs: one for each sequence and one for each share. So few programs have no run.

If results may not depend on the batch, runs begin at the multiples of a fixed number of tiles instead. There may be far
more of them then than a GPU computes at a time, so a program takes several in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import num_tiles

_AT_ONCE = tl.constexpr(128)
"""Number of lengths that are read, and of runs that are written, at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRuns:
    """At most R runs of B sequences, as 32-bit integers on the device."""

    runs_R4: torch.Tensor
    """(sequence, first tile of keys, one past the last, 1 if the sequence has no other run). The partial result of a
    run has the run's number as its place."""
    num_runs_1: torch.Tensor
    """Number of runs."""
    splits_B4: torch.Tensor
    """(sequence, 1, first place, places), as `combine` takes them."""
    num_programs: int
    """Programs of a KV head, which take the runs in turn if there are more of these."""


def most_runs(batch: int, wanted: int, max_tiles: int, least_tiles: int) -> int:
    """Greatest number of runs of `batch` sequences of up to `max_tiles` tiles of keys each. If it is `batch`, no
    sequence is cut."""
    return min(batch + wanted, batch * max(1, (max_tiles + least_tiles // 2) // least_tiles))


def decode_runs(
    seq_lens_B: torch.Tensor,
    *,
    window: int | None,
    max_seq_len: int,
    tile: int,
    wanted: int,
    least_tiles: int,
    run_tiles: int = 0,
) -> DecodeRuns:
    """Cut contexts into about `wanted` runs of tiles of `tile` keys, none shorter than about `least_tiles` tiles; with
    `run_tiles`, at the multiples of as many tiles.

    No length may exceed `max_seq_len`. A sequence of length 0 has one run without keys.
    """
    batch, device = seq_lens_B.shape[0], seq_lens_B.device
    most_keys = max_seq_len if window is None else min(max_seq_len, window + tile - 1)  # a window may begin in a tile
    if run_tiles:
        most_of_one = num_tiles(max_seq_len, run_tiles * tile)
        if window is not None:
            most_of_one = min(most_of_one, num_tiles(window - 1, run_tiles * tile) + 1)
        most = batch * most_of_one
    else:
        most = most_runs(batch, wanted, num_tiles(most_keys, tile), least_tiles)
    runs = DecodeRuns(
        runs_R4=torch.empty(most, 4, dtype=torch.int32, device=device),
        num_runs_1=torch.empty(1, dtype=torch.int32, device=device),
        splits_B4=torch.empty(batch, 4, dtype=torch.int32, device=device),
        num_programs=min(most, batch + wanted),
    )
    _cut[(batch,)](
        seq_lens_B,
        runs.runs_R4,
        runs.num_runs_1,
        runs.splits_B4,
        2**31 - 1 if window is None else window,
        tile,
        wanted,
        least_tiles,
        RUN_TILES=run_tiles,
        num_warps=4,
    )
    return runs


@triton.jit
def _span(lens_ptr, rows, inside, window, tile):
    """The tiles of keys that each sequence sees: (first, one past the last)."""
    lens = tl.load(lens_ptr + rows, mask=inside, other=0).to(tl.int32)
    return tl.maximum(lens - window, 0) // tile, tl.cdiv(lens, tile)


@triton.jit
def _runs_of(begins, ends, share, RUN_TILES: tl.constexpr):
    """(where the first run would begin, tiles per run, number of runs) for contexts that see the tiles [begins, ends),
    with about `share` tiles per run, or RUN_TILES; at least one run each."""
    num_tiles = ends - begins
    if RUN_TILES:
        origins, size = begins // RUN_TILES * RUN_TILES, num_tiles * 0 + RUN_TILES
    else:
        origins, size = begins, tl.maximum(tl.cdiv(num_tiles, tl.maximum((num_tiles + share // 2) // share, 1)), 1)
    return origins, size, tl.maximum(tl.cdiv(ends - origins, size), 1)


@triton.jit(do_not_specialize=["window", "tile", "wanted", "least_tiles"])
def _cut(
    lens_ptr, runs_ptr, num_runs_ptr, splits_ptr, window, tile, wanted, least_tiles, RUN_TILES: tl.constexpr
):  # fmt: skip
    """Write the runs of one sequence, after those of the sequences before it."""
    row, batch = tl.program_id(0), tl.num_programs(0)
    total = 0
    for start in range(0, batch, _AT_ONCE):
        rows = start + tl.arange(0, _AT_ONCE)
        begins, ends = _span(lens_ptr, rows, rows < batch, window, tile)
        total += tl.sum(ends - begins, axis=0)
    share = tl.maximum(tl.cdiv(total, wanted), least_tiles)
    place = 0
    for start in range(0, row, _AT_ONCE):
        rows = start + tl.arange(0, _AT_ONCE)
        begins, ends = _span(lens_ptr, rows, rows < row, window, tile)
        _, _, nums = _runs_of(begins, ends, share, RUN_TILES)
        place += tl.sum(tl.where(rows < row, nums, 0), axis=0)
    begin, end = _span(lens_ptr, row, True, window, tile)
    origin, size, num = _runs_of(begin, end, share, RUN_TILES)
    for start in range(0, num, _AT_ONCE):
        each = start + tl.arange(0, _AT_ONCE)
        inside = each < num
        run_ptr = runs_ptr + (place + each) * 4
        tl.store(run_ptr, row, mask=inside)
        tl.store(run_ptr + 1, tl.maximum(origin + each * size, begin), mask=inside)
        tl.store(run_ptr + 2, tl.minimum(origin + (each + 1) * size, end), mask=inside)
        tl.store(run_ptr + 3, (num == 1).to(tl.int32), mask=inside)
    split_ptr = splits_ptr + row * 4
    tl.store(split_ptr, row)
    tl.store(split_ptr + 1, 1)
    tl.store(split_ptr + 2, place)
    tl.store(split_ptr + 3, num)
    if row == batch - 1:
        tl.store(num_runs_ptr, place + num)
