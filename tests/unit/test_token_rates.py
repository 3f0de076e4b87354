"""Tokens a second from counters that are read now and then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.token_rates import WINDOW_S, TokenRates


def test_two_readings_make_a_rate() -> None:
    rates = TokenRates()
    assert rates.per_s is None
    rates.read(10.0, 100, 7)
    assert rates.per_s is None
    rates.read(10.5, 150, 7)
    assert rates.per_s == (100.0, 0.0)


def test_what_is_older_than_the_window_counts_no_more() -> None:
    rates = TokenRates()
    for tick in range(40):
        rates.read(tick * 0.25, 1000 if tick else 0, tick)
    assert rates.per_s == (0.0, 4.0)


def test_a_rate_is_over_the_last_two_readings_where_they_are_far_apart() -> None:
    rates = TokenRates()
    for now, tokens in ((0.0, 0), (60.0, 600), (120.0, 1800)):
        rates.read(now, 0, tokens)
    assert rates.per_s == (0.0, 20.0)


def test_counters_that_have_shrunk_begin_anew() -> None:
    rates = TokenRates()
    rates.read(0.0, 500, 500)
    rates.read(1.0, 600, 3)
    assert rates.per_s is None
    rates.read(2.0, 610, 5)
    assert rates.per_s == (10.0, 2.0)


def test_another_session_begins_anew() -> None:
    rates = TokenRates()
    rates.read(0.0, 0, 0)
    rates.read(1.0, 10, 10)
    rates.forget()
    assert rates.per_s is None


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 1000), st.integers(-50, 1000)), max_size=200))
def test_a_rate_is_never_negative(readings: list[tuple[float, int, int]]) -> None:
    rates, now, prompt, output = TokenRates(), 0.0, 0, 0
    for step_s, more_prompt, more_output in readings:
        now += step_s
        prompt, output = prompt + more_prompt, max(0, output + more_output)
        rates.read(now, prompt, output)
        found = rates.per_s
        assert found is None or min(found) >= 0
    assert len(rates._readings) <= 64
    assert all(reading.at > now - WINDOW_S for reading in list(rates._readings)[2:])
