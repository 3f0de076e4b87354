"""The small operations of a layer, each one pass over its rows: norms, rotation and KV write, gates.

They compute in float32, and round when they store. Shapes: T tokens, E hidden size, F outputs of a projection, H query
heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.engine.kernels.tiles import await_inputs, early, num_tiles, padded

_GATE_TILE = 1024
_HEADS_TILE = 8


def add_norm(h_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta_TE` to `h_TE` in place. Returns the weighted root mean square normalisation of `h_TE`, in its type.
    All tensors must be contiguous."""
    num_tokens, size = h_TE.shape
    out_TE = torch.empty_like(h_TE)
    assert all(each.is_contiguous() for each in (h_TE, delta_TE, weight_E) if each is not None)
    _add_norm[(num_tokens,)](
        h_TE,
        h_TE if delta_TE is None else delta_TE,
        weight_E,
        out_TE,
        eps,
        E=size,
        E_PAD=padded(size),
        ADD=delta_TE is not None,
        num_warps=min(16, max(4, padded(size) // 512)),
        **early(),
    )
    return out_TE


@triton.jit
def _add_norm(
    h_ptr, delta_ptr, weight_ptr, out_ptr, eps,
    E: tl.constexpr, E_PAD: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, E_PAD)
    inside = columns < E
    weight_E = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    place = tl.program_id(0).to(tl.int64) * E + columns
    h_E = tl.load(h_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        delta_E = tl.load(delta_ptr + place, mask=inside, other=0.0).to(tl.float32)
        h_E = (h_E + delta_E).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + place, h_E, mask=inside)
        h_E = h_E.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(h_E * h_E, axis=0) / E + eps)
    tl.store(out_ptr + place, (h_E * scale * weight_E).to(out_ptr.dtype.element_ty), mask=inside)


def rotate_and_write(
    qkv_TF: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_blocks_T: torch.Tensor,
    slot_offsets_T: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values to their slots of `kv_layer`. Returns the queries `[T, H, D]`.

    A row of `qkv_TF` holds H queries, K keys and K values. With `norms`, queries and keys are normalised first.
    `angles` are a table from `common.engine.rope.Rope.table` and the positions `[T]`, int64. If a token's block is
    negative, its keys and values are not written.
    """
    _, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    num_tokens = qkv_TF.shape[0]
    table, positions_T = angles
    assert all(each.is_contiguous() for each in (qkv_TF, table, positions_T))
    assert table.shape[1] == head_dim
    assert kv_layer.stride()[2:] == (block_size * head_dim, head_dim, 1)
    q_THD = qkv_TF.new_empty(num_tokens, num_heads, head_dim)
    grid = (num_tokens, num_tiles(num_heads + 2 * num_kv_heads, _HEADS_TILE))
    _rotate_and_write[grid](
        qkv_TF,
        q_THD,
        kv_layer,
        slot_blocks_T,
        slot_offsets_T,
        qkv_TF if norms is None else norms[0],
        qkv_TF if norms is None else norms[1],
        table,
        positions_T,
        eps,
        kv_layer.stride(0),
        kv_layer.stride(1),
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        HALF_PAD=padded(head_dim // 2),
        HEADS=_HEADS_TILE,
        NORMS=norms is not None,
        num_warps=4,
        **early(),
    )
    return q_THD


@triton.jit
def _rotate_and_write(
    qkv_ptr,
    q_ptr,
    kv_ptr,
    slot_blocks_ptr,
    slot_offsets_ptr,
    q_norm_ptr,
    k_norm_ptr,
    table_ptr,
    positions_ptr,
    eps,
    block_stride,
    head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Process up to `HEADS` heads of one token, each as two halves `[HEADS, HALF_PAD]`."""
    HALF: tl.constexpr = D // 2
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF_PAD)
    inside = (heads < H + 2 * K)[:, None] & (pairs < HALF)[None, :]
    place = token * (H + 2 * K) * D + heads[:, None] * D + pairs[None, :]
    low = tl.load(qkv_ptr + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_ptr + place + HALF, mask=inside, other=0.0).to(tl.float32)
    is_q, is_v = heads < H, heads >= H + K
    new_low, new_high = low, high
    if NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps)
        q_low = tl.load(q_norm_ptr + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm_ptr + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm_ptr + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm_ptr + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
        new_low = low * scale[:, None] * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])
        new_high = high * scale[:, None] * tl.where(is_q[:, None], q_high[None, :], k_high[None, :])
    angles_ptr = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * D + pairs
    cos = tl.load(angles_ptr, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angles_ptr + HALF, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
    rotated_low = new_low * cos - new_high * sin
    rotated_high = new_high * cos + new_low * sin
    low = tl.where(is_v[:, None], low, rotated_low)
    high = tl.where(is_v[:, None], high, rotated_high)

    to_q = inside & is_q[:, None]
    q_place = token * H * D + heads[:, None] * D + pairs[None, :]
    tl.store(q_ptr + q_place, low.to(q_ptr.dtype.element_ty), mask=to_q)
    tl.store(q_ptr + q_place + HALF, high.to(q_ptr.dtype.element_ty), mask=to_q)
    block = tl.load(slot_blocks_ptr + token).to(tl.int64)
    if block >= 0:
        slot = tl.load(slot_offsets_ptr + token).to(tl.int64)
        kv_head = tl.where(is_v, heads - H - K, heads - H)
        kv_place = block * block_stride + kv_head * head_stride + (is_v.to(tl.int64) * BLOCK_SIZE + slot) * D
        kv_place = kv_place[:, None] + pairs[None, :]
        to_kv = inside & (heads >= H)[:, None]
        tl.store(kv_ptr + kv_place, low.to(kv_ptr.dtype.element_ty), mask=to_kv)
        tl.store(kv_ptr + kv_place + HALF, high.to(kv_ptr.dtype.element_ty), mask=to_kv)


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, `[T, F / 2]`. A row of `gate_up_TF` holds all gates, then all ups."""
    num_tokens, twice = gate_up_TF.shape
    assert gate_up_TF.is_contiguous()
    out = gate_up_TF.new_empty(num_tokens, twice // 2)
    grid = (num_tokens, num_tiles(twice // 2, _GATE_TILE))
    _silu_mul[grid](gate_up_TF, out, twice // 2, TILE=_GATE_TILE, num_warps=4, **early())
    return out


@triton.jit
def _silu_mul(in_ptr, out_ptr, size, TILE: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < size
    gate = tl.load(in_ptr + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(in_ptr + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)
