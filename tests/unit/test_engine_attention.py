"""Attention backends against the reference, and the reference against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.kv_layout import KVLayout
from common.engine.attention import ReferenceAttention
from common.engine.batch import Slice
from common.engine.cpu_attention import CpuAttention
from common.engine.kv_cache import KVCache
from common.engine.ragged import RaggedBatch

torch.set_num_threads(1)

HEAD_DIM = 8
CPU = torch.device("cpu")


def make(
    spans: list[tuple[int, int]], num_kv_heads: int, group: int, block_size: int, dtype: str = "float32"
) -> tuple[torch.Tensor, KVCache, RaggedBatch]:
    """Random queries, a cache of random keys and values, and the batch of the spans (start, tokens)."""
    generator = torch.Generator().manual_seed(0)
    needed = [-(-(start + num) // block_size) for start, num in spans]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    slices = []
    for (start, num), blocks in zip(spans, needed, strict=True):
        slices.append(Slice(token_ids=[0] * num, start=start, block_table=[order.pop() for _ in range(blocks)]))
    layout = KVLayout(num_layers=3, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, block_size=block_size, dtype=dtype)
    cache = KVCache(layout, sum(needed) + 2, CPU)
    for layer in range(3):
        cache.layer(layer).normal_(generator=generator)
    batch = RaggedBatch.of(slices, block_size, CPU)
    q_THD = torch.randn(batch.num_tokens, num_kv_heads * group, HEAD_DIM, generator=generator)
    return q_THD.to(cache.layer(0).dtype), cache, batch


slices = st.one_of(
    st.tuples(st.integers(0, 70), st.just(1)),
    st.tuples(st.integers(0, 40), st.integers(1, 30)),
)


@settings(max_examples=80, deadline=None)
@given(
    spans=st.lists(slices, min_size=1, max_size=7),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 7]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_cpu_attention_is_the_reference(
    spans: list[tuple[int, int]], num_kv_heads: int, group: int, block_size: int, window: int | None
) -> None:
    q_THD, cache, batch = make(spans, num_kv_heads, group, block_size)
    expected = ReferenceAttention().attend(q_THD, cache.layer(1), batch, window, 0.3)
    ours = CpuAttention().attend(q_THD, cache.layer(1), batch, window, 0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(spans=st.lists(slices, min_size=1, max_size=5), block_size=st.sampled_from([1, 4, 16]))
def test_writes_reach_their_slots_and_no_other(spans: list[tuple[int, int]], block_size: int) -> None:
    q_THD, cache, batch = make(spans, 2, 1, block_size)
    k_TKD, v_TKD = q_THD + 1, q_THD - 1
    _, other, _ = make(spans, 2, 1, block_size)
    ReferenceAttention().write(other.layer(1), k_TKD, v_TKD, batch)
    CpuAttention().write(cache.layer(1), k_TKD, v_TKD, batch)
    for layer in range(3):
        assert torch.equal(cache.layer(layer), other.layer(layer))
    block, offset = batch.slot_blocks_T[-1], batch.slot_offsets_T[-1]
    assert torch.equal(cache.layer(1)[block, :, :, offset], torch.stack((k_TKD[-1], v_TKD[-1]), dim=1))


def test_one_backend_serves_batch_after_batch_and_layers_with_unequal_windows() -> None:
    ours = CpuAttention()
    for spans in ([(5, 1), (60, 1)], [(5, 9), (3, 1)], [(70, 1)], [(0, 70)]):
        q_THD, cache, batch = make(spans, 2, 2, 4)
        for layer, window in ((0, None), (1, 6), (2, None), (1, 6)):
            expected = ReferenceAttention().attend(q_THD, cache.layer(layer), batch, window, 0.3)
            torch.testing.assert_close(ours.attend(q_THD, cache.layer(layer), batch, window, 0.3), expected)


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_of_many_tiles_and_groups_beyond_the_gather_bound(window: int | None) -> None:
    spans = [(3, 300), *((length, 1) for length in (290, 300, 310, 40, 295, 305, 41))]
    q_THD, cache, batch = make(spans, 2, 2, 16)
    expected = ReferenceAttention().attend(q_THD, cache.layer(1), batch, window, 0.3)
    for gather_bytes in (1, 64 * 1024):
        ours = CpuAttention(gather_bytes).attend(q_THD, cache.layer(1), batch, window, 0.3)
        torch.testing.assert_close(ours, expected)


def test_nothing_comes_from_other_sequences_blocks() -> None:
    """A sequence that is padded to share a call with a longer one: only its own blocks are multiplied."""
    q_THD, cache, batch = make([(7, 1), (11, 1)], 2, 2, 4)
    expected = ReferenceAttention().attend(q_THD, cache.layer(1), batch, None, 0.3)
    own = batch.block_tables_BM[0, :2].tolist()
    for block in set(range(cache.num_blocks)) - set(own):
        cache.layer(1)[block] = float("nan")
    ours = CpuAttention().attend(q_THD, cache.layer(1), batch, None, 0.3)
    torch.testing.assert_close(ours[0], expected[0])
    assert bool(ours[1].isnan().all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_close_to_the_reference(dtype: str) -> None:
    q_THD, cache, batch = make([(33, 1), (40, 1), (7, 20)], 2, 3, 16, dtype)
    expected = ReferenceAttention().attend(q_THD, cache.layer(1), batch, None, 0.3)
    ours = CpuAttention().attend(q_THD, cache.layer(1), batch, None, 0.3)
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_the_reference_is_softmax_of_scaled_products() -> None:
    """One query head, one token at position 2 with a window of 2, by hand."""
    cache = KVCache(KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32"), 3, CPU)
    table = [2, 0]
    values = {0: (9.0, 9.0), 1: (1.0, 2.0), 2: (3.0, 5.0)}
    keys = {0: (50.0, 50.0), 1: (1.0, 0.0), 2: (0.0, 2.0)}
    for position in range(3):
        block = cache.layer(0)[table[position // 2]]
        block[0, 0, position % 2] = torch.tensor(keys[position])
        block[0, 1, position % 2] = torch.tensor(values[position])
    batch = RaggedBatch.of([Slice(token_ids=[0], start=2, block_table=table)], 2, CPU)
    out = ReferenceAttention().attend(torch.tensor([[[1.0, 1.0]]]), cache.layer(0), batch, 2, 0.5)
    left, right = math.exp(0.5 * 1.0), math.exp(0.5 * 2.0)
    expected = [(left * 1 + right * 3) / (left + right), (left * 2 + right * 5) / (left + right)]
    assert out[0, 0].tolist() == pytest.approx(expected)
