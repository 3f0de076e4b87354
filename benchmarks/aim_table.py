"""The table of aims: by the medians of the recorded runs, which are met, and on which kind of CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.record import Run, instructions
from benchmarks.result_tables import Figures, bound_threads, table

_CPUS = ("", "-amx", "-amx-as-avx2", "-avx2")
"""What may stand behind the name of a record that depends on the CPU."""
_CASES = (
    "15m-bfloat16-fixed",
    "15m-float32-fixed",
    "15m-bfloat16-sharegpt",
    "15m-float32-sharegpt",
    "0.5b-bfloat16-fixed",
    "0.5b-bfloat16-fixed-baton-pair-vllm-pair",
    "0.5b-bfloat16-fixed-baton-colocated-vllm-single",
    "0.5b-float32-fixed",
    "0.5b-float32-fixed-baton-pair-vllm-pair",
    "0.5b-float32-fixed-baton-colocated-vllm-single",
    "0.5b-bfloat16-sharegpt",
    "0.5b-float32-sharegpt-baton-pair-vllm-pair",
    "0.5b-float32-sharegpt-baton-colocated-vllm-single",
)
_VERSUS = tuple(f"versus-{case}{cpu}" for case in _CASES for cpu in _CPUS)
_LLAMA = tuple(f"llama-0.5b{cpu}" for cpu in _CPUS)
_FLOORS = tuple(f"floors-0.5b-{dtype}-1{cpu}" for dtype in ("float32", "bfloat16") for cpu in _CPUS)


class Point(NamedTuple):
    """One measured value with an aim."""

    excess: float
    """The value over its limit, or what it should be at least over the value: above 1 the aim is missed."""
    told: str


@dataclass(frozen=True, slots=True)
class Aim:
    """One line of the table."""

    told: str
    section: str
    """Where its tables are: an anchor of the results, or another page."""
    records: tuple[str, ...]
    """Names of the runs that it goes by; not every one has to be there."""
    points: Callable[[Figures], Iterator[Point]]


_FAST_LOOP_SINCE = "2026-11-28T11:04:22Z"
"""When the loop that reads memory for the floors became faster (commit 0a6c5da): with it, floors of records from before
would be lower."""
_NOTHING = Point(math.inf, "nothing to compare")
"""A point at which a system made nothing: it misses its aim."""


def _at_most(value: float | None, limit: float, form: str) -> Point:
    return _NOTHING if value is None else Point(value / limit, form.format(value))


def _at_least(value: float | None, limit: float, form: str) -> Point:
    return Point(limit / value, form.format(value)) if value else _NOTHING


def _rates(figures: Figures) -> Iterator[Point]:
    for each in figures["ratios"]:
        least = 1.3 if each["ours"] == "baton pair" else 1.1
        yield _at_least(each["output_tokens_per_s"]["ratio"], least, "{:.2f}")


def _latencies(name: str) -> Callable[[Figures], Iterator[Point]]:
    return lambda figures: (_at_most(each[name]["ratio"], 1.0, "{:.2f}") for each in figures["ratios"])


def _floors(figures: Figures) -> Iterator[Point]:
    for each in figures["cases"]:
        limit = 1.43 if each["kind"] == "prompts" else 1.15 if each["size"] == 1 else 1.3
        yield _at_most(each["ratio"], limit, "{:.2f}")


def _drafts(figures: Figures) -> Iterator[Point]:
    for each in figures["ratios"]:
        if each["text"] in ("novel", "misleading") and each["system"] != "again":
            yield _at_least(each["output_tokens_per_s"]["ratio"], 0.98, "{:.2f}")


def _steps(figures: Figures) -> Iterator[Point]:
    for streams, limit_us in (("32", 300.0), ("256", 1000.0)):
        yield _at_most(figures[streams]["greedy"]["outside_us"]["p50"], limit_us, "{:.0f} µs")


def _routing(figures: Figures) -> Iterator[Point]:
    for load in ("idle", "busy"):
        of = figures[load]["1000"]
        for holders in ("none", "20", "all"):
            yield _at_most(of[f"choose_us_{holders}"] / 1000, 0.15, "{:.2f} ms")


def _gateway(figures: Figures) -> Iterator[Point]:
    yield _at_least(max(figures[streams]["tokens_per_s"]["p50"] for streams in ("1", "100", "1000")), 45e3, "{:,.0f}/s")
    yield _at_most(figures["100"]["moderate_cpu_us_per_token"]["p50"], 35.0, "{:.0f} µs a token")
    yield _at_most(figures["1000"]["moderate_cpu_us_per_token"]["p50"], 45.0, "{:.0f} µs a token")
    yield _at_most(figures["100"]["added_p50_ms"]["p50"], 1.3, "{:.2f} ms added")
    yield _at_most(figures["requests"]["cpu_us_per_request"]["p50"], 500.0, "{:,.0f} µs a request")


def _overload(figures: Figures) -> Iterator[Point]:
    of = figures["summary"]
    yield _at_least(of["accepted_that_met_the_target_at_most"], 0.95, "{:.0%} on time")
    yield _at_least(of["goodput_at_most_over_best"], 0.9, "{:.0%} of the best goodput")
    yield _at_most(1000 * (of["refusal_max_s"] or 0.0), 50.0, "{:.0f} ms to a refusal")
    others = of["neither_accepted_nor_refused"]
    yield Point(math.inf if others else 0.0, f"{others} failed")


_BESIDE_VLLM = "#beside-vllm-on-the-same-two-cores"
BESIDE_VLLM_AIMS = (
    Aim("tokens/s beside vLLM: a pair 1.3 times a pair's, one worker 1.1 times one's", _BESIDE_VLLM, _VERSUS, _rates),
    Aim("first tokens (median) no later than vLLM's", _BESIDE_VLLM, _VERSUS, _latencies("ttft_p50_s")),
    Aim("gaps between tokens (P99) no longer than vLLM's", _BESIDE_VLLM, _VERSUS, _latencies("itl_p99_s")),
)
AIMS = (
    *BESIDE_VLLM_AIMS,
    Aim(
        "prompts and steps take no longer than llama.cpp's",
        "#beside-llamacpp-on-the-same-two-cores",
        _LLAMA,
        lambda figures: (_at_most(each["seconds"]["ratio"], 1.0, "{:.2f}") for each in figures["cases"]),
    ),
    Aim(
        "steps of 1, of 8 and 32 sequences, and prompts take 1.15, 1.3 and 1.43 times their floors at most",
        "#steps-and-prompts-and-their-floors",
        _FLOORS,
        _floors,
    ),
    Aim("drafts that cannot win keep 0.98 of the tokens/s", "#drafts", ("speculation-15m-float32",), _drafts),
    Aim(
        "the first gap after a handoff takes less than 2 decode steps",
        "../README.md#figures",
        ("handoff-demo", "handoff-15m"),
        lambda figures: iter([_at_most(figures["first_gap_in_decode_steps"], 2.0, "{:.2f}")]),
    ),
    Aim(
        "outside the model a step takes 300 µs with 32 streams, 1 ms with 256",
        "#what-a-step-costs-outside-the-model",
        ("step-overhead",),
        _steps,
    ),
    Aim(
        "scheduling a step of 1,024 sequences takes 1 ms",
        "../README.md#figures",
        ("scheduler-cost",),
        lambda figures: iter([_at_most(figures["running"]["1024"]["p50_us"] / 1000, 1.0, "{:.2f} ms")]),
    ),
    Aim("a choice among 1,000 workers takes 0.15 ms", "#what-a-choice-of-workers-costs", ("routing-cost",), _routing),
    Aim(
        "one gateway: 45,000 tokens/s, 35 and 45 µs a token, 1.3 ms added to it, 500 µs a request",
        "#the-gateway-alone",
        ("gateway",),
        _gateway,
    ),
    Aim(
        "at three times the capacity: 95 % on time, 0.9 of the best goodput, refusals within 50 ms, nothing else",
        "#overload",
        ("overload",),
        _overload,
    ),
)
AIMED = tuple(dict.fromkeys(record for aim in AIMS for record in aim.records))


def aims(*runs: Run | None) -> str:
    """A line for each aim with its outcome on each kind of CPU; `runs` are those of `AIMED`.

    An outcome is marked with * if a run that it goes by is known to favour Baton.
    """
    found = {name: run for name, run in zip(AIMED, runs, strict=True) if run is not None}
    kinds = list(dict.fromkeys(instructions(run["machine"]) for run in found.values()))
    rows = []
    for aim in AIMS:
        of = [found[name] for name in aim.records if name in found]
        by_kind = [[run for run in of if instructions(run["machine"]) == kind] for kind in kinds]
        rows.append([f"[{aim.told}]({aim.section})", *(outcome(aim, each) for each in by_kind)])
    return table(["aim", *kinds], rows)


def outcome(aim: Aim, runs: Sequence[Run]) -> str:
    """Whether an aim is met in these runs, and at how many points it is not; empty without a point."""
    points = [point for run in runs for point in aim.points(run["figures"])]
    if not points:
        return ""
    missed = [point for point in points if point.excess > 1]
    of = f"of {len(points)}"
    told = f"missed at {len(missed)} {of}, worst: {max(missed).told}" if missed else f"met at {len(points)} {of}"
    return f"{told} *" if any(bound_threads(run) or _has_slow_loop(aim, run) for run in runs) else told


def _has_slow_loop(aim: Aim, run: Run) -> bool:
    return aim.records is _FLOORS and run["recorded_at"] < _FAST_LOOP_SINCE
