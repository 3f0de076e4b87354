"""Restarts of a process: pauses that double, and an end to them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.runtime.restarts import FIRST_PAUSE_S, MAX_RESTARTS, WINDOW_S, Restarts


def test_pauses_double_and_after_five_restarts_there_is_none() -> None:
    restarts, now = Restarts(), 0.0
    pauses = []
    for _ in range(6):
        restarts.ready(now)
        pauses.append(restarts.ended(now + 1.0))
        now += 10.0
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert restarts.num == 5


def test_a_minute_of_service_is_a_new_beginning() -> None:
    restarts = Restarts()
    restarts.ready(0.0)
    assert restarts.ended(5.0) == 0.5
    restarts.ready(10.0)
    assert restarts.ended(11.0) == 1.0
    restarts.ready(20.0)
    assert restarts.ended(79.0) == 1.0, "60 s after the first restart, which is out of the window then"
    restarts.ready(100.0)
    assert restarts.ended(160.0) == 0.5
    assert restarts.num == 4


def test_starts_that_fail_slowly_are_given_up_too() -> None:
    restarts, now = Restarts(), 0.0
    restarts.ready(now)
    pauses = []
    for _ in range(6):
        now += 3600.0
        pauses.append(restarts.ended(now))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, None]


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.none() | st.floats(0.0, 90.0)), max_size=60))
def test_it_is_given_up_exactly_when_six_ends_lie_within_a_minute_of_service(
    lives: list[tuple[float, float | None]],
) -> None:
    """Each life takes so long to start, and serves so long, or ends before it does (None)."""
    restarts, now, served_s = Restarts(), 0.0, 0.0
    ends: list[float] = []
    for start_s, serve_s in lives:
        now += start_s
        if serve_s is not None:
            restarts.ready(now)
            before, now = now, now + serve_s
            served_s += now - before
        near = [end for end in ends if served_s - end < WINDOW_S]
        pause_s = restarts.ended(now)
        assert pause_s == (None if len(near) >= MAX_RESTARTS else FIRST_PAUSE_S * 2 ** len(near))
        if pause_s is None:
            assert restarts.num == len(ends)
            return
        ends.append(served_s)
        now += pause_s
