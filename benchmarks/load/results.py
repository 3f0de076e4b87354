"""The results file of a run or a sweep: figures, and everything needed to repeat the measurement."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.endpoint import Endpoint
from benchmarks.load.record import Record
from benchmarks.load.runner import Recording
from benchmarks.load.settings import LoadSettings
from benchmarks.load.summary import Targets, summarize
from benchmarks.record import ROOT, cpuinfo, git, versions
from common.contract.errors import OperatorError

FORMAT = "baton-bench/1"
_PACKAGES = ("baton", "aiohttp", "uvloop", "pydantic")
_SECRET_OPTION = "--api-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of one run."""

    plan_digest: str
    recording: Recording
    targets: Targets

    def summary(self) -> dict[str, Any]:
        """The figures of the run."""
        return summarize(self.recording.records, self.targets, self.recording.loop_lag_s)

    def as_json(self, *, with_timeline: bool) -> dict[str, Any]:
        """The JSON form for the results file."""
        body: dict[str, Any] = {"plan_sha256": self.plan_digest, "interrupted": self.recording.interrupted}
        body["summary"] = self.summary()
        if with_timeline:
            body["timeline"] = {
                "loop_lag_s": self.recording.loop_lag_s,
                "records": [record.as_json() for record in self.recording.records],
            }
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any], targets: Targets) -> Measured:
        """Read a run from a file's timeline. Raises `KeyError`, `TypeError` or `ValueError` for another form."""
        timeline = body["timeline"]
        records = [Record.from_json(each) for each in timeline["records"]]
        recording = Recording(records, [float(each) for each in timeline["loop_lag_s"]], bool(body["interrupted"]))
        return cls(plan_digest=str(body["plan_sha256"]), recording=recording, targets=targets)


def targets_of(settings: LoadSettings) -> Targets:
    """The targets for goodput."""
    return Targets(ttft_s=settings.ttft_target_s, tpot_s=settings.tpot_target_s, itl_s=settings.itl_target_s)


def heading(kind: str, settings: LoadSettings, endpoint: Endpoint, argv: Sequence[str], started: str) -> dict[str, Any]:
    """The content of a file besides figures. `started` is wall time, ISO 8601."""
    processor = cpuinfo("model name") or platform.processor()
    machine = {"cpu": processor, "cores": os.cpu_count(), "system": platform.platform()}
    return {
        "format": FORMAT,
        "kind": kind,
        "started": started,
        "command": shlex.join(_without_secret(argv)),
        "settings": _plain(settings),
        "endpoint": endpoint.as_json(),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions(_PACKAGES)},
        "machine": machine | {"client_cores": sorted(os.sched_getaffinity(0))},
    }


def write(path: Path, body: Mapping[str, Any]) -> None:
    """Write the file atomically. Raises `OperatorError`."""
    scratch = _scratch(path)
    try:
        scratch.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")
        scratch.replace(path)
    except OSError as error:
        raise OperatorError(f"cannot write the results: {error}") from error


def check(path: Path) -> None:
    """Make, and remove, the file from which `write` makes this one. Raises `OperatorError` if `write` would."""
    if path.is_dir():
        raise OperatorError(f"cannot write the results: {path} is a folder")
    try:
        _scratch(path).touch()
        _scratch(path).unlink()
    except OSError as error:
        raise OperatorError(f"cannot write the results: {error}") from error


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def read(path: Path) -> dict[str, Any]:
    """Read a results file. Raises `OperatorError`."""
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise OperatorError(f"cannot read {path}: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("kind") not in ("run", "sweep"):
        raise OperatorError(f"{path} is no result of baton bench ({FORMAT})")
    return body


def runs_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run of a file, or the runs of its sweep."""
    return [body["run"]] if body["kind"] == "run" else [point["run"] for point in body["points"]]


def recomputed(body: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The summaries computed again from the timelines. Raises `OperatorError` if a timeline is missing, or if the
    result differs from the file."""
    settings = body["settings"]
    targets = Targets(
        ttft_s=settings["ttft_target_s"], tpot_s=settings["tpot_target_s"], itl_s=settings["itl_target_s"]
    )
    summaries = []
    for run in runs_of(body):
        if "timeline" not in run:
            raise OperatorError(f"{path} has no timeline: it was made without --timeline")
        try:
            summary = Measured.from_json(run, targets).summary()
        except (KeyError, TypeError, ValueError) as error:
            raise OperatorError(f"the timeline of {path} is not of this form: {error!r}") from error
        if summary != run["summary"]:
            raise OperatorError(f"the summary in {path} does not follow from its timeline")
        summaries.append(summary)
    return summaries


def _plain(settings: LoadSettings) -> dict[str, Any]:
    """The settings in JSON form, without secrets, and with infinity as a word."""
    fields = settings.model_dump(mode="json", exclude={"api_key"})
    return fields | {"rate": "inf" if settings.rate is not None and math.isinf(settings.rate) else settings.rate}


def _without_secret(argv: Sequence[str]) -> list[str]:
    shown = []
    hide = False
    for part in argv:
        if part.startswith(f"{_SECRET_OPTION}="):
            shown.append(f"{_SECRET_OPTION}=***")
        else:
            shown.append("***" if hide else part)
        hide = part == _SECRET_OPTION
    return shown


def _commit() -> str | None:
    """The commit of the checkout that contains this file; None if there is no checkout."""
    if not (ROOT / ".git").exists():  # git would find the repository of whoever has the environment in theirs
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!:/benchmarks/results")
    return commit + ("+changes" if changed else "") if commit else None
