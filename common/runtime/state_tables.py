"""State machines as tables of the form {state: {event: next state}}.

A table is total over what can happen: an event without a row in the present state is a bug, and raises with the story
of the object. The diagrams in `docs/architecture/` are made from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)


class ImpossibleTransitionError(AssertionError):
    """An event came in a state in which it cannot come."""


def follow(table: Mapping[_State, Mapping[_Event, _State]], state: _State, event: _Event, story: object) -> _State:
    """The state after `event` in `state`. Raises `ImpossibleTransitionError`, with `story`, if the table has no row."""
    after = table[state].get(event)
    if after is None:
        raise ImpossibleTransitionError(f"{event} while {state}: {story}")
    return after
