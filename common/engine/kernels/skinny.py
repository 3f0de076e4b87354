"""Products of a few rows with a weight, which is read once: what a decode step of a small batch spends its time on.

A program has some outputs for all rows. Where that gives fewer programs than there are multiprocessors, the inputs are
split, too: the partial sums are then added, in the order of the splits, by a second kernel, so that the result is the
same every time. What comes after a product is done with it:

* `silu(gate) * up` of a product that has gates, then what they let through: a program has both of its outputs.
* The addition of the result to what it is the residual of.

A kernel that is launched early fetches the first weights of each program into the GPU's cache while the kernels before
it still run. Sums are float32, and rounded once. Shapes: M rows, K inputs, N outputs, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import await_inputs, early, num_tiles, padded, widens
from common.engine.linear import FEW_ROWS

_SUM_TILE = 256
"""Outputs that a program adds the partial sums of."""
_LINE_BYTES = 128
"""Bytes of a cache line."""
_FETCHED_BYTES = 16 * 2**20
"""Most bytes that a product fetches before its input is there: of a cache of 50 MiB (H100) and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyTiling:
    """How the work is cut."""

    columns: int = 32
    """Outputs of a program; of a gated product so many gates, and what they let through."""
    depth: int = 128
    """Inputs that are multiplied at a time."""
    splits: int = 1
    """Most parts that the inputs are cut into."""
    num_warps: int = 4
    num_stages: int = 4
    lines: int = 16
    """Most cache lines of each row of the weight that are fetched before the input is there; a power of two."""


def skinny(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    tiling: SkinnyTiling,
    *,
    gated: bool = False,
    onto_MN: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` of at most `FEW_ROWS` rows, in the type of both.

    If `gated`, the first half of the outputs are gates of the second: `[M, N / 2]`. The result is added to `onto_MN`
    where that is given, in place.
    """
    num_rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0] // (2 if gated else 1)
    given = [x_MK, weight_NK, bias_N, onto_MN]
    assert all(each.is_contiguous() for each in given if each is not None)
    assert num_rows <= FEW_ROWS
    assert weight_NK.shape[1] == inputs
    out_MN = x_MK.new_empty(num_rows, outputs) if onto_MN is None else onto_MN
    depth = min(tiling.depth, padded(inputs))
    split_depth = num_tiles(num_tiles(inputs, tiling.splits), depth) * depth
    num_splits = num_tiles(inputs, split_depth)
    programs = num_tiles(outputs, tiling.columns)
    line = _LINE_BYTES // weight_NK.itemsize
    most_lines = max(1, _FETCHED_BYTES // (weight_NK.shape[0] * num_splits * _LINE_BYTES))
    kept = num_splits > 1
    partial_SMN = x_MK.new_empty(num_splits if kept else 0, num_rows, weight_NK.shape[0], dtype=torch.float32)
    bias = out_MN if bias_N is None else bias_N
    flags = {"GATED": gated, "BIAS": bias_N is not None, "ADD": onto_MN is not None}
    _skinny[programs, num_splits](
        x_MK, weight_NK, bias, out_MN, partial_SMN, num_rows,
        OUTPUTS=outputs, INPUTS=inputs, SPLIT_DEPTH=split_depth, SPLIT=kept,
        EVEN=outputs % tiling.columns == 0 and inputs % split_depth == 0,
        ROWS=FEW_ROWS, COLUMNS=tiling.columns, DEPTH=depth, WIDEN=widens(x_MK), **flags,
        LINE=line, LINES=min(tiling.lines, 1 << (most_lines.bit_length() - 1), padded(num_tiles(split_depth, line), 1)),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **early(),
    )  # fmt: skip
    if kept:
        _skinny_sum[num_tiles(outputs, _SUM_TILE), num_rows](
            partial_SMN, bias, out_MN, OUTPUTS=outputs, SPLITS=num_splits, COLUMNS=_SUM_TILE, **flags, num_warps=4,
            **early(),
        )  # fmt: skip
    return out_MN


@triton.jit(do_not_specialize=["num_rows"])
def _skinny(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT_DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some outputs, of some inputs."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place_N = weight_ptr + columns.to(tl.int64)[:, None] * INPUTS
    acc_MN = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_MN = tl.zeros([ROWS, COLUMNS], tl.float32)
    begin = tl.program_id(1) * SPLIT_DEPTH
    if EARLY:
        lines = tl.minimum(begin + tl.arange(0, LINES) * LINE, INPUTS - 1)
        line_NL = weight_ptr + tl.minimum(columns, OUTPUTS - 1).to(tl.int64)[:, None] * INPUTS + lines[None, :]
        _fetch(line_NL)
        if GATED:
            _fetch(line_NL + tl.cast(OUTPUTS, tl.int64) * INPUTS)
    await_inputs(EARLY)
    for start in range(0, SPLIT_DEPTH, DEPTH):
        depths = begin + start + tl.arange(0, DEPTH)
        inside_K = depths < INPUTS
        inside_MK = (rows < num_rows)[:, None] & inside_K[None, :]
        x_MK = tl.load(x_ptr + rows[:, None] * INPUTS + depths[None, :], mask=inside_MK, other=0.0)
        if WIDEN:
            x_MK = x_MK.to(tl.float32)
        inside_NK = (columns < OUTPUTS)[:, None] & inside_K[None, :]
        acc_MN = _product(x_MK, place_N + depths[None, :], inside_NK, acc_MN, EVEN, WIDEN)
        if GATED:
            up_place = place_N + tl.cast(OUTPUTS, tl.int64) * INPUTS + depths[None, :]
            up_MN = _product(x_MK, up_place, inside_NK, up_MN, EVEN, WIDEN)
    if SPLIT:
        WIDTH: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
        of_split = tl.program_id(1) * num_rows + rows
        inside = (rows < num_rows)[:, None] & (columns < OUTPUTS)[None, :]
        partial = partial_ptr + of_split[:, None] * WIDTH + columns[None, :]
        tl.store(partial, acc_MN, mask=inside)
        if GATED:
            tl.store(partial + OUTPUTS, up_MN, mask=inside)
    else:
        _finish(acc_MN, up_MN, rows, columns, num_rows, bias_ptr, out_ptr, OUTPUTS, GATED, BIAS, ADD)


@triton.jit
def _fetch(line_ptrs):
    """Fetch cache lines into the GPU's cache of the second level."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line_ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _product(x_MK, place_NK, inside_NK, acc_MN, EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """`acc` plus the product of `x` with a tile of weights."""
    if EVEN:
        weight_NK = tl.load(place_NK)
    else:
        weight_NK = tl.load(place_NK, mask=inside_NK, other=0.0)
    if WIDEN:
        weight_NK = weight_NK.to(tl.float32)
    return tl.dot(x_MK, tl.trans(weight_NK), acc_MN, input_precision="tf32x3")


@triton.jit
def _finish(
    acc_MN,
    up_MN,
    rows,
    columns,
    num_rows,
    bias_ptr,
    out_ptr,
    OUTPUTS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Let what was summed through the gates, add it to what is there, and store it."""
    inside_N = columns < OUTPUTS
    if BIAS:
        acc_MN += tl.load(bias_ptr + columns, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up_MN += tl.load(bias_ptr + OUTPUTS + columns, mask=inside_N, other=0.0).to(tl.float32)[None, :]
        acc_MN = acc_MN / (1.0 + tl.exp(-acc_MN)) * up_MN
    inside = (rows < num_rows)[:, None] & inside_N[None, :]
    place = out_ptr + rows[:, None] * OUTPUTS + columns[None, :]
    if ADD:
        acc_MN += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, acc_MN.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _skinny_sum(
    partial_ptr,
    bias_ptr,
    out_ptr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some outputs of a row: the sums of its splits, one after the other."""
    await_inputs(EARLY)
    WIDTH: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    num_rows = tl.num_programs(1)
    rows = tl.program_id(1) + tl.arange(0, 1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < OUTPUTS)[None, :]
    acc_MN = tl.zeros([1, COLUMNS], tl.float32)
    up_MN = tl.zeros([1, COLUMNS], tl.float32)
    for split in tl.static_range(SPLITS):
        of_split = split * num_rows + rows
        partial = partial_ptr + of_split[:, None] * WIDTH + columns[None, :]
        acc_MN += tl.load(partial, mask=inside, other=0.0)
        if GATED:
            up_MN += tl.load(partial + OUTPUTS, mask=inside, other=0.0)
    _finish(acc_MN, up_MN, rows, columns, num_rows, bias_ptr, out_ptr, OUTPUTS, GATED, BIAS, ADD)
