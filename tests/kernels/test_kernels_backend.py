"""Attention of whole batches by the backend: which kernel has which slice, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.batch import Slice
from common.engine.kernels import backend as backends
from common.engine.kernels.backend import TritonBackend
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.decode_runs import DecodeRuns
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.tuning import Tuning
from common.engine.ragged import RaggedBatch, Rows
from kernels.reference import TOLERANCE, attention, error

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 64, 16
SCALE = HEAD_DIM**-0.5


class Scene:
    """Slices over a cache that is written."""

    def __init__(self, device: torch.device, query_lens: list[int], seq_lens: list[int]) -> None:
        generator = torch.Generator().manual_seed(2)
        counts = [-(-length // BLOCK_SIZE) for length in seq_lens]
        order = torch.randperm(sum(counts), generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.query_lens, self.seq_lens, self.device = query_lens, seq_lens, device
        cache = torch.randn(sum(counts), KV_HEADS, 2, 2, BLOCK_SIZE, HEAD_DIM, generator=generator)
        self.kv_layer = cache.to(device)[:, :, 1]
        self.q_THD = torch.randn(sum(query_lens), HEADS, HEAD_DIM, generator=generator).to(device)

    def batch(self, num: int) -> RaggedBatch:
        """The first so many slices."""
        lens = zip(self.query_lens[:num], self.seq_lens, self.tables, strict=False)
        slices = [
            Slice(token_ids=[0] * query_len, start=seq_len - query_len, block_table=table)
            for query_len, seq_len, table in lens
        ]
        return Rows.of(slices, BLOCK_SIZE).on(self.device)

    def attend(self, backend: TritonBackend, batch: RaggedBatch, window: int | None = None) -> torch.Tensor:
        """The backend's."""
        return backend.attend(self.q_THD[: len(batch.token_ids_T)], self.kv_layer, batch, window, SCALE)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """In float64."""
        return attention(self.q_THD, self.kv_layer, self.tables, self.query_lens, self.seq_lens, window, SCALE)


def test_decode_tokens_are_computed_beside_chunks_as_without_them(device: torch.device) -> None:
    """Bit by bit: their contexts are split in the same way."""
    backend, scene = TritonBackend(device), Scene(device, [1, 1, 1, 20, 1, 3], [300, 5, 64, 50, 40, 3])
    mixed = scene.attend(backend, scene.batch(6))
    assert error(mixed, scene.expected()) < TOLERANCE[torch.float32]
    assert torch.equal(mixed[:3], scene.attend(backend, scene.batch(3)))


def test_batches_one_after_another_and_windows_side_by_side(device: torch.device) -> None:
    """What is kept of a batch, for its other layers, is not taken for the next one's."""
    backend = TritonBackend(device)
    for query_lens in ([1, 1, 30], [20, 1], [1], [1, 40]):
        scene = Scene(device, query_lens, [60 + index for index in range(len(query_lens))])
        for window in (None, 7, None):
            out = scene.attend(backend, scene.batch(len(query_lens)), window)
            assert error(out, scene.expected(window)) < TOLERANCE[torch.float32]


def test_runs_are_made_once_a_step_for_each_window(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = DecodeTiling.runs

    def counted(tiling: DecodeTiling, seq_lens_B: torch.Tensor, *, window: int | None, **sizes: int) -> DecodeRuns:
        made.append(window)
        return make(tiling, seq_lens_B, window=window, **sizes)

    monkeypatch.setattr(DecodeTiling, "runs", counted)
    backend, scene = TritonBackend(device), Scene(device, [1, 1], [300, 5])
    for num in (2, 1):
        batch = scene.batch(num)
        for window in (None, 7, None, 7):
            scene.attend(backend, batch, window)
    assert made == [None, 7] * 2


def test_the_table_is_asked_once_a_step_for_each_window(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each layer: it takes longer the more the table has."""
    asked: list[str] = []
    nearest = Tuning._nearest

    def counted(tuning: Tuning, kernel: str, *args: Any) -> dict[str, Any]:
        asked.append(kernel)
        return nearest(tuning, kernel, *args)

    monkeypatch.setattr(Tuning, "_nearest", counted)
    backend, scene = TritonBackend(device), Scene(device, [1, 1, 20], [30, 5, 40])
    for _ in range(2):
        batch = scene.batch(3)
        for window in (None, 7, None, 7):
            scene.attend(backend, batch, window)
    assert asked == 2 * ["decode", "prefill", "decode", "prefill"]


def test_a_copy_engine_loads_each_layer_from_its_own_memory(device: torch.device) -> None:
    """Which is described once; blocks of 64 tokens in float16, as the copy engine takes them."""
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(5, KV_HEADS, 3, 2, 64, HEAD_DIM, generator=generator).to(device, torch.float16)
    backend, tables, lens, queries = TritonBackend(device), [[3, 0, 4], [2]], [150, 30], [70, 30]
    if device.type == "cpu":
        backend._tuning = Tuning("", 228 * 2**10, copy_engine=True)
    slices = [
        Slice(token_ids=[0] * num, start=length - num, block_table=table)
        for num, length, table in zip(queries, lens, tables, strict=True)
    ]
    for window in (None, 50):
        for layer in (0, 2, 0):
            q_THD = torch.randn(100, HEADS, HEAD_DIM, generator=generator).to(device, torch.float16)
            batch = Rows.of(slices, 64).on(device)
            out = backend.attend(q_THD, cache[:, :, layer], batch, window, SCALE)
            expected = attention(q_THD, cache[:, :, layer], tables, queries, lens, window, SCALE)
            assert error(out, expected) < TOLERANCE[torch.float16]
    assert device.type == "cuda" or len(backend._descriptors) == 2


@pytest.mark.parametrize("invariant", [False, True])
def test_a_copy_engine_is_used_as_long_as_it_can_number_the_rows_of_a_cache(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 31 bits: small heads in a large GPU have more rows. The cache has no memory here, and nothing is run."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(backends, "prefill_attention", lambda *args, **options: launched.append(options))
    monkeypatch.setattr(backends, "describe", lambda kv_layer, tile: "descriptor")
    backend = TritonBackend(torch.device("cpu"), batch_invariant=invariant)
    backend._tuning = Tuning("", 228 * 2**10, copy_engine=True)
    rows_of_block = 3 * KV_HEADS * 2 * 64
    for num_blocks in (2**31 // rows_of_block, 2**31 // rows_of_block + 2):
        cache = torch.empty(num_blocks, KV_HEADS, 3, 2, 64, 32, dtype=torch.bfloat16, device="meta")
        q_THD = torch.empty(2, HEADS, 32, dtype=torch.bfloat16, device="meta")
        batch = Rows.of([Slice(token_ids=[0, 0], start=0, block_table=[0])], 64).on(torch.device("cpu"))
        backend._prefill(q_THD, cache[:, :, 0], batch, None, SCALE, q_THD)
        backend._runs.clear()
    assert [each["kv_descriptor"] for each in launched] == ["descriptor", None]
    assert [each["tiling"].copy_engine for each in launched] == [True, False]
    assert launched[1]["tiling"].num_warps == PrefillTiling().num_warps, "the tiling that loads by pointers"
