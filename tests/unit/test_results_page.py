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
            "prefill_attention": [{"chunk": 2048, "context": 8192, "us": 500.0, "tflops": 412.0}],
            "layer": [{"kernel": "add_norm", "tokens": 64, "us": 4.0, "floor_us": 1.5}],
            "sampler": [rows],
        },
    )
    decode = {"batch": 1, "context": 2048, "step_ms": 4.2, "over_floor": 1.13}
    recorded("gpu-engine", {"llama": {"decode": [decode], "prefill": [{"tokens": 8192, "s": 0.2, "of_matmul": 0.56}]}})
    recorded("gpu-transfer", {"reads": [{"block_bytes": 2**21, "blocks": 4, "us": 170.0, "gb_per_s": 49.3}]})
    recorded("gpu-stack", {"output_tokens_per_s": {"baton pair": 3000.0, "static batching": 250.0}})
    assert "| static batching | 250 | 12.0 |" in part("gpu-stack")
    assert "| 8 x 1024 | 20.0 | 50% | 1.25 | 99.0 |" in part("gpu decode attention")
    assert "| 2048 of 8192 | 500 | 412 |" in part("gpu prefill attention")
    assert "| add_norm, 64 tokens | 4.0 | 1.5 |" in part("gpu small kernels")
    assert "| top_k_top_p, 64 rows of 128256 | 310 |  |" in part("gpu small kernels")
    assert "| llama, decode 1 x 2048 | 4.20 ms | 1.13 times |" in part("gpu-engine")
    assert "| llama, prefill 8192 | 200 ms | 56% of a product's rate |" in part("gpu-engine")
    assert "| 4 x 2 MiB | 170 | 49.3 |" in part("gpu-transfer")
