"""What surrounds the start of a process."""

from __future__ import annotations

import gc

import pytest

from common.runtime.lifecycle import collector_paused


def test_the_collector_rests_and_goes_on_whatever_happens() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 // 0
    assert gc.isenabled()
