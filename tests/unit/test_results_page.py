"""What the results page shows is what is recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import results_page
from benchmarks.results_page import PAGE, PARTS, TABLES, part, rendered


def test_the_page_shows_the_records() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "python -m benchmarks.results_page"


def test_every_mark_is_known_and_every_picture_there() -> None:
    page = PAGE.read_text()
    names = set(re.findall(r"<!-- (.+?) -->", page)) - {"end"}
    assert names <= {*TABLES, *PARTS, "kv sizes"}
    assert len(names) > 10
    missing = [name for name in re.findall(r"\]\((results/.+?)\)", page) if not (PAGE.parent / name).exists()]
    assert missing == []


def test_a_run_that_is_not_recorded_is_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = "before\n<!-- steady -->\nold\n<!-- end -->\nafter\n"
    assert rendered(page) == "before\n<!-- steady -->\n\nNot measured yet.\n\n<!-- end -->\nafter\n"


def test_a_table_has_its_run_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    run = {
        "command": "python -m benchmarks.steady",
        "commit": "0123456789",
        "machine": {"cpu": "Abacus", "cores": 3},
        "figures": {"resident_mib": {"gateway": [10.0, 11.4, 12.6]}},
    }
    (tmp_path / "steady.json").write_text(json.dumps(run))
    lines = part("steady").splitlines()
    assert "![Memory of each process over the requests](results/steady.svg)" in lines
    assert "| gateway | 10 | 11 | 13 |" in lines
    assert "`python -m benchmarks.steady`, commit 0123456, Abacus, 3 cores" in lines


def test_overload_adds_counts_up_and_tells_the_worst_of_what_is_promised() -> None:
    def run(
        share: float, goodput: float, accepted: int, refused: int, neither: int, on_time: float, **refusal_s: float
    ) -> results_page.Run:
        return {
            "share": share,
            "rate": 10 * share,
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
    rows = results_page.overload({"figures": {"runs": runs}}).splitlines()[2:]
    assert rows == [
        "| 0.5 | 5.0 | 2.5 | 101 | 0 | 0 | 50.0 % |  |",
        "| 3 | 30.0 | 7.0 | 265 | 17 | 3 | 96.0 % | 6 / 100 |",
    ]


def test_routing_shows_medians_and_beside_them_the_median_of_the_ratios() -> None:
    names = ("ttft_mean_ms", "ttft_p99_ms", "tokens_computed")
    runs = [
        {"workload": workload, "routing": routing} | dict.fromkeys(names, figure)
        for workload, ours, theirs in (
            ("multi-turn", (10.0, 90.0, 30.0), (20.0, 100.0, 10.0)),
            ("unshared", (5000.0,), (7000.0,)),
        )
        for routing, figures in (("round_robin", theirs), ("expected", ours))
        for figure in figures
    ]
    ratios = {"multi-turn": dict(zip(names, (0.9, 0.8, 0.7), strict=True)), "unshared": dict.fromkeys(names, 5 / 7)}
    rows = results_page.routing({"figures": {"ratios": ratios, "runs": runs}}).splitlines()[2:]
    assert rows == [
        "| multi-turn | 30 / 20 (**0.90**) | 30 / 20 (**0.80**) | 30 / 20 (**0.70**) |",
        "| unshared | 5000 / 7000 (**0.71**) | 5000 / 7000 (**0.71**) | 5,000 / 7,000 (**0.71**) |",
    ]


def test_of_the_autoscaler_s_runs_the_worst_counts() -> None:
    def run(
        asked_s: float, met_s: float, most: int, last: int, turns: int, p90_s: float, refused: int
    ) -> results_page.Run:
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
    table = results_page.autoscale({"figures": {"rules": runs}})
    assert table.splitlines()[2:] == ["| rules | 105 s | 150 s | 6 | 4, 5 | 1, 0 | 0.75 s | 7 |"]


def test_a_decode_step_is_beside_the_larger_of_its_floors() -> None:
    batches = {
        "1": {"step_ms": {"min": 4.0, "p50": 5.0}, "floor_ms": 2.0, "compute_floor_ms": 0.5, "ratio": 2.0},
        "8": {"step_ms": {"min": 9.0, "p50": 10.0}, "floor_ms": 3.0, "compute_floor_ms": 6.0, "ratio": 3.0},
    }
    run = {"figures": {"batches": batches}}
    assert results_page.decode_floor(run).splitlines()[2:] == [
        "| 1 | 4.0 (median 5.0) | 2.0 | 0.5 | 2.00 | 2.00 |",
        "| 8 | 9.0 (median 10.0) | 3.0 | 6.0 | 3.00 | 1.50 |",
    ]
    rows = results_page.batch_throughput(run).splitlines()[2:]
    assert rows == ["| 1 | 200 | 1.0 |", "| 8 | 800 | 4.0 |"], "of the medians, as what is usual is asked for"


def test_clients_differ_by_the_ratio_of_their_rounds() -> None:
    ratios = {
        "ttft_mean_ms": {"ours": 67.714, "theirs": 69.0, "ratio": 1.031},
        "requests_per_s": {"ours": 14.0, "theirs": 13.0, "ratio": 0.75},
    }
    rows = results_page.agreement({"figures": {"ratios": ratios}}).splitlines()[2:]
    assert rows == ["| ttft mean ms | 67.71 | 69 | +3.1 % |", "| requests per s | 14 | 13 | -25.0 % |"]


def test_requests_that_failed_beside_vllm_are_told() -> None:
    def both(**changes: float) -> dict[str, float]:
        return {"ours": 0.25, "theirs": 0.5, "ratio": 0.5, "ratio_min": 0.375, "ratio_max": 0.625} | changes

    ratio = {"ours": "baton pair", "theirs": "vllm pair", "concurrency": 8, "ttft_p50_s": both(), "itl_p99_s": both()}
    ratio["output_tokens_per_s"] = both(ours=400.0, theirs=80.0, ratio=5.0, ratio_min=4.0, ratio_max=6.0)
    failures = (("baton pair", 0), ("vllm pair", 2), ("baton pair", 0), ("vllm pair", 1))
    runs = [{"system": system, "failed": number} for system, number in failures]
    lines = results_page.versus({"figures": {"ratios": [ratio], "runs": runs}}).splitlines()[2:]
    row = "| baton pair / vllm pair | 8 | 400.0 / 80.0 | **5.00** (4.00 to 6.00) | 250 / 500 | 250 / 500 |"
    assert lines == [row, "", "Failed requests: 3 of vllm pair."]
    whole = results_page.versus({"figures": {"ratios": [ratio], "runs": runs[::2]}})
    assert whole.splitlines()[2:] == [row]


def test_sizes_of_the_kv_need_no_run() -> None:
    assert "| llama-2-7b | 512 KiB | 2 GiB |" in part("kv sizes")


def test_runs_on_a_gpu_will_have_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is recorded yet; the records will have these names (`benchmarks/gpu/`)."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)

    def recorded(name: str, figures: dict[str, object]) -> None:
        run = {"command": "c", "commit": "c", "machine": {"cpu": "Abacus", "cores": 3}, "figures": figures}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))

    attention = {"batch": 8, "length": 1024, "us": 20.0, "of_copy_rate": 0.5, "over_fa3_fit": 1.25, "sdpa_us": 99.0}
    rows = {"batch": 64, "vocabulary": 128256, "greedy_us": 9.0, "temperature_us": 30.0, "top_k_top_p_us": 310.0}
    recorded(
        "gpu-kernels",
        {
            "decode_attention": [attention],
            "decode_ragged": {"long": 32768, "short": 1024, "num_short": 32, "us": 80.0, "of_copy_rate": 0.75},
            "prefill_attention": [{"chunk": 2048, "context": 8192, "us": 500.0, "tflops": 412.0}],
            "layer": [{"kernel": "add_norm", "tokens": 64, "us": 4.0, "floor_us": 1.5}],
            "sampler": [rows],
        },
    )
    decode = {"batch": 1, "context": 2048, "step_ms": 4.2, "over_floor": 1.13}
    recorded("gpu-engine", {"llama": {"decode": [decode], "prefill": [{"tokens": 8192, "s": 0.2, "of_matmul": 0.56}]}})
    read = {"block_bytes": 2**21, "blocks": 4, "us": 170.0, "gb_per_s": 49.3}
    recorded("gpu-transfer", {"reads": [read], "writes": [read | {"gb_per_s": 48.0}]})
    recorded("gpu-stack", {"output_tokens_per_s": {"baton pair": 3000.0, "static batching": 250.0}})
    assert "| static batching | 250 | 12.0 |" in part("gpu-stack")
    assert "| 8 x 1024 | 20.0 | 50% | 1.25 | 99.0 |" in part("gpu decode attention")
    assert "| 32 x 1024 and 1 x 32768 | 80.0 | 75% |  |  |" in part("gpu decode attention")
    assert "| 2048 of 8192 | 500 | 412 |" in part("gpu prefill attention")
    assert "| add_norm, 64 tokens | 4.0 | 1.5 |" in part("gpu small kernels")
    assert "| top_k_top_p, 64 rows of 128256 | 310 |  |" in part("gpu small kernels")
    assert "| llama, decode 1 x 2048 | 4.20 ms | 1.13 times |" in part("gpu-engine")
    assert "| llama, prefill 8192 | 200 ms | 56% of a product's rate |" in part("gpu-engine")
    assert "| 4 x 2 MiB | 170 | 49.3 | 48.0 |" in part("gpu-transfer")
