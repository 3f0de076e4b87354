"""Attention of one token per sequence to the paged cache, split along the context ("Flash-Decoding", 2023).

A program computes the query heads of one KV head, for one sequence, over one run of key tiles (`decode_runs`), or one
after another over several. The grid is fixed for a batch, so that a captured graph can be replayed; programs without a
run end at once. If a sequence has one run, that run writes the output. If it has several, a second kernel combines
their results.

Shapes: B sequences, H query heads, K KV heads, G = H / K, D head dimension, M blocks of the longest table, R runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.kernels.combine import combine
from common.engine.kernels.decode_runs import DecodeRuns, decode_runs
from common.engine.kernels.tiles import LOG2_E, await_inputs, early, key_offsets, load_tile, padded, soften, widens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """The sizes and options with which the kernel is compiled, and how it splits contexts."""

    tile: int = 64
    """Keys per tile; a power of two."""
    num_warps: int = 4
    num_stages: int = 5
    """The address of a tile depends on another load, from the block table, so this many stages keep two tiles under
    way."""
    programs_per_processor: float = 2.0
    """Contexts are split until there are this many programs per multiprocessor."""
    least_tiles: int = 2
    """Least tiles of a run. With fewer, splitting costs more than it gains."""
    run_tiles: int = 0
    """Tiles of every run, at whose multiples contexts are split. Then whatever is added up is added in one order: runs
    in that of their positions, the weights of a tile as `tiles.soften` says. 0: as many as the batch asks for."""

    def runs(
        self, seq_lens_B: torch.Tensor, *, window: int | None, max_seq_len: int, num_kv_heads: int, num_processors: int
    ) -> DecodeRuns:
        """Split contexts into runs, for every layer with this window. `max_seq_len`, the greatest possible length,
        decides the size of the grid."""
        return decode_runs(
            seq_lens_B,
            window=window,
            max_seq_len=max_seq_len,
            tile=self.tile,
            wanted=max(1, round(self.programs_per_processor * num_processors / num_kv_heads)),
            least_tiles=self.least_tiles,
            run_tiles=self.run_tiles,
        )


def decode_attention(
    q_BHD: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables_BM: torch.Tensor,
    seq_lens_B: torch.Tensor,
    runs: DecodeRuns,
    *,
    window: int | None,
    scale: float,
    tiling: DecodeTiling,
    out_BHD: torch.Tensor,
) -> None:
    """Write each token's attention to positions `[max(0, len - window), len)` of its sequence into `out_BHD`.

    `kv_layer` is `[num_blocks, K, 2, block_size, D]`, with any stride between blocks and between heads. A length of 0
    gives zeros. The runs must have been made for this tiling, these lengths and this window.
    """
    batch, num_heads, head_dim = q_BHD.shape
    _, num_kv_heads, _, block_size, _ = kv_layer.shape
    group, most_runs = num_heads // num_kv_heads, runs.runs_R4.shape[0]
    assert kv_layer.stride()[2:] == (block_size * head_dim, head_dim, 1)
    assert q_BHD.stride(2) == out_BHD.stride(2) == block_tables_BM.stride(1) == 1
    partial = q_BHD.new_empty(most_runs, num_kv_heads, group, head_dim, dtype=torch.float32)
    stats = q_BHD.new_empty(most_runs, num_kv_heads, group, 2, dtype=torch.float32)
    _decode[num_kv_heads, runs.num_programs](
        q_BHD,
        kv_layer,
        block_tables_BM,
        seq_lens_B,
        runs.runs_R4,
        runs.num_runs_1,
        out_BHD,
        partial,
        stats,
        scale * LOG2_E,
        2**31 - 1 if window is None else window,
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
        WIDEN=widens(q_BHD),
        IN_TURN=runs.num_programs < most_runs,
        IN_ORDER=tiling.run_tiles > 0,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **early(),
    )
    if most_runs > batch:
        combine(partial, stats, runs.splits_B4, group, out_BHD, 1 if tiling.run_tiles else 16)


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    q_ptr,
    kv_ptr,
    tables_ptr,
    lens_ptr,
    runs_ptr,
    num_runs_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale_log2,
    window,
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
    WIDEN: tl.constexpr,
    IN_TURN: tl.constexpr,
    IN_ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute a run, or IN_TURN several."""
    await_inputs(EARLY)
    num_runs = tl.load(num_runs_ptr)
    if IN_TURN:
        for run in range(tl.program_id(1), num_runs, tl.num_programs(1)):
            _compute_run(
                run, q_ptr, kv_ptr, tables_ptr, lens_ptr, runs_ptr, out_ptr, partial_ptr, stats_ptr, scale_log2, window,
                q_stride_b, q_stride_h, out_stride_b, out_stride_h, block_stride, head_stride, table_stride,
                GROUP, GROUP_PAD, D, D_PAD, BLOCK_SIZE, TILE, WIDEN, IN_ORDER,
            )  # fmt: skip
    else:
        if tl.program_id(1) < num_runs:
            _compute_run(
                tl.program_id(1), q_ptr, kv_ptr, tables_ptr, lens_ptr, runs_ptr, out_ptr, partial_ptr, stats_ptr,
                scale_log2, window,
                q_stride_b, q_stride_h, out_stride_b, out_stride_h, block_stride, head_stride, table_stride,
                GROUP, GROUP_PAD, D, D_PAD, BLOCK_SIZE, TILE, WIDEN, IN_ORDER,
            )  # fmt: skip


@triton.jit
def _compute_run(
    run,
    q_ptr,
    kv_ptr,
    tables_ptr,
    lens_ptr,
    runs_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    scale_log2,
    window,
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
    WIDEN: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """Compute one run of keys of one sequence."""
    kv_head = tl.program_id(0)
    run_ptr = runs_ptr + run * 4
    row = tl.load(run_ptr).to(tl.int64)
    begin, end, alone = tl.load(run_ptr + 1), tl.load(run_ptr + 2), tl.load(run_ptr + 3)
    seq_len = tl.load(lens_ptr + row).to(tl.int32)
    first = tl.maximum(seq_len - window, 0)
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
    for tile in range(begin, end):
        start = tile * TILE
        positions = start + tl.arange(0, TILE)
        written = positions < seq_len
        offsets = key_offsets(
            tables_ptr + row * table_stride, start, seq_len, block_stride, D, BLOCK_SIZE, TILE
        )  # fmt: skip
        k_ND = load_tile(keys_ptr, offsets, written, D, D_PAD, WIDEN, True, q_GD)
        v_ND = load_tile(keys_ptr + BLOCK_SIZE * D, offsets, written, D, D_PAD, WIDEN, True, q_GD)
        visible = (written & (positions >= first))[None, :]
        acc_GD, max_G, sum_G = soften(q_GD, k_ND, v_ND, visible, acc_GD, max_G, sum_G, scale_log2, True, IN_ORDER)
    if alone != 0:
        out = acc_GD / tl.where(sum_G > 0, sum_G, 1.0)[:, None]
        place = out_ptr + row * out_stride_b + heads[:, None] * out_stride_h + dims[None, :]
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        run_G = tl.cast(run, tl.int64) * tl.num_programs(0) * GROUP + heads
        tl.store(partial_ptr + run_G[:, None] * D + dims[None, :], acc_GD, mask=inside)
        one_of_ours = tl.arange(0, GROUP_PAD) < GROUP
        tl.store(stats_ptr + run_G * 2, max_G, mask=one_of_ours)
        tl.store(stats_ptr + run_G * 2 + 1, sum_G, mask=one_of_ours)
