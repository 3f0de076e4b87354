"""The command line of a measurement, what it prints and what it records."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from benchmarks import command, record
from benchmarks.command import Result, UsageError, call, run, show

WITHOUT = {"load/__main__.py", "gpu/child.py", "engine_turns.py", "peers/llama_cpp.py"}
"""`baton bench`, whose options are settings, and processes that others start with what they need."""


def everything(
    what: Literal["a", "b"],
    *,
    numbers: tuple[int, ...] = (1, 2),
    pair: Annotated[tuple[float, float], "two of them"] = (0.5, 1.5),
    folder: Path | None = None,
    quick: bool = False,
    port: int,
) -> tuple[Any, ...]:
    if quick and folder is None:
        raise UsageError("quick needs a folder")
    return what, numbers, pair, folder, quick, port


def test_options_are_the_parameters_of_a_function() -> None:
    assert call(everything, "", ["a", "--port", "7"]) == ("a", (1, 2), (0.5, 1.5), None, False, 7)
    words = ["b", "--numbers", "3", "--pair", "1", "2", "--folder", "/x", "--quick", "--port", "8"]
    assert call(everything, "", words) == ("b", (3,), (1.0, 2.0), Path("/x"), True, 8)


@pytest.mark.parametrize(
    "words", ["", "c --port 1", "a", "a --port x", "a --port 1 --pair 1", "a --port 1 --quick", "a --port 1 --other"]
)
def test_what_does_not_fit_is_an_error(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(everything, "", words.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(everything, "What it does.", ["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "What it does." in told
    assert re.search(r"--pair PAIR PAIR\s+two of them", told)


def test_every_program_declares_its_command_line() -> None:
    root = Path(command.__file__).parent
    for path in root.rglob("*.py"):
        _, found, entry = path.read_text().partition('if __name__ == "__main__":')
        if found and str(path.relative_to(root)) not in WITHOUT:
            assert re.search(r"\b(call|run)\(", entry), path


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "is_clean", lambda: True)
    return tmp_path


def measured(scratch: Path, *, rounds: int = 2, seed: int = 3) -> Iterator[Result]:
    assert scratch.is_dir()
    for number in range(rounds):
        yield Result(name="speed", figures={"of": {"ms": number / 4}}, workload={"model": "tiny"})


def test_a_measurement_is_recorded_with_its_options(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--rounds", "3"])
    assert run(measured, "").figures == {"of": {"ms": 0.5}}
    made = json.loads((results / "speed.json").read_text())
    assert (made["workload"], made["seed"]) == ({"rounds": 3, "model": "tiny"}, 3)
    assert made["figures"] == {"of": {"ms": 0.5}}
    assert capsys.readouterr().out.splitlines() == [f"{'of':<28}ms 0.5", str(results / "speed.json")]


def test_nothing_is_recorded_if_that_is_asked_for(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--no-record"])
    run(measured, "")
    assert list(results.iterdir()) == []


def test_a_tree_that_changes_during_the_measurement_is_not_the_one_that_was_measured(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"commit": "a" * 40, "product": "p"}
    monkeypatch.setattr(record, "tree", lambda: dict(now))
    monkeypatch.setattr(tempfile, "tempdir", str(results / "elsewhere"))
    monkeypatch.setattr(sys, "argv", ["speed.py"])
    (results / "elsewhere").mkdir()

    def speed(scratch: Path) -> Iterator[Result]:
        yield Result(name="before", figures={"ms": 1.0})
        now["commit"] = "b" * 40
        yield Result(name="after", figures={"ms": 1.0})

    run(speed, "")
    assert (results / "before.json").exists()
    assert not (results / "after.json").exists()
    assert (results / "elsewhere" / "after.json").exists()


def test_figures_are_told_by_groups(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"min": 1.0, "p50": 2.0, "max": 30.0, "n": 5}
    show("all", {"ms": spread, "failed": 0, "runs": [1, 2], "one": {"rate": 1234.5, "two": {"x": "y"}}})
    assert capsys.readouterr().out.splitlines() == [
        f"{'all':<28}ms 2 30  failed 0",
        f"{'all one':<28}rate 1234",
        f"{'all one two':<28}x y",
    ]


def test_instructions_can_be_limited_and_the_record_says_so(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in record.LIMITS["avx2"]:
        monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.setattr(record, "cpuinfo", {"flags": "avx2 avx512f amx_bf16"}.get)
    monkeypatch.setattr(sys, "argv", ["speed.py", "--rounds", "1"])

    def named(scratch: Path, *, rounds: int = 2) -> Result:
        assert os.environ.get("ONEDNN_MAX_CPU_ISA") == ("AVX2" if "--instructions" in sys.argv else "")
        return Result(name=record.by_cpu("speed"), figures={"ms": 1.0})

    run(named, "")
    assert "limited_to" not in json.loads((results / "speed-amx.json").read_text())["machine"]
    monkeypatch.setattr(sys, "argv", ["speed.py", "--instructions", "avx2"])
    run(named, "")
    made = json.loads((results / "speed-amx-as-avx2.json").read_text())
    assert (made["machine"]["limited_to"], made["workload"]) == ("avx2", {"rounds": 2})
    assert record.of_any_cpu("speed-amx-as-avx2") == "speed"

    def unnamed(scratch: Path, *, rounds: int = 2) -> Result:
        return Result(name="speed", figures={"ms": 1.0})

    run(unnamed, "")
    assert (results / "speed-as-avx2.json").exists(), "it does not replace the record of all instructions"


def test_the_limits_are_those_of_the_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--help"])
    with pytest.raises(SystemExit):
        run(measured, "")
    assert f"--instructions {{{','.join(record.LIMITS)}}}" in capsys.readouterr().out


def test_nothing_measured_is_an_error(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--rounds", "0"])
    with pytest.raises(SystemExit, match="nothing was measured"):
        run(measured, "")
