"""What takes long comes first, wherever it has moved."""

from __future__ import annotations

from pathlib import Path

from file_order import FIRST

TESTS = Path(__file__).parents[1]


def test_every_file_that_comes_first_is_there() -> None:
    assert len(set(FIRST)) == len(FIRST)
    assert [name for name in FIRST if not (TESTS / name).exists()] == []
