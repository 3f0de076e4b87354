"""The small kernels of a layer against float64, over shapes that hypothesis draws; what is not written is poison."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.kernels.layer import add_norm, rotate_and_write, silu_mul
from common.engine.rope import Rope, RopeConfig, rotate
from kernels.reference import TOLERANCE, error, examples

types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
seeds = st.integers(0, 2**31)
EPS = 1e-5


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@settings(max_examples=examples(25), deadline=None)
@given(tokens=st.integers(1, 5), size=st.integers(1, 300), adds=st.booleans(), dtype=types, seed=seeds)
def test_add_norm(device: torch.device, tokens: int, size: int, adds: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    h = torch.randn(tokens, size).to(device, dtype)
    delta = torch.randn(tokens, size).to(device, dtype) if adds else None
    weight = torch.randn(size).to(device)
    total = h.double() + (0 if delta is None else delta.double())
    out = add_norm(h, delta, weight, EPS)
    assert error(h, total) < TOLERANCE[dtype]
    assert error(out, norm(h.double(), weight)) < TOLERANCE[dtype]
    assert out.dtype == h.dtype


@settings(max_examples=examples(25), deadline=None)
@given(tokens=st.integers(1, 4), size=st.one_of(st.integers(1, 50), st.integers(1020, 1030)), dtype=types, seed=seeds)
def test_silu_mul(device: torch.device, tokens: int, size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = (3 * torch.randn(tokens, 2 * size)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    assert error(silu_mul(gate_up), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@settings(max_examples=examples(40), deadline=None)
@given(
    slots=st.lists(st.integers(-1, 39), min_size=1, max_size=5, unique_by=lambda slot: slot if slot >= 0 else object()),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    with_norms=st.booleans(),
    dtype=types,
    seed=seeds,
)
def test_rotate_and_write(
    device: torch.device,
    slots: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    with_norms: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    num_tokens, block_size, num_heads = len(slots), 8, kv_heads * group
    qkv = torch.randn(num_tokens, (num_heads + 2 * kv_heads) * head_dim).to(device, dtype)
    norms = (torch.randn(head_dim).to(device), torch.randn(head_dim).to(device)) if with_norms else None
    rope = Rope(RopeConfig(theta=10000.0), head_dim, 5000, device)
    positions = torch.randint(0, 5000, (num_tokens,), device=device)
    angles = rope.angles(positions, torch.float32)
    cache = torch.full((5, kv_heads, 2, 2, block_size, head_dim), float("nan"), dtype=dtype).to(device)

    heads = qkv.double().view(num_tokens, -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = norm(q, norms[0]), norm(k, norms[1])
    q, k = (rotate(x, (angles[0].double(), angles[1].double())) for x in (q, k))

    blocks, offsets = [slot // block_size for slot in slots], [slot % block_size for slot in slots]
    q_THD = rotate_and_write(
        qkv,
        cache[:, :, 1],
        torch.tensor(blocks, device=device),
        torch.tensor(offsets, device=device),
        num_heads,
        norms,
        EPS,
        (rope.table(torch.float32), positions),
    )
    assert error(q_THD, q) < TOLERANCE[dtype]
    for token, slot in enumerate(slots):
        if slot >= 0:
            written = cache[blocks[token], :, 1, :, offsets[token]]
            assert error(written, torch.stack((k[token], v[token]), dim=1)) < TOLERANCE[dtype]
            cache[blocks[token], :, 1, :, offsets[token]] = float("nan")
    assert bool(cache.isnan().all()), "something else was written"
