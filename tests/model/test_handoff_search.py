"""Every interleaving within small bounds, over the protocol's own state machines; and the same with a rule left out.

The worlds are in `handoff_world`, the search in `handoff_search`, what is searched in `handoff_scenarios`.
"""

from __future__ import annotations

import re

import pytest
from handoff_broken import BROKEN, LEASE_STEPS, PULL_STEPS, WATCHED
from handoff_scenarios import SMALL, only
from handoff_search import Violation, counted_ids, digest, dump, load, search
from handoff_world import Bounds, World

from kv_transfer import sink


@pytest.mark.parametrize("name", SMALL)
def test_every_promise_is_kept_in_every_state(name: str) -> None:
    found = search(SMALL[name], WATCHED)
    print(f"{name}: {found}")
    assert found.complete
    assert found.final > 0


@pytest.mark.parametrize("left_out", BROKEN)
def test_the_search_finds_what_is_left_out(left_out: str) -> None:
    parts, bounds, broken = BROKEN[left_out]
    with pytest.raises(Violation, match=re.escape(broken)) as caught:
        search(bounds, parts)
    print(caught.value)
    assert re.search(r"^ +1\. deliver", str(caught.value), re.MULTILINE), "a trace comes with it"


def test_the_search_goes_through_every_step_of_a_pull() -> None:
    """Not only are the steps that are taken in the table (the pull asserts that): every one in the table is taken."""
    for bounds in (only("abort"), only("deadline"), only("lose")):
        search(bounds, WATCHED)
    table = {(a.value, b.value) for a, after in sink._TRANSITIONS.items() for b in after}
    assert table == PULL_STEPS
    assert {before for before, _ in LEASE_STEPS} == {"open", "growing", "complete"}


def test_equal_worlds_are_one_state_and_copies_are_equal() -> None:
    with counted_ids():
        one, other = World(Bounds()), World(Bounds())
        one.begin()
        other.begin()
        assert digest(one) == digest(other) == digest(load(dump(one)))
        for _ in range(12):
            before = digest(one)
            event = one.progress()[0]
            one.apply(event)
            other.apply(event)
            other = load(dump(other))
            assert before != digest(one) == digest(other)
