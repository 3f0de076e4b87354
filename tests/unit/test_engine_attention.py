"""Attention in torch against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.kv_layout import KVLayout
from common.engine import backend
from common.engine.backend import TorchBackend
from common.engine.batch import Slice
from common.engine.kv_cache import KVCache
from common.engine.ragged import RaggedBatch, Rows

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
    batch = Rows.of(slices, block_size).on(CPU)
    q_THD = torch.randn(len(batch.token_ids_T), num_kv_heads * group, HEAD_DIM, generator=generator)
    return q_THD.to(cache.layer(0).dtype), cache, batch


def defined(
    q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
) -> torch.Tensor:
    """Attention by its definition: for each token and head, the softmax of scaled products with the keys it sees."""
    out_THD, group, block_size = q_THD.clone(), q_THD.shape[1] // kv_layer.shape[1], kv_layer.shape[3]
    rows = [row for row, num in enumerate(batch.query_lens) for _ in range(num)]
    for token, (row, position) in enumerate(zip(rows, batch.positions_T.tolist(), strict=True)):
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        slots = [(int(batch.block_tables_BM[row, each // block_size]), each % block_size) for each in seen]
        for head in range(q_THD.shape[1]):
            keys, values = (
                torch.stack([kv_layer[block, head // group, kind, slot] for block, slot in slots]).float()
                for kind in (0, 1)
            )
            weights = (keys @ q_THD[token, head].float() * scale).softmax(dim=0)
            out_THD[token, head] = weights @ values
    return out_THD


slices = st.one_of(
    st.tuples(st.integers(0, 70), st.just(1)),
    st.tuples(st.integers(0, 40), st.integers(1, 30)),
)


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(slices, min_size=1, max_size=4),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 3]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 50)),
)
def test_attention_is_as_defined(
    spans: list[tuple[int, int]], num_kv_heads: int, group: int, block_size: int, window: int | None
) -> None:
    q_THD, cache, batch = make(spans, num_kv_heads, group, block_size)
    expected = defined(q_THD, cache.layer(1), batch, window, 0.3)
    ours = TorchBackend().attend(q_THD, cache.layer(1), batch, window, 0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_the_mask_of_a_long_chunk_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one has as many numbers as the chunk has tokens times the context."""
    q_THD, cache, batch = make([(3, 300), (9, 1)], 1, 2, 16)
    masks, attend = list[tuple[int, ...]](), torch.nn.functional.scaled_dot_product_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, *, scale: float) -> torch.Tensor:
        masks.append(tuple(mask.shape))
        return attend(q, k, v, mask, scale=scale)

    monkeypatch.setattr(backend, "scaled_dot_product_attention", watched)
    ours = TorchBackend().attend(q_THD, cache.layer(1), batch, 40, 0.3)
    torch.testing.assert_close(ours, defined(q_THD, cache.layer(1), batch, 40, 0.3), rtol=1e-5, atol=1e-5)
    assert masks == [(128, 304), (128, 304), (44, 304), (1, 16)]


@settings(max_examples=20, deadline=None)
@given(spans=st.lists(slices, min_size=1, max_size=5), block_size=st.sampled_from([1, 4, 16]))
def test_writes_reach_their_slots_and_no_other(spans: list[tuple[int, int]], block_size: int) -> None:
    q_THD, cache, batch = make(spans, 2, 1, block_size)
    k_TKD, v_TKD = q_THD + 1, q_THD - 1
    _, other, _ = make(spans, 2, 1, block_size)
    slots = zip(batch.slot_blocks_T.tolist(), batch.slot_offsets_T.tolist(), strict=True)
    for token, (block, offset) in enumerate(slots):
        other.layer(1)[block, :, :, offset] = torch.stack((k_TKD[token], v_TKD[token]), dim=1)
    TorchBackend().write(cache.layer(1), k_TKD, v_TKD, batch)
    for layer in range(3):
        assert torch.equal(cache.layer(layer), other.layer(layer))


def test_nothing_comes_from_other_sequences_blocks() -> None:
    q_THD, cache, batch = make([(7, 1), (11, 1)], 2, 2, 4)
    expected = TorchBackend().attend(q_THD, cache.layer(1), batch, None, 0.3)
    own = batch.block_tables_BM[0, :2].tolist()
    for block in set(range(cache.num_blocks)) - set(own):
        cache.layer(1)[block] = float("nan")
    ours = TorchBackend().attend(q_THD, cache.layer(1), batch, None, 0.3)
    assert torch.equal(ours[0], expected[0])
    assert bool(ours[1].isnan().all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_close(dtype: str) -> None:
    q_THD, cache, batch = make([(33, 1), (40, 1), (7, 20)], 2, 3, 16, dtype)
    expected = defined(q_THD, cache.layer(1), batch, None, 0.3)
    ours = TorchBackend().attend(q_THD, cache.layer(1), batch, None, 0.3)
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_attention_is_softmax_of_scaled_products() -> None:
    """One query head, one token at position 2 with a window of 2, by hand."""
    cache = KVCache(KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32"), 3, CPU)
    table = [2, 0]
    values = {0: (9.0, 9.0), 1: (1.0, 2.0), 2: (3.0, 5.0)}
    keys = {0: (50.0, 50.0), 1: (1.0, 0.0), 2: (0.0, 2.0)}
    for position in range(3):
        block = cache.layer(0)[table[position // 2]]
        block[0, 0, position % 2] = torch.tensor(keys[position])
        block[0, 1, position % 2] = torch.tensor(values[position])
    batch = Rows.of([Slice(token_ids=[0], start=2, block_table=table)], 2).on(CPU)
    out = TorchBackend().attend(torch.tensor([[[1.0, 1.0]]]), cache.layer(0), batch, 2, 0.5)
    left, right = math.exp(0.5 * 1.0), math.exp(0.5 * 2.0)
    expected = [(left * 1 + right * 3) / (left + right), (left * 2 + right * 5) / (left + right)]
    assert out[0, 0].tolist() == pytest.approx(expected)
