from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from common.engine.batch import Decodes, Sampled, Slice
from common.engine.runner import ModelRunner, Submitted, load_runner
from common.engine.timing import measure_costs
from common.scheduling.costs import DEEP_TOKENS, Costs

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_a_warm_up_keeps_to_the_context_of_the_model(tmp_path: Path) -> None:
    """Positions beyond it have no angles; a GPU would read what lies behind the table."""
    folder = make_checkpoint("llama", tmp_path, max_position_embeddings=20)
    load_runner(folder, kv_cache_bytes=2**18, block_size=16).warm_up()


def test_a_warm_up_ends_with_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as long as the context or the cache allows, together."""
    folder = make_checkpoint("llama", tmp_path, max_position_embeddings=40)
    runner = load_runner(folder, kv_cache_bytes=2**18, block_size=16)
    steps: list[list[int]] = []
    step = runner.step

    def watch(slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
        steps.append([len(each.token_ids) for each in slices])
        return step(slices)

    monkeypatch.setattr(runner, "step", watch)
    runner.warm_up(100)
    assert steps[-2] == [40, 40, 20], "the last one waits for the cache to be cleared"
    assert not runner.cache.blocks.any()


class TimedRunner:
    """A real runner on a machine of known speed: its clock stands still but for what it is asked to do."""

    def __init__(
        self, runner: ModelRunner, *, step_s: float, token_s: float, block_s: float, depth_s: float = 0.0
    ) -> None:
        self._runner = runner
        self._step_s, self._token_s, self._block_s, self._depth_s = step_s, token_s, block_s, depth_s
        self.now = 0.0
        self.sizes: list[int] = []
        self.delays: list[float] = []
        """Extra seconds of the next steps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def clock(self) -> float:
        return self.now

    def step(self, slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
        num_tokens = sum(len(each.token_ids) for each in slices)
        self.sizes.append(num_tokens)
        self.now += self._step_s + num_tokens * self._token_s + (self.delays.pop(0) if self.delays else 0.0)
        self.now += self._depth_s * sum(each.start * len(each.token_ids) for each in slices)
        return self._runner.step(slices)

    def submit(self, slices: Sequence[Slice], decodes: Decodes) -> Submitted:
        assert (len(slices), decodes.token_ids_D.size) == (0, 1)
        assert decodes.positions_D > 0, "a token that begins a block takes the time to zero it"
        self.sizes.append(1)
        self.now += self._step_s + self._token_s + (self.delays.pop(0) if self.delays else 0.0)
        return self._runner.submit(slices, decodes)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.now += len(pairs) * self._block_s
        self._runner.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.now += len(pairs) * self._block_s
        self._runner.swap_in(pairs)


def timed(folder: Path, *, kv_cache_bytes: int = 2**18, swap_bytes: int = 2**17, **speed: float) -> TimedRunner:
    runner = load_runner(folder, kv_cache_bytes=kv_cache_bytes, block_size=16, swap_bytes=swap_bytes)
    return TimedRunner(runner, **({"step_s": 0.0, "token_s": 1e-4, "block_s": 1e-5} | speed))


def measured(runner: TimedRunner, most_tokens: int = 128) -> Costs:
    return measure_costs(runner, most_tokens, runner.clock)  # type: ignore[arg-type]


def test_a_swap_is_out_and_in() -> None:
    costs = Costs(prefill_s_per_token=0.002, swap_s_per_block=0.0005)
    assert costs.compute_s(0, 300) == pytest.approx(0.6)
    assert costs.swap_s(10) == pytest.approx(0.01)
    assert costs.compute_s(0, 0) == costs.swap_s(0) == 0.0


def test_without_swap_space_a_swap_is_never_the_cheaper_way() -> None:
    costs = Costs(prefill_s_per_token=10.0, swap_s_per_block=math.inf)
    assert costs.swap_s(1) == math.inf
    assert costs.swap_s(0) == 0.0


def test_the_estimate_follows_what_is_observed() -> None:
    costs = Costs(prefill_s_per_token=0.001)
    for _ in range(60):
        costs.observe_prefill(256, 0.512)
    assert costs.prefill_s_per_token == pytest.approx(0.002, rel=0.01)
    for _ in range(60):
        costs.observe_prefill(512, 0.0512)
    assert costs.prefill_s_per_token == pytest.approx(0.0001, rel=0.05)


def test_one_observation_moves_the_estimate_a_little() -> None:
    costs = Costs(prefill_s_per_token=0.001)
    costs.observe_prefill(16, 3600.0)
    assert 0.001 < costs.prefill_s_per_token <= 0.0013 + 1e-12, "the process was stopped for an hour"
    costs = Costs(prefill_s_per_token=0.001)
    costs.observe_prefill(16, 0.0)
    assert 0.0009 < costs.prefill_s_per_token < 0.001, "a clock that did not advance"


def test_short_prompts_do_not_make_long_ones_look_dear() -> None:
    costs = Costs(prefill_s_per_token=20e-6)
    for _ in range(60):
        costs.observe_prefill(20, 0.010 + 20 * 20e-6)
    assert costs.prefill_s_per_token < 25e-6, "it was 25 times as much"


def test_what_a_step_takes_is_no_part_of_what_its_tokens_take() -> None:
    costs = Costs(prefill_s_per_token=20e-6, step_s=0.010)
    for num_tokens in (20, 256, 2048, 100):
        costs.observe_prefill(num_tokens, 0.010 + num_tokens * 20e-6)
    assert costs.prefill_s_per_token == pytest.approx(20e-6)


def test_a_fixed_time_that_was_measured_too_long_does_not_make_tokens_free() -> None:
    """The machine was busy when the worker started."""
    costs = Costs(prefill_s_per_token=1e-4, step_s=0.06)
    for _ in range(2000):
        costs.observe_step(100, 0, 0.055)
    assert costs.step_s + 100 * costs.prefill_s_per_token == pytest.approx(0.055, rel=0.02)
    assert costs.prefill_s_per_token >= 1e-4 / 16
    for _ in range(100):
        costs.observe_step(300, 0, 0.085)
    assert costs.step_s + 300 * costs.prefill_s_per_token == pytest.approx(0.085, rel=0.05)


def test_a_few_tokens_tell_nothing() -> None:
    costs = Costs(prefill_s_per_token=0.001)
    costs.observe_prefill(15, 1.0)
    costs.observe_prefill(0, 1.0)
    assert costs == Costs(prefill_s_per_token=0.001)


def test_measures_what_the_machine_takes(folder: Path) -> None:
    runner = timed(folder)
    costs = measured(runner)
    assert costs.prefill_s_per_token == pytest.approx(1e-4)
    assert costs.swap_s_per_block == pytest.approx(1e-5)
    assert max(runner.sizes) == 128


@pytest.mark.parametrize("most_tokens", [32, 100, 512])
def test_what_a_step_takes_is_told_apart_from_its_tokens(folder: Path, most_tokens: int) -> None:
    runner = timed(folder, step_s=5e-3, token_s=1e-4)
    costs = measured(runner, most_tokens)
    assert (costs.step_s, costs.prefill_s_per_token) == pytest.approx((5e-3, 1e-4))
    assert costs.prompt_s_per_token == pytest.approx(1e-4 + 5e-3 / most_tokens)
    assert max(runner.sizes) == most_tokens


def test_a_step_that_is_long_enough_is_the_largest(folder: Path) -> None:
    """Of 64 tokens it takes more than a tenth of a second."""
    runner = timed(folder, step_s=1e-3, token_s=2e-3)
    costs = measured(runner, 512)
    assert (costs.step_s, costs.prefill_s_per_token) == pytest.approx((1e-3, 2e-3))
    assert costs.prompt_s_per_token == pytest.approx(2e-3 + 1e-3 / 512), "a full step has 512 tokens all the same"
    assert max(runner.sizes) == 64
    assert runner.now < 0.5


def test_a_machine_that_takes_as_long_for_many_tokens_as_for_few_is_not_free(folder: Path) -> None:
    costs = measured(timed(folder, step_s=8e-3, token_s=0.0))
    assert costs.prefill_s_per_token == pytest.approx(8e-3 / 128)


def test_a_slow_warm_up_and_one_interruption_do_not_show(folder: Path) -> None:
    runner = timed(folder)
    runner.delays = [0.05, 0.0, 0.0, 0.3]
    assert measured(runner).prefill_s_per_token == pytest.approx(1e-4)


def test_a_short_step_that_was_interrupted_twice_does_not_make_tokens_free(folder: Path) -> None:
    """It took as long as the largest one then, as if most of that were the step's own time."""
    runner = timed(folder)
    runner.delays = [0.011, 0.011]
    assert measured(runner).prefill_s_per_token == pytest.approx(1e-4)


def test_a_prompt_also_takes_the_time_of_its_steps() -> None:
    """Of two equal workers one may put down to its steps what the other one does to tokens."""
    one = Costs(prefill_s_per_token=25e-6, step_tokens=64)
    other = Costs(prefill_s_per_token=1e-9, step_s=1.6e-3, step_tokens=64)
    assert one.prompt_s_per_token == pytest.approx(other.prompt_s_per_token, rel=1e-3)


@pytest.mark.parametrize(("token_s", "sizes"), [(0.05, [16]), (0.02, [16, 16]), (0.005, [16, 16, 32, 32])])
def test_a_slow_machine_is_measured_by_less(folder: Path, token_s: float, sizes: list[int]) -> None:
    runner = timed(folder, token_s=token_s)
    assert measured(runner).prefill_s_per_token == pytest.approx(token_s)
    assert runner.sizes == [*sizes, 1, 1, 1]
    assert runner.now <= 2.0


def test_a_small_cache_and_a_small_swap_space_do(folder: Path) -> None:
    block_bytes = load_runner(folder, kv_cache_bytes=2**16, block_size=16).layout.block_bytes
    runner = timed(folder, kv_cache_bytes=2 * block_bytes, swap_bytes=block_bytes)
    costs = measured(runner)
    assert max(runner.sizes) == 32
    assert (costs.prefill_s_per_token, costs.swap_s_per_block) == pytest.approx((1e-4, 1e-5))


def test_without_swap_space_prefill_alone_is_measured(folder: Path) -> None:
    costs = measured(timed(folder, swap_bytes=0))
    assert costs.prefill_s_per_token == pytest.approx(1e-4)
    assert costs.swap_s_per_block == math.inf


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a context of more than `DEEP_TOKENS`."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=8192)


@pytest.mark.parametrize("most_tokens", [100, 512])
def test_what_depth_costs_is_told_apart_from_the_token(long_folder: Path, most_tokens: int) -> None:
    runner = timed(long_folder, kv_cache_bytes=2**22, step_s=5e-3, depth_s=2e-8)
    costs = measured(runner, most_tokens)
    assert (costs.step_s, costs.prefill_s_per_token, costs.depth_s) == pytest.approx((5e-3, 1e-4, 2e-8))
    assert not runner.cache.blocks.any()


def test_interruptions_do_not_make_depth_look_dearer_than_the_token(long_folder: Path) -> None:
    """Both deep runs last 0.1 s longer, all other runs do not."""
    runner = timed(long_folder, kv_cache_bytes=2**22, step_s=5e-3, depth_s=2e-8)
    step = runner.step

    def interrupted(slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
        runner.delays = [0.1] if slices[0].start else []
        return step(slices)

    runner.step = interrupted  # type: ignore[method-assign]
    costs = measured(runner, 512)
    assert (costs.prefill_s_per_token, costs.depth_s) == pytest.approx((1e-4, 1e-4 / DEEP_TOKENS))


@pytest.mark.parametrize("num_tokens", [2048, 512])
def test_a_cache_that_holds_less_is_enough_unless_it_holds_little(long_folder: Path, num_tokens: int) -> None:
    block_bytes = load_runner(long_folder, kv_cache_bytes=2**16, block_size=16).layout.block_bytes
    runner = timed(long_folder, kv_cache_bytes=block_bytes * num_tokens // 16, depth_s=2e-8)
    assert measured(runner).depth_s == pytest.approx(2e-8 if num_tokens > 1500 else 0.0)
    assert not runner.cache.blocks.any()


@pytest.mark.parametrize("token_s", [0.05, 0.02, 0.005])
def test_a_slow_machine_spends_little_time_on_depth(long_folder: Path, token_s: float) -> None:
    runner = timed(long_folder, kv_cache_bytes=2**22, token_s=token_s, depth_s=token_s / 4096)
    assert measured(runner).depth_s == pytest.approx(token_s / 4096 if token_s < 0.05 else 0.0)
    assert runner.now <= 2.0


def test_the_least_step_is_one_of_one_token(folder: Path) -> None:
    runner = timed(folder, step_s=0.03, token_s=0.01)
    assert measured(runner).least_step_s == pytest.approx(0.04)


def test_an_interruption_of_one_least_step_does_not_count(folder: Path) -> None:
    runner = timed(folder, step_s=0.03, token_s=0.05)
    runner.delays = [0.0, 0.2]
    assert measured(runner).least_step_s == pytest.approx(0.08)
    assert runner.sizes == [16, 1, 1, 1], "the second step was the one that took longer"


def test_no_step_takes_less_than_the_least_one() -> None:
    """All of its measurements were interrupted by other workers that started."""
    costs = Costs(least_step_s=0.3)
    for _ in range(2):
        costs.observe_step(16, 1, 0.2)
    assert costs.least_step_s == 0.2
    for _ in range(2):
        costs.observe_prefill(256, 0.1)
    assert costs.least_step_s == 0.1
    costs.observe_step(0, 1, 0.5)
    assert costs.least_step_s == 0.1


def test_a_step_whose_predecessor_was_seen_to_end_late_lowers_no_bound() -> None:
    """The process stood still for 0.2 s, in which two steps of 0.03 s ended on the GPU."""
    costs = Costs(least_step_s=0.02, depth_s=1e-6)
    for seconds in (0.03, 0.2, 0.002, 0.03):
        costs.observe_step(16, 8, seconds, 16 * 10_000)
    assert costs.least_step_s == 0.02
    assert costs.depth_s == pytest.approx(0.03 / (16 * 10_000), rel=1e-9)


def test_prompts_whose_end_is_heard_late_do_not_lower_the_fixed_time_of_a_step() -> None:
    """Each fourth one, by 6 ms, which the next step then seems to take less."""
    costs = Costs(prefill_s_per_token=2e-5, step_s=3e-3, step_tokens=2048)
    true_s = 3e-3 + 256 * 2e-5
    for number in range(1000):
        costs.observe_prefill(256, true_s + {0: 6e-3, 1: -6e-3}.get(number % 4, 0.0))
    assert costs.step_s > 2.9e-3
    assert costs.prefill_s_per_token == pytest.approx(2e-5, rel=0.3)


def test_a_measurement_leaves_the_cache_as_it_was(folder: Path) -> None:
    runner = load_runner(folder, kv_cache_bytes=2**18, block_size=16, swap_bytes=2**17)
    written: list[bool] = []

    class Watched(TimedRunner):
        def step(self, slices: Sequence[Slice]) -> list[tuple[Sampled, ...]]:
            outcomes = super().step(slices)
            written.append(bool(self._runner.cache.blocks.any()))
            return outcomes

    measured(Watched(runner, step_s=0.0, token_s=1e-4, block_s=1e-5))
    assert all(written)
    assert written
    assert not runner.cache.blocks.any()
    costs = measure_costs(runner, 128)
    assert 0 < costs.prefill_s_per_token < 1
    assert 0 < costs.swap_s_per_block < 1
    assert not runner.cache.blocks.any()
