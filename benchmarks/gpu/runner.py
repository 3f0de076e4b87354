"""Runs measurements one after another, each in a process of its own, and writes each row as soon as it arrives.

A measurement is a function that yields rows (`benchmarks.gpu.child` calls it). Its rows arrive through a pipe, and each
is appended to `gpu.jsonl` at once; its other output goes to `gpu.log`. If a measurement fails or takes too long, a line
with the end of its output is appended, and the next one begins. After a measurement none of its processes is left: its
process group is killed, and other processes that it started are found by a variable of their environment.

This module uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from benchmarks.command import line_of
from benchmarks.record import ROOT

LINES, LOG = "gpu.jsonl", "gpu.log"
OK, FAILED, TIMEOUT, SKIPPED = "ok", "failed", "timeout", "skipped"
TAIL_CHARS = 2000
"""Characters of a failed measurement's output that its line keeps."""
MOST_LOG_BYTES = 2**20
"""Bytes of the log of one measurement. Of a longer log the beginning and the end are kept."""
_MOST_ROW_BYTES = 2**20
_LEAST_S = 5.0
"""Seconds that must be left for a measurement to be started."""
_DUMP_S = 1.0
"""Seconds in which a measurement whose time is up may print the stack of each thread."""
_KILL_S = 10.0
"""Seconds to wait for killed processes to end."""
_MARK = "BENCHMARK_MARK"
"""Environment variable by which the processes that a measurement started are found."""

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A function to call in a process of its own."""

    part: str
    name: str
    function: str
    """MODULE:NAME."""
    timeout_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the function; JSON must be able to represent them."""
    env: Mapping[str, str] = field(default_factory=dict)
    instead_of: str = ""
    """Name of another measurement of the run: this one runs only if that one has not succeeded."""
    optional: bool = False
    """Whether a part can be recorded without this measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a measurement."""

    measurement: Measurement
    status: str
    seconds: float = 0.0
    num_rows: int = 0
    last: str = ""
    """Text of its last row."""
    error: str = ""
    """The end of its output, if it failed."""

    @property
    def note(self) -> str:
        """One line for the table: the last row's text, or the last line of the error."""
        return self.last if self.status == OK else (self.error.strip().splitlines() or [""])[-1].strip()


class Lines:
    """A file of JSON lines. A line is on disk when `add` returns."""

    def __init__(self, path: Path, **common: Any) -> None:
        self._path = path
        self._common = common

    def add(self, line: str, **fields: Any) -> None:
        """Append a line. `line` is its kind: "begin" of a run, "row", "garbage", or "end" of a measurement."""
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = json.dumps({"line": line, "at": at, **self._common, **fields}) + "\n"
        with self._path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read() == b"\n" else "\n" + text  # the line before was cut off
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


def say(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)


def run(
    measurements: Sequence[Measurement],
    folder: Path,
    limit_s: float,
    *,
    begin: Mapping[str, Any],
    state: Callable[[], str] = lambda: "",
    show: Show = say,
) -> list[Outcome]:
    """Run the measurements, in at most `limit_s` seconds in all. `show` gets each row's text, and the table at the end.

    `begin` is part of the run's first line. `state()` returns a digest of the files that were measured, at the end of
    each measurement.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = Lines(folder / LINES, run=uuid4().hex)
    lines.add("begin", limit_s=limit_s, measurements=[each.name for each in measurements], **begin)
    end = time.monotonic() + limit_s
    outcomes: dict[str, Outcome] = {}
    for each in measurements:
        instead_of = outcomes.get(each.instead_of)
        if each.instead_of and (instead_of is None or instead_of.status == OK):
            continue
        left_s = end - time.monotonic()
        if left_s < _LEAST_S:
            outcome = Outcome(measurement=each, status=SKIPPED, error=f"no time is left of {limit_s:.0f} s")
        else:
            show(f"--- {each.name}, at most {min(each.timeout_s, left_s):.0f} s")
            outcome = measure(each, folder / LOG, min(each.timeout_s, left_s), lines, show)
        lines.add(
            "end", part=each.part, measurement=each.name, status=outcome.status, s=round(outcome.seconds, 2),
            rows=outcome.num_rows, error=outcome.error, tree=state(),
        )  # fmt: skip
        outcomes[each.name] = outcome
    show(table(list(outcomes.values())))
    return list(outcomes.values())


def table(outcomes: Sequence[Outcome]) -> str:
    """A text with one line for each measurement."""
    width = max([11, *(len(each.measurement.name) for each in outcomes)])
    rows = [f"{'measurement':{width}}  status   seconds  rows"]
    rows += [
        f"{each.measurement.name:{width}}  {each.status:7}  {each.seconds:7.1f}  {each.num_rows:4}  {each.note[:100]}"
        for each in outcomes
    ]
    return "\n".join(row.rstrip() for row in rows)


def measure(measurement: Measurement, log_path: Path, timeout_s: float, lines: Lines, show: Show) -> Outcome:
    """Run one measurement. Its rows are written as they arrive; the caller writes its "end" line."""
    began = time.monotonic()
    with log_path.open("a+b") as log:
        log.write(f"=== {measurement.name}\n".encode())
        log.flush()
        start = log.seek(0, os.SEEK_END)
        mark = uuid4().hex
        try:
            process = _start(measurement, log, mark)
        except OSError as error:
            return Outcome(measurement=measurement, status=FAILED, error=f"does not start: {error}")
        taken = _Rows(measurement, lines, show)
        try:
            in_time = _follow(process, began + timeout_s, taken)
        finally:
            remaining = _end(process, mark)
        why = _why(process, timeout_s, taken, in_time=in_time)
        if remaining:
            why += f"\nprocesses that do not die: {remaining}"
        printed = _tail(log, start)
    return Outcome(
        measurement=measurement,
        status=TIMEOUT if not in_time else FAILED if why else OK,
        seconds=time.monotonic() - began,
        num_rows=taken.num,
        last=taken.last,
        error=f"{printed}\n{why}".strip() if why else "",
    )


class _Rows:
    """Writes the rows of a measurement to the file as they arrive."""

    def __init__(self, measurement: Measurement, lines: Lines, show: Show) -> None:
        self._measurement, self._lines, self._show = measurement, lines, show
        self.num = 0
        self.last = ""
        self.garbage = ""
        """The last line that was no row."""

    def take(self, line: bytes) -> None:
        """Take a line of the pipe."""
        names = {"part": self._measurement.part, "measurement": self._measurement.name}
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            self.garbage = repr(line[:200])
            self._lines.add("garbage", **names, text=self.garbage)
            return
        self.num += 1
        self.last = str(row.get("text", "")) or line_of(str(row.get("kind", "")), row)
        self._lines.add("row", **names, row=row)
        self._show(self.last)


def _start(measurement: Measurement, log: IO[bytes], mark: str) -> subprocess.Popen[bytes]:
    arguments = json.dumps(dict(measurement.arguments))
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.child", measurement.function, arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(measurement.env) | {_MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Let the kernel kill this process when the runner ends first (`PR_SET_PDEATHSIG`)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _follow(process: subprocess.Popen[bytes], end: float, taken: _Rows) -> bool:
    """Take rows until the process has ended; returns whether it ended before `end`."""
    for line in _lines_of(process, end):
        taken.take(line)
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # its threads' stacks go to the log
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DUMP_S)
        return False
    return True


def _lines_of(process: subprocess.Popen[bytes], end: float) -> Iterator[bytes]:
    """Lines that the process writes to the pipe, until no process has it open or `end` is reached. The last one may be
    cut off."""
    assert process.stdout is not None
    pipe, buffer = process.stdout.fileno(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left_s := end - time.monotonic()) > 0:
            if not selector.select(min(left_s, 0.5)):
                if process.poll() is not None:  # a process that it forked still has the pipe open
                    break
                continue
            data = os.read(pipe, 2**16)
            if not data:
                break
            *whole, buffer = (buffer + data).split(b"\n")
            yield from whole
            if len(buffer) > _MOST_ROW_BYTES:
                yield buffer
                buffer = b""
    if buffer:
        yield buffer


def _end(process: subprocess.Popen[bytes], mark: str) -> list[int]:
    """Kill the process group, and every other process with the mark. Returns the ids of those still there after
    `_KILL_S`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    end = time.monotonic() + _KILL_S
    while (remaining := marked(mark)) and time.monotonic() < end:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.1, end - time.monotonic()))
    assert process.stdout is not None
    process.stdout.close()
    return remaining


def marked(mark: str) -> list[int]:
    """Ids of the processes that inherited this mark, without those that have ended and await their parent."""
    wanted, found = f"{_MARK}={mark}".encode(), []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def _why(process: subprocess.Popen[bytes], timeout_s: float, taken: _Rows, *, in_time: bool) -> str:
    """Why the measurement failed; empty if it did not."""
    if not in_time:
        return f"not done in {timeout_s:.0f} s"
    if process.returncode != 0:
        return f"ended with {process.returncode}"
    if taken.garbage:
        return f"no row: {taken.garbage}"
    return "" if taken.num else "no rows"


def _tail(log: IO[bytes], start: int) -> str:
    """The end of what was logged since `start`. Clips that part of the log to `MOST_LOG_BYTES`."""
    size = log.seek(0, os.SEEK_END) - start
    if size > MOST_LOG_BYTES:
        log.seek(start + size - MOST_LOG_BYTES // 2)
        end = log.read()[-(MOST_LOG_BYTES // 2) :]
        log.truncate(start + MOST_LOG_BYTES // 2)
        log.write(b"\n[...]\n" + end)
        log.flush()
    log.seek(max(start, log.seek(0, os.SEEK_END) - 4 * TAIL_CHARS))
    return log.read().decode(errors="replace")[-TAIL_CHARS:]
