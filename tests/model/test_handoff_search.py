"""Every interleaving within small bounds, over the protocol's own state machines; and the same with a rule left out.

The worlds are in `handoff_world`, the search in `handoff_search`, what is searched in `handoff_scenarios`.
"""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from typing import Any

import handoff_search
import pytest
from handoff_broken import BROKEN, LEASE_STEPS, PULL_STEPS, WATCHED
from handoff_decode import DecodeShell, Running
from handoff_scenarios import SMALL, TWO, only
from handoff_search import Violation, counted_ids, digest, dump, load, search
from handoff_world import Bounds, Event, World

from kv_transfer import lease, sink

LONGER: dict[str, Any] = TWO | {"output_tokens": 4}
"""Long enough that a sequence is still running when the worker that is to take it over has asked for it."""
SEARCHED = SMALL | {"a running sequence moves": only("move", **LONGER)}


@pytest.mark.parametrize("name", SEARCHED)
def test_every_promise_is_kept_in_every_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no state comes twice in a run, so that each run ends."""
    last = b""
    before: dict[bytes, set[bytes]] = {}
    follow = handoff_search._Search.follow

    def noted_digest(world: World) -> bytes:
        nonlocal last
        last = digest(world)
        return last

    def noted_follow(self: handoff_search._Search, state: bytes, *event: Any) -> None:
        follow(self, state, *event)
        before.setdefault(last, set()).add(state)

    monkeypatch.setattr(handoff_search, "digest", noted_digest)
    monkeypatch.setattr(handoff_search._Search, "follow", noted_follow)
    found = search(SEARCHED[name], WATCHED)
    print(f"{name}: {found}")
    assert found.complete
    assert found.final > 0
    assert len(before) == found.states - 1, "every state but the first has one before it"
    TopologicalSorter(before).prepare()  # raises on a cycle


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


def test_the_search_goes_through_every_step_of_a_lease() -> None:
    """The ends are told apart: a settle is valid only once the lease is complete."""
    search(only("abort", chunks=2), WATCHED)
    table = {(state.value, after.value) for state, events in lease.LEASE_TABLE.items() for after in events.values()}
    assert {(a, b) for a, b in table if a != b} | {("complete", "settled")} == LEASE_STEPS


def test_the_search_finds_a_worker_that_goes_on_after_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodeShell, "leave", lambda self, running: list(running.request.blocks))
    with pytest.raises(Violation, match="released more often than held"):
        search(only("move", **LONGER))


def test_the_search_finds_a_cut_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    look_again, leave = DecodeShell.look_again, DecodeShell.leave

    def cut_at_once(self: DecodeShell) -> None:
        look_again(self)
        self.departures.cut()

    def leave_in_mid_step(self: DecodeShell, running: Running) -> list[int]:
        step, self.step = self.step, None
        blocks = leave(self, running)
        self.step = step
        return blocks

    monkeypatch.setattr(DecodeShell, "look_again", cut_at_once)
    monkeypatch.setattr(DecodeShell, "leave", leave_in_mid_step)
    with pytest.raises(Violation, match="unverified KV"):
        search(only("move", **LONGER))


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
