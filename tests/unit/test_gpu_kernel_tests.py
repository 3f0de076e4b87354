"""The kernels' tests are for machines with a GPU, too, which may have nothing of pytest but itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.record import ROOT

pytestmark = pytest.mark.processes


def test_the_tests_of_kernels_are_collected_by_pytest_alone() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "tests/kernels"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
