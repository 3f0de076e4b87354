"""Limits of open files, without setting any."""

from __future__ import annotations

import resource

import pytest

from common.runtime.descriptors import allow_descriptors

WITHOUT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "needed", "after", "allowed"),
    [
        ((1024, 4096), 2000, (2000, 4096), 2000),
        ((1024, 4096), 9000, (4096, 4096), 4096),
        ((1024, WITHOUT), 9000, (9000, WITHOUT), 9000),
        ((3000, 4096), 2000, None, 2000),
        ((4096, 4096), 9000, (4096, 4096), 4096),
        ((WITHOUT, WITHOUT), 9000, None, 9000),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[int, int],
    needed: int,
    after: tuple[int, int] | None,
    allowed: int,
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    assert allow_descriptors(needed) == allowed
    assert made == ([] if after is None else [after])
