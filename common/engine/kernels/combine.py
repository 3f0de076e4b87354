"""Combines the partial attention results of several runs over one context ("Flash-Decoding", 2023).

Shapes: P places of partial results, K KV heads, R rows of a place (tokens times the query heads that share a KV head),
D head dimension, S results that may have several runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import await_inputs, early, padded


def combine(
    partial_PKRD: torch.Tensor,
    stats_PKR2: torch.Tensor,
    splits_S4: torch.Tensor,
    group: int,
    out_THD: torch.Tensor,
    at_once: int = 16,
) -> None:
    """Combine the partial results of tokens whose contexts are cut, and write their attention to `out_THD`.

    A row of `splits_S4` is (first token, tokens, first place, places). A result with a single place is left as it is. A
    place has weighted sums of values in `partial_PKRD`. In `stats_PKR2` it has, for each row, the largest exponent,
    base 2, and the sum of the weights.

    Results are read `at_once` at a time. With one at a time they are added in the order of their places, and those of
    runs in which a row sees no key, before or after the others, change no bit.
    """
    _, num_kv_heads, num_rows, head_dim = partial_PKRD.shape
    _combine[num_rows, num_kv_heads, splits_S4.shape[0]](
        partial_PKRD,
        stats_PKR2,
        splits_S4,
        out_THD,
        group,
        out_THD.stride(0),
        out_THD.stride(1),
        D=head_dim,
        D_PAD=padded(head_dim),
        AT_ONCE=at_once,
        num_warps=4,
        **early(),
    )


@triton.jit(do_not_specialize=["group", "out_stride_t", "out_stride_h"])
def _combine(
    partial_ptr,
    stats_ptr,
    splits_ptr,
    out_ptr,
    group,
    out_stride_t,
    out_stride_h,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combine one row of one result."""
    await_inputs(EARLY)
    row, kv_head = tl.program_id(0), tl.program_id(1)
    split_ptr = splits_ptr + tl.program_id(2) * 4
    token = tl.load(split_ptr) + row // group
    num_places = tl.load(split_ptr + 3)
    if (row >= tl.load(split_ptr + 1) * group) | (num_places < 2):
        return
    first_place = tl.load(split_ptr + 2).to(tl.int64)
    dims = tl.arange(0, D_PAD)
    highest = float("-inf")
    total = 0.0
    acc_D = tl.zeros([D_PAD], tl.float32)
    for begin in range(0, num_places, AT_ONCE):
        each = begin + tl.arange(0, AT_ONCE)
        used_P = each < num_places
        row_P = ((first_place + each) * tl.num_programs(1) + kv_head) * tl.num_programs(0) + row
        max_P = tl.load(stats_ptr + row_P * 2, mask=used_P, other=float("-inf"))
        sum_P = tl.load(stats_ptr + row_P * 2 + 1, mask=used_P, other=0.0)
        inside = used_P[:, None] & (dims < D)[None, :]
        partial_PD = tl.load(partial_ptr + row_P[:, None] * D + dims[None, :], mask=inside, other=0.0)
        higher = tl.maximum(highest, tl.max(max_P, axis=0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight_P = tl.exp2(max_P - base)
        faded = tl.exp2(highest - base)
        total = total * faded + tl.sum(sum_P * weight_P, axis=0)
        acc_D = acc_D * faded + tl.sum(partial_PD * weight_P[:, None], axis=0)
        highest = higher
    out_D = acc_D / tl.where(total > 0, total, 1.0)
    head = kv_head * group + row % group
    place = out_ptr + token.to(tl.int64) * out_stride_t + head * out_stride_h + dims
    tl.store(place, out_D.to(out_ptr.dtype.element_ty), mask=dims < D)
