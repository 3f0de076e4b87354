"""What is not tested is said, and fails CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest

pytestmark = pytest.mark.processes

TESTS = Path(__file__).parents[1]
SKIPPING = """
import pytest

def test_that_runs(): pass

@pytest.mark.skipif(True, reason="there is no anvil")
def test_with_an_anvil(): pass

@pytest.fixture
def anvil(): pytest.skip("the anvil is gone")

def test_with_a_fixture(anvil): pass

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a GPU")
def test_on_a_gpu(): pass

@pytest.mark.xfail
def test_that_is_known_to_fail(): assert False
"""


def run(folder: Path, content: str, *options: str, **variables: str) -> tuple[int, str]:
    """A run of pytest with the hooks; its exit code, and what it prints."""
    (folder / "test_them.py").write_text(content)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-q", "-rA", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two"])
def test_what_is_skipped_fails_ci_but_for_what_needs_a_gpu(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, printed = run(tmp_path, SKIPPING, *options, CI="true")
    assert code == 1
    assert "1 passed, 1 skipped, 1 xfailed, 2 errors" in printed
    for test, reason in (("test_with_an_anvil", "there is no anvil"), ("test_with_a_fixture", "the anvil is gone")):
        assert f"test_them.py::{test} is skipped, which CI does not allow. Skipped: {reason}" in printed


def test_a_file_that_is_skipped_fails_ci(tmp_path: Path) -> None:
    code, printed = run(tmp_path, 'import pytest\npytest.skip("no anvil", allow_module_level=True)', CI="true")
    assert code == 2
    assert "test_them.py is skipped, which CI does not allow" in printed


def test_elsewhere_it_is_skipped(tmp_path: Path) -> None:
    code, printed = run(tmp_path, SKIPPING)
    assert code == 0
    assert "1 passed, 3 skipped, 1 xfailed" in printed


def needs_of(*options: str, **variables: str) -> str:
    """What `tests/needs.py` prints."""
    command = [sys.executable, str(TESTS / "needs.py"), *options]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


def test_whoever_lacks_something_is_told_what_is_not_tested(tmp_path: Path) -> None:
    lines = needs_of(PATH=str(tmp_path)).splitlines()
    assert len(lines) == len(needs.NEEDS)
    for line, need in zip(lines, needs.NEEDS.values(), strict=True):
        assert line.startswith(f"NOT TESTED: {need.tested}: there is no ")
        assert line.endswith(need.remedy)
    packages = needs_of("--packages", PATH=str(tmp_path)).split()
    assert packages == ["chromium", "prometheus", "gcc", "libc6-dev", "make", "curl", "git", "iproute2"]


def test_what_is_there_is_not_mentioned(tmp_path: Path) -> None:
    for program in ("chrome", "promtool", "kubectl", "cc", "make", "curl", "git"):
        (tmp_path / program).write_text("#!/bin/sh\necho false\n")
        (tmp_path / program).chmod(0o755)
    lines = needs_of(PATH=str(tmp_path), CHROMIUM="chrome").splitlines()
    assert [line.split(": ")[1] for line in lines] == [needs.NEEDS["hosts"].tested]
