"""State machines as tables: what cannot happen raises, and the documents show the tables as they are."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import pytest
from state_diagrams import PAGES, diagram, redrawn, tables

from common.runtime.state_tables import ImpossibleTransitionError, follow
from decode_worker.request import REQUEST_TABLE, STAGE_TABLE
from kv_transfer.lease import LEASE_TABLE
from kv_transfer.pull import PULL_TABLE
from prefill_worker.request import PROMPT_TABLE

TABLES: list[Mapping[Any, Mapping[Any, Any]]] = [PROMPT_TABLE, REQUEST_TABLE, STAGE_TABLE, LEASE_TABLE, PULL_TABLE]


class Lamp(StrEnum):
    OFF = "off"
    ON = "on"
    BROKEN = "broken"


class Press(StrEnum):
    BUTTON = "button"
    HAMMER = "hammer"


LAMP = {
    Lamp.OFF: {Press.BUTTON: Lamp.ON, Press.HAMMER: Lamp.BROKEN},
    Lamp.ON: {Press.BUTTON: Lamp.OFF, Press.HAMMER: Lamp.BROKEN},
    Lamp.BROKEN: {},
}


def test_an_event_leads_to_the_state_of_its_row() -> None:
    assert follow(LAMP, Lamp.OFF, Press.BUTTON, ()) is Lamp.ON


def test_an_event_without_a_row_raises_with_the_story() -> None:
    with pytest.raises(ImpossibleTransitionError, match=r"button while broken: .'off', 'broken'."):
        follow(LAMP, Lamp.BROKEN, Press.BUTTON, ["off", "broken"])


def test_a_diagram_has_every_row() -> None:
    assert diagram(LAMP).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> off",
        "    off --> on: button",
        "    off --> broken: hammer",
        "    on --> off: button",
        "    on --> broken: hammer",
        "    broken --> [*]",
        "```",
    ]


@pytest.mark.parametrize("table", TABLES)
def test_each_state_can_be_reached_and_can_end(table: Mapping[Any, Mapping[Any, Any]]) -> None:
    assert list(table) == list(next(iter(table)).__class__), "a state without a row"
    reached = {next(iter(table))}
    while more := {after for state in reached for after in table[state].values()} - reached:
        reached |= more
    assert reached == set(table)
    ending = {state for state, events in table.items() if not events}
    while more := {s for s, events in table.items() if ending.intersection(events.values())} - ending:
        ending |= more
    assert ending == set(table)


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.name)
def test_a_page_shows_the_tables_as_they_are(page: Any) -> None:
    text = page.read_text()
    assert redrawn(text) == text, "run `python tests/state_diagrams.py`"


def test_each_table_is_shown() -> None:
    shown = {name for page in PAGES.glob("*.md") for name in tables(page.read_text())}
    assert shown == {
        "decode_worker.request.REQUEST_TABLE",
        "decode_worker.request.STAGE_TABLE",
        "prefill_worker.request.PROMPT_TABLE",
        "kv_transfer.lease.LEASE_TABLE",
        "kv_transfer.pull.PULL_TABLE",
    }
