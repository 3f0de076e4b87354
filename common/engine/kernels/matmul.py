"""Products with weights in which an output has the same bits whatever rows are beside it.

A program has a tile of outputs and goes through all inputs, a fixed number at a time: the order in which an output is
summed depends neither on the number of rows nor on the place of its row among them. Libraries choose how they cut the
inputs by the number of rows, so a row's last bits depend on how many others there are. Sums are float32, and rounded
once.

Shapes: M rows, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import num_tiles, padded, widens
from common.engine.linear import MANY_ROWS

_DEPTH_BYTES = 128
"""Bytes of the inputs that are multiplied at a time: the same for every number of rows."""
_GROUP = tl.constexpr(8)
"""Tiles of rows whose programs run one after another for the same columns, so that these are in the L2 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTiling:
    """The tile of a program."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


_TILINGS = (
    MatmulTiling(rows=16, columns=32, num_warps=4, num_stages=5),
    MatmulTiling(rows=64, columns=64, num_warps=4, num_stages=5),
    MatmulTiling(rows=MANY_ROWS, columns=128, num_warps=8, num_stages=4),
)
"""The first that has room for all rows is used, or else the last. All must give the same bits, although a Hopper GPU
multiplies 16 rows by another instruction than 64: on a GPU where they do not, only one may be here. Whether they do,
`common.engine.kernels.invariance` looks at start."""
_FLOAT32_TILINGS = (MatmulTiling(rows=64, columns=32, num_warps=4, num_stages=3),)
"""Three products of TF32 for each one: a larger tile does not fit into the registers."""


def matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, `[M, N]`, for any number of rows but zero. All three have one type, and the result has it,
    too, or `out_dtype`: float32 is what was computed, before it is rounded."""
    num_rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    assert all(each.is_contiguous() for each in (x_MK, weight_NK, bias_N) if each is not None)
    assert weight_NK.shape[1] == inputs
    assert x_MK.dtype == weight_NK.dtype
    out_MN = x_MK.new_empty(num_rows, outputs, dtype=out_dtype)
    tilings = _FLOAT32_TILINGS if x_MK.itemsize == 4 else _TILINGS
    tiling = next((each for each in tilings if num_rows <= each.rows), tilings[-1])
    depth = min(_DEPTH_BYTES // x_MK.itemsize, padded(inputs))
    _matmul[(num_tiles(num_rows, tiling.rows) * num_tiles(outputs, tiling.columns),)](
        x_MK, weight_NK, out_MN if bias_N is None else bias_N, out_MN, num_rows,
        OUTPUTS=outputs, INPUTS=inputs, ROWS=tiling.rows, COLUMNS=tiling.columns, DEPTH=depth,
        BIAS=bias_N is not None, WIDEN=widens(x_MK),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out_MN


@triton.jit(do_not_specialize=["num_rows"])
def _matmul(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Some outputs of some rows, of all inputs."""
    program = tl.program_id(0)
    of_group: tl.constexpr = _GROUP * ((OUTPUTS + COLUMNS - 1) // COLUMNS)
    first = program // of_group * _GROUP
    size = tl.minimum(tl.cdiv(num_rows, ROWS) - first, _GROUP)
    rows = (first + program % of_group % size) * ROWS + tl.arange(0, ROWS)
    columns = program % of_group // size * COLUMNS + tl.arange(0, COLUMNS)
    # What is beyond the last row, or column, is that one again, and is not stored: so loads need no mask.
    x_M1 = x_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * INPUTS
    weight_N1 = weight_ptr + tl.minimum(columns, OUTPUTS - 1).to(tl.int64)[:, None] * INPUTS
    acc_MN = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        depths = (start + tl.arange(0, DEPTH))[None, :]
        if INPUTS % DEPTH == 0:
            x_MK = tl.load(x_M1 + depths)
            weight_NK = tl.load(weight_N1 + depths)
        else:
            x_MK = tl.load(x_M1 + depths, mask=depths < INPUTS, other=0.0)
            weight_NK = tl.load(weight_N1 + depths, mask=depths < INPUTS, other=0.0)
        if WIDEN:
            x_MK = x_MK.to(tl.float32)
            weight_NK = weight_NK.to(tl.float32)
        acc_MN = tl.dot(x_MK, tl.trans(weight_NK), acc_MN, input_precision="tf32x3")
    inside_N = columns < OUTPUTS
    if BIAS:
        acc_MN += tl.load(bias_ptr + columns, mask=inside_N, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + rows.to(tl.int64)[:, None] * OUTPUTS + columns[None, :]
    tl.store(place, acc_MN.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[:, None] & inside_N[None, :])
