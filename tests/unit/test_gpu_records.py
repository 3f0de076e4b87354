"""Records of what was measured on a GPU are made from the lines that came back, and only of this commit's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_tables, record
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import parts, records
from benchmarks.gpu.runner import Measurement
from benchmarks.record import ROOT
from benchmarks.results_page import MARKED, PAGES

DECODE = {"kind": "decode_attention", "batch": 8, "us": 20.0, "text": "decode 8"}
RAGGED = {"kind": "decode_ragged", "long": 32768, "us": 80.0, "text": "decode 32 x"}
PREFILL = {"kind": "prefill_attention", "chunk": 2048, "us": 500.0, "text": "prefill"}
KERNELS = [
    Measurement(part="kernels", name=f"kernels {name}", function="m:f", timeout_s=1.0) for name in ("decode", "prefill")
]


def run_of(number: str, tree: str, measurements: dict[str, list[dict[str, Any]]], status: str = "ok") -> list[Any]:
    """The lines of a run."""
    lines: list[dict[str, Any]] = [{"line": "begin", "run": number, "at": f"t{number}", "machine": {"cpu": number}}]
    for name, rows in measurements.items():
        told = {"run": number, "measurement": name, "at": f"t{number}"}
        lines += [{"line": "row", **told, "row": row} for row in rows]
        lines.append({"line": "end", **told, "status": status, "tree": tree})
    return lines


DEVICE = {"device": [{"kind": "device", "gpu": "H100", "copy_bytes_per_s": 3e12, "text": "H100"}]}


def named(name: str, **more: Any) -> Measurement:
    return Measurement(part="kernels", name=name, function="m:f", timeout_s=1.0, **more)


WAYS = [named("a"), named("b", instead_of="a"), named("c", optional=True)]
"""A measurement with another way to do it, and one that may be missing."""


def made(*runs: list[Any], measurements: list[Measurement] = KERNELS) -> dict[str, Any] | str:
    lines = [line for run in runs for line in run]
    return records.record_of("kernels", measurements, records.successes(lines), "here")


def test_a_part_is_recorded_from_the_last_success_of_each_measurement() -> None:
    first = run_of("1", "other", DEVICE | {"kernels decode": [DECODE | {"us": 99.0}, RAGGED]})
    second = run_of("2", "here", DEVICE | {"kernels decode": [DECODE, RAGGED], "kernels prefill": [PREFILL]})
    failed = run_of("3", "here", {"kernels decode": [DECODE | {"us": 1.0}]}, status="failed")
    run = made(first, second, failed)
    assert isinstance(run, dict)
    assert run["figures"] == {
        "decode_attention": [{"batch": 8, "us": 20.0}],
        "decode_ragged": {"long": 32768, "us": 80.0},
        "prefill_attention": [{"chunk": 2048, "us": 500.0}],
    }
    assert run["workload"] == {"gpu": "H100", "copy_bytes_per_s": 3e12}
    assert (run["machine"], run["recorded_at"]) == ({"cpu": "2"}, "t2")
    assert (run["command"], run["seed"]) == ("python -m benchmarks.gpu kernels", 0)
    assert run["product"] == record.product_digest()


def test_what_did_not_succeed_or_is_of_other_files_is_not_recorded() -> None:
    whole = {"kernels decode": [DECODE, RAGGED], "kernels prefill": [PREFILL]}
    assert made(run_of("1", "here", {"kernels decode": [DECODE]})) == "kernels prefill has not succeeded"
    assert made(run_of("1", "here", whole, status="timeout")) == "kernels decode has not succeeded"
    assert made(run_of("1", "other", whole)) == (
        "kernels decode was measured with other files than those of this commit"
    )


def test_what_is_measured_instead_counts_and_what_is_optional_may_be_missing() -> None:
    for name in ("a", "b"):
        run = made(run_of("1", "here", {name: [DECODE, RAGGED]}), measurements=WAYS)
        assert isinstance(run, dict)
        assert run["figures"]["decode_ragged"]["us"] == 80.0
    assert made(run_of("1", "here", {"c": [DECODE]}), measurements=WAYS) == "a has not succeeded"


def slow(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, but with times that other files have taken."""
    return [row | {"us": 999.0} for row in rows]


def test_a_first_way_that_succeeded_with_other_files_does_not_hide_the_second() -> None:
    run = made(
        run_of("1", "other", {"a": slow(DECODE, RAGGED)}),
        run_of("2", "here", {"a": []}, status="failed"),
        run_of("2", "here", {"b": [DECODE, RAGGED]}),
        measurements=WAYS,
    )
    assert isinstance(run, dict), run
    assert run["figures"]["decode_ragged"]["us"] == 80.0


def test_what_is_optional_and_succeeded_with_other_files_only_is_left_out() -> None:
    run = made(
        run_of("1", "other", {"c": slow(DECODE)}),
        run_of("2", "here", {"a": [DECODE, RAGGED]}),
        run_of("3", "here", {"c": slow(DECODE)}, status="failed"),
        measurements=WAYS,
    )
    assert isinstance(run, dict), run
    assert [row["us"] for row in run["figures"]["decode_attention"]] == [20.0]


def test_a_success_with_these_files_counts_although_a_later_one_had_others() -> None:
    whole = {"kernels decode": [DECODE, RAGGED], "kernels prefill": [PREFILL]}
    run = made(run_of("1", "here", whole), run_of("2", "other", {"kernels decode": slow(DECODE, RAGGED)}))
    assert isinstance(run, dict), run
    assert run["figures"]["decode_ragged"]["us"] == 80.0
    assert run["recorded_at"] == "t1"


def test_a_second_way_that_succeeded_with_other_files_only_is_told() -> None:
    told = made(run_of("1", "other", {"b": [DECODE, RAGGED]}), measurements=WAYS)
    assert told == "b was measured with other files than those of this commit"


def test_a_record_names_the_gpu_of_its_own_run() -> None:
    """The device is measured before `tune` changes the files, so its success may be of other ones."""
    whole = {"kernels decode": [DECODE, RAGGED], "kernels prefill": [PREFILL]}
    other = {"device": [{"kind": "device", "gpu": "H200", "copy_bytes_per_s": 4e12}]}
    first = [*run_of("1", "before", DEVICE), *run_of("1", "here", whole)]
    for later in (run_of("2", "here", other), run_of("2", "here", other | {"transfer": [PREFILL]})):
        run = made(first, later)
        assert isinstance(run, dict), run
        assert run["workload"] == {"gpu": "H100", "copy_bytes_per_s": 3e12}
        assert run["machine"] == {"cpu": "1"}
    partly = made(first, run_of("2", "here", other | {"kernels prefill": [PREFILL]}))
    assert isinstance(partly, dict)
    assert (partly["workload"]["gpu"], partly["machine"]) == ("H200", {"cpu": "2"})


def test_every_part_that_may_be_recorded_is_shown_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody looks at is not recorded: tests/unit/test_results_page.py would fail."""
    monkeypatch.setattr(record, "is_clean", lambda: True)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "tree", lambda root: "here")
    monkeypatch.setattr(records, "figures", lambda part, rows: {})
    plan = command.planned([*parts.PARTS, "compile"], Path("/out"), Path("/scratch"), 90)
    rows = {each.name: [{"kind": "any", "capability": 90}] for part in plan.values() for each in part}
    path = tmp_path / "gpu.jsonl"
    path.write_text("\n".join(map(json.dumps, run_of("1", "here", rows))))
    written = {each.stem for each in records.write(path, plan)}
    marks = {found["name"] for page in PAGES for found in MARKED.finditer(page.read_text())}
    shown = {gpu_tables.PARTS[name][0] if name in gpu_tables.PARTS else name for name in marks}
    assert written == {"gpu-kernels", "gpu-engine", "gpu-transfer", "gpu-stack", "gpu-compile"}
    assert written <= shown


def test_figures_are_as_the_tables_want_them() -> None:
    assert records.figures("compile", [{"kind": "compiler", "capability": 90}, {"kind": "binary", "registers": 7}]) == {
        "capability": 90,
        "binaries": [{"registers": 7}],
    }
    decode, prefill = {"kind": "decode", "model": "m", "batch": 1}, {"kind": "prefill", "model": "m", "tokens": 9}
    profile = {"kind": "profile", "model": "m", "busy_us": 3.0}
    invariant = {"kind": "invariant", "model": "m", "ratio": 1.5}
    assert records.figures("engine", [decode, prefill, profile, invariant]) == {
        "m": {
            "decode": [{"batch": 1}],
            "prefill": [{"tokens": 9}],
            "profile": [{"busy_us": 3.0}],
            "early": [],
            "invariant": [{"ratio": 1.5}],
        }
    }
    runs = [{"kind": "run", "system": "a", "output_tokens_per_s": rate} for rate in (1.0, 3.0)]
    assert records.figures("stack", runs)["output_tokens_per_s"] == {"a": 2.0}
    assert records.figures("transfer", [{"kind": "reads", "us": 1}, {"kind": "writes", "us": 2}]) == {
        "reads": [{"us": 1}],
        "writes": [{"us": 2}],
    }


def test_a_step_whose_kernels_are_launched_early_is_told_beside_one_without() -> None:
    step = {"kind": "early", "model": "m", "batch": 4, "context": 512, "early_ms": 1.25, "plain_ms": 1.5}
    figures = records.figures("engine", [step])
    told = gpu_tables.TABLES["gpu-engine"]({"figures": figures})
    assert "| m, decode 4 x 512, kernels launched early | 1.25 ms | 1.50 ms without |" in told.splitlines()


def test_records_are_written_and_a_line_that_was_cut_off_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "is_clean", lambda: True)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "tree", lambda root: "here")
    whole = DEVICE | {"kernels decode": [DECODE, RAGGED], "kernels prefill": [PREFILL]}
    path = tmp_path / "gpu.jsonl"
    path.write_text("\n".join(map(json.dumps, run_of("1", "here", whole))) + '\n{"line": "r')
    absent = Measurement(part="stack", name="stack baton pair", function="m:f", timeout_s=1.0)
    written = records.write(path, {"kernels": KERNELS, "stack": [absent], "tune": KERNELS})
    assert written == [tmp_path / "gpu-kernels.json"]
    assert json.loads(written[0].read_text())["figures"]["decode_ragged"]["us"] == 80.0
    monkeypatch.setattr(record, "is_clean", lambda: False)
    assert records.write(path, {"kernels": KERNELS}) == []
    told = capsys.readouterr().out
    assert "no line" in told
    assert "gpu-stack is not recorded: stack baton pair has not succeeded" in told


def test_the_digest_is_of_the_files_and_of_no_results(tmp_path: Path) -> None:
    names = [*record.PRODUCT, "benchmarks", "tests/kernels"]
    for name in names:
        path = tmp_path / name if "." in name else tmp_path / name / "code.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    before = records.tree(tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir()
    (tmp_path / "benchmarks" / "results" / "gpu.json").write_text("{}")
    (tmp_path / "common" / "__pycache__").mkdir()
    (tmp_path / "common" / "__pycache__" / "code.pyc").write_text("")
    assert records.tree(tmp_path) == before
    (tmp_path / "common" / "tuning.json").write_text("{}")
    assert records.tree(tmp_path) != before
    assert len(records.tree(ROOT)) == 64
