"""What the benchmark of goodput makes of its runs, on runs that can be counted by hand, and both comparisons without
any peer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from load_server import Connection, obedient, scripted

from benchmarks import goodput, result_tables, versus
from benchmarks import systems as systems_that_compete
from benchmarks.figures import compared
from benchmarks.load.record import Outcome, Record
from benchmarks.load.summary import Targets, summarize
from benchmarks.record import by_cpu
from benchmarks.systems import System


def request(*, ttft_s: float = 0.5, gap_s: float = 0.03, outcome: Outcome = Outcome.OK) -> Record:
    chunk_s = (ttft_s, ttft_s + gap_s, ttft_s + 2 * gap_s) if outcome is Outcome.OK else ()
    return Record(
        index=0,
        turn=0,
        planned_s=0.0,
        due_s=0.0,
        sent_s=0.0,
        chunk_s=chunk_s,
        last_s=chunk_s[-1] if chunk_s else None,
        ended_s=chunk_s[-1] if chunk_s else 60.0,
        input_tokens=8,
        output_tokens=3,
        prompt_tokens=8,
        completion_tokens=3 if chunk_s else None,
        outcome=outcome,
        status=200,
        detail="",
    )


def figures_of(*records: Record) -> dict[str, Any]:
    targets = Targets(ttft_s=1.0, tpot_s=0.05)
    return goodput.goodput_figures({"summary": summarize(records, targets, [])}, seconds=4.0)


def turn(
    system: str, rate: float, good: int, *, number: int = 0, requests: int = 20, failed: int = 0
) -> dict[str, Any]:
    figures = {"requests": requests, "failed": failed, "good": good, "good_share": good / requests}
    figures |= {"goodput": rate * good / requests, "output_tokens_per_s": 10 * rate}
    return {"system": system, "rate": rate, "round": number, **figures}


# --- one run ---------------------------------------------------------------------------------------------------------


def test_good_is_who_met_both_targets() -> None:
    found = figures_of(request(), request(), request(ttft_s=1.5), request(gap_s=0.06))
    assert (found["requests"], found["failed"], found["good"]) == (4, 0, 2)
    assert (found["good_share"], found["goodput"]) == (0.5, 2 / 4.0), "per second of arrivals, not of the whole run"


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.REFUSED, Outcome.CONNECTION, Outcome.STREAM_ERROR])
def test_a_request_that_failed_is_not_good(outcome: Outcome) -> None:
    found = figures_of(request(), request(outcome=outcome))
    assert (found["requests"], found["failed"], found["good"], found["good_share"]) == (2, 1, 1, 0.5)


def test_a_run_in_which_all_failed_has_no_latencies() -> None:
    found = figures_of(request(outcome=Outcome.TIMEOUT))
    assert (found["good_share"], found["goodput"], found["output_tokens_per_s"]) == (0.0, 0.0, 0.0)
    assert (found["ttft_p90_s"], found["tpot_p90_s"], found["itl_p99_s"]) == (None, None, None)


# --- all of them -----------------------------------------------------------------------------------------------------


def test_the_highest_rate_is_the_largest_one_with_nine_in_ten_good() -> None:
    runs = [turn("a", rate, good) for rate, good in ((8, 10), (2, 20), (6, 18), (4, 17))]
    runs += [turn("b", 2, 17)]
    found = goodput.held(runs)
    assert found["a"]["highest_rate"] == 6, "exactly 90 % is enough"
    assert [each["good_share"] for each in found["a"]["shares"]] == [1.0, 0.85, 0.9, 0.5]
    assert found["b"]["highest_rate"] is None


def test_the_share_is_over_the_requests_of_all_rounds() -> None:
    """The mean of 0.85 and 0.95 is below 0.9 in floating point."""
    runs = [turn("a", 2, 17), turn("a", 2, 19, number=1), turn("a", 4, 20), turn("a", 4, 15, number=1)]
    assert goodput.held(runs)["a"]["highest_rate"] == 2


def test_pairs_are_compared_at_each_rate() -> None:
    runs = [turn("baton pair", rate, 20) for rate in (4, 2)] + [turn("vllm pair", rate, 10) for rate in (2, 4)]
    ratios = goodput.summary(runs)["ratios"]
    assert [(each["rate"], each["goodput"]["ours"], each["goodput"]["ratio"]) for each in ratios] == [
        (2, 2.0, 2.0),
        (4, 4.0, 2.0),
    ]


def test_there_is_no_ratio_to_nothing() -> None:
    found = compared([(1.0, 2.0), (1.0, 0.0)])
    assert found == {"ours": 1.0, "theirs": 1.0, "ratio": None, "ratio_min": None, "ratio_max": None}


def test_the_table_tells_targets_rates_and_failures() -> None:
    runs = [turn("baton pair", rate, 20, number=n) for rate in (2, 4) for n in (0, 1)]
    runs += [turn("vllm pair", 2, 10, number=n) for n in (0, 1)] + [turn("vllm pair", 4, 0, failed=3)]
    workload = {"ttft_s": 1.0, "itl_s": 0.05}
    lines = result_tables.goodput({"workload": workload, "figures": {**goodput.summary(runs), "runs": runs}}).split(
        "\n"
    )
    assert lines[2:4] == [
        "| baton pair / vllm pair | 2 | 2 | 2.00 / 1.00 | **2.00** (2.00 to 2.00) | 100 / 50 | 20 / 20 |",
        "| baton pair / vllm pair | 4 | 2 | 4.00 / 0.00 | - | 100 / 0 | 40 / 40 |",
    ]
    assert "the first token within 1 s, the others 50 ms apart in the mean" in lines[5]
    assert lines[5].endswith("met both: baton pair 4, vllm pair -.")
    assert lines[7] == "Failed requests: 3 of vllm pair."


# --- both comparisons, between two endpoints that are scripted --------------------------------------------------------


async def refusing(connection: Connection, body: dict[str, Any]) -> None:
    await connection.answer("429 Too Many Requests", {"error": {"message": "full"}})


async def test_systems_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = ("baton pair", "baton colocated")
    async with scripted(obedient) as one, scripted(obedient) as other, scripted(refusing) as full:
        up = {"baton pair": System(one.url), "baton colocated": System(other.url)}

        @contextmanager
        def started(*_: object) -> Iterator[dict[str, System]]:
            yield up

        monkeypatch.setattr(systems_that_compete, "SETTLING_S", 0.0)
        for module in (goodput, versus):
            monkeypatch.setattr(module, "started", started)
        few: dict[str, Any] = {"rounds": 1, "workload": "fixed", "output_tokens": 3, "systems": systems}
        made = await asyncio.to_thread(lambda: list(versus.measure(tmp_path, concurrency=(2,), **few)))
        runs = made[-1].figures["runs"]
        assert [(each["system"], each["concurrency"], each["failed"]) for each in runs] == [
            ("baton pair", 2, 0),
            ("baton colocated", 2, 0),
        ]
        assert made[-1].name == by_cpu("versus-15m-bfloat16-fixed-baton-pair-baton-colocated")
        got = [(sorted(each.bodies[:6]), sorted(each.bodies[6:])) for each in (one, other)]
        assert got[0] == got[1], "in the warm-up and in a round, all systems get the same prompts, in any order"
        assert [len(each) for each in got[0]] == [6, 6]

        up["baton colocated"] = System(full.url)
        few |= {"rates": (40.0,), "seconds": 0.1, "ttft_s": 60.0, "itl_s": 60.0}
        made = await asyncio.to_thread(lambda: list(goodput.measure(tmp_path, **few)))
        found = {each["system"]: each for each in made[-1].figures["runs"]}
        assert [(found[name]["good"], found[name]["failed"]) for name in systems] == [(4, 0), (0, 4)]
        highest = {name: each["highest_rate"] for name, each in made[-1].figures["systems"].items()}
        assert highest == {"baton pair": 40.0, "baton colocated": None}
        assert made[-1].name == by_cpu("goodput-15m-float32-fixed-baton-pair-baton-colocated")
