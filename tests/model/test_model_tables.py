"""The Promela model takes the same steps as the Python tables: those of pulls, and those of leases."""

from __future__ import annotations

import re
from pathlib import Path

from handoff_broken import LEASE_STEPS, WATCHED
from handoff_scenarios import only
from handoff_search import search

from kv_transfer import sink

MODEL = (Path(__file__).parent / "handoff.pml").read_text()
MIGRATION = (Path(__file__).parent / "migration.pml").read_text()


def steps(model: str, macro: str) -> set[tuple[str, str]]:
    """The steps that a model takes by `macro(…, FROM, TO)`, in the words of the Python code."""
    found = re.findall(rf"(?<!inline ){macro}\((?:\w+, )?([A-Z_]+), ([A-Z_]+)\)", model)
    return {(a.removeprefix("L_").lower(), b.removeprefix("L_").lower()) for a, b in found}


def assignments(model: str, variable: str) -> set[str]:
    """States that a variable is set to otherwise."""
    return set(re.findall(rf"\b{variable}(?:\[\w+\])? = (\w+)\s*[;:}}\n]", model))


def test_pulls_take_the_steps_of_the_table() -> None:
    table = {(state.value, after.value) for state, events in sink.PULL_TABLE.items() for after in events.values()}
    assert steps(MODEL, "PULL_TO") == table


def test_leases_take_the_steps_that_the_lease_table_was_seen_to_take() -> None:
    search(only("abort", chunks=2), WATCHED)
    assert steps(MODEL, "LEASE_TO") == LEASE_STEPS
    assert steps(MIGRATION, "LEASE_TO") <= LEASE_STEPS | {("open", "complete")}


def test_nothing_else_changes_a_pull_or_a_lease() -> None:
    """A new Decode begins a pull, a crash or a refusal leaves none; a lease is opened, or gone with its worker."""
    assert assignments(MODEL, "pull") <= {"IDLE", "ATTACHING", "to"}
    assert assignments(MODEL, "lease") <= {"L_NONE", "L_OPEN", "to"}
