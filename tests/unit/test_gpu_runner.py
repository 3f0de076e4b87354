"""The runner of the measurements on a GPU: nothing that a measurement does keeps the others, or its rows, from us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.child import attempts, plain
from benchmarks.gpu.runner import LINES, LOG, MOST_LOG_BYTES, Lines, Measurement, Outcome, marked, measure, run, table
from benchmarks.record import ROOT

FAKES = '''
import os, subprocess, sys, time
from pathlib import Path

def fine(number=3):
    for index in range(number):
        yield {"kind": "fine", "index": index, "text": f"row {index}"}

def crashes():
    yield {"kind": "first"}
    print("about to fall over")
    os.abort()

def raises():
    yield {"kind": "first"}
    raise RuntimeError("there is no such kernel")

def hangs():
    yield {"kind": "first"}
    hang_in_a_function_of_this_name()

def hang_in_a_function_of_this_name():
    time.sleep(600)

def leaves(pids):
    """Processes of the same group and of another; and hangs."""
    same = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(pids).write_text(f"{same.pid} {other.pid}")
    yield {"kind": "left"}
    time.sleep(600)

def ends_and_leaves(pids):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(pids).write_text(str(other.pid))
    yield {"kind": "left"}

def chatters():
    """On standard output, as libraries do, by print and past it."""
    print("[1732.1] UCX WARN what nobody asked for")
    os.write(1, bytes(range(256)) + b"\\n")
    yield {"kind": "fine", "text": "among noise"}

def garbles():
    """Into the pipe of the rows itself."""
    (pipe,) = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and pipe_of(fd)]
    os.write(pipe, b"\\xff no row \\n")
    yield {"kind": "fine"}

def pipe_of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    except OSError:
        return False

def says_nothing():
    return iter(())

def talks(size):
    sys.stderr.write("begin" + "x" * size + "the end")
    yield {"kind": "fine"}

def waits_for(path, found):
    """Until the file exists; its first row is then on disk."""
    yield {"kind": "first"}
    while not Path(path).exists():
        time.sleep(0.01)
    Path(found).write_text(Path(path).read_text())
    yield {"kind": "last"}
'''


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with a module of fake measurements."""
    (tmp_path / "fakes.py").write_text(FAKES)
    return tmp_path


def fake(folder: Path, name: str, timeout_s: float = 60.0, **arguments: Any) -> Measurement:
    """A measurement of that module."""
    path = f"{folder}:{ROOT}"
    return Measurement(
        part="fakes", name=name, function=f"fakes:{name}", timeout_s=timeout_s, arguments=arguments,
        env={"PYTHONPATH": path},
    )  # fmt: skip


def run_all(folder: Path, *measurements: Measurement, limit_s: float = 300.0) -> dict[str, Outcome]:
    """By name; the results are in `folder / "out"`."""
    outcomes = run(measurements, folder / "out", limit_s, begin={"command": "test"}, show=lambda text: None)
    return {each.measurement.name: each for each in outcomes}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / LINES).read_text().splitlines()]


def ends_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["measurement"]: each for each in lines_of(folder) if each["line"] == "end"}


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.processes
def test_it_goes_on_after_whatever_a_measurement_does(fakes: Path) -> None:
    names = ("fine", "crashes", "raises", "hangs", "chatters", "garbles", "says_nothing")
    last = fake(fakes, "fine", number=1)
    measurements = [fake(fakes, name, 8.0 if name == "hangs" else 60.0) for name in names]
    outcomes = run_all(fakes, *measurements, Measurement(**{**fields(last), "name": "last"}))
    assert {name: (each.status, each.num_rows) for name, each in outcomes.items()} == {
        "fine": ("ok", 3),
        "crashes": ("failed", 1),
        "raises": ("failed", 1),
        "hangs": ("timeout", 1),
        "chatters": ("ok", 1),
        "garbles": ("failed", 1),
        "says_nothing": ("failed", 0),
        "last": ("ok", 1),
    }
    ends = ends_of(fakes)
    assert {name: end["status"] for name, end in ends.items()} == {name: o.status for name, o in outcomes.items()}
    assert "about to fall over" in ends["crashes"]["error"]
    assert "ended with -6" in ends["crashes"]["error"]
    assert "RuntimeError: there is no such kernel" in ends["raises"]["error"]
    assert "not done in 8 s" in ends["hangs"]["error"]
    assert "hang_in_a_function_of_this_name" in ends["hangs"]["error"], "where it stood is told"
    assert "no row" in ends["garbles"]["error"]
    assert ends["fine"]["error"] == ends["chatters"]["error"] == ""
    assert "what nobody asked for" in (fakes / "out" / LOG).read_text(errors="replace")
    rows = [(each["measurement"], each["row"]["kind"]) for each in lines_of(fakes) if each["line"] == "row"]
    assert {("crashes", "first"), ("hangs", "first")} <= set(rows), "rows of what failed are kept"


def fields(measurement: Measurement) -> dict[str, Any]:
    return {name: getattr(measurement, name) for name in measurement.__slots__}


@pytest.mark.processes
def test_a_row_is_on_disk_while_its_measurement_goes_on(fakes: Path) -> None:
    """The measurement itself sees the file of the results, with the row that it has yielded before."""
    found = fakes / "found"
    measurement = fake(fakes, "waits_for", path=str(fakes / "signal"), found=str(found))
    signal = fakes / "signal"

    def show(text: str) -> None:
        pass

    class Copying(Lines):
        """Copies the file to where the measurement waits for it, once a row is there."""

        def add(self, line: str, **told: Any) -> None:
            super().add(line, **told)
            if line == "row" and not signal.exists():
                half = fakes / "half"
                half.write_bytes((fakes / "out" / LINES).read_bytes())
                os.replace(half, signal)

    (fakes / "out").mkdir()
    outcome = measure(measurement, fakes / "out" / LOG, 60.0, Copying(fakes / "out" / LINES), show)
    assert (outcome.status, outcome.num_rows) == ("ok", 2), outcome.error
    (line,) = [json.loads(line) for line in found.read_text().splitlines()]
    assert line["row"] == {"kind": "first"}


@pytest.mark.processes
@pytest.mark.parametrize("name", ["leaves", "ends_and_leaves"])
def test_nothing_that_a_measurement_started_is_left(fakes: Path, name: str) -> None:
    pids = fakes / "pids"
    (outcome,) = run_all(fakes, fake(fakes, name, 12.0 if name == "leaves" else 60.0, pids=str(pids))).values()
    assert outcome.status == ("timeout" if name == "leaves" else "ok"), outcome.error
    found = [int(pid) for pid in pids.read_text().split()]
    assert found
    assert not [pid for pid in found if runs(pid)]


@pytest.mark.processes
def test_a_process_is_found_by_its_mark() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"BENCHMARK_MARK": "m1"})
    try:
        deadline = time.monotonic() + 30
        while marked("m1") != [process.pid] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert marked("m1") == [process.pid]
        assert marked("m") == []
    finally:
        process.communicate(b"\n")
    assert marked("m1") == []


@pytest.mark.processes
def test_what_there_is_no_time_for_is_told(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.runner._LEAST_S", 1.0)
    outcomes = run_all(fakes, fake(fakes, "hangs", 100.0), fake(fakes, "fine"), limit_s=2.0)
    assert {name: each.status for name, each in outcomes.items()} == {"hangs": "timeout", "fine": "skipped"}
    assert ends_of(fakes)["fine"]["error"] == "no time is left of 2 s"


@pytest.mark.processes
def test_a_second_way_is_tried_only_if_the_first_fails(fakes: Path) -> None:
    def instead(of: str, name: str) -> Measurement:
        return Measurement(**{**fields(fake(fakes, "fine")), "name": name, "instead_of": of})

    measurements = [fake(fakes, "raises"), instead("raises", "a"), fake(fakes, "fine"), instead("fine", "b")]
    assert list(run_all(fakes, *measurements, instead("not chosen", "c"))) == ["raises", "a", "fine"]


@pytest.mark.processes
def test_of_much_output_the_begin_and_the_end_are_kept(fakes: Path) -> None:
    run_all(fakes, fake(fakes, "fine"), fake(fakes, "talks", size=3 * MOST_LOG_BYTES))
    text = (fakes / "out" / LOG).read_text()
    assert text.startswith("=== fine\n=== talks\nbeginxxx")
    assert text.endswith("xxxthe end")
    assert len(text) < 1.1 * MOST_LOG_BYTES


@pytest.mark.processes
def test_runs_are_appended_and_each_tells_its_command(fakes: Path) -> None:
    for _ in range(2):
        run_all(fakes, fake(fakes, "fine", number=1))
    lines = lines_of(fakes)
    assert [each["line"] for each in lines] == ["begin", "row", "end"] * 2
    assert {each["command"] for each in lines if each["line"] == "begin"} == {"test"}
    assert len({each["run"] for each in lines}) == 2


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / LINES
    path.write_text('{"line": "ro')
    for number in range(2):
        Lines(path).add("row", number=number)
    cut_off, *whole = path.read_text().splitlines()
    assert cut_off == '{"line": "ro'
    assert [json.loads(line)["number"] for line in whole] == [0, 1]


def test_the_table_has_a_short_line_for_each(fakes: Path) -> None:
    one = Outcome(measurement=fake(fakes, "fine"), status="ok", seconds=1.25, num_rows=3, last="row 2")
    other = Outcome(measurement=fake(fakes, "hangs"), status="timeout", error="somewhere\n" + "y" * 300)
    head, *rows = table([one, other]).splitlines()
    assert head.split() == ["measurement", "status", "seconds", "rows"]
    assert rows[0].split() == ["fine", "ok", "1.2", "3", "row", "2"]
    assert rows[1].endswith(" " + "y" * 100)


def test_numbers_that_json_lacks_are_words() -> None:
    assert plain({"a": [1.5, float("inf")], "b": (float("nan"),)}) == {"a": [1.5, "inf"], "b": ["nan"]}


def test_of_several_attempts_one_that_fails_is_a_row_and_the_others_go_on() -> None:
    def bad() -> dict[str, Any]:
        raise RuntimeError("no room")

    made = attempts([("a", lambda: {"kind": "x"}), ("b", bad), ("c", lambda: {"kind": "y"})])
    assert [next(made)["kind"] for _ in range(3)] == ["x", "failed", "y"]
    with pytest.raises(RuntimeError, match="1 failed: b"):
        next(made)
