"""What a step takes, by its rows and by what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from common.engine.batch import Decodes, Slice
from common.engine.runner import Submitted, load_runner
from common.engine.timing import time_rows
from common.scheduling.row_times import RowTimes
from decode_worker.lookup import LEAST_CHANCE


def times() -> RowTimes:
    return RowTimes(rows=(1, 2, 8), seconds=(10.0, 12.0, 36.0), token_s=0.5)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 10.0), (1, 10.0), (2, 12.0), (5, 24.0), (8, 36.0), (16, 68.0), (12, 52.0)]
)
def test_between_two_measurements_the_line_counts_and_beyond_them_the_last_line(rows: int, seconds: float) -> None:
    assert times().step_s((rows, 0)) == pytest.approx(seconds)
    assert times().step_s((rows, 6)) == pytest.approx(seconds + 3.0)


def test_drafts_add_their_rows_and_what_these_attend_to() -> None:
    assert times().step_s((2, 10), (3, 20)) == pytest.approx(24.0 + 15.0)


def test_steps_correct_what_was_measured() -> None:
    learnt = times()
    for _ in range(200):
        learnt.observe((2, 0), (0, 0), 24.0)
    assert learnt.step_s((2, 0)) == pytest.approx(24.0)
    assert learnt.step_s((2, 0), (6, 0)) == pytest.approx(72.0)
    for _ in range(200):
        learnt.observe((2, 0), (6, 0), 48.0)
    assert learnt.step_s((2, 0), (6, 0)) == pytest.approx(48.0)
    assert learnt.step_s((2, 0)) == pytest.approx(24.0)


def test_that_drafts_were_dear_is_forgotten_by_steps_without_them() -> None:
    learnt = times()
    for _ in range(100):
        learnt.observe((2, 0), (6, 0), 120.0)
    assert learnt.draft_scale > 1.1
    for _ in range(500):
        learnt.observe((2, 0), (0, 0), 12.0)
    assert learnt.step_s((2, 0), (6, 0)) == pytest.approx(36.0, rel=0.02)


def test_a_process_that_was_stopped_counts_as_four_times_as_slow_once() -> None:
    learnt = times()
    learnt.observe((2, 0), (0, 0), 1e6)
    assert learnt.step_s((2, 0)) == pytest.approx(1.3 * 12.0)
    for _ in range(500):
        learnt.observe((2, 0), (6, 0), 0.0)
    assert learnt.scale >= 0.25
    assert learnt.draft_scale >= 1 / 16, "no row is free"


@pytest.mark.parametrize("num_plain", [1, 8, 100])
def test_drafts_that_were_measured_to_be_free_are_corrected(num_plain: int) -> None:
    """Whatever the batch, a drafted row is found to cost as much as every other one, or a sixth of a step."""
    learnt = RowTimes(rows=(1, 2), seconds=(1.0, 1.0))
    plain, drafts = (num_plain, 0), (8, 0)
    assert 1.0 < learnt.step_s(plain, drafts) < 1.09
    assert num_plain * learnt.least_share(plain, 8) < LEAST_CHANCE, "no draft that may be made is too dear at first"
    for _ in range(200):
        learnt.observe(plain, drafts, 3.0)
    assert learnt.step_s(plain, drafts) == pytest.approx(1 + 8 * min(0.16, 1 / num_plain))
    for _ in range(200):
        learnt.observe(plain, drafts, 1.0)
    assert learnt.step_s(plain, drafts) == pytest.approx(1.0, abs=0.01)


def test_time_between_steps_is_part_of_each_and_that_before_drafts_is_told_apart() -> None:
    learnt = times()
    for _ in range(200):
        learnt.observe((2, 0), (0, 0), 12.0, 1.0)
        learnt.observe((2, 0), (6, 0), 36.0, 4.0)
    assert learnt.step_s((2, 0)) == pytest.approx(13.0)
    assert 37.0 < learnt.step_s((2, 0), (6, 0)) <= 40.0
    assert learnt.scale == pytest.approx(1.0)
    before = learnt.step_s((2, 0), (6, 0))
    for _ in range(200):
        learnt.observe((2, 0), (0, 0), 12.0, 1.0)
    assert before > 37.5
    assert learnt.step_s((2, 0), (6, 0)) == pytest.approx(37.0, abs=0.01), "what nothing would correct is forgotten"
    assert learnt.least_share((2, 0), 6) == pytest.approx(4.0 / 13.0)
    assert learnt.least_share((2, 14), 6) == pytest.approx(4.0 / 20.0), "a step that reads more is longer"


def test_of_an_unknown_time_between_steps_nothing_is_learnt() -> None:
    learnt = times()
    learnt.observe((2, 0), (0, 0), 12.0, 1.0)
    learnt.observe((2, 0), (6, 0), 36.0, 4.0)
    before = learnt.plan_s, learnt.draft_plan_s
    learnt.observe((2, 0), (6, 0), 36.0)
    assert (learnt.plan_s, learnt.draft_plan_s) == before
    learnt.observe((2, 0), (0, 0), 12.0)
    assert learnt.plan_s == before[0]


class Clock:
    """Each look at it takes what the last step should."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_steps_are_timed_and_leave_the_cache_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    runner = load_runner(folder, kv_cache_bytes=2**20, block_size=4)
    timed = time_rows(runner, 12)
    assert timed.rows == (1, 2, 4, 8, 12)
    assert list(timed.seconds) == sorted(timed.seconds)
    assert timed.seconds[0] > 0
    assert timed.token_s >= 0
    assert not runner.cache.blocks.any()
    slow = time_rows(runner, 12, Clock(1.0))
    assert slow.rows == (1, 2), "two are timed however long a step takes: one does not tell what a row adds"
    assert slow.step_s((3, 0)) == slow.step_s((1, 0))
    assert time_rows(runner, 12, Clock(0.05)).rows == (1, 2, 4, 8, 12), "each is run once"
    cleared = runner.cache.begin
    begun: list[int] = []

    def begin(blocks: torch.Tensor) -> None:
        begun.append(len(blocks))
        cleared(blocks)

    monkeypatch.setattr(runner.cache, "begin", begin)
    time_rows(runner, 12)
    assert begun == [runner.cache.num_blocks], "no row begins a block; at the end all are cleared"
    small = load_runner(folder, kv_cache_bytes=runner.layout.block_bytes, block_size=4)
    assert time_rows(small, 3).rows == (1, 2, 3), "one block is enough"


def test_an_interrupted_step_lifts_no_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is so long that it is run once."""
    runner = load_runner(make_checkpoint("llama", tmp_path), kv_cache_bytes=2**20, block_size=4)
    submit, took_s, now = runner.submit, {1: 0.08, 2: 0.05, 4: 0.06, 8: 0.05}, 0.0

    def submitted(slices: Sequence[Slice], decodes: Decodes | None = None) -> Submitted:
        nonlocal now
        now += took_s[len(decodes.token_ids_D)] if decodes is not None else 0.0
        return submit(slices, decodes)

    monkeypatch.setattr(runner, "submit", submitted)
    timed = time_rows(runner, 8, lambda: now)
    assert timed.rows == (1, 2, 4, 8)
    assert timed.seconds == pytest.approx((0.05,) * 4)


def test_on_a_gpu_what_attention_takes_is_told_apart_from_steps_that_differ_by_one_in_a_hundred() -> None:
    """Those of few tokens take longer by that, and those of many are quicker."""
    now, token_s = 0.0, 4e-8  # of a cache of 128 KiB per token that is read at 3.3 TB/s

    def submit(slices: Sequence[Slice], decodes: Decodes) -> Any:
        nonlocal now
        rows, num_tokens = len(decodes.token_ids_D), int(decodes.positions_D.sum()) + len(decodes.token_ids_D)
        now += (5e-3 + 2e-5 * rows + token_s * num_tokens) * (1.01 if num_tokens <= 2 * rows else 0.99)
        return SimpleNamespace(chosen=lambda: None)

    runner: Any = SimpleNamespace(
        layout=SimpleNamespace(block_size=64),
        cache=SimpleNamespace(num_blocks=2000, device=torch.device("cuda")),
        config=SimpleNamespace(max_sequence_tokens=131_072),
        submit=submit,
        clear=lambda num_blocks: None,
    )
    assert time_rows(runner, 64, lambda: now).token_s == pytest.approx(token_s, rel=0.2)
