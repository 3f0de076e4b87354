"""How decode attention cuts contexts into runs, on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.decode_runs import decode_runs, most_runs

TILE = 16
Run = tuple[int, int]
"""First tile of keys, and one past the last."""


def runs_of(
    device: torch.device, lens: list[int], window: int | None, wanted: int, max_seq_len: int
) -> list[list[Run]]:
    """Of each sequence; two tiles in a run at least. What there is beside the runs is as it should be."""
    runs = decode_runs(
        torch.tensor(lens, device=device),
        window=window, max_seq_len=max_seq_len, tile=TILE, wanted=wanted, least_tiles=2,
    )  # fmt: skip
    num = int(runs.num_runs_1)
    assert len(lens) <= num <= len(runs.runs_R4)
    found: list[list[Run]] = [[] for _ in lens]
    for row, begin, end, _ in runs.runs_R4[:num].tolist():
        found[row].append((begin, end))
    assert [alone == 1 for *_, alone in runs.runs_R4[:num].tolist()] == [
        len(each) == 1 for each in found for _ in each
    ]  # fmt: skip
    places = [sum(len(each) for each in found[:row]) for row in range(len(lens))]
    assert runs.splits_B4.tolist() == [[row, 1, places[row], len(each)] for row, each in enumerate(found)]
    return found


def pieces(num_tiles: int, size: int) -> list[Run]:
    """Of a context, one after another."""
    return [(begin, min(begin + size, num_tiles)) for begin in range(0, num_tiles, size)]


def test_one_long_context_among_short_ones_is_cut_and_they_are_not(device: torch.device) -> None:
    lens = [TILE * 512, *[TILE * 4] * 130]
    long, *short = runs_of(device, lens, None, 32, max(lens))
    assert long == pieces(512, 32)  # a run is a thirty-second of all tiles, 33, and those of one row as long as can be
    assert short == [[(0, 4)]] * 130


def test_of_one_length_all_are_cut_alike(device: torch.device) -> None:
    assert runs_of(device, [TILE * 64] * 4, None, 16, TILE * 64) == [pieces(64, 16)] * 4
    # Shares of 52: no second run for 12.
    assert runs_of(device, [TILE * 64] * 4, None, 5, TILE * 64) == [[(0, 64)]] * 4


def test_many_runs_of_one_context(device: torch.device) -> None:
    """More than are written at a time."""
    assert runs_of(device, [1, TILE * 1000], None, 400, 2**20) == [[(0, 1)], pieces(1000, 4)]


@settings(max_examples=30, deadline=None)
@given(
    lens=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    window=st.sampled_from([1, 100, None]),
    wanted=st.integers(1, 40),
    longest=st.sampled_from([3000, 2**17]),
)
def test_runs_cover_the_context_and_none_is_much_longer_than_its_share(
    device: torch.device, lens: list[int], window: int | None, wanted: int, longest: int
) -> None:
    spans = [(0 if window is None else max(0, length - window) // TILE, -(-length // TILE)) for length in lens]
    share = max(2, -(-sum(end - begin for begin, end in spans) // wanted))
    for (begin, end), runs in zip(spans, runs_of(device, lens, window, wanted, longest), strict=True):
        assert [first for first, _ in runs] == [begin, *(last for _, last in runs[:-1])]
        assert runs[-1][1] == end
        assert all(last - first < 1.5 * share + 1 for first, last in runs)
        assert all(last > first for first, last in runs) or begin == end


@pytest.mark.parametrize(("batch", "length"), [(1, 32768), (8, 4096), (16, 16384), (64, 8192), (256, 1024)])
def test_most_programs_of_a_graph_have_a_run(device: torch.device, batch: int, length: int) -> None:
    """Of contexts of one length, in a grid for the longest that there can be."""
    lens = torch.full((batch,), length, device=device)
    runs = DecodeTiling().runs(lens, window=None, max_seq_len=65536, num_kv_heads=8, num_processors=132)
    assert int(runs.num_runs_1) >= 0.6 * len(runs.runs_R4)


def test_as_many_runs_as_a_sequence_alone_needs_and_few_beside_those_of_many() -> None:
    assert most_runs(1, 33, 2048, 2) == 34
    assert most_runs(1, 33, 16, 2) == 8
    assert most_runs(64, 33, 512, 2) == 97
    assert most_runs(1, 33, 1, 2) == 1
    assert most_runs(64, 33, 2, 2) == 64
