"""Every interleaving within small bounds, over the protocol's own state machines; and the same with a rule left out.

The worlds are in `handoff_world`, the search in `handoff_search`, what is searched in `handoff_scenarios`.
"""

from __future__ import annotations

import re

import pytest
from handoff_broken import BROKEN, PULL_STEPS, WATCHED
from handoff_scenarios import SMALL, TWO, only
from handoff_search import Violation, counted_ids, digest, dump, load, search
from handoff_world import Bounds, Event, World

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
    search(only("abort revoke", busy=True), WATCHED)
    table = {(state.value, event.value) for state, events in sink.PULL_TABLE.items() for event in events}
    assert table == PULL_STEPS


def play(world: World, events: list[Event]) -> None:
    """Let these happen, one after the other."""
    for event in events:
        (World.disturb if event in world.disturbances() else World.apply)(world, event)


def test_a_first_token_that_ends_the_request_needs_one_attempt() -> None:
    search(only("", output_tokens=1, first_ends=True))


def test_nothing_moves_before_the_client_has_some_of_it() -> None:
    """Frames of the worker come after lost ones, so that it counts as running: whoever was to pull the bare prompt from
    it would refuse that, for good."""
    with counted_ids():
        world = World(only("lose move crash", disturbances=3, **TWO))
        world.begin()
        ahead: list[Event] = [("deliver", "g>p0", "up"), ("deliver", "g>d0", "up"), ("end_step", "p0")]
        ahead += [("deliver", "d0.1>p0", "up"), *[("deliver", "d0.1>p0", "down")] * 2, ("end_read", "d0", 0)]
        ahead += [("deliver", "d0.1>p0", "up"), ("deliver", "d0.1>p0", "down"), *[("end_step", "d0")] * 2]
        play(world, [*ahead, ("lose", "g>d0", "down"), ("deliver", "g>d0", "down")])
        [attempt] = world.gateway.flow.attempts
        assert attempt.decode_has_spoken
        assert world.gateway.flow.movable(attempt.decode.place.address) == []


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
