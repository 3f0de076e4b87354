"""Every interleaving within small bounds, of the workers' own cores; and the same with a rule left out.

The worlds are in `handoff_world`, the search in `handoff_search`, what is searched in `handoff_scenarios`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
from handoff_bounds import Bounds
from handoff_broken import BROKEN
from handoff_scenarios import SMALL, TWO, only
from handoff_search import Steps, Violation, playing, search
from handoff_states import Kept, Workers, digest, dump, load
from handoff_worker import Sent, Worker
from handoff_world import Event, World

from kv_transfer.lease import LEASE_TABLE
from kv_transfer.pull import PULL_TABLE


@pytest.mark.parametrize("name", SMALL)
def test_every_promise_is_kept_in_every_state(name: str) -> None:
    found = search(SMALL[name])
    print(f"{name}: {found}")
    assert found.complete
    assert found.final > 0


@pytest.mark.parametrize("left_out", BROKEN)
def test_the_search_finds_what_is_left_out(left_out: str) -> None:
    parts, bounds, broken = BROKEN[left_out]
    with pytest.raises(Violation, match=re.escape(broken)) as caught:
        search(bounds, parts)
    print(caught.value)
    assert re.search(r"^ +1\. (deliver|replay)", str(caught.value), re.MULTILINE), "a trace comes with it"


def rows(*tables: Any) -> Steps:
    """The rows of state tables."""
    return {(type(s), s.value, e.value) for table in tables for s, events in table.items() for e in events}


def test_the_search_takes_every_step_of_pulls_and_leases() -> None:
    """Not only are the steps that are taken in the tables (cores make sure of that): every one in them is taken."""
    steps = search(only("abort revoke", busy=True, chunks=2)).steps
    assert rows(PULL_TABLE, LEASE_TABLE) <= steps


def play(world: World, events: list[Event]) -> None:
    """Let these happen, one after the other."""
    for event in events:
        (World.disturb if event in world.disturbances() else World.apply)(world, event)


def test_a_first_token_that_ends_the_request_needs_one_attempt() -> None:
    found = search(only("", output_tokens=1))
    assert found.complete
    assert found.final > 0


def test_nothing_moves_before_the_client_has_some_of_it() -> None:
    """Frames of the worker come after lost ones, so that it counts as running: whoever was to pull the bare prompt from
    it would refuse that, for good."""
    with playing():
        world = World(only("lose move crash", disturbances=3, **TWO))
        world.begin()
        ahead: list[Event] = [("deliver", "g>p0", "up"), ("deliver", "g>d0", "up"), ("end_step", "p0")]
        ahead += [("deliver", "d0.1>p0", "up"), *[("deliver", "d0.1>p0", "down")] * 2, ("end_read", "d0", 0)]
        ahead += [("deliver", "d0.1>p0", "up"), ("deliver", "d0.1>p0", "down"), *[("end_step", "d0")] * 2]
        play(world, [*ahead, ("lose", "g>d0", "down"), ("deliver", "g>d0", "down")])
        [attempt] = world.gateway.flow.attempts
        assert attempt.decode_has_spoken
        assert world.gateway.flow.attempts.movable(attempt.decode.life.address) == []


def test_equal_worlds_are_one_state_and_copies_are_equal() -> None:
    with playing():
        one = World(Bounds())
        one.begin()
        other = load(dump(one))
        assert digest(one) == digest(other)
        for _ in range(12):
            before = digest(one)
            event = one.progress()[0]
            one.apply(event)
            other.apply(event)
            other = load(dump(other))
            assert before != digest(one) == digest(other)


def test_what_tells_no_states_of_a_worker_apart_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was taken for one in a state that is known looks like that one, and goes on like it."""
    twins: defaultdict[Kept, dict[bytes, None]] = defaultdict(dict)
    keep = Workers._keep

    def note(workers: Workers, worker: Worker) -> Kept:
        kept = keep(workers, worker)
        packed = dump(worker)
        if packed != kept.packed:
            twins[kept][packed] = None
            assert worker.view() == kept.view
        return kept

    monkeypatch.setattr(Workers, "_keep", note)
    search(SMALL["a message is lost"])
    num_compared = 0
    for kept, others in twins.items():
        for (name, *args), (after, sent) in kept.after.items():
            for packed in others:
                worker: Worker = load(packed)
                getattr(worker, name)(*args)
                assert worker.view() == after.view
                assert list(map(kind, worker.sent)) == list(map(kind, sent))
                num_compared += 1
    print(f"{num_compared} compared")
    assert num_compared > 100


def kind(sent: Sent) -> tuple[type, type]:
    """What a worker sends, without its ids."""
    return type(sent), type(getattr(sent, "message", None))
