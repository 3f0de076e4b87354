"""The ring of recent requests and latencies against a list of everything that was ever said to it."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.observability.recent import NUM_SLOTS, SLOT_S, SUMMARY_SLOTS, Recent

BUCKET = 2**0.25
"""Of a bucket, its upper edge divided by the lower one."""
durations = st.floats(0.0003, 900)
events = st.one_of(
    st.tuples(st.just("ttft"), durations),
    st.tuples(st.just("gap"), durations),
    st.tuples(st.just("met"), st.booleans()),
    st.tuples(st.just("refused"), st.none()),
    st.tuples(st.just("failed"), st.none()),
)
steps = st.floats(0, 20) | st.floats(0, 0.5) | st.just(NUM_SLOTS * SLOT_S)
timelines = st.lists(st.tuples(steps, events), max_size=80)


def tell(recent: Recent, now: float, event: tuple[str, Any]) -> None:
    match event:
        case "ttft", seconds:
            recent.first_token(seconds, now)
        case "gap", seconds:
            recent.tokens(2, seconds, now)
        case "met", met:
            recent.finished(now, met=met)
        case "refused", _:
            recent.refused(now)
        case "failed", _:
            recent.failed(now)


def exact(values: list[float], share: float) -> tuple[float, float]:
    """Between which of the values the percentile is."""
    ordered = sorted(values)
    rank = share * len(ordered)
    return ordered[max(math.ceil(rank) - 1, 0)], ordered[min(math.floor(rank), len(ordered) - 1)]


@given(timelines, st.floats(0, 1000), st.floats(0, 30))
def test_slots_and_summary_say_what_happened(
    timeline: list[tuple[float, tuple[str, Any]]], start: float, wait: float
) -> None:
    recent, now, history = Recent(), start, []
    for step, event in timeline:
        now += step
        tell(recent, now, event)
        history.append((int(now // SLOT_S), event))
    now += wait
    current = int(now // SLOT_S)

    shown: Any = recent.slots(now)
    assert shown["current"] == current
    assert len(shown["slots"]) <= NUM_SLOTS
    kept = {number for number, _ in history if number > current - NUM_SLOTS}
    assert [slot["number"] for slot in shown["slots"]] == sorted(kept)
    for slot in shown["slots"]:
        here = [event for number, event in history if number == slot["number"]]
        assert slot["finished"] == sum(kind == "met" for kind, _ in here)
        assert slot["met"] == sum(kind == "met" and met for kind, met in here)
        assert slot["refused"] == sum(kind == "refused" for kind, _ in here)
        assert slot["failed"] == sum(kind == "failed" for kind, _ in here)
        assert slot["output_tokens"] == sum(2 for kind, _ in here if kind == "gap")
        check_latencies(slot, here)

    summary: Any = recent.summary(now)
    here = [event for number, event in history if number > current - SUMMARY_SLOTS]
    check_latencies(summary, here)
    finished, lost = sum(kind == "met" for kind, _ in here), sum(kind in ("refused", "failed") for kind, _ in here)
    met = sum(kind == "met" and value for kind, value in here)
    assert math.isclose(summary["requests_per_s"] * summary["over_s"], finished, rel_tol=1e-2)
    if finished + lost:
        assert math.isclose(summary["goodput_share"], met / (finished + lost), rel_tol=1e-3)
    else:
        assert summary["goodput_share"] is None


def check_latencies(said: Any, here: list[tuple[str, Any]]) -> None:
    for name, kind in (("ttft", "ttft"), ("itl", "gap")):
        values = [value for each, value in here if each == kind]
        for percent in (50, 95):
            found = said[f"{name}_p{percent}_s"]
            if not values:
                assert found is None
                continue
            low, high = exact(values, percent / 100)
            assert low / BUCKET * 0.999 <= found <= high * BUCKET * 1.001


@given(st.lists(st.tuples(st.floats(-5, 5), events), min_size=1, max_size=30))
def test_a_clock_that_is_read_late_loses_nothing(timeline: list[tuple[float, tuple[str, Any]]]) -> None:
    """Two who tell it something may have read the clock in the other order."""
    recent, now = Recent(), 1000.0
    for step, event in timeline:
        now += step
        tell(recent, now, event)
    slots: Any = recent.slots(now + 100)
    numbers = [slot["number"] for slot in slots["slots"]]
    assert numbers == sorted(set(numbers))
    assert sum(slot["finished"] for slot in slots["slots"]) == sum(kind == "met" for _, (kind, _) in timeline)


@given(st.floats(0, 1e-5) | st.floats(1100, 1e6))
def test_durations_beyond_every_bucket_are_kept(seconds: float) -> None:
    recent = Recent()
    recent.first_token(seconds, 1.0)
    found: Any = recent.summary(1.0)["ttft_p50_s"]
    assert found < 0.001 if seconds < 1 else found > 1000
