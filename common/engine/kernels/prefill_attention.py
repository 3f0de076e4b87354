"""Attention of prompt chunks of any length to the paged cache, for a ragged batch of any mix.

A program computes a tile of queries: some tokens of one sequence, with all the query heads that share a KV head. Key
tiles that every row sees need no mask; key tiles at the diagonal, or at a window's edge, are masked. The softmax is
online ("FlashAttention-2", arXiv 2307.08691, algorithm 1). Where the tiles are too few for the device, several programs
share one tile of queries, each over a run of its keys (`query_runs`).

A key that a row does not see changes no bit of that row: its weight is exactly 0, and the row's sums are multiplied by
exactly 1, or by anything while they are 0. So a row's result is the same in a tile of keys with a mask and without one,
and whatever other rows its tile of queries has. It depends on how the keys are cut into runs.

Shapes: T tokens of B slices, H query heads, K KV heads, G = H / K, D head dimension, R runs, S tiles of queries that
are cut into several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from common.engine.kernels.combine import combine
from common.engine.kernels.tiles import (
    LOG2_E,
    await_inputs,
    describe,
    early,
    key_offsets,
    load_tile,
    padded,
    soften,
    widens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiling:
    """The sizes and options with which the kernel is compiled, and how it cuts keys into runs."""

    rows: int = 128
    """Rows of queries (tokens times heads) per program; a power of two."""
    tile: int = 64
    """Keys per tile; a power of two."""
    num_warps: int = 8
    num_stages: int = 3
    """The address of a tile depends on another load, from the block table, so this many stages keep one tile under
    way."""
    copy_engine: bool = False
    """Whether the GPU's copy engine loads tiles of keys and values (TMA, from compute capability 9.0 on). A tile must
    lie within one block."""
    least_tiles: int = 8
    """Least tiles of keys of a run. With fewer, cutting costs more than it gains."""
    run_tiles: int = 0
    """See `DecodeTiling`."""
    programs: int = 1
    """Number of programs that a multiprocessor has room for, by which `longest_run` cuts keys into runs."""

    def num_tokens(self, group: int) -> int:
        """Tokens per tile of queries; at least one."""
        return max(1, self.rows // group)


def prefill_attention(
    q_THD: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_start_B1: torch.Tensor,
    seq_lens_B: torch.Tensor,
    runs_R5: torch.Tensor,
    splits_S4: torch.Tensor,
    *,
    num_places: int,
    window: int | None,
    scale: float,
    tiling: PrefillTiling,
    out_THD: torch.Tensor,
    kv_descriptor: TensorDescriptor | None = None,
) -> None:
    """Write the causal attention of each token of the runs to its sequence in the cache into `out_THD`.

    Slice `b` is the last `query_start_B1[b + 1] - query_start_B1[b]` of the `seq_lens_B[b]` tokens of its sequence.
    `runs_R5` and `splits_S4` are those of `query_runs` for this tiling and window, with `num_places` partial results.
    `kv_layer` is `[num_blocks, K, 2, block_size, D]`, with any stride between blocks and between heads.
    `kv_descriptor` is its `describe`, for a tiling with a copy engine, where the caller has it. With a copy engine,
    slots after a sequence's last token must hold finite numbers.
    """
    _, num_heads, head_dim = q_THD.shape
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    num_tokens = tiling.num_tokens(group)
    assert kv_layer.stride()[2:] == (block_size * head_dim, head_dim, 1)
    assert q_THD.stride(2) == out_THD.stride(2) == block_tables_BM.stride(1) == 1
    assert not tiling.copy_engine or block_size % tiling.tile == 0
    num_rows = padded(num_tokens * group)
    partial = q_THD.new_empty(max(1, num_places), num_kv_heads, num_rows, head_dim, dtype=torch.float32)
    stats = q_THD.new_empty(max(1, num_places), num_kv_heads, num_rows, 2, dtype=torch.float32)
    # Programs start in the order of the grid: the heads of a run side by side, and the longest runs first.
    _prefill[num_kv_heads, runs_R5.shape[0]](
        q_THD,
        kv_layer,
        kv_descriptor or describe(kv_layer, tiling.tile) if tiling.copy_engine else kv_layer,
        block_tables_BM,
        query_start_B1,
        seq_lens_B,
        runs_R5,
        out_THD,
        partial,
        stats,
        scale * LOG2_E,
        2**31 - 1 if window is None else window,
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        block_tables_BM.stride(0),
        GROUP=group,
        TOKENS=num_tokens,
        ROWS=num_rows,
        D=head_dim,
        D_PAD=padded(head_dim),
        BLOCK_SIZE=block_size,
        TILE=tiling.tile,
        COPY_ENGINE=tiling.copy_engine,
        IN_ORDER=tiling.run_tiles > 0,
        WIDEN=widens(q_THD),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **early(),
    )
    if splits_S4.shape[0]:
        combine(partial, stats, splits_S4, group, out_THD, 1 if tiling.run_tiles else 16)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    q_ptr,
    kv_ptr,
    kv_desc,
    tables_ptr,
    query_start_ptr,
    lens_ptr,
    runs_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale_log2,
    window,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    block_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    WIDEN: tl.constexpr,
    IN_ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    kv_head = tl.program_id(0)
    run_ptr = runs_ptr + tl.program_id(1) * 5
    row = tl.load(run_ptr).to(tl.int64)
    first_token, begin_tile, end_tile = tl.load(run_ptr + 1), tl.load(run_ptr + 2), tl.load(run_ptr + 3)
    run_place = tl.load(run_ptr + 4)
    begin = tl.load(query_start_ptr + row)
    query_len = (tl.load(query_start_ptr + row + 1) - begin).to(tl.int32)
    seq_len = tl.load(lens_ptr + row).to(tl.int32)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    ours = (rows < TOKENS * GROUP) & (tokens < query_len)
    inside = ours[:, None] & (dims < D)[None, :]
    place_M = (begin + tokens) * q_stride_t + heads * q_stride_h
    q_MD = tl.load(q_ptr + place_M[:, None] + dims[None, :], mask=inside, other=0.0)
    if WIDEN:
        q_MD = q_MD.to(tl.float32)

    # Position p sees (p - window, p]. Rows beyond the tile's tokens see what the last token's rows see.
    lowest = seq_len - query_len + first_token
    highest = tl.minimum(lowest + TOKENS, seq_len) - 1
    position_M = tl.minimum(lowest + rows // GROUP, highest)
    # Every row sees all keys of the tiles [clear_begin, clear_end).
    clear_begin = tl.cdiv(tl.maximum(highest - window + 1, 0), TILE)
    clear_end = tl.maximum((lowest + 1) // TILE, clear_begin)

    max_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MD = tl.zeros([ROWS, D_PAD], tl.float32)
    head_offset = kv_head * head_stride
    table_ptr = tables_ptr + row * table_stride
    for tile in range(begin_tile, tl.minimum(clear_begin, end_tile)):
        acc_MD, max_M, sum_M = _take(
            q_MD, kv_ptr, kv_desc, head_offset, table_ptr, tile, seq_len, position_M, window, block_stride,
            acc_MD, max_M, sum_M, scale_log2, D, D_PAD, BLOCK_SIZE, TILE, COPY_ENGINE, WIDEN, IN_ORDER, True,
        )  # fmt: skip
    for tile in range(tl.maximum(begin_tile, clear_begin), tl.minimum(clear_end, end_tile)):
        acc_MD, max_M, sum_M = _take(
            q_MD, kv_ptr, kv_desc, head_offset, table_ptr, tile, seq_len, position_M, window, block_stride,
            acc_MD, max_M, sum_M, scale_log2, D, D_PAD, BLOCK_SIZE, TILE, COPY_ENGINE, WIDEN, IN_ORDER, False,
        )  # fmt: skip
    for tile in range(tl.maximum(begin_tile, clear_end), end_tile):
        acc_MD, max_M, sum_M = _take(
            q_MD, kv_ptr, kv_desc, head_offset, table_ptr, tile, seq_len, position_M, window, block_stride,
            acc_MD, max_M, sum_M, scale_log2, D, D_PAD, BLOCK_SIZE, TILE, COPY_ENGINE, WIDEN, IN_ORDER, True,
        )  # fmt: skip
    if run_place < 0:
        out_MD = acc_MD / sum_M[:, None]
        place_M = (begin + tokens) * out_stride_t + heads * out_stride_h
        tl.store(out_ptr + place_M[:, None] + dims[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        row_M = (run_place.to(tl.int64) * tl.num_programs(0) + kv_head) * ROWS + rows
        tl.store(partial_ptr + row_M[:, None] * D + dims[None, :], acc_MD, mask=inside)
        tl.store(stats_ptr + row_M * 2, max_M, mask=ours)
        tl.store(stats_ptr + row_M * 2 + 1, sum_M, mask=ours)


@triton.jit
def _take(
    q_MD,
    kv_ptr,
    kv_desc,
    head_offset,
    table_ptr,
    tile,
    seq_len,
    position_M,
    window,
    block_stride,
    acc_MD,
    max_M,
    sum_M,
    scale_log2,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    WIDEN: tl.constexpr,
    IN_ORDER: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take one tile of keys and values into the running softmax."""
    start = tile * TILE
    positions = start + tl.arange(0, TILE)
    if COPY_ENGINE:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        row = ((block * block_stride + head_offset) // D + start % BLOCK_SIZE).to(tl.int32)
        k_ND = kv_desc.load([row, 0])
        v_ND = kv_desc.load([row + BLOCK_SIZE, 0])
        if WIDEN:
            k_ND, v_ND = k_ND.to(tl.float32), v_ND.to(tl.float32)
    else:
        written = positions < seq_len
        keys_ptr = kv_ptr + head_offset
        offsets = key_offsets(table_ptr, start, seq_len, block_stride, D, BLOCK_SIZE, TILE)
        k_ND = load_tile(keys_ptr, offsets, written, D, D_PAD, WIDEN, MASKED, q_MD)
        v_ND = load_tile(keys_ptr + BLOCK_SIZE * D, offsets, written, D, D_PAD, WIDEN, MASKED, q_MD)
    behind_MN = position_M[:, None] - positions[None, :]
    visible_MN = (behind_MN >= 0) & (behind_MN < window)
    return soften(q_MD, k_ND, v_ND, visible_MN, acc_MD, max_M, sum_M, scale_log2, MASKED, IN_ORDER)
