"""What `baton` says of itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from common.runtime import cli

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_the_version_is_said_with_the_commit_of_a_checkout() -> None:
    command = [sys.executable, "-m", "common.runtime.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    said = f"baton {version('baton')}"
    if (ROOT / ".git").exists():
        asked = ["git", "rev-parse", "HEAD"]
        said += ", commit " + subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert done.stdout.strip() == said


def test_a_copy_in_somebody_elses_repository_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is installed into an environment there."""
    monkeypatch.setattr(cli, "__file__", str(ROOT / "tests" / "common" / "runtime" / "cli.py"))
    assert cli._version() == version("baton")
