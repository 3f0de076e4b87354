"""The search for the rate at which goodput breaks, on servers whose breaking point is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.sweep import RateSearch


def search(attains: Callable[[float], float], **options: Any) -> RateSearch:
    """Run a search to its end."""
    fields = {"next_rate": 1.0, "attainment": 0.9, "factor": 2.0, "bisections": 3, "max_steps": 12} | options
    found = RateSearch(**fields)
    while found.next_rate is not None:
        found.observe(attains(found.next_rate))
    return found


def up_to(limit: float) -> Callable[[float], float]:
    """A server that meets its targets up to a rate."""
    return lambda rate: 1.0 if rate <= limit else 0.5


def test_upward_then_between() -> None:
    found = search(up_to(5.5))
    assert found.tried == [1.0, 2.0, 4.0, 8.0, 6.0, 5.0, 5.5]
    assert (found.held, found.broke) == (5.5, 6.0)


def test_a_first_rate_that_is_too_high_goes_downward() -> None:
    found = search(up_to(0.3), bisections=1)
    assert found.tried == [1.0, 0.5, 0.25, 0.375]
    assert (found.held, found.broke) == (0.25, 0.375)


def test_exactly_the_share_asked_for_holds() -> None:
    assert search(lambda rate: 0.9, max_steps=2).held == 2.0


def test_a_server_that_never_breaks_and_one_that_always_does() -> None:
    assert search(up_to(1e9), max_steps=5).tried == [1.0, 2.0, 4.0, 8.0, 16.0]
    hopeless = search(lambda rate: 0.0, max_steps=4)
    assert (hopeless.held, len(hopeless.tried)) == (None, 4)


def test_no_bisections() -> None:
    assert search(up_to(3.0), bisections=0).tried == [1.0, 2.0, 4.0]


@given(st.floats(0.01, 500), st.floats(1.1, 5), st.integers(0, 8), st.integers(1, 30))
def test_any_search_ends_with_the_limit_between(limit: float, factor: float, bisections: int, most: int) -> None:
    found = search(up_to(limit), factor=factor, bisections=bisections, max_steps=most)
    assert len(found.tried) <= most
    assert len(set(found.tried)) == len(found.tried)
    assert found.held is None or found.held <= limit
    assert found.broke is None or found.broke > limit


@given(st.lists(st.floats(0, 1), min_size=40, max_size=40))
def test_a_server_of_moods_does_not_break_it(moods: list[float]) -> None:
    left = iter(moods)
    assert len(search(lambda rate: next(left), max_steps=40, bisections=20).tried) <= 40


def test_an_ended_search_takes_no_more() -> None:
    found = search(up_to(1.0), max_steps=1)
    with pytest.raises(AssertionError, match="ended"):
        found.observe(1.0)
