"""What benchmarks make of their measurements before it is recorded, on examples that can be counted by hand."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import modes, versus
from benchmarks.driver import Arrival
from benchmarks.figures import compared, cpu_seconds, spread
from benchmarks.interference import gaps_around, summary_ms
from benchmarks.load_run import load_figures
from benchmarks.steady import resident_mib
from benchmarks.systems import PAIRS, SYSTEMS, length_options, lengths_of, order

# --- quantiles -------------------------------------------------------------------------------------------------------


def test_a_spread_of_known_values() -> None:
    values = [float(value) for value in range(1, 21)]
    random.Random(0).shuffle(values)
    assert spread(values) == {"min": 1.0, "p50": 10.5, "p90": 18.1, "max": 20.0, "n": 20}
    assert spread([7.0]) == {"min": 7.0, "p50": 7.0, "p90": 7.0, "max": 7.0, "n": 1}


def test_systems_in_turns_are_compared_by_the_ratios_of_their_rounds() -> None:
    assert compared(iter([(1.0, 4.0), (6.0, 2.0), (5.0, 5.0)])) == {
        "ours": 5.0,
        "theirs": 4.0,
        "ratio": 1.0,
        "ratio_min": 0.25,
        "ratio_max": 3.0,
    }


@pytest.mark.parametrize("names", [SYSTEMS, SYSTEMS[2:]])
def test_each_system_has_its_turn_as_often_before_as_after_the_one_it_is_compared_with(names: Sequence[str]) -> None:
    rounds = [order(names, number) for number in range(4)]
    assert all(sorted(each) == sorted(names) for each in rounds)
    for ours, theirs in PAIRS:
        if ours in names:
            assert sum(each.index(ours) < each.index(theirs) for each in rounds) == 2
            assert rounds[0].index(ours) < rounds[0].index(theirs)
            assert rounds[1].index(ours) > rounds[1].index(theirs)
    assert len({each[0] for each in rounds}) > 1


def test_a_record_has_the_lengths_that_were_asked_for() -> None:
    fixed = lengths_of("fixed", 512, 64)
    assert (fixed, length_options("fixed", fixed)) == (
        {"input_tokens": 512, "output_tokens": 64},
        ["--workload", "fixed", "--input-tokens", "512", "--output-tokens", "64"],
    )
    drawn = lengths_of("sharegpt", 512, 64)
    assert {name: number for name, number in drawn.items() if number is not None} == {
        "max_input_tokens": 1500,
        "max_output_tokens": 300,
    }
    assert drawn.keys() >= fixed.keys(), "else the record has the options of the other workload"
    options = ["--workload", "sharegpt", "--max-input-tokens", "1500", "--max-output-tokens", "300"]
    assert length_options("sharegpt", drawn) == options


def test_processor_time_is_that_of_all_threads() -> None:
    began = cpu_seconds(os.getpid())
    spent = threading.Thread(target=lambda: sum(range(10**6)))
    spent.start()
    spent.join()
    assert began < cpu_seconds(os.getpid()) <= time.process_time()


def test_seconds_are_told_in_milliseconds() -> None:
    values = [number / 4 for number in range(200, 0, -1)]
    assert summary_ms(values) == {"p50_ms": 25125.0, "p99_ms": 49502.5, "max_ms": 50000.0, "n": 200}


# --- streams beside a long prompt ------------------------------------------------------------------------------------


def test_gaps_are_those_of_each_stream_and_of_their_time() -> None:
    """The prompt came at 10 and had its token at 20."""
    one = [7.0, 7.5, 8.5, 9.25, 9.75, 12.0, 19.0, 21.0, 24.0]
    other = [9.5, 10.0, 20.0, 20.5]
    before, during = gaps_around([one, other], 10.0, 20.0)
    assert before == [1.0, 0.75, 0.5, 0.5], "of the two seconds before, and nothing of the prompt's time"
    assert during == [2.25, 7.0, 2.0, 10.0], "any part of it, and nothing of the time after"


def test_the_gap_into_which_the_prompt_comes_is_not_one_of_those_before() -> None:
    assert gaps_around([[9.0, 19.0]], 10.0, 20.0) == ([], [10.0])
    assert gaps_around([[9.0]], 10.0, 20.0) == ([], []), "one token has no gap"


# --- one trace, every mode -------------------------------------------------------------------------------------------


def arrival(time_s: float) -> Arrival:
    return Arrival(time_s=time_s, prompt=(1,), num_output=3, max_tokens=3)


def test_what_users_see_of_a_mode() -> None:
    arrivals = [arrival(2.0), arrival(3.0), arrival(4.0)]
    outcomes = [([7, 7, 7], [0.5, 1.0, 8.0]), ([7, 7], [1.0, 1.25]), ([7], [3.0])]
    found = modes.summary(arrivals, outcomes)
    assert found == {
        "ttft_mean_s": 1.5,
        "ttft_p99_s": 2.96,
        "itl_p50_ms": 500.0,
        "itl_p99_ms": 6870.0,
        "latency_mean_s": pytest.approx((8.0 + 1.25 + 3.0) / 3),
        "tokens_per_s": 6 / 10.0,
    }


def test_the_rate_of_a_mode_is_over_the_time_until_the_last_token_of_all() -> None:
    """Which is not the last arrival's here, nor that of the longest request."""
    arrivals = [arrival(0.0), arrival(5.0), arrival(6.0)]
    outcomes = [([7, 7], [1.0, 6.0]), ([7, 7], [1.0, 5.0]), ([7], [1.0])]
    assert modes.summary(arrivals, outcomes)["tokens_per_s"] == 5 / 10.0


# --- systems that take turns -----------------------------------------------------------------------------------------


def turn(system: str, number: int, rate: float, *, concurrency: int = 8, **changes: float) -> dict[str, Any]:
    figures = {"output_tokens_per_s": rate, "ttft_p50_s": 1.0, "itl_p99_s": 0.5} | changes
    return {"system": system, "concurrency": concurrency, "round": number, **figures}


def test_systems_are_compared_round_by_round() -> None:
    """A machine that was slow for a round was slow for both: of the medians, 200 / 100, the ratio would be another."""
    rounds = [(100.0, 100.0), (200.0, 50.0), (900.0, 300.0)]
    runs = [turn("baton pair", number, ours) for number, (ours, _) in enumerate(rounds)]
    runs += [turn("vllm pair", number, theirs, ttft_p50_s=4.0) for number, (_, theirs) in enumerate(rounds)][::-1]
    [found] = versus.summary(runs)
    assert (found["ours"], found["theirs"], found["concurrency"]) == ("baton pair", "vllm pair", 8)
    assert found["output_tokens_per_s"] == {
        "ours": 200.0,
        "theirs": 100.0,
        "ratio": 3.0,
        "ratio_min": 1.0,
        "ratio_max": 4.0,
    }
    assert found["ttft_p50_s"] == {"ours": 1.0, "theirs": 4.0, "ratio": 0.25, "ratio_min": 0.25, "ratio_max": 0.25}


def test_a_round_that_was_cut_short_does_not_count() -> None:
    runs = [turn("baton pair", 0, 30.0), turn("vllm pair", 0, 10.0), turn("baton pair", 1, 990.0)]
    [found] = versus.summary(runs)
    assert (found["output_tokens_per_s"]["ours"], found["output_tokens_per_s"]["ratio"]) == (30.0, 3.0)
    assert versus.summary(runs[2:]) == []


def test_every_concurrency_and_every_pair_of_systems_is_by_itself() -> None:
    runs = [
        turn(system, 0, rate * concurrency, concurrency=concurrency)
        for concurrency in (32, 1)
        for system, rate in (("vllm single", 2.0), ("baton pair", 6.0), ("vllm pair", 1.0), ("baton colocated", 8.0))
    ]
    found = versus.summary(runs)
    assert [(each["ours"], each["concurrency"], each["output_tokens_per_s"]["ratio"]) for each in found] == [
        ("baton pair", 1, 6.0),
        ("baton pair", 32, 6.0),
        ("baton colocated", 1, 4.0),
        ("baton colocated", 32, 4.0),
    ]
    assert found[1]["output_tokens_per_s"]["ours"] == 192.0


def test_of_a_run_of_the_load_comparisons_keep_who_failed() -> None:
    summary = {
        "requests": 64,
        "succeeded": 62,
        "throughput": {"requests_per_s": 9.0, "output_tokens_per_s": 100.0, "total_tokens_per_s": 300.0},
        "ttft_s": {"mean": 9.0, "p50": 1.0, "p90": 9.0, "p99": 9.0, "max": 9.0},
        "itl_s": {"mean": 9.0, "p50": 9.0, "p90": 9.0, "p99": 2.0, "max": 9.0},
        "tpot_s": {"mean": 9.0, "p50": 3.0, "p90": 9.0, "p99": 9.0, "max": 9.0},
    }
    assert load_figures({"summary": summary}) == {
        "failed": 2,
        "output_tokens_per_s": 100.0,
        "ttft_p50_s": 1.0,
        "itl_p99_s": 2.0,
        "tpot_p50_s": 3.0,
    }


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_what_a_process_has_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(2**20) * 48)
    before = resident_mib(os.getpid())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE)) > 0
        assert resident_mib(os.getpid()) - before == pytest.approx(0, abs=8), "a file's pages are not its own"
    held = bytearray(b"x") * (48 * 2**20)
    assert resident_mib(os.getpid()) - before == pytest.approx(len(held) / 2**20, abs=8)
