"""What tests of several kinds share."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from checkpoints import make_checkpoint
from file_order import pytest_collection_modifyitems
from skips import pytest_make_collect_report, pytest_runtest_makereport

collect_ignore = ["clients"]
"""They run in an environment of their own: `make clients`."""

hypothesis.settings.register_profile("patient", deadline=None)
if "CI" not in os.environ:  # there hypothesis has a profile of its own, without a deadline
    hypothesis.settings.load_profile("patient")

# What somebody has set for servers of their own concerns no test, nor the processes that tests start.
for _name in [name for name in os.environ if name.upper().startswith("BATON_")]:
    del os.environ[_name]

__all__ = [
    "checkpoint",
    "limit_of_files_restored",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What has been imported and collected stays: no collection of garbage looks at it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make (once) the tiny random checkpoint of a family."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family), seed=7)
        return made[family]

    return make


@pytest.fixture
def limit_of_files_restored() -> Iterator[None]:
    """The process may have as many files open after the test as before, whatever the test raises the limit to."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
