"""What the benchmark of overload makes of its requests, on runs that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.load.record import Outcome, Record
from benchmarks.overload import SHARES, figures, per_second, summary


def request(planned_s: float, *, ttft_s: float = 0.1, token_s: float = 0.01, took_s: float | None = None) -> Record:
    """One that had its three tokens; with `took_s` it was refused after so long."""
    first_s = planned_s + ttft_s
    chunk_s: tuple[float, ...] = (first_s, first_s + token_s, first_s + 2 * token_s) if took_s is None else ()
    return Record(
        index=0,
        turn=0,
        planned_s=planned_s,
        due_s=planned_s,
        sent_s=planned_s,
        chunk_s=chunk_s,
        last_s=chunk_s[-1] if chunk_s else None,
        ended_s=chunk_s[-1] if took_s is None else planned_s + took_s,
        input_tokens=8,
        output_tokens=3,
        prompt_tokens=8,
        completion_tokens=3 if took_s is None else None,
        outcome=Outcome.OK if took_s is None else Outcome.REFUSED,
        status=200 if took_s is None else 429,
        detail="",
    )


def failed(planned_s: float, outcome: Outcome, status: int | None = None) -> Record:
    return replace(request(planned_s, took_s=0.01), outcome=outcome, status=status)


def moved(records: list[Record], by_s: float) -> list[Record]:
    """The same, so much later."""
    return [
        replace(
            each,
            planned_s=each.planned_s + by_s,
            sent_s=each.sent_s + by_s,
            chunk_s=tuple(chunk + by_s for chunk in each.chunk_s),
            last_s=None if each.last_s is None else each.last_s + by_s,
            ended_s=each.ended_s + by_s,
        )
        for each in records
    ]


# --- one run ---------------------------------------------------------------------------------------------------------


def test_good_is_who_was_accepted_and_on_time() -> None:
    found = figures(
        [
            request(0.0),
            request(0.5, ttft_s=0.6),
            request(1.0, token_s=0.2),
            request(1.5, took_s=0.01),
            request(2.0, ttft_s=0.25),
        ],
        rate=7.0,
    )
    assert (found["rate"], found["requests"]) == (7.0, 5)
    assert (found["accepted"], found["refused"], found["neither"]) == (4, 1, 0)
    assert found["goodput"] == 7.0 * 2 / 5, "a late first token, a slow stream and a refusal are misses"
    assert found["accepted_that_met_the_target"] == 2 / 4
    assert found["ttft_s"]["max"] == pytest.approx(0.6)
    assert found["ttft_s"]["n"] == 4


def test_refusals_take_goodput_and_nothing_from_those_who_were_accepted() -> None:
    served = [request(float(n)) for n in (0, 2, 4)]
    refused = [request(n + 0.5, took_s=0.002 * (n + 1)) for n in range(3)]
    found = figures(served + refused, rate=1.5)
    assert found["goodput"] == 1.5 * 3 / 6
    assert found["accepted_that_met_the_target"] == 1.0
    assert found["refusal_s"]["n"] == 3
    assert (found["refusal_s"]["p50"], found["refusal_s"]["max"]) == pytest.approx((0.004, 0.006))


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.REFUSED, 503),
        (Outcome.HTTP_ERROR, 500),
        (Outcome.STREAM_ERROR, 200),
        (Outcome.TIMEOUT, None),
        (Outcome.CONNECTION, None),
    ],
)
def test_whatever_else_became_of_a_request_is_neither(outcome: Outcome, status: int | None) -> None:
    found = figures([request(0.0), failed(1.0, outcome, status), request(2.0)], rate=1.0)
    assert (found["accepted"], found["refused"], found["neither"]) == (2, 0, 1)
    assert found["refusal_s"] is None, "a failure is no refusal, however soon it came"
    assert found["goodput"] == pytest.approx(2 / 3)


def test_without_requests_of_a_kind_there_are_no_times_of_it() -> None:
    alone = figures([request(0.0), request(1.0)], rate=1.0)
    assert alone["refusal_s"] is None
    nobody = figures([request(0.0, took_s=0.01), request(1.0, took_s=0.01)], rate=1.0)
    assert nobody["ttft_s"] is None
    assert (nobody["goodput"], nobody["accepted_that_met_the_target"]) == (0.0, 0.0), "nobody was on time"


@pytest.mark.parametrize("span_s", [1.5, 2.0, 2.5])
def test_if_all_are_good_goodput_is_the_rate_whatever_span_was_drawn(span_s: float) -> None:
    records = [request(span_s * n / 3) for n in range(4)]
    assert figures(records, rate=2.0)["goodput"] == 2.0


def test_neither_figures_nor_capacity_know_when_the_clock_began() -> None:
    records = [request(0.0), request(0.5, took_s=0.25), request(2.0)]
    assert figures(moved(records, 4.0), rate=1.0)["goodput"] == figures(records, rate=1.0)["goodput"]
    assert per_second(moved(records, 4.0)) == pytest.approx(per_second(records))


def test_capacity_is_over_the_time_until_the_last_has_ended() -> None:
    long = replace(request(0.0), ended_s=4.0)
    assert per_second([long, request(1.0), request(2.0)]) == 3 / 4.0


# --- all of them -----------------------------------------------------------------------------------------------------


def run(share: float, goodput: float, **changes: Any) -> dict[str, Any]:
    """The figures of one, as far as the summary goes by them."""
    refusal_s = {"p50": 0.01, "p90": 0.02, "max": 0.03}
    return {
        "share": share,
        "goodput": goodput,
        "accepted_that_met_the_target": 1.0,
        "refusal_s": refusal_s,
        "neither": 0,
    } | changes


def rounds(*goodputs: dict[float, float]) -> list[dict[str, Any]]:
    """One run at each load, of 1.0 where nothing else is said; every other round backwards."""
    return [
        run(share, goodput.get(share, 1.0))
        for number, goodput in enumerate(goodputs)
        for share in (SHARES if number % 2 == 0 else SHARES[::-1])
    ]


def test_what_is_left_of_the_best_goodput() -> None:
    found = summary(rounds({1.5: 8.0, 3.0: 2.0}, {1.5: 10.0, 3.0: 4.0}, {1.5: 90.0, 3.0: 6.0}))
    assert found["goodput"] == {"0.5": 1.0, "0.75": 1.0, "1.0": 1.0, "1.5": 10.0, "2.0": 1.0, "3.0": 4.0}
    assert found["goodput_at_most_over_best"] == 4.0 / 10.0, "medians of the rounds, before the best is chosen"


def test_the_best_may_be_at_the_highest_load() -> None:
    assert summary(rounds({3.0: 7.0}))["goodput_at_most_over_best"] == 1.0


def test_of_the_highest_load_the_worst_round_tells_who_was_on_time() -> None:
    runs = rounds({}, {}, {})
    at_most = [each for each in runs if each["share"] == SHARES[-1]]
    for each, on_time, p50, p90, most in zip(
        at_most, (0.97, 0.91, 0.99), (0.004, 0.007, 0.006), (0.01, 0.03, 0.02), (0.1, 0.5, 0.2), strict=True
    ):
        each |= {"accepted_that_met_the_target": on_time, "refusal_s": {"p50": p50, "p90": p90, "max": most}}
    runs[0] |= {"accepted_that_met_the_target": 0.1, "refusal_s": {"p50": 1.0, "p90": 2.0, "max": 3.0}}
    found = summary(runs)
    assert found["accepted_that_met_the_target_at_most"] == 0.91
    assert (found["refusal_p50_s"], found["refusal_p90_s"], found["refusal_max_s"]) == (0.006, 0.02, 0.5)


def test_a_round_without_refusals_has_none_to_tell_of() -> None:
    runs = rounds({}, {})
    runs[5] |= {"refusal_s": None}
    assert runs[5]["share"] == SHARES[-1]
    assert summary(runs)["refusal_max_s"] == 0.03, "the other round's"
    found = summary([each | {"refusal_s": None} for each in runs])
    assert [found[f"refusal_{name}_s"] for name in ("p50", "p90", "max")] == [None] * 3


def test_failures_count_at_any_load() -> None:
    runs = rounds({}, {})
    runs[0] |= {"neither": 2}
    runs[-1] |= {"neither": 1}
    assert summary(runs)["neither_accepted_nor_refused"] == 3
