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
