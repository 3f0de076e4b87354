"""A batch-invariant backend: a token's numbers have the same bits whatever is computed beside it, and in whichever
pieces its sequence is computed.

In the interpreter numpy multiplies, whose sums depend on the number of rows. There the products of a tile are added one
after another (`kernels.ordered`), so the bits show how keys and inputs are cut. Whether the instructions of a GPU give
the same bits in tiles of different sizes only the tests on a GPU show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from checkpoints import VOCAB_SIZE, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.executor import Executor
from common.engine.host_swap import HostSwap
from common.engine.kernels import invariance
from common.engine.kernels.backend import TritonBackend
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.invariance import require_invariance
from common.engine.kernels.matmul import matmul
from common.engine.kernels.query_runs import NO_PLACE, aligned_runs, query_runs, query_tiles
from common.engine.kernels.tiles import sum_of_keys
from common.engine.kernels.tuning import INVARIANT_RUN, Tuning
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.ragged import RaggedBatch, Rows
from common.engine.runner import ModelRunner
from common.engine.weights import load_weights
from kernels.eager_graphs import EagerGraphs
from kernels.ordered import multiply_in_order
from kernels.reference import TOLERANCE, attention, error

BLOCK_SIZE = 16
RUN = 64
"""Keys of a run in the interpreter; a tile of float32 has 32, one of bfloat16 all of them."""
ANY = Sample(params=SamplingParams(max_tokens=9), choice=0, position=1, token_ids=(), prompt_len=1)
Piece = tuple[int, int, int]
"""Tokens `[start, end)` of a sequence: (sequence, start, end)."""


class Scene:
    """Sequences whose KV is written, and a query for each of their tokens."""

    def __init__(self, device: torch.device, lens: Sequence[int], dtype: torch.dtype, heads: int = 4) -> None:
        generator = torch.Generator().manual_seed(2)
        counts = [-(-length // BLOCK_SIZE) for length in lens]
        order = torch.randperm(sum(counts), generator=generator).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.lens, self.device, self.dtype = lens, device, dtype
        cache = torch.randn(sum(counts), 2, 2, 2, BLOCK_SIZE, 32, generator=generator)
        self.kv_layer = cache.to(device, dtype)[:, :, 1]
        self.queries = [torch.randn(length, heads, 32, generator=generator).to(device, dtype) for length in lens]

    def attend(self, backend: TritonBackend, pieces: Sequence[Piece], window: int | None) -> list[torch.Tensor]:
        """The attention of each piece, computed in one batch, float32: rounding hides most differences."""
        slices = [
            Slice(token_ids=[0] * (end - start), start=start, block_table=self.tables[sequence])
            for sequence, start, end in pieces
        ]
        q_THD = torch.cat([self.queries[sequence][start:end] for sequence, start, end in pieces])
        batch = Rows.of(slices, BLOCK_SIZE).on(self.device)
        out_THD = backend.attend(q_THD, self.kv_layer, batch, window, 32**-0.5, out_dtype=torch.float32)
        return list(torch.split(out_THD, [end - start for _, start, end in pieces]))

    def expected(self, sequence: int, window: int | None) -> torch.Tensor:
        """Of a whole sequence, in float64."""
        length = self.lens[sequence]
        query, table = self.queries[sequence], self.tables[sequence]
        return attention(query, self.kv_layer, [table], [length], [length], window, 32**-0.5)


def whole_of(length: int, *sizes: int) -> list[Piece]:
    """Sequence 0 in pieces of these sizes, and the rest of it."""
    ends = [*accumulate(sizes), length]
    return [(0, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def differences(backend: TritonBackend, scene: Scene, window: int | None) -> set[str]:
    """The ways to compute sequence 0 whose bits are not those of its computation as a whole."""
    length = scene.lens[0]
    (alone,) = scene.attend(backend, [(0, 0, length)], window)
    assert error(alone, scene.expected(0, window)) < TOLERANCE[scene.dtype]
    places = [0, 32, RUN - 1, RUN, length - 1]
    tokens: list[Piece] = [(0, place, place + 1) for place in places]
    batches: dict[str, list[list[Piece]]] = {
        "in chunks": [[piece] for piece in whole_of(length, 5, 60, 1)],
        "token by token": [[token] for token in tokens],
        "tokens side by side": [tokens],
        "tokens and chunks beside others": [
            [(1, 69, 70), tokens[3], (2, 4, 5), tokens[-1], *whole_of(length, 70), (2, 1, 20)],
            [tokens[-2], (1, 12, 13), (2, 0, 30), *whole_of(length, 7)],
        ],
    }
    found = set()
    for name, steps in batches.items():
        for pieces in steps:
            for (sequence, start, end), out in zip(pieces, scene.attend(backend, pieces, window), strict=True):
                if sequence == 0 and not torch.equal(out, alone[start:end]):
                    found.add(name)
    return found


LENS = [80, 70, 33]
"""Of the sequences below: the first one has keys in two runs, and rows whose window of 10 lies in the second."""


@pytest.mark.parametrize(
    ("dtype", "heads", "window"),
    [
        (torch.float32, 4, None),
        (torch.float32, 4, 10),
        (torch.bfloat16, 6, 70),
    ],
)
def test_a_row_attends_with_the_same_bits_in_every_batch(
    device: torch.device, dtype: torch.dtype, heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_order(monkeypatch)
    scene = Scene(device, LENS, dtype, heads)
    assert differences(TritonBackend(device, batch_invariant=True, run_keys=RUN), scene, window) == set()


def test_partial_results_in_parts_give_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_order(monkeypatch)
    scene, backend = Scene(device, [140], torch.float32), TritonBackend(device, batch_invariant=True, run_keys=RUN)
    pieces = [(0, 56, 80), (0, 124, 140)]  # of one, two and three runs
    whole = scene.attend(backend, pieces, None)
    monkeypatch.setattr("common.engine.kernels.backend._MOST_PARTIAL_BYTES", 1)
    parts = scene.attend(backend, pieces, None)
    assert len(backend._runs[None][1]) > 1
    assert all(map(torch.equal, whole, parts))


def test_without_invariance_the_bits_depend_on_the_batch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    multiply_in_order(monkeypatch)
    scene = Scene(device, LENS, torch.float32)
    assert differences(TritonBackend(device), scene, None)


def test_a_place_that_nobody_has_gets_zeros(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(device, [40, 40], torch.float32)
    backend = TritonBackend(device, batch_invariant=True, run_keys=RUN)
    slices = [Slice(token_ids=[0], start=20, block_table=table) for table in scene.tables]
    batch = Rows.of(slices, BLOCK_SIZE).on(device)
    batch.seq_lens_B[1] = 0
    q_THD = torch.cat([queries[20:21] for queries in scene.queries])
    monkeypatch.setattr(torch, "empty_like", lambda x, dtype: torch.full_like(x, float("nan"), dtype=dtype))
    out = backend.attend(q_THD, scene.kv_layer, batch, None, 1.0)
    assert bool(out[0].any())
    assert not out[1].any()


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    window=st.sampled_from([1, 64, 65, 100, None]),
    tile=st.sampled_from([16, 64]),
    longest=st.sampled_from([1500, 4000]),
)
def test_runs_that_the_device_makes_are_those_of_the_host(
    device: torch.device, lens: list[int], window: int | None, tile: int, longest: int
) -> None:
    tiling = DecodeTiling(tile=tile, run_tiles=RUN // tile, programs_per_processor=1.0)
    made = tiling.runs(
        torch.tensor(lens, device=device), window=window, max_seq_len=longest, num_kv_heads=2, num_processors=8
    )
    (expected,) = aligned_runs(query_tiles([1] * len(lens), lens, 1, tile, window), RUN // tile, 10**6)
    num = int(made.num_runs_1)
    runs = made.runs_R4[:num].tolist()
    assert sorted(run[:3] for run in runs) == sorted([run[0], run[2], run[3]] for run in expected.runs)
    splits = made.splits_B4.tolist()
    assert [row for row, *_ in splits] == list(range(len(lens)))
    for row, one, first, places in splits:
        ours = runs[first : first + places]
        assert one == 1
        assert {run[0] for run in ours} == {row}
        assert [run[1] for run in ours] == sorted(run[1] for run in runs if run[0] == row)
        assert {run[3] for run in ours} == {int(places == 1)}
    assert 1 <= made.num_programs <= min(len(made.runs_R4), len(lens) + 4)


def test_runs_begin_at_fixed_positions() -> None:
    """Whatever else is computed; without alignment they follow from the number of keys."""
    for window in (None, 500):
        tiles = query_tiles([60], [1050], 8, 16, window)
        aligned = {begin for runs in aligned_runs(tiles, 16, 10) for _, _, begin, _, _ in runs.runs}
        fixed = {*range(0, 80, 16), *(tile.begin for tile in tiles)}
        assert aligned <= fixed
        assert not {begin for _, _, begin, _, _ in query_runs(tiles, 16).runs} <= fixed


def test_partial_results_of_long_prompts_take_a_bounded_memory() -> None:
    tiles = query_tiles([60, 9], [1050, 10], 8, 16, None)
    whole = aligned_runs(tiles, 16, 10**6)
    assert len(whole) == 1
    parts = aligned_runs(tiles, 16, 12)
    assert len(parts) > 1
    assert max(each.num_places for each in parts) <= 12
    assert sorted(run[:4] for each in parts for run in each.runs) == sorted(run[:4] for run in whole[0].runs)
    for each in parts:
        assert sorted(run[4] for run in each.runs if run[4] != NO_PLACE) == list(range(each.num_places))
    assert [each.num_places for each in aligned_runs(tiles[:1], 16, 1)] == [5], "a tile of queries is not parted"


def test_the_tilings_cut_keys_alike() -> None:
    for head_dim in (64, 80, 128, 256):
        for itemsize in (2, 4):
            for copy_engine in (False, True):
                tuning = Tuning("", 228 * 2**10, copy_engine=copy_engine)
                decodes, chunks = tuning.invariant(head_dim=head_dim, itemsize=itemsize, block_size=64)
                assert decodes.tile == chunks.tile
                assert decodes.run_tiles == chunks.run_tiles == INVARIANT_RUN // chunks.tile


def test_a_worker_looks_at_start_whether_its_gpu_gives_the_same_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_in_order(monkeypatch)
    if device.type == "cpu":  # where it takes long
        monkeypatch.setattr(invariance, "_INPUTS", 128)
        monkeypatch.setattr(invariance, "_OUTPUTS", 64)
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=16, block_size=BLOCK_SIZE, dtype="float32")
    require_invariance(TritonBackend(device, batch_invariant=True, run_keys=RUN), layout, 2, device)
    with pytest.raises(OperatorError, match="attention of the same row"):
        require_invariance(TritonBackend(device, run_keys=RUN), layout, 2, device)


def other_in_the_last_bit(out: torch.Tensor) -> None:
    """A few sums, as another order of addition makes them."""
    few = out.flatten(1)[:3, :2]
    few.copy_(torch.nextafter(few, torch.full_like(few, float("inf"))))


class OtherDecodeTokens(TritonBackend):
    """A GPU that attends to decode tokens by an instruction which adds in another order than that for chunks."""

    def attend(
        self,
        q_THD: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: RaggedBatch,
        window: int | None,
        scale: float,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        out_THD = super().attend(q_THD, kv_layer, batch, window, scale, out_dtype=torch.float32)
        if max(batch.query_lens) == 1:
            other_in_the_last_bit(out_THD)
        return out_THD.to(q_THD.dtype if out_dtype is None else out_dtype)


def other_products_of_few_rows(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """As `OtherDecodeTokens`."""
    out_MN = matmul(x_MK, weight_NK, out_dtype=torch.float32)
    if x_MK.shape[0] <= 16:
        other_in_the_last_bit(out_MN)
    return out_MN.to(x_MK.dtype if out_dtype is None else out_dtype)


def test_a_single_sum_with_another_last_bit_is_seen_before_it_is_rounded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such sum in 65,536 becomes another number of bfloat16."""
    multiply_in_order(monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(invariance, "_INPUTS", 128)
        monkeypatch.setattr(invariance, "_OUTPUTS", 64)
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=BLOCK_SIZE, dtype="bfloat16")
    require_invariance(TritonBackend(device, batch_invariant=True, run_keys=RUN), layout, 2, device)
    with pytest.raises(OperatorError, match="device: attention of the same row"):
        require_invariance(OtherDecodeTokens(device, batch_invariant=True, run_keys=RUN), layout, 2, device)
    monkeypatch.setattr(invariance, "matmul", other_products_of_few_rows)
    with pytest.raises(OperatorError, match="device: products of the same row"):
        require_invariance(TritonBackend(device, batch_invariant=True, run_keys=RUN), layout, 2, device)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(tile_ptr: Any, sums_ptr: Any, ROWS: tl.constexpr, KEYS: tl.constexpr) -> None:
    rows, keys = tl.arange(0, ROWS), tl.arange(0, KEYS)
    tile = tl.load(tile_ptr + rows[:, None] * KEYS + keys[None, :])
    tl.store(sums_ptr + rows, sum_of_keys(tile, True))


@pytest.mark.parametrize(("rows", "keys", "num_warps"), [(16, 64, 1), (16, 64, 4), (128, 64, 8), (16, 32, 4)])
def test_the_keys_of_a_tile_are_added_half_to_half(device: torch.device, rows: int, keys: int, num_warps: int) -> None:
    """Whatever part of a row a thread has."""
    tile = torch.rand(rows, keys, generator=torch.Generator().manual_seed(4)).to(device)
    sums = tile.new_empty(rows)
    _sum_rows[(1,)](tile, sums, ROWS=rows, KEYS=keys, num_warps=num_warps)
    expected = tile
    while expected.shape[1] > 1:
        expected = expected[:, : expected.shape[1] // 2] + expected[:, expected.shape[1] // 2 :]
    assert torch.equal(sums, expected[:, 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_gpu_gives_the_same_bits_before_they_are_rounded(dtype: str) -> None:
    """With heads of the usual size, and blocks that a copy engine loads."""
    device = torch.device("cuda")
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=128, block_size=64, dtype=dtype)
    require_invariance(TritonBackend(device, batch_invariant=True), layout, 8, device)


class Computation:
    """A model whose steps are watched: what they compute of sequence 0."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: str,
        lens: Sequence[int],
        run: int,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        config = ModelConfig.from_folder(folder)
        layout = config.layout(block_size, dtype)
        weights = load_weights(config, folder, dtype, device, batch_invariant=True)
        for layer in weights.layers:  # a larger model attends to as many tokens as a small one, not to one alone
            layer.qkv.weight.mul_((64 / config.hidden_size) ** 0.5)
        counts = [layout.blocks_for(length) for length in lens]
        ends = list(accumulate(counts))
        self.tables = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
        generator = torch.Generator().manual_seed(3)
        self.tokens = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lens]
        cache, swap = KVCache(layout, sum(counts), device), HostSwap(layout, 0, device)
        backend = TritonBackend(device, batch_invariant=True, run_keys=run)
        self.runner = ModelRunner(Executor(Decoder(config, weights), cache, swap, backend))
        executor = self.runner.executor
        if device.type == "cuda":
            self.runner.capture_graphs(len(lens))
        else:
            executor.graphs = EagerGraphs(
                executor.decoder, cache, backend, max_num_seqs=len(lens), max_blocks=max(counts)
            )

    def of(self, steps: Sequence[Sequence[Piece]]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """The KV of sequence 0 after these steps, and the logits of the last token of each of its pieces."""
        cache = self.runner.cache
        cache.blocks.zero_()
        nothing = torch.zeros(0, dtype=torch.int64, device=cache.device)
        logits = {}
        for pieces in steps:
            slices = [
                Slice(
                    token_ids=self.tokens[sequence][start:end], start=start, block_table=self.tables[sequence],
                    samples=(ANY,),
                )
                for sequence, start, end in pieces
            ]  # fmt: skip
            computed = self.runner.executor.compute(Rows.of(slices, self.runner.layout.block_size), nothing)
            for row, (sequence, _, end) in enumerate(pieces):
                if sequence == 0:
                    logits[end - 1] = computed.logits_RV[row].float().clone()
        return cache.blocks[self.tables[0]].clone(), logits


def require_one_result(computation: Computation, ways: dict[str, list[list[Piece]]]) -> None:
    """Fail unless sequence 0 gets the same KV in all ways, and each token the same logits in all that compute them."""
    kv, known = None, dict[int, torch.Tensor]()
    for name, steps in ways.items():
        own, logits = computation.of(steps)
        assert bool(own.any())
        assert kv is None or torch.equal(own, kv), f"KV, {name}"
        kv = own
        for position, each in logits.items():
            assert torch.equal(each, known.setdefault(position, each)), f"logits of {position}, {name}"


@pytest.mark.parametrize(("family", "dtype"), [("mistral", "float32"), ("qwen3", "bfloat16")])
def test_a_sequence_has_the_same_bits_however_it_is_computed(
    device: torch.device, checkpoint: Callable[[str], Path], family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV and logits, in chunks of any size, through decode steps and graphs, and beside others. For the instructions of
    a GPU see the next test."""
    multiply_in_order(monkeypatch)
    monkeypatch.setattr("common.engine.linear.linear", None)  # torch's: no product is its
    computation = Computation(checkpoint(family), device, dtype, [72, 50, 30], RUN)
    whole: list[list[Piece]] = [[(0, 0, 72)]]
    chunks: list[list[Piece]] = [[piece] for piece in whole_of(72, 3, 30, 32)]
    tokens: list[list[Piece]] = [[(0, 0, 62)], *([(0, place, place + 1)] for place in range(62, 66)), [(0, 66, 72)]]
    beside: list[list[Piece]] = [
        [(1, 0, 40), (0, 0, 33), (2, 0, 20)],
        [(1, 40, 41), (0, 33, 34), (2, 20, 21)],
        [(1, 41, 42), (0, 34, 35), (0, 35, 36), (2, 21, 30)],
        [(1, 42, 43), (0, 36, 63), (0, 63, 66)],
        [(0, 66, 67), (0, 67, 68)],
        [(1, 43, 50), (0, 68, 72)],
    ]
    ways = {"as a whole": whole, "in chunks": chunks, "token by token": tokens, "beside others": beside}
    require_one_result(computation, ways)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_on_a_gpu_a_sequence_has_the_same_bits_however_it_is_computed(family: str, tmp_path: Path) -> None:
    """Contexts of more than two runs, in bfloat16, with captured graphs, tiles of all sizes, and blocks as a GPU has by
    default, which a copy engine loads."""
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 8192}
    sizes |= {"sliding_window": 3000} if family == "mistral" else {}
    folder = make_checkpoint(family, tmp_path / family, dtype="bfloat16", **sizes)
    length, others = 2 * INVARIANT_RUN + 500, [900 + 7 * index for index in range(150)]
    computation = Computation(folder, torch.device("cuda"), "bfloat16", [length, *others], INVARIANT_RUN, 64)
    rows: list[Piece] = [(index, size - 1, size) for index, size in enumerate(others, start=1)]
    whole: list[list[Piece]] = [[(0, 0, length)]]
    chunks: list[list[Piece]] = [[piece] for piece in whole_of(length, 1, 2000, 48, 17, 700, 64, 129, 1000)]
    beside_it = (0, 1, 3, 20, 60, 150)  # decode tokens, so that graphs of several sizes are replayed
    tokens: list[list[Piece]] = [
        [(0, 0, 2000)],
        *([*rows[: beside_it[place % 6]], (0, place, place + 1)] for place in range(2000, length)),
    ]
    beside: list[list[Piece]] = [[*rows[:3], (5, 0, 300), (0, 0, 1500), (6, 0, 40)]]
    beside += [[*rows[:70], (0, start, start + 50), (99, 0, 100)] for start in range(1500, 2000, 50)]
    beside += [[*rows[:2], *((0, place, place + 1) for place in range(2000, 2005)), (8, 0, 9)]]  # as with drafts
    beside += [[(9, 0, 700), (0, 2005, length)]]
    ways = {"as a whole": whole, "in chunks": chunks, "token by token": tokens, "beside others": beside}
    require_one_result(computation, ways)
