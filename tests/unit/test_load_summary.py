"""The load generator's arithmetic against one written differently, over drawn timelines: equal to the last bit."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.load.record import Outcome, Record
from benchmarks.load.results import Measured
from benchmarks.load.runner import Recording
from benchmarks.load.summary import Targets, percentile, spread, summarize

seconds = st.floats(0, 1e4, allow_nan=False, allow_infinity=False)


@st.composite
def records(draw: st.DrawFn, index: int = 0) -> Record:
    """A request with times in the order in which they happen, and any outcome."""
    planned_s, due_s, sent_s, *rest = sorted(draw(st.lists(seconds, min_size=5, max_size=14)))
    chunk_s, ended_s = tuple(rest[:-1]), rest[-1]
    outcome = draw(st.sampled_from([Outcome.OK] * 5 + list(Outcome)))
    counted = draw(st.booleans())
    return Record(
        index=index,
        turn=draw(st.integers(0, 1)),
        planned_s=planned_s,
        due_s=due_s,
        sent_s=sent_s,
        chunk_s=chunk_s,
        last_s=draw(st.sampled_from([chunk_s[-1], ended_s])),
        ended_s=ended_s,
        input_tokens=draw(st.integers(1, 99)),
        output_tokens=draw(st.integers(1, 12)),
        prompt_tokens=draw(st.integers(1, 99)) if counted else None,
        completion_tokens=draw(st.integers(1, 30)) if counted else None,
        outcome=outcome,
        status=draw(st.sampled_from([200, 429, 500])),
        detail="",
    )


timelines = st.lists(records(), max_size=12)
targets = st.builds(
    Targets,
    ttft_s=st.none() | seconds,
    tpot_s=st.none() | seconds,
    itl_s=st.none() | seconds,
)


class Independent:
    """The same figures from the definitions, in rational numbers."""

    def __init__(self, timeline: list[Record], goal: Targets) -> None:
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.itl: list[float] = []
        self.e2e: list[float] = []
        self.good = self.seen = self.ok = self.tokens_out = self.tokens_in = 0
        begin, end = [], []
        for one in timeline:
            if one.outcome == "interrupted":
                continue
            self.seen += 1
            if one.outcome != "abandoned":
                begin.append(one.sent_s)
                end.append(one.ended_s)
            if one.outcome == "ok":
                self._add(one, goal)
        self.duration = max(end) - min(begin) if end else 0.0

    def _add(self, one: Record, goal: Targets) -> None:
        assert one.last_s is not None
        tokens = one.completion_tokens if one.completion_tokens is not None else len(one.chunk_s)
        self.ok += 1
        self.tokens_out += tokens
        self.tokens_in += one.prompt_tokens if one.prompt_tokens is not None else one.input_tokens
        first, end_to_end = one.chunk_s[0] - one.sent_s, one.last_s - one.sent_s
        gaps = [one.chunk_s[k] - one.chunk_s[k - 1] for k in range(1, len(one.chunk_s))]
        self.ttft.append(first)
        self.e2e.append(end_to_end)
        self.itl.extend(gaps)
        good = goal.ttft_s is None or first <= goal.ttft_s
        if tokens > 1:
            each = (end_to_end - first) / (tokens - 1)
            self.tpot.append(each)
            good = good and (goal.tpot_s is None or each <= goal.tpot_s)
        for gap in gaps:
            good = good and (goal.itl_s is None or gap <= goal.itl_s)
        self.good += good

    @staticmethod
    def spread(values: list[float]) -> dict[str, float] | None:
        if not values:
            return None
        mean = float(sum(map(Fraction, values))) / len(values)
        exact = sorted(map(Fraction, values))

        def at(share: Fraction) -> float:
            place = share * (len(exact) - 1)
            below, above = exact[math.floor(place)], exact[math.ceil(place)]
            return float(below + (above - below) * (place % 1))

        cuts = {f"p{percent}": at(Fraction(percent, 100)) for percent in (50, 90, 99)}
        return {"mean": mean, **cuts, "max": max(values)}


@settings(max_examples=150, deadline=None)
@given(timelines, targets, st.lists(seconds, max_size=5))
def test_every_figure_equals_an_independent_calculation(
    timeline: list[Record], goal: Targets, lag: list[float]
) -> None:
    summary = summarize(timeline, goal, lag)
    other = Independent(timeline, goal)
    for name, values in (("ttft_s", other.ttft), ("tpot_s", other.tpot), ("itl_s", other.itl), ("e2e_s", other.e2e)):
        assert summary[name] == other.spread(values), name
    assert (summary["requests"], summary["succeeded"]) == (other.seen, other.ok)
    assert (summary["tokens"]["prompt"], summary["tokens"]["output"]) == (other.tokens_in, other.tokens_out)
    assert summary["duration_s"] == other.duration
    assert sum(summary["outcomes"].values()) == len(timeline)
    if other.duration > 0:
        assert summary["throughput"] == {
            "requests_per_s": other.ok / other.duration,
            "output_tokens_per_s": other.tokens_out / other.duration,
            "total_tokens_per_s": (other.tokens_in + other.tokens_out) / other.duration,
        }
    if goal.any:
        assert summary["goodput"]["good"] == other.good
        assert summary["goodput"]["attainment"] == (other.good / other.seen if other.seen else 0)
        assert summary["goodput"]["requests_per_s"] == (other.good / other.duration if other.duration else None)
    else:
        assert summary["goodput"] is None


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from([50, 90, 99]))
def test_a_percentile_is_numpys_linear_interpolation(values: list[float], percent: int) -> None:
    expected = float(np.percentile(values, percent, method="linear"))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_percentile_of_known_values() -> None:
    values = [float(value) for value in range(1, 11)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [5.5, 9.1, 9.91]
    assert spread([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert spread([]) is None


@settings(max_examples=50, deadline=None)
@given(timelines, targets, st.lists(seconds, max_size=5))
def test_a_file_yields_the_same_figures_again(timeline: list[Record], goal: Targets, lag: list[float]) -> None:
    measured = Measured(plan_digest="", recording=Recording(timeline, lag), targets=goal)
    stored: dict[str, Any] = json.loads(json.dumps(measured.as_json(with_timeline=True)))
    again = Measured.from_json(stored, goal)
    assert again.recording == measured.recording
    assert again.summary() == stored["summary"]


def one(**changes: object) -> Record:
    """A request that took 1 s to its first token and 0.5 s for each of the 3 others."""
    fields: dict[str, Any] = {
        "index": 0,
        "turn": 0,
        "planned_s": 9.0,
        "due_s": 9.5,
        "sent_s": 10.0,
        "chunk_s": (11.0, 11.25, 12.0, 12.5),
        "last_s": 12.5,
        "ended_s": 13.0,
        "input_tokens": 8,
        "output_tokens": 4,
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "outcome": Outcome.OK,
        "status": 200,
        "detail": "",
    }
    return Record(**(fields | changes))


def test_the_definitions_on_one_request() -> None:
    summary = summarize([one()], Targets(), [])
    assert (summary["ttft_s"]["max"], summary["tpot_s"]["max"], summary["e2e_s"]["max"]) == (1.0, 0.5, 2.5)
    assert (summary["itl_s"]["max"], summary["itl_s"]["mean"]) == (0.75, 0.5)
    assert summary["duration_s"] == 3.0
    assert (summary["lag"]["send_s"]["max"], summary["lag"]["wait_for_room_s"]["max"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        (Targets(ttft_s=1.0, tpot_s=0.5, itl_s=0.75), True),
        (Targets(ttft_s=0.999), False),
        (Targets(ttft_s=1.0, tpot_s=0.499), False),
        (Targets(ttft_s=1.0, itl_s=0.749), False),
    ],
)
def test_targets_are_joint_and_inclusive(goal: Targets, good: bool) -> None:
    assert goal.met_by(one()) is good


def test_a_single_token_has_no_tpot_to_miss() -> None:
    short = one(chunk_s=(11.0,), last_s=11.0, completion_tokens=1)
    assert Targets(ttft_s=1.0, tpot_s=1e-9, itl_s=1e-9).met_by(short)


def test_whatever_does_not_succeed_is_a_miss_and_interruptions_are_nothing() -> None:
    goal = Targets(ttft_s=100.0)
    timeline = [one(index=index, outcome=outcome, status=429) for index, outcome in enumerate(Outcome)]
    summary = summarize(timeline, goal, [])
    assert (summary["requests"], summary["interrupted"]) == (len(Outcome) - 1, 1)
    assert summary["goodput"]["good"] == 1
    assert summary["goodput"]["attainment"] == 1 / (len(Outcome) - 1)
    assert summary["outcomes"]["refused 429"] == 1
    assert Counter(summary["outcomes"].values()) == {1: len(Outcome)}


def test_nothing_at_all_has_no_figures() -> None:
    summary = summarize([], Targets(ttft_s=1.0), [])
    assert (summary["ttft_s"], summary["throughput"]["requests_per_s"]) == (None, None)
    assert summary["goodput"]["attainment"] == 0.0
