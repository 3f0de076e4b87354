"""In CI no test is skipped: what would be is a failure, but for what needs a GPU.

A run that is green because a program is missing has tested less than it says.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    if "CI" in os.environ and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} is skipped, which CI does not allow. {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that is skipped."""
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file that is."""
    report = yield
    _fail(report)
    return report
