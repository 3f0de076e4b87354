"""How long answers are expected to be: lengths seen lately, and what they say of a sequence that is still going."""

from __future__ import annotations

import pytest

from common.contract.tiers import Tier
from decode_worker.output_profile import OutputProfile

INTERACTIVE, STANDARD, BATCH = Tier


def profile(*lengths: int, window: int = 512) -> OutputProfile:
    made = OutputProfile(window)
    for length in lengths:
        made.observe(STANDARD, length)
    return made


def test_without_lengths_every_one_up_to_the_limit_is_as_likely() -> None:
    quantiles = [(index + 0.5) / 100 for index in range(100)]
    assert [profile().predict(STANDARD, 0, quantile, 100) for quantile in quantiles] == list(range(1, 101))


def test_without_lengths_what_is_left_is_as_likely() -> None:
    quantiles = [(index + 0.5) / 40 for index in range(40)]
    assert [profile().predict(STANDARD, 60, quantile, 100) for quantile in quantiles] == list(range(61, 101))


@pytest.mark.parametrize(("quantile", "length"), [(0.0, 10), (0.24, 10), (0.25, 20), (0.5, 30), (0.75, 40), (0.99, 40)])
def test_the_quantile_is_a_place_among_the_lengths(quantile: float, length: int) -> None:
    assert profile(*[40, 10, 30, 20] * 8).predict(STANDARD, 0, quantile, 1000) == length


@pytest.mark.parametrize(("num_output", "lengths"), [(9, [10, 20, 30, 40]), (10, [20, 30, 40]), (35, [40])])
def test_only_lengths_that_it_can_still_have_count(num_output: int, lengths: list[int]) -> None:
    made = profile(*[10, 20, 30, 40] * 8)
    quantiles = [(index + 0.5) / len(lengths) for index in range(len(lengths))]
    assert [made.predict(STANDARD, num_output, quantile, 1000) for quantile in quantiles] == lengths


def test_longer_than_anything_lately_means_as_long_again() -> None:
    assert profile(*[10] * 32).predict(STANDARD, 50, 0.5, 1000) == 101


@pytest.mark.parametrize(("num_output", "expected"), [(0, 25), (24, 25), (25, 25), (30, 25)])
def test_nothing_is_expected_beyond_the_limit(num_output: int, expected: int) -> None:
    assert profile(*[40] * 32).predict(STANDARD, num_output, 0.5, 25) == expected


@pytest.mark.parametrize(
    ("num_lengths", "expected"),
    [(0, 100), (8, 80), (16, 60), (24, 40), pytest.param(32, 20, id="enough"), pytest.param(500, 20, id="many")],
)
def test_the_blind_guess_loses_weight_with_each_length(num_lengths: int, expected: int) -> None:
    found = profile(*[20] * num_lengths).predict(STANDARD, 0, 0.99, 100)
    assert abs(found - expected) <= 1


def test_the_window_forgets_the_oldest() -> None:
    made = profile(*[1000] * 40, *[10] * 40, window=40)
    assert made.predict(STANDARD, 0, 0.999, 10_000) == 10
    made.observe(STANDARD, 500)
    assert made.predict(STANDARD, 0, 0.999, 10_000) == 500


def test_tiers_are_apart() -> None:
    made = profile(*[10] * 32)
    for _ in range(32):
        made.observe(BATCH, 700)
    assert made.predict(STANDARD, 0, 0.9, 1000) == 10
    assert made.predict(BATCH, 0, 0.1, 1000) == 700
    assert made.predict(INTERACTIVE, 0, 0.5, 1000) == 501, "nothing is known of it"


def test_a_prediction_does_not_change_while_nothing_ends() -> None:
    """Until the sequence outlives it: it is drawn again then, from what is left."""
    made = profile(*range(1, 101))
    first = made.predict(STANDARD, 0, 0.6, 1000)
    assert first == 61
    assert made.predict(STANDARD, 0, 0.6, 1000) == first
    assert made.predict(STANDARD, first, 0.6, 1000) > first
