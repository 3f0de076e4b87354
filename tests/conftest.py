"""What tests of several kinds share."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest
from checkpoints import make_checkpoint
from skips import pytest_make_collect_report, pytest_runtest_makereport

collect_ignore = ["clients"]
"""They run in an environment of their own: `make clients`."""

hypothesis.settings.register_profile("patient", deadline=None)
if "CI" not in os.environ:  # there hypothesis has a profile of its own, without a deadline
    hypothesis.settings.load_profile("patient")

__all__ = ["checkpoint", "no_settings", "pytest_collection", "pytest_make_collect_report", "pytest_runtest_makereport"]


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
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the environment is one of Baton's settings."""
    for name in os.environ:
        if name.upper().startswith("BATON_"):
            monkeypatch.delenv(name)
