"""What some tests need of the machine, and what is not tested where it is missing.

python tests/needs.py              what is not tested here, and why: nothing if all is there
python tests/needs.py --packages   Debian's packages that are missing for it
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


def _program(name: str, variable: str = "") -> Callable[[], str]:
    """Whether a program is there: on the path, or the one that a variable names, perhaps with arguments."""

    def why() -> str:
        wanted = (shlex.split(os.environ.get(variable, "")) or [name])[0]
        return "" if shutil.which(wanted) else f"there is no {wanted}"

    return why


def _no_hosts() -> str:
    if shutil.which("ip") is None or shutil.which("bridge") is None or shutil.which("ss") is None:
        return "there is no iproute2 (ip, bridge and ss)"
    probe = f"bt{os.getpid() % 10000}probe"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if added.returncode != 0:
        return f"network namespaces cannot be made ({added.stderr.strip()}): be root"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=True)
    return ""


def _no_history() -> str:
    if shutil.which("git") is None:
        return "there is no git"
    asked = ["git", "rev-parse", "--is-shallow-repository"]
    shallow = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return "" if shallow.strip() == "false" else "this is no clone with all of its history"


@dataclass(frozen=True)
class Need:
    """Something that a machine may lack."""

    tested: str
    """What is tested with it."""
    missing: Callable[[], str]
    """Why that is impossible here; empty if it is not."""
    packages: str
    """Of Debian, that have it; empty if none does."""
    remedy: str
    """What else helps."""


NEEDS = {
    "chromium": Need(
        "the dashboard in a browser",
        _program("chromium", "CHROMIUM"),
        "chromium",
        "or set CHROMIUM to where it, or Chrome, is",
    ),
    "promtool": Need("the alerts and the recording rules", _program("promtool"), "prometheus", "which has it"),
    "kubectl": Need(
        "the Kubernetes manifests",
        _program("kubectl"),
        "",
        "install 1.27 or later (https://kubernetes.io/docs/tasks/tools/)",
    ),
    "compiler": Need("the kernels in C", _program("cc", "CC"), "gcc libc6-dev", "or set CC to another C compiler"),
    "make": Need("the Makefile", _program("make"), "make", "which runs the tests, too"),
    "curl": Need("the command that a stack prints", _program("curl"), "curl", "which runs it"),
    "history": Need("that records are of commits that exist", _no_history, "git", "and clone all of the history"),
    "hosts": Need("faults between hosts (tests/chaos)", _no_hosts, "iproute2", "and run the tests as root"),
}


@functools.cache
def why_not(name: str) -> str:
    """Why what needs this cannot be tested here, and what helps; empty if it can."""
    need = NEEDS[name]
    why = need.missing()
    if not why:
        return ""
    install = f"apt-get install {need.packages}, " if need.packages else ""
    return f"{why}: {install}{need.remedy}"


def needs(name: str) -> pytest.MarkDecorator:
    """A mark: skip the test where this is missing; in CI that is a failure (`skips`)."""
    return pytest.mark.skipif(bool(why_not(name)), reason=why_not(name))


def require(name: str) -> None:
    """Skip from here on where this is missing."""
    if why := why_not(name):
        pytest.skip(why)


def main(arguments: list[str]) -> None:
    """Entry point."""
    missing = {name: need for name, need in NEEDS.items() if why_not(name)}
    if arguments == ["--packages"]:
        print(*(need.packages for need in missing.values() if need.packages))
        return
    for name, need in missing.items():
        print(f"NOT TESTED: {need.tested}: {why_not(name)}")


if __name__ == "__main__":
    main(sys.argv[1:])
