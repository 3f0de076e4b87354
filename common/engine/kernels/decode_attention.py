"""Attention of one token per sequence to the paged cache, split along the context ("Flash-Decoding", 2023).

A program takes the query heads of one KV head, of one sequence, over a run of key tiles. The grid is fixed by the
batch, so that a captured graph can be replayed. Into how many runs each context is cut is decided on the device, by the
lengths of all: runs are about as long as it takes for every multiprocessor to have its share, so that one long sequence
among short ones does not keep a few of them busy while the others wait. Programs without a run end at once. The only
run of a sequence is written to the output; of several the results are combined by a second kernel.

Shapes: B sequences, H query heads, K KV heads, G = H / K, D head dimension, M blocks of the longest table, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import LOG2_E, key_offsets, load_tile, padded, soften, widens

MAX_SPLITS = 128
_PROGRAMS = 16
"""For each multiprocessor, in a grid; most of them have no run."""
_LENS = tl.constexpr(128)
"""Lengths that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """How the kernel is cut and compiled."""

    tile: int = 64
    """Keys that a program takes at a time; a power of two."""
    num_warps: int = 4
    num_stages: int = 5
    """The address of a tile comes from the block table, by another load: so many keep two tiles on their way."""
    programs_per_processor: float = 2.0
    """The context is split until there are so many programs for each multiprocessor."""
    least_tiles: int = 2
    """Tiles of a split: below this, splitting costs more than it gains."""

    def num_runs(self, num_kv_heads: int, num_processors: int) -> int:
        """Of all sequences together, for each KV head."""
        return max(1, round(self.programs_per_processor * num_processors / num_kv_heads))

    def num_splits(self, batch: int, num_kv_heads: int, max_seq_len: int, num_processors: int) -> int:
        """Most runs of one sequence, a power of two: enough for a sequence that is alone, but for large batches.

        Those would have too many programs without a run; what few splits they have are for sequences that are longer
        than the others.
        """
        wanted = self.num_runs(num_kv_heads, num_processors)
        most = min(MAX_SPLITS, max_seq_len // (self.tile * self.least_tiles))
        most = min(most, max(4, _PROGRAMS * num_processors // (batch * num_kv_heads)))
        num = 1
        while 2 * num <= most and 1.5 * num < wanted:
            num *= 2
        return num


def decode_attention(
    q_BHD: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables_BM: torch.Tensor,
    seq_lens_B: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    max_seq_len: int,
    num_processors: int,
    tiling: DecodeTiling,
    out_BHD: torch.Tensor,
) -> None:
    """Write each token's attention to its sequence into `out_BHD`: positions `[max(0, len - window), len)`.

    `kv_layer` is `[num_blocks, K, 2, block_size, D]`, any stride between blocks and between heads. A length of 0 gives
    zeros; none is above `max_seq_len`, by which the grid is made.
    """
    batch, num_heads, head_dim = q_BHD.shape
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    assert kv_layer.stride()[2:] == (block_size * head_dim, head_dim, 1)
    assert q_BHD.stride(2) == out_BHD.stride(2) == block_tables_BM.stride(1) == 1
    num_splits = tiling.num_splits(batch, num_kv_heads, max_seq_len, num_processors)
    num_runs = tiling.num_runs(num_kv_heads, num_processors)
    partial = q_BHD.new_empty(batch, num_heads, num_splits, head_dim, dtype=torch.float32)
    stats = q_BHD.new_empty(batch, num_heads, num_splits, 2, dtype=torch.float32)
    _decode[batch, num_kv_heads, num_splits](
        q_BHD,
        kv_layer,
        block_tables_BM,
        seq_lens_B,
        out_BHD,
        partial,
        stats,
        scale * LOG2_E,
        2**31 - 1 if window is None else window,
        num_runs,
        q_BHD.stride(0),
        q_BHD.stride(1),
        out_BHD.stride(0),
        out_BHD.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        block_tables_BM.stride(0),
        GROUP=group,
        GROUP_PAD=padded(group),
        D=head_dim,
        D_PAD=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tiling.tile,
        LEAST_TILES=tiling.least_tiles,
        WIDEN=widens(q_BHD),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        _combine[batch, num_heads](
            partial,
            stats,
            seq_lens_B,
            out_BHD,
            2**31 - 1 if window is None else window,
            num_runs,
            out_BHD.stride(0),
            out_BHD.stride(1),
            tiling.tile,
            tiling.least_tiles,
            D=head_dim,
            D_PAD=padded(head_dim),
            SPLITS=num_splits,
            num_warps=4,
        )


@triton.jit
def _cut(lens_ptr, row, window, num_runs, num_splits, tile, least_tiles):
    """(length of a row's sequence, first position that it sees, its first tile, one past its last, tiles of a run)."""
    total = 0
    for start in range(0, tl.num_programs(0), _LENS):
        rows = start + tl.arange(0, _LENS)
        lens = tl.load(lens_ptr + rows, mask=rows < tl.num_programs(0), other=0).to(tl.int32)
        total += tl.sum(tl.cdiv(tl.minimum(lens, window), tile), axis=0)
    seq_len = tl.load(lens_ptr + row).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
    begin, end = first // tile, tl.cdiv(seq_len, tile)
    share = tl.maximum(tl.cdiv(total, num_runs), least_tiles)
    runs = tl.minimum((end - begin + share // 2) // share, num_splits)
    return seq_len, first, begin, end, tl.cdiv(end - begin, tl.maximum(runs, 1))


@triton.jit(do_not_specialize=["table_stride", "num_runs"])
def _decode(
    q_ptr,
    kv_ptr,
    tables_ptr,
    lens_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale_log2,
    window,
    num_runs,
    q_stride_b,
    q_stride_h,
    out_stride_b,
    out_stride_h,
    block_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seq_len, first, begin, end, per_run = _cut(
        lens_ptr, row, window, num_runs, tl.num_programs(2), TILE, LEAST_TILES
    )  # fmt: skip
    alone = per_run >= end - begin
    begin += split * per_run
    if (split > 0) & (begin >= end):
        return
    heads = kv_head * GROUP + tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D_PAD)
    inside = (tl.arange(0, GROUP_PAD) < GROUP)[:, None] & (dims < D)[None, :]
    q_GD = tl.load(q_ptr + row * q_stride_b + heads[:, None] * q_stride_h + dims[None, :], mask=inside, other=0.0)
    if WIDEN:
        q_GD = q_GD.to(tl.float32)
    keys_ptr = kv_ptr + kv_head * head_stride
    max_G = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    sum_G = tl.zeros([GROUP_PAD], tl.float32)
    acc_GD = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for tile in range(begin, tl.minimum(begin + per_run, end)):
        start = tile * TILE
        positions = start + tl.arange(0, TILE)
        written = positions < seq_len
        offsets = key_offsets(
            tables_ptr + row * table_stride, start, seq_len, block_stride, D, BLOCK_SIZE, TILE
        )  # fmt: skip
        k_ND = load_tile(keys_ptr, offsets, written, D, D_PAD, WIDEN, True, q_GD)
        v_ND = load_tile(keys_ptr + BLOCK_SIZE * D, offsets, written, D, D_PAD, WIDEN, True, q_GD)
        visible = (written & (positions >= first))[None, :]
        acc_GD, max_G, sum_G = soften(q_GD, k_ND, v_ND, visible, acc_GD, max_G, sum_G, scale_log2, True)
    if alone:
        out = acc_GD / tl.where(sum_G > 0, sum_G, 1.0)[:, None]
        place = out_ptr + row * out_stride_b + heads[:, None] * out_stride_h + dims[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        num_heads = tl.num_programs(1) * GROUP
        run_G = (row * num_heads + heads) * tl.num_programs(2) + split
        tl.store(partial_ptr + run_G[:, None] * D + dims[None, :], acc_GD, mask=inside)
        one_of_ours = tl.arange(0, GROUP_PAD) < GROUP
        tl.store(stats_ptr + run_G * 2, max_G, mask=one_of_ours)
        tl.store(stats_ptr + run_G * 2 + 1, sum_G, mask=one_of_ours)


@triton.jit(do_not_specialize=["num_runs"])
def _combine(
    partial_ptr,
    stats_ptr,
    lens_ptr,
    out_ptr,
    window,
    num_runs,
    out_stride_b,
    out_stride_h,
    tile,
    least_tiles,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Of the runs of a sequence that has several: the other splits have written nothing."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, begin, end, per_run = _cut(lens_ptr, row, window, num_runs, SPLITS, tile, least_tiles)
    if per_run >= end - begin:
        return
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    used_S = begin + splits * per_run < end
    run_S = (row * tl.num_programs(1) + head) * SPLITS + splits
    max_S = tl.load(stats_ptr + run_S * 2, mask=used_S, other=float("-inf"))
    sum_S = tl.load(stats_ptr + run_S * 2 + 1, mask=used_S, other=0.0)
    highest = tl.max(max_S, axis=0)
    weight_S = tl.exp2(max_S - tl.where(highest == float("-inf"), 0.0, highest))
    partial = tl.load(
        partial_ptr + run_S[:, None] * D + dims[None, :], mask=used_S[:, None] & (dims < D)[None, :], other=0.0
    )
    total = tl.sum(sum_S * weight_S, axis=0)
    out = tl.sum(partial * weight_S[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    place = out_ptr + row * out_stride_b + head * out_stride_h + dims
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=dims < D)
