"""Ids that are counted instead of drawn at random, so that the same happens again if the same events come again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from common.contract.ids import Handle


class Draws(Protocol):
    """A gateway or a worker, which needs ids that nobody else has."""

    num_drawn: int
    """Ids drawn so far."""

    @property
    def name(self) -> str:
        """It distinguishes these ids from those of others."""


_drawing: list[Draws] = []


@contextmanager
def drawing(who: Draws) -> Iterator[None]:
    """Ids are drawn by `who`."""
    _drawing.append(who)
    try:
        yield
    finally:
        _drawing.pop()


def draw_id() -> str:
    """In the place of `new_lease_id` and `new_request_id`."""
    return f"{_drawing[-1].name}-{_next()}"


def draw_handle() -> Handle:
    """In the place of `new_handle`."""
    return Handle(_next())


def _next() -> int:
    _drawing[-1].num_drawn += 1
    return _drawing[-1].num_drawn
