"""The arithmetic of the claims about batching and memory, on examples that can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks import claims
from benchmarks.claims import BLOCK_SIZE, MAX_MODEL_LEN, MAX_PROMPT, MEAN_TOKENS, Clock, Size
from benchmarks.driver import Arrival, Modelled, Story

CLOCK = Clock({0: 1.0, 100: 11.0}, prompt_token_s=0.01)
"""1 second for a step, and 0.1 for each sequence."""


def of_outputs(*outputs: int) -> list[Size]:
    return [Size(10, output) for output in outputs]


# --- the clock -------------------------------------------------------------------------------------------------------


def test_a_step_costs_what_was_timed_and_between_two_batches_something_between() -> None:
    clock = Clock({0: 1.0, 1: 2.0, 8: 16.0}, prompt_token_s=0.5)
    assert [clock.step_s(num, 0) for num in (0, 1, 4, 8, 20)] == [1, 2, 8, 16, 16]
    assert clock.step_s(1, 10) == 7


def test_where_the_engine_is_linear_so_are_the_clock_and_the_fit() -> None:
    decode_step_s = {batch: 1 + 0.1 * batch for batch in (1, 2, 8, 32)}
    clock, line = claims.fit(decode_step_s, prompt_s=1 + 256 * 0.01)
    assert (line.step_s, line.decode_s, line.prompt_token_s) == pytest.approx((1, 0.1, 0.01))
    assert [clock.step_s(num, 10) for num in (0, 5, 32)] == pytest.approx([1.1, 1.6, 4.3])
    sizes = claims.varied_sizes(1, 24, seed=0)
    rates = [claims.tokens_per_s(claims.serve(sizes, each, 8)[1]) for each in (clock, Modelled(line))]
    assert rates[0] == pytest.approx(rates[1])


# --- batching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "batch", "expected"),
    [
        ((7, 7, 7, 7), 2, 1.0),
        ((5, 200, 3, 150), 4, 358 / 800),
        ((1, 3, 10, 10), 2, 24 / 26),
        pytest.param((4, 4, 4), 2, 12 / 16, id="the last batch is not full"),
    ],
)
def test_utilisation_is_tokens_over_places_and_steps(outputs: tuple[int, ...], batch: int, expected: float) -> None:
    assert claims.static_utilisation(of_outputs(*outputs), batch) == pytest.approx(expected)


def test_naive_static_batching_pays_for_its_longest_prompt_and_output() -> None:
    sizes = [Size(10, 5), Size(20, 3), Size(5, 1)]
    first = (1 + 2 * 20 * 0.01) + (5 - 1) * (1 + 2 * 0.1)
    last = 1 + 5 * 0.01
    assert claims.naive_static_s(sizes, 2, CLOCK) == pytest.approx(first + last)


def test_where_all_are_alike_naive_batching_is_what_the_driver_does() -> None:
    sizes = [Size(20, 10)] * 8
    _, stories = claims.serve(sizes, CLOCK, 4, static=True)
    assert 80 / claims.tokens_per_s(stories) == pytest.approx(claims.naive_static_s(sizes, 4, CLOCK))


def test_throughput_is_all_tokens_by_the_time_of_the_last() -> None:
    arrival = Arrival(time_s=0.0, prompt=(1,), num_output=3, max_tokens=3)
    stories = [Story(arrival, [7, 7, 7], [1.0, 2.0, 8.0]), Story(arrival, [7, 7], [4.0, 5.0])]
    assert claims.tokens_per_s(stories) == 5 / 8


def test_without_variation_continuous_batching_gains_nothing() -> None:
    found = claims.compare(claims.varied_sizes(0, 64, seed=0), CLOCK, 8)
    assert found["ratio"] == pytest.approx(1, abs=0.05)
    assert found["static_utilisation"] == 1


def test_the_more_outputs_vary_the_more_continuous_batching_gains() -> None:
    found = [claims.compare(claims.varied_sizes(cv, 64, seed=0), CLOCK, 4) for cv in (0, 0.5, 1, 2)]
    for name in ("output_cv", "ratio", "ratio_to_naive", "ratio_of_steps"):
        values = [each[name] for each in found]
        assert values == sorted(values), name
    assert found[-1]["ratio"] > 1.5
    assert found[-1]["static_utilisation"] < 0.5 < found[-1]["continuous_utilisation"]
    assert all(each["ratio_to_naive"] > each["ratio"] for each in found)


def test_in_a_cache_that_paging_fills_continuous_batching_runs_more_at_a_time() -> None:
    sizes = claims.varied_sizes(0.5, 64, seed=0)
    few, many = claims.compare(sizes, CLOCK, 4), claims.compare(sizes, CLOCK, 4, places=64, num_blocks=512)
    assert many["mean_decoding"] > 2 * few["mean_decoding"]
    assert many["ratio"] > 1.5 * few["ratio"]


def test_sizes_differ_in_their_outputs_only_and_fit() -> None:
    steady, varied = claims.varied_sizes(0, 500, seed=1), claims.varied_sizes(3, 500, seed=1)
    assert [size.prompt for size in steady] == [size.prompt for size in varied]
    assert {size.output for size in steady} == {MEAN_TOKENS}
    assert all(1 <= size.prompt <= MAX_PROMPT and size.prompt + size.output <= MAX_MODEL_LEN for size in varied)
    assert len({size.output for size in varied}) > 50


# --- memory and padding ----------------------------------------------------------------------------------------------


def test_empty_slots_are_counted_in_every_decode_step() -> None:
    # 3, 4 and 5 slots have a token after the three steps.
    assert list(claims.stored(Size(2, 4))) == [3, 4, 5]
    assert claims.empty_share([Size(2, 4)], lambda size: 8) == pytest.approx(1 - 12 / 24)
    assert claims.empty_share([Size(2, 4)], lambda size: size.prompt + 4) == pytest.approx(1 - 12 / 18)


def test_a_longer_output_counts_for_more_steps() -> None:
    assert claims.empty_share([Size(7, 2), Size(1, 3)], lambda size: 10) == pytest.approx(1 - 13 / 30)


def test_the_block_pool_reserves_whole_blocks_and_nothing_else() -> None:
    sizes = [Size(5, 40), Size(16, 20), Size(31, 3), Size(100, 60)]
    held = [num for size in sizes for num in claims.stored(size)]
    reserved = sum(-(-num // BLOCK_SIZE) * BLOCK_SIZE for num in held)
    assert claims.paged_empty_share(sizes) == pytest.approx(1 - sum(held) / reserved)


def test_paging_leaves_less_empty_than_any_reservation() -> None:
    empty = claims.memory(24, seed=0)
    assert 0 < empty["paged"] < 0.04 < empty["prompt_and_max_tokens"] < empty["max_model_len"] < 1


@pytest.mark.parametrize(("prompts", "expected"), [((3, 5, 8), 8), ((6, 6), 0), ((9,), 0), ((1, 100), 99)])
def test_padding_fills_every_prompt_up_to_the_longest(prompts: tuple[int, ...], expected: int) -> None:
    assert claims.padding(prompts) == expected


def test_the_share_of_padding_is_of_all_that_is_computed() -> None:
    alone, together = claims.mean_padding(1, 20, seed=0), claims.mean_padding(8, 20, seed=0)
    assert alone["tokens"] == alone["share"] == 0
    assert 0.3 < together["share"] < 0.9
