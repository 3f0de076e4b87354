"""Makes the records of the documents' tables from the lines of runs. Uses the standard library alone.

A machine with a GPU often has no checkout, and the lines come from there. So each measurement reports a digest of the
files that it ran. A part is recorded if each of its measurements has succeeded with the files of this commit, in
whichever run. What other files gave does not count.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.gpu.runner import OK, Measurement

_KINDS = (".py", ".c", ".json", ".toml")
"""Suffixes of the files that determine what is measured."""
NOT_RECORDED = ("check", "tune")
"""Parts without a record: no table shows the rows of `check`, and `tune` makes the tuning table, which is committed."""
Rows = list[dict[str, Any]]


def tree(root: Path) -> str:
    """SHA-256 digest of the product, the benchmarks and the kernels' tests, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted([*record.PRODUCT, "benchmarks", "tests/kernels"]):
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            place = path.relative_to(root)
            if path.suffix in _KINDS and path.is_file() and place.parts[:2] != ("benchmarks", "results"):
                digest.update(f"{place}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Success:
    """A success of a measurement."""

    begin: dict[str, Any]
    """The first line of its run."""
    end: dict[str, Any]
    """Its last line, which tells the digest of the files that it ran."""
    rows: Rows

    @property
    def name(self) -> str:
        """Name of the measurement."""
        return str(self.end["measurement"])


def successes(lines: Sequence[dict[str, Any]]) -> list[Success]:
    """Every success of a measurement, in the order of the lines."""
    begins = {each["run"]: each for each in lines if each["line"] == "begin"}
    found = []
    for end in lines:
        if end["line"] == "end" and end["status"] == OK and end["run"] in begins:
            mine = (end["run"], end["measurement"])
            rows = [
                each["row"] for each in lines if each["line"] == "row" and (each["run"], each["measurement"]) == mine
            ]
            found.append(Success(begin=begins[end["run"]], end=end, rows=rows))
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a last one that was cut off."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            print(f"{path}: no line: {line[:80]}")
    return lines


def write(path: Path, parts: dict[str, list[Measurement]]) -> list[Path]:
    """Write the records of the parts that can be recorded, and print what the others lack. Returns the paths."""
    if not record.is_clean():
        print("not recorded, for there are changes since the last commit")
        return []
    succeeded, here, written = successes(read(path)), tree(record.ROOT), []
    for part, measurements in parts.items():
        if part in NOT_RECORDED:
            continue
        made = record_of(part, measurements, succeeded, here)
        if isinstance(made, str):
            print(f"gpu-{part} is not recorded: {made}")
            continue
        written.append(record.RESULTS / f"gpu-{part}.json")
        written[-1].write_text(json.dumps(made, indent=2) + "\n")
        print(written[-1])
    return written


def record_of(
    part: str, measurements: Sequence[Measurement], succeeded: Sequence[Success], here: str
) -> dict[str, Any] | str:
    """A part's record, or the reason why there is none. `here` is the digest of this commit's files; of several
    successes with these files the last one counts."""
    found = {each.name: each for each in succeeded if each.end["tree"] == here}
    used = []
    for each in measurements:
        if each.instead_of:
            continue
        names = [each.name, *(other.name for other in measurements if other.instead_of == each.name)]
        if name := next((name for name in names if name in found), None):
            used.append(found[name])
        elif not each.optional:
            with_others = [success.name for success in succeeded if success.name in names]
            return (
                f"{with_others[-1]} was measured with other files than those of this commit"
                if with_others
                else f"{each.name} has not succeeded"
            )
    last = max(used, key=lambda success: str(success.end["at"]))
    rows = [row for success in used for row in success.rows]
    command, workload = f"python -m benchmarks.gpu {part}", _device(succeeded, last.end["run"])
    if part == "compile":
        workload = {"capability": rows[0]["capability"]}
        command += f" --capability {rows[0]['capability']}"
    return {
        "command": command,
        **record.tree(),
        "recorded_at": last.end["at"],
        "machine": last.begin["machine"],
        "workload": workload,
        "seed": None if part == "compile" else 0,
        "figures": figures(part, rows),
    }  # fmt: skip


def _device(succeeded: Sequence[Success], run: str) -> dict[str, Any]:
    """The GPU of a run and its rates, as that run has measured them. The digest of this success may be another one than
    that of the run's last measurement, since `tune` changes a file."""
    rows = [each.rows[0] for each in succeeded if each.name == "device" and each.end["run"] == run]
    return _plain(rows[0]) if rows else {"gpu": "not told"}


def figures(part: str, rows: Rows) -> dict[str, Any]:
    """The figures of a part, in the form that the tables use."""
    of_kind: dict[str, Rows] = {}
    for row in rows:
        of_kind.setdefault(row["kind"], []).append(_plain(row))
    if part == "compile":
        return {**of_kind["compiler"][0], "binaries": of_kind["binary"]}
    if part == "kernels":
        return {**of_kind, "decode_ragged": of_kind["decode_ragged"][0]}
    if part == "engine":
        return _by_model(rows)
    if part == "stack":
        rates: dict[str, list[float]] = {}
        for each in of_kind["run"]:
            rates.setdefault(each["system"], []).append(each["output_tokens_per_s"])
        return {"runs": of_kind["run"], "output_tokens_per_s": {k: statistics.median(v) for k, v in rates.items()}}
    return dict(of_kind)


def _by_model(rows: Rows) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        kinds = ("decode", "prefill", "profile", "early", "invariant")
        model = found.setdefault(row["model"], {kind: [] for kind in kinds})
        model[row["kind"]].append({name: value for name, value in _plain(row).items() if name != "model"})
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("kind", "text")}
