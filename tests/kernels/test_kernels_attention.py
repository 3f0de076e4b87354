"""Attention kernels against float64, over shapes that hypothesis draws; what is not written is poison."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.kernels.decode_attention import DecodeTiling, decode_attention
from common.engine.kernels.prefill_attention import PrefillTiling, prefill_attention
from common.engine.kernels.query_runs import WHOLE, query_runs, query_tiles
from common.engine.kernels.tiles import is_hopper_or_later, padded
from kernels.reference import TOLERANCE, attention, error, examples

TYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 80, 96, 128, 256)
NAN = float("nan")


@dataclass
class Case:
    """A ragged batch over a cache."""

    query_lens: list[int]
    seq_lens: list[int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    dtype: torch.dtype
    seed: int

    def make(self, device: torch.device) -> None:
        """Queries, the cache, of which only what the sequences have written is finite, and shuffled block tables."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        counts = [max(1, -(-length // self.block_size)) for length in self.seq_lens]
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
        ends = list(itertools.accumulate(counts))
        self.tables = [order[end - count : end] for end, count in zip(ends, counts, strict=True)]
        # As in the engine: a layer among others, and zero, not anything, after the last token of a block in use.
        cache = torch.full((len(order), self.num_kv_heads, 2, 2, self.block_size, self.head_dim), NAN, dtype=self.dtype)
        self.kv_layer = cache[:, :, 1]
        for table, length in zip(self.tables, self.seq_lens, strict=True):
            if length:
                self.kv_layer[table] = 0
            for index in range(length):
                block, slot = table[index // self.block_size], index % self.block_size
                self.kv_layer[block, :, :, slot] = normal(self.num_kv_heads, 2, self.head_dim)
        self.kv_layer = cache.to(device)[:, :, 1]
        self.q_THD = normal(sum(self.query_lens), self.num_heads, self.head_dim).to(device)
        width = max(counts)
        padded = [table + [2**20] * (width - len(table)) for table in self.tables]  # a block that is not there
        self.tables_BM = torch.tensor(padded, device=device)
        self.lens_B = torch.tensor(self.seq_lens, device=device)
        starts = [0, *itertools.accumulate(self.query_lens)]
        self.starts_B1 = torch.tensor(starts, device=device)
        self.scale = self.head_dim**-0.5

    def expected(self) -> torch.Tensor:
        """In float64."""
        return attention(
            self.q_THD, self.kv_layer, self.tables, self.query_lens, self.seq_lens, self.window, self.scale
        )

    def poison(self) -> torch.Tensor:
        """An output that has not been written."""
        return torch.full_like(self.q_THD, NAN)


lengths = st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 200]))


@st.composite
def cases(draw: st.DrawFn, *, decode: bool) -> Case:
    """Mixed lengths, groups small and large, blocks smaller and larger than a tile."""
    seq_lens = draw(st.lists(lengths, min_size=1, max_size=3))
    group = draw(st.sampled_from([1, 2, 3, 7, 8, 20]))
    num_kv_heads, longest = (draw(st.integers(1, 2)), 40) if group < 7 else (1, 12)  # large groups take long
    query_lens = [1 if decode else draw(st.integers(1, min(length, longest))) for length in seq_lens]
    if decode and draw(st.booleans()):
        seq_lens[draw(st.integers(0, len(seq_lens) - 1))] = 0  # a place of a graph's batch that nobody has
    return Case(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        block_size=draw(st.sampled_from([4, 16, 24, 32, 64])),
        window=draw(st.one_of(st.none(), st.integers(1, 80))),
        dtype=draw(st.sampled_from(TYPES)),
        seed=draw(st.integers(0, 2**31)),
    )


def fitting_tile(case: Case, tile: int) -> int:
    """Keys of a tile of which a GPU's shared memory holds several."""
    return min(tile, 2**14 // (padded(case.head_dim) * case.dtype.itemsize))


def decoded(case: Case, num_processors: int, tiling: DecodeTiling) -> torch.Tensor:
    """What the kernel writes."""
    out = case.poison()
    runs = tiling.runs(
        case.lens_B,
        window=case.window,
        max_seq_len=max(1, *case.seq_lens),
        num_kv_heads=case.num_kv_heads,
        num_processors=num_processors,
    )
    decode_attention(
        case.q_THD,
        case.kv_layer,
        case.tables_BM,
        case.lens_B,
        runs,
        window=case.window,
        scale=case.scale,
        tiling=tiling,
        out_BHD=out,
    )
    return out


def prefilled(case: Case, tiling: PrefillTiling, longest: int = WHOLE) -> torch.Tensor:
    """What the kernels write, with runs of up to `longest` tiles of keys."""
    out = case.poison()
    num_tokens = tiling.num_tokens(case.num_heads // case.num_kv_heads)
    runs = query_runs(query_tiles(case.query_lens, case.seq_lens, num_tokens, tiling.tile, case.window), longest)
    prefill_attention(
        case.q_THD,
        case.kv_layer,
        case.tables_BM,
        case.starts_B1,
        case.lens_B,
        torch.tensor(runs.runs, dtype=torch.int32, device=out.device),
        torch.tensor(runs.splits, dtype=torch.int32, device=out.device),
        num_places=runs.num_places,
        window=case.window,
        scale=case.scale,
        tiling=tiling,
        out_THD=out,
    )
    return out


@settings(max_examples=examples(80), deadline=None)
@given(case=cases(decode=True), processors=st.sampled_from([1, 2, 4, 16]), tile=st.sampled_from([16, 32, 64]))
def test_decode_attention(device: torch.device, case: Case, processors: int, tile: int) -> None:
    case.make(device)
    out = decoded(case, processors, DecodeTiling(tile=fitting_tile(case, tile), least_tiles=1))
    assert error(out, case.expected()) < TOLERANCE[case.dtype]


@settings(max_examples=examples(80), deadline=None)
@given(
    case=cases(decode=False),
    rows=st.sampled_from([16, 32, 64]),
    tile=st.sampled_from([16, 32, 64]),
    longest=st.sampled_from([WHOLE, 1, 2, 3]),
    copy_engine=st.booleans(),
)
def test_prefill_attention(
    device: torch.device, case: Case, rows: int, tile: int, longest: int, copy_engine: bool
) -> None:
    case.make(device)
    rows = min(rows, 32) if case.dtype == torch.float32 else rows  # more do not fit into the registers
    tile = fitting_tile(case, tile)
    copy_engine = copy_engine and case.block_size % tile == 0 and case.dtype != torch.float32
    copy_engine = copy_engine and (device.type == "cpu" or is_hopper_or_later())
    out = prefilled(case, PrefillTiling(rows=rows, tile=tile, copy_engine=copy_engine), longest)
    assert error(out, case.expected()) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_decode_token_is_a_chunk_of_one(device: torch.device, dtype: torch.dtype) -> None:
    case = Case([1, 1, 1], [150, 16, 1], 6, 2, 64, 16, None, dtype, seed=3)
    case.make(device)
    chunk = prefilled(case, PrefillTiling(rows=32, tile=32)).double()
    difference = error(decoded(case, 4, DecodeTiling(least_tiles=1)), chunk)
    assert difference < TOLERANCE[dtype]


def test_a_context_of_many_runs_is_combined(device: torch.device) -> None:
    """Of more runs than are read at a time; some rows see nothing of the first, and none of the last."""
    case = Case([5, 20], [580, 570], 6, 2, 64, 16, 540, torch.float32, seed=4)
    case.make(device)
    out = prefilled(case, PrefillTiling(rows=32, tile=16), 1)
    assert error(out, case.expected()) < TOLERANCE[case.dtype]
