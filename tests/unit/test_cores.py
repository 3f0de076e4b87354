"""How many cores a process takes for its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime.cores import cores_here

QUOTAS = {
    "none": ("max 100000", None),
    "of its group": ("150000 100000", 2),
    "less than a core": ("20000 100000", 1),
    "of many cores": ("99900000 100000", None),
    "that nobody understands": ("plenty", None),
}


@pytest.fixture
def num_cores(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a large machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return 64


@pytest.mark.parametrize("place", ["pods/one", "pods", ""])
@pytest.mark.parametrize(("quota", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_of_the_group_or_of_one_around_it_counts(
    tmp_path: Path, num_cores: int, place: str, quota: str, expected: int | None
) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/other\n0::/pods/one\n")
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "cpu.max").write_text(f"{quota}\n")
    assert cores_here(tmp_path, own) == (expected or num_cores)


def test_the_least_quota_counts(tmp_path: Path, num_cores: int) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pods/one\n")
    (tmp_path / "pods" / "one").mkdir(parents=True)
    (tmp_path / "pods" / "one" / "cpu.max").write_text("800000 100000\n")
    (tmp_path / "pods" / "cpu.max").write_text("300000 100000\n")
    assert cores_here(tmp_path, own) == 3


@pytest.mark.parametrize("groups", [None, "", "4:cpu:/pods/one\n"], ids=["no file", "empty", "version 1"])
def test_without_groups_of_version_2_it_is_the_affinity(tmp_path: Path, num_cores: int, groups: str | None) -> None:
    own = tmp_path / "own"
    if groups is not None:
        own.write_text(groups)
    assert cores_here(tmp_path, own) == num_cores


@pytest.mark.processes
def test_a_process_that_is_kept_to_one_core_takes_one() -> None:
    told = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from common.runtime.cores import *"
    done = subprocess.run(
        [sys.executable, "-c", f"{told}; print(cores_here())"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
