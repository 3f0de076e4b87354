"""Run the whole fault matrix (every fault in every state over every transport), and count the results.

    python -m benchmarks.chaos       # as root; a quarter of an hour

Runs `tests/chaos` without the soaks, which only `make chaos` includes, and records how many cells passed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks.command import Result, run
from benchmarks.record import ROOT

_TRANSPORT = re.compile(r"\b(nixl-ranks|nixl-tcp|nixl|zmq)\b")
_FAULT = re.compile(r"\b(kill-rank|freeze-rank|cut-in|cut-out|cut|freeze|kill|part|reset|slow)\b")
"""The first one in a name is the fault: `cut` is also a state."""
_MATRIX = ("test_the_stream_goes_on", "test_a_gateway_is_gone")
"""Prefixes of the names of tests that have a fault among their parameters."""
_ANY_TRANSPORT = "nixl"
"""The transport of a test that has none among its parameters."""


def counted(cases: Iterable[tuple[str, bool]]) -> dict[str, dict[str, dict[str, int]]]:
    """Numbers of passed and failed cells, by transport and fault. `cases` are (test name, whether it passed)."""
    found: dict[str, dict[str, Counter[str]]] = {"passed": {}, "failed": {}}
    for name, passed in cases:
        found["passed" if passed else "failed"].setdefault(_transport(name), Counter())[_fault(name)] += 1
    return {outcome: {transport: dict(each) for transport, each in by.items()} for outcome, by in found.items()}


def aborts(cases: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Number of times that UCX aborted a worker (docs/log.md), by transport. `cases` are (test name, its output)."""
    found: Counter[str] = Counter()
    for name, printed in cases:
        found[_transport(name)] += printed.count("was aborted by UCX")
    return dict(found)


def _transport(name: str) -> str:
    """The transport of a cell; `nixl-ranks` is NIXL with workers of two ranks."""
    found = _TRANSPORT.search(name)
    return found[0] if found else _ANY_TRANSPORT


def _fault(name: str) -> str:
    """The fault of a cell of the matrix; of any other test, what it shows."""
    if not name.startswith(_MATRIX):
        return name.partition("[")[0].removeprefix("test_").replace("_", " ")
    found = _FAULT.search(name)
    assert found is not None, name
    return found[0]


def measure(scratch: Path) -> Result:
    """Run and count."""
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", f"--junitxml={report}", "tests/chaos"]
    command += ["--ignore=tests/chaos/test_soak.py", "-o", "junit_logging=system-out"]
    command += ["-n", "3"]  # cells wait most of the time
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    passed = {"failure", "error", "skipped"}.isdisjoint
    outcomes = counted((each.attrib["name"], passed(part.tag for part in each)) for each in cases)
    aborted = aborts((each.attrib["name"], each.findtext("system-out", "")) for each in cases)
    workload = {"cells": sum(sum(each.values()) for by in outcomes.values() for each in by.values())}
    figures = {**outcomes, "aborted_by_ucx": aborted}
    return Result(name="chaos", figures=figures, workload=workload | {"model": "llama, random"})


if __name__ == "__main__":
    raise SystemExit(bool(run(measure, __doc__).figures["failed"]))
