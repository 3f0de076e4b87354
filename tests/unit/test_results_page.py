"""What the results page shows is what is recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, result_tables, versus
from benchmarks.aim_table import AIMED, AIMS, aims
from benchmarks.overview_tables import OVERVIEWS, SUMMARIES, at_a_glance, beside_vllm, handoff, scheduler_aim, soaks
from benchmarks.record import RECORDED_ONCE, RESULTS, ROOT, Run, of_any_cpu
from benchmarks.result_tables import grammars, matrix
from benchmarks.results_page import MARKED, ONCE, PAGE, PAGES, PARTS, TABLES, part, rendered, source


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_the_records(page: Path) -> None:
    text = page.read_text()
    assert rendered(text) == text, "python -m benchmarks.results_page"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_mark_is_known_and_every_picture_there(page: Path) -> None:
    text = page.read_text()
    names = [found["name"] for found in MARKED.finditer(text)]
    assert names
    assert len(names) == text.count("<!-- end -->")
    once = {ONCE + name for name in RECORDED_ONCE}
    assert {*map(of_any_cpu, names)} <= {*TABLES, *PARTS, *OVERVIEWS, *SUMMARIES, "kv sizes", *once}
    missing = [name for name in re.findall(r"\]\((results/.+?)\)", text) if not (PAGE.parent / name).exists()]
    assert missing == []


def test_every_record_is_shown_somewhere() -> None:
    """What nobody looks at need not be measured."""
    marks = {found["name"] for page in PAGES for found in MARKED.finditer(page.read_text())}
    shown = {record for name in marks & set(PARTS) for record in PARTS[name][:1]} | {
        name for name in marks if of_any_cpu(name) in TABLES
    }
    overviews = OVERVIEWS | SUMMARIES
    shown |= {record for name in marks & set(overviews) for record in overviews[name][0]}
    shown |= {name.removeprefix(ONCE) for name in marks if name.startswith(ONCE)}
    assert {path.stem for path in RESULTS.glob("*.json")} <= shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_was_recorded_once_says_so_and_names_its_run(page: Path) -> None:
    for found in MARKED.finditer(page.read_text()):
        if found["name"].startswith(ONCE):
            run = record.recorded(found["name"].removeprefix(ONCE))
            assert run is not None
            assert source([run]).strip() + "\\\nrecorded once: the program is in the history" in found["body"]


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_the_program_of_a_record_is_there_unless_it_was_recorded_once(name: str) -> None:
    run = record.recorded(name)
    assert run is not None
    program = re.search(r"python -m (benchmarks[\w.]*|pytest .*?(tests/[\w./]+))", run["command"])
    assert program is not None, run["command"]
    path = ROOT / (program[2] or program[1].replace(".", "/"))
    there = path.exists() if path.suffix else path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    assert there == (name not in RECORDED_ONCE)


def test_a_run_that_is_not_recorded_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    page = "before\n<!-- steady -->\nold\n<!-- end -->\nafter\n"
    assert rendered(page) == "before\n<!-- steady -->\n\nNot measured yet: `steady`.\n\n<!-- end -->\nafter\n"


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("versus-0.5b-float32-fixed", "`versus-0.5b-float32-fixed` (0.5b, float32, fixed)"),
        ("vllm-settings-0.5b-float32-amx", "`vllm-settings-0.5b-float32-amx` (0.5b, float32)"),
        ("gpu-engine", "`gpu-engine`"),
        ("handoff", "`handoff-demo`, `handoff-15m`"),
    ],
)
def test_what_is_missing_is_told_with_model_type_and_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert part(name) == f"\nNot measured yet: {missing}.\n\n"


def test_a_table_has_its_run_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    run: Run = {
        "command": "python -m benchmarks.steady",
        "commit": "0123456789",
        "product": "abcdef0123456789",
        "machine": {"cpu": "Abacus", "cores": 3, "cpu_flags": ["avx", "avx2", "sse4_1"]},
        "figures": {"resident_mib": {"gateway": [10.0, 11.4, 12.6]}},
    }
    (tmp_path / "steady.json").write_text(json.dumps(run))
    lines = part("steady").splitlines()
    assert "![Memory of each process over the requests](results/steady.svg)" in lines
    assert "| gateway | 10 | 11 | 13 |" in lines
    told = "`python -m benchmarks.steady`, commit 0123456, product abcdef01, "
    assert f"{told}Abacus, 3 cores, AVX2" in lines
    (tmp_path / "steady.json").write_text(json.dumps(run | {"machine": run["machine"] | {"limited_to": "avx2"}}))
    assert f"{told}Abacus, 3 cores, AVX2, limited to AVX2" in part("steady").splitlines()
    (tmp_path / "steady.json").write_text(json.dumps(run | {"workload": {"gpu": "Slide rule"}}))
    assert f"{told}Slide rule, Abacus, 3 cores, AVX2" in part("steady").splitlines()


def test_overload_adds_counts_up_and_tells_the_worst_of_what_is_promised() -> None:
    def run(
        share: float, goodput: float, accepted: int, refused: int, neither: int, on_time: float, **refusal_s: float
    ) -> Run:
        return {
            "share": share,
            "rate": 10 * share,
            "requests": accepted + refused + neither,
            "goodput": goodput,
            "accepted": accepted,
            "refused": refused,
            "neither": neither,
            "accepted_that_met_the_target": on_time,
            "refusal_s": refusal_s or None,
        }

    runs = [
        run(3, 7.0, 90, 9, 1, 1.0, p50=0.004, max=0.1),
        run(0.5, 2.0, 50, 0, 0, 0.5),
        run(0.5, 3.0, 51, 0, 0, 0.75),
        run(3, 9.0, 95, 0, 2, 0.96),
        run(3, 6.0, 80, 8, 0, 1.0, p50=0.008, max=0.05),
    ]
    rows = result_tables.overload({"figures": {"runs": runs}}).splitlines()[2:]
    assert rows == [
        "| 0.5 | 5.0 | 2.5 (2.0 to 3.0) | 101 | 0 | 0 (0 to 0) | 0 | 62 (50 to 75) |  |",
        "| 3 | 30.0 | 7.0 (6.0 to 9.0) | 265 | 17 | 9 (0 to 9) | 3 | 100 (96 to 100) | 6 / 100 |",
    ]


def test_of_the_autoscaler_s_runs_the_worst_counts() -> None:
    def run(asked_s: float, met_s: float, most: int, last: int, turns: int, p90_s: float, refused: int) -> Run:
        return {
            "seconds_until_needed_are_asked_for": asked_s,
            "seconds_until_the_target_is_met": met_s,
            "most_replicas": most,
            "last_replicas": last,
            "changes_of_direction": turns,
            "p90_ttft_s_after": p90_s,
            "refused": refused,
        }

    runs = [run(105.0, 90.0, 5, 4, 1, 0.25, 7), run(45.0, 150.0, 6, 5, 0, 0.75, 3)]
    table = result_tables.autoscale({"figures": {"rules": runs}})
    assert table.splitlines()[2:] == ["| rules | 105 s | 150 s | 6 | 4, 5 | 1, 0 | 0.75 s | 7 |"]


def test_requests_that_failed_beside_vllm_are_told() -> None:
    def both(**changes: float) -> dict[str, float]:
        return {"ours": 0.25, "theirs": 0.5, "ratio": 0.48, "ratio_min": 0.375, "ratio_max": 0.625} | changes

    ratio = {"ours": "baton pair", "theirs": "vllm pair", "concurrency": 8, "ttft_p50_s": both(), "itl_p99_s": both()}
    ratio["output_tokens_per_s"] = both(ours=400.0, theirs=80.0, ratio=5.0, ratio_min=4.0, ratio_max=6.0)
    failures = (("baton pair", 0), ("vllm pair", 2), ("baton pair", 0), ("vllm pair", 1))
    runs = [{"system": system, "failed": number, "concurrency": 8} for system, number in failures]
    lines = result_tables.versus({"figures": {"ratios": [ratio], "runs": runs}}).splitlines()[2:]
    row = "| baton pair / vllm pair | 8 | 2 | 400.0 / 80.0 | **5.00** (4.00 to 6.00) "
    row += "| 250 / 500 | **0.48** (0.38 to 0.62) | 250 / 500 | **0.48** (0.38 to 0.62) |"
    assert lines == [row, "", "Failed requests: 3 of vllm pair."]
    whole: Run = {"figures": {"ratios": [ratio], "runs": runs[::2]}}
    assert result_tables.versus(whole).splitlines()[2:] == [row]
    for settings, told in (({"threads": "nobind"}, False), ({}, True)):
        text = result_tables.versus(whole | {"peers": {"vllm": {"settings": settings}}})
        assert ("bound to cores" in text) == told
    (once,) = result_tables.versus({"figures": {"ratios": [ratio], "runs": runs[:1]}}).splitlines()[2:]
    assert once == re.sub(r" \(\d.*?\)", "", row).replace("| 8 | 2 |", "| 8 | 1 |")


THREADS = {"threads": "chosen"}
"""Settings of vLLM in a record whose threads could be bound or not."""

# --- README ----------------------------------------------------------------------------------------------------------


def beside(systems: Mapping[str, tuple[tuple[float, ...], ...]], **run: Any) -> Run:
    """A run with one request at a time and with eight; of each system the tokens per second of its rounds."""
    runs = [
        {
            "system": system,
            "concurrency": concurrency,
            "round": number,
            "output_tokens_per_s": rate,
            "ttft_p50_s": 1 / rate,
            "itl_p99_s": 2.0 if system.startswith("baton") else 4.0,
        }
        for system, points in systems.items()
        for concurrency, rates in zip((1, 8), points, strict=True)
        for number, rate in enumerate(rates)
    ]
    workload = {"model": "15m", "dtype": "float32", "concurrency": [1, 8]}
    figures = {"runs": runs, "ratios": versus.summary(runs)}
    return {"workload": workload, "machine": {"cpu": "Some", "cpu_flags": ["avx2"]}, "figures": figures} | run


def test_beside_vllm_each_pairing_is_told_by_rate_first_tokens_and_gaps() -> None:
    systems = {
        "baton pair": ((30.0, 20.0), (60.0, 90.0)),
        "vllm pair": ((20.0, 20.0), (80.0, 30.0)),
        "vllm single": ((40.0, 40.0), (40.0, 40.0)),
        "baton colocated": ((60.0, 50.0), (80.0, 40.0)),
    }
    lines = beside_vllm(beside(systems)).splitlines()
    assert lines == [
        "| model, weights, requests, CPU | systems | rounds | tokens/s | first token | gaps, P99 |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 15m, float32, 1 8 at a time, AVX2 (Some) | a pair / one vLLM | 2 "
        "| 0.62 to 1.88 (0.50 to 2.25) | 0.56 to 1.67 (0.44 to 2.00) | 0.50 to 0.50 (0.50 to 0.50) |",
        "|  | a pair / a pair | 2 "
        "| 1.25 to 1.88 (0.75 to 3.00) | 0.83 to 0.83 (0.33 to 1.33) | 0.50 to 0.50 (0.50 to 0.50) |",
        "|  | one worker / one vLLM | 2 "
        "| 1.38 to 1.50 (1.00 to 2.00) | 0.73 to 0.75 (0.50 to 1.00) | 0.50 to 0.50 (0.50 to 0.50) |",
        "",
        "The aims, by medians, at all points of these runs:",
        "",
        "* tokens/s beside vLLM: a pair 1.3 times a pair's, one worker 1.1 times one's: missed at 1 of 4, worst: 1.25",
        "* first tokens (median) no later than vLLM's: met at 4 of 4",
        "* gaps between tokens (P99) no longer than vLLM's: met at 4 of 4",
    ]


def test_beside_vllm_the_least_favourable_run_comes_first() -> None:
    amx = {"cpu": "Other", "cpu_flags": ["amx_bf16"]}
    theirs = {"vllm pair": ((20.0,), (80.0, 30.0)), "vllm single": ((20.0,), (80.0, 30.0))}
    runs = [
        beside({"baton pair": ((30.0,), (60.0, 90.0))} | theirs),
        beside({"baton pair": ((10.0,), (200.0, 90.0))} | theirs, machine=amx, peers={"vllm": {"settings": {}}}),
        beside(
            {"baton colocated": ((30.0,), (56.0, 21.0))} | theirs, machine=amx, peers={"vllm": {"settings": THREADS}}
        ),
        None,
    ]
    table, _ = beside_vllm(*runs).split("\n\n", 1)
    rows = [line.split(" | ")[:3] for line in table.splitlines()[2:]]
    assert rows == [
        ["| 15m, float32, 1 8 at a time, AMX (Other) *", "a pair / one vLLM", "1"],
        ["| ", "a pair / a pair", "1"],
        ["| 15m, float32, 1 8 at a time, AMX (Other)", "one worker / one vLLM", "1"],
        ["| 15m, float32, 1 8 at a time, AVX2 (Some)", "a pair / one vLLM", "1"],
        ["| ", "a pair / a pair", "1"],
    ], "pairings that were not run have no row"


def test_an_aim_is_met_or_missed_on_each_kind_of_cpu() -> None:
    def run(flag: str, rates: tuple[float, ...], **more: Any) -> Run:
        ratios = [
            {
                "ours": ours,
                "output_tokens_per_s": {"ratio": rate},
                "ttft_p50_s": {"ratio": 1.0},
                "itl_p99_s": {"ratio": 1 / rate},
            }
            for ours, rate in zip(("baton pair", "baton colocated"), rates, strict=True)
        ]
        return {"machine": {"cpu_flags": [flag]}, "figures": {"ratios": ratios}} | more

    def floor(ratio: float, flag: str, recorded_at: str) -> Run:
        figures = {"cases": [{"kind": "decode", "size": 1, "ratio": ratio}]}
        return {"machine": {"cpu_flags": [flag]}, "recorded_at": recorded_at, "figures": figures}

    nothing = run("avx2", (2.0, 2.0))
    nothing["figures"]["ratios"][0]["output_tokens_per_s"]["ratio"] = None
    runs: dict[str, Run] = {
        "versus-15m-bfloat16-fixed": run("avx512_bf16", (1.31, 1.1), peers={"vllm": {"settings": {}}}),
        "versus-0.5b-float32-fixed-avx2": run("avx2", (1.2, 1.09)),
        "versus-15m-float32-fixed-avx2": run("avx2", (1.29, 0.9)),
        "versus-15m-bfloat16-fixed-avx2": nothing,
        "floors-0.5b-float32-1": floor(1.2, "avx512_bf16", "2026-11-28T00:00:00Z"),
        "floors-0.5b-float32-1-avx2": floor(1.15, "avx2", "2026-11-29T00:00:00Z"),
        "llama-0.5b-avx2": {
            "machine": {"cpu_flags": ["avx2"]},
            "figures": {"cases": [{"seconds": {"ratio": 1.06}}, {"seconds": {"ratio": 0.8}}]},
        },
    }
    lines = aims(*(runs.get(name) for name in AIMED)).splitlines()
    assert lines[0] == "| aim | AVX-512 with bf16 | AVX2 |"
    assert [line.split(" | ", 1)[1] for line in lines[2:7]] == [
        "met at 2 of 2 * | missed at 5 of 6, worst: nothing to compare |",
        "met at 2 of 2 * | met at 6 of 6 |",
        "met at 2 of 2 * | missed at 1 of 6, worst: 1.11 |",
        " | missed at 1 of 2, worst: 1.06 |",
        "missed at 1 of 1, worst: 1.20 * | met at 1 of 1 |",
    ]
    assert len(lines) == 2 + len(AIMS)


def test_the_handoff_of_two_models_is_side_by_side() -> None:
    def run(model: str, ms: float) -> Run:
        names = ("isolated_ttft_ms", "ttft_ms", "gap_ms", "first_gap_ms")
        figures = {name: {"p50": ms + number, "p90": 2 * ms} for number, name in enumerate(names)}
        return {"workload": {"model": model}, "figures": figures | {"first_gap_in_decode_steps": ms / 10}}

    lines = handoff(run("demo", 10.0), run("15m", 20.0)).splitlines()
    assert lines[0] == "|  | demo model (0.5 M weights) | random Llama (15 M weights) |"
    assert [line.split(" | ")[1:] for line in lines[2:]] == [
        ["10.0 ms (P90 20.0)", "20.0 ms (P90 40.0) |"],
        ["11.0 ms (P90 20.0)", "21.0 ms (P90 40.0) |"],
        ["12.0 ms (P90 20.0)", "22.0 ms (P90 40.0) |"],
        ["13.0 ms (P90 20.0)", "23.0 ms (P90 40.0) |"],
        ["1.00", "2.00 |"],
    ]


def test_the_rest_at_a_glance() -> None:
    def memory(preempted: float, failed: int = 0, other: int = 0) -> dict[str, float]:
        return {
            "failed": failed,
            "different_outputs": other,
            "demand_over_memory": 2.0,
            "preemptions_share_of_requests": preempted,
        }

    figures: tuple[dict[str, Any], ...] = (
        {"kill": {"stall_ms": {"p50": 476.0, "max": 488.0}}, "freeze": {"stall_ms": {"p50": 1611.0, "max": 1746.0}}},
        {"total_percent_of_a_core": {"p50": 0.67, "min": 0.6, "max": 0.71}},
        {
            "colocated-512": {"itl_during": {"p99_ms": 630.0}},
            "colocated-256": {"itl_during": {"p99_ms": 429.0}, "long_ttft_s": 5.0},
            "disaggregated-256": {"itl_during": {"p99_ms": 18.0}, "long_ttft_s": 9.5},
        },
        {"alone": {"itl": {"p99_ms": 14.0}}, "batch-flood": {"itl": {"p99_ms": 85.0}}},
        {"mean_output_tokens": 9.0, "default": memory(0.0, 1), "swap": memory(0.41), "recompute": memory(0.44, 0, 2)},
        {"rows": [{}, {}, {"beyond_mib": 265, "peak_mib": 3193}]},
        {
            "conversations": {"0": {}, "0.05": {"preempted_share": 0.0, "blocks_used_share": 0.89}},
            "code": {"0": {}, "0.05": {"preempted_share": 0.0098, "blocks_used_share": 0.942}},
        },
        {
            "running": {"1024": {"p50_us": 1138.0}},
            "queued": {"0": {"p50_us": 490.0}, "100000": {"p50_us": 839.0}},
        },
    )
    runs = [{"figures": each} for each in figures]
    lines = at_a_glance(*runs).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [
        "476 ms, at most 488",
        "1611 ms, at most 1746",
        "0.67 % (0.60 to 0.71)",
        "18 / 429 ms; 9.5 / 5.0 s",
        "14 / 85 ms",
        "3; 0 (41 and 44 where memory is over-committed on purpose)",
        "265 MiB; 3,193 MiB",
        "1.0 %; 89 to 94 %",
        "1.14 ms; 0.3 ms",
    ]
    assert lines[-1].endswith("| [record](benchmarks/results/scheduler-cost.json) |")
    assert lines[-2].endswith("| [record](benchmarks/results/reserve.json), made once |")
    for p50_us, aim in ((1000.0, "(the aim: 1 ms)"), (1000.1, "(the aim: 1 ms, missed)")):
        assert aim in scheduler_aim({"running": {"1024": {"p50_us": p50_us}}})
    assert at_a_glance(None, runs[1], *[None] * 6).splitlines()[2:] == [lines[2]], "what is not recorded has no line"


def test_faults_are_counted_over_the_transports() -> None:
    def soak(transport: str, **figures: int) -> Run:
        faults = {"kill decode": 2, "kill prefill": 1, "freeze decode": 3}
        figures = {"near_ties": 0, "lost": 0, "wrong": 0} | figures
        return {"workload": {"transport": transport, "requests": 500}, "figures": {"faults": faults, **figures}}

    lines = soaks(soak("zmq"), soak("nixl", lost=1, near_ties=2)).splitlines()
    assert lines[2:] == [
        "| zmq | 500 | freeze 3, kill 3 | 0 | 0 | 0 |",
        "| nixl | 500 | freeze 3, kill 3 | 1 | 0 | 2 |",
    ]
    cells = {"zmq": {"kill": 4, "cut": 3}, "nixl": {"kill": 5}}
    aborted = {"zmq": 0, "nixl": 1}
    run = {"figures": {"passed": cells, "failed": {"nixl": {"cut": 2}}, "aborted_by_ucx": aborted}}
    assert matrix(run).splitlines() == [
        "| fault | zmq | nixl |",
        "| --- | --- | --- |",
        "| cut | 3 | 0, and 2 failed |",
        "| kill | 4 | 5 |",
        "| all | 7 | 5, and 2 failed |",
        "| workers that UCX aborted meanwhile | 0 | 1 |",
    ]


def test_grammars_show_the_longest_gap_of_all_rounds() -> None:
    def found(longest: float, end: str) -> dict[str, Any]:
        gaps = {"p50_ms": 1.0, "p99_ms": longest - 1, "max_ms": longest}
        return {"itl_before": gaps | {"max_ms": longest + 1}, "itl_during": gaps, "end": end}

    rounds = [found(3.0, "complete"), found(90.0, "complete"), found(5.0, "invalid")]
    row = grammars({"figures": {"free": rounds}}).splitlines()[2]
    assert row == "| free | 4 | 6 | 91 | 4 | 5 | 90 | complete 2, invalid 1 |"


def test_choices_are_shown_by_workers_load_and_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    each = {"choose_us_none": 92.0, "choose_us_20": 96.0, "choose_us_all": 258.0, "report_us": 5.3}
    run = {"command": "c", "commit": "c", "product": "p", "machine": {"cpu": "Abacus", "cores": 2}}
    figures = {"idle": {"1000": each}, "busy": {"10": each | {"report_us": 8.6}}}
    (tmp_path / "routing-cost.json").write_text(json.dumps(run | {"figures": figures}))
    rows = [line for line in part("routing-cost").splitlines() if line.startswith("|")][2:]
    assert rows == ["| 1,000 | idle | 0.09 | 0.10 | 0.26 | 5 |", "| 10 | busy | 0.09 | 0.10 | 0.26 | 9 |"]
