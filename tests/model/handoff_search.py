"""An exhaustive, stateful search: every event in every state that can be reached, breadth first.

A state is the whole world (`handoff_world`), from whose pickle each event gets a world of its own (`handoff_states`).
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
from handoff_bounds import Bounds, Parts
from handoff_ids import draw_handle, draw_id
from handoff_states import digest, dump, forget_values, load
from handoff_world import Event, World

from common.contract.messages.fields import RequestMessage
from common.runtime.state_tables import follow
from common.worker import front
from decode_worker import core as decode_core
from decode_worker import migration
from decode_worker import request as decode_request
from decode_worker import scheduler as decode_scheduler
from gateway.serving import attempt, flow
from kv_transfer import lease, lease_table, lender, pull
from prefill_worker import core as prefill_core
from prefill_worker import request as prefill_request

# --- the search --------------------------------------------------------------------------------------------------


class Violation(AssertionError):  # noqa: N818
    """A promise is broken; the message tells by which events."""


Steps = set[tuple[type[StrEnum], str, str]]
"""(kind of state, state, event): the rows of the workers' state tables that were taken."""


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    events: int = 0
    final: int = 0
    depth: int = 0
    workers: int = 0
    """States of single workers."""
    seconds: float = 0.0
    complete: bool = False
    steps: Steps = field(default_factory=set)

    def __str__(self) -> str:
        end = "all of them" if self.complete else "not all of them"
        return (
            f"{self.states} states ({end}), {self.events} events, {self.final} final states, "
            f"depth {self.depth}, {self.workers} states of workers, {self.seconds:.1f} s"
        )


@contextmanager
def playing(parts: Parts = Parts(), steps: Steps | None = None) -> Iterator[None]:  # noqa: B008 (frozen)
    """Worlds are made of these parts, draw their ids by counting, and note the steps of all state tables."""
    steps = set() if steps is None else steps

    def noted(table: Any, state: Any, event: Any, story: object) -> Any:
        steps.add((type(state), state.value, event.value))
        return follow(table, state, event, story)

    forget_values()
    logging.disable(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "new_handle", draw_handle)
        patch.setattr(lease_table, "new_lease_id", draw_id)
        for user in (flow, migration):
            patch.setattr(user, "new_request_id", draw_id)
        patch.setattr(lender, "LeaseTable", parts.table)
        patch.setattr(front, "AttemptFence", parts.fence)
        for core in (prefill_core, decode_core):
            patch.setattr(core, "BlockPool", parts.pool)
        for user in (decode_core, migration):
            patch.setattr(user, "Pull", parts.pull)
        patch.setattr(decode_core, "Departures", parts.departures)
        patch.setattr(decode_scheduler, "Sequences", parts.sequences)
        for module in (decode_request, prefill_request, lease, pull):
            patch.setattr(module, "follow", noted)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def search(bounds: Bounds, parts: Parts = Parts(), *, most_states: int = 10**9) -> Found:  # noqa: B008 (frozen)
    """Visit every state within `bounds`. Raises `Violation`."""
    found = Found()
    with playing(parts, found.steps):
        _Search(bounds, most_states, found).run()
    return found


class _Search:
    def __init__(self, bounds: Bounds, most_states: int, found: Found) -> None:
        self.bounds = bounds
        self.most_states = most_states
        self.found = found
        self.before: dict[bytes, tuple[bytes, Event]] = {}
        """A state → the one before it on the shortest way, and the event."""
        self.all_before: dict[bytes, set[bytes]] = {}
        """A state → every state from which an event leads to it."""
        self.frontier: deque[tuple[bytes, bytes, int]] = deque()

    def first(self) -> World:
        world = World(self.bounds)
        world.begin()
        return world

    def run(self) -> None:
        began = time.process_time()
        num_frozen = gc.get_freeze_count()
        gc.collect()
        gc.freeze()  # what was there before is not looked at again and again
        try:
            self.visit_all()
        finally:
            if not num_frozen:
                gc.unfreeze()
        self.found.workers = len(self.workers)
        self.found.states = len(self.before)
        self.found.complete = not self.frontier
        self.found.seconds = time.process_time() - began

    def visit_all(self) -> None:
        world = self.first()
        self.workers = world.states
        start = digest(world)
        self.before[start] = (b"", ())
        self.frontier.append((start, dump(world), 0))
        while self.frontier and len(self.before) < self.most_states:
            self.expand(*self.frontier.popleft())
        try:
            TopologicalSorter(self.all_before).prepare()
        except CycleError as error:
            raise Violation("a state comes twice in a run, which need not end then") from error

    def expand(self, state: bytes, packed: bytes, depth: int) -> None:
        """Everything that can happen next."""
        self.found.depth = max(self.found.depth, depth)
        world = load(packed)
        progress = world.progress()
        timers = [] if progress else world.timers()
        if not progress and not timers:
            self.found.final += 1
            self.judge(world, state, ("the end",), lambda _: world.check_final())
        disturbances = world.disturbances()
        for event in (*progress, *timers):
            self.follow(state, packed, depth, event, World.apply)
        for event in disturbances:
            self.follow(state, packed, depth, event, World.disturb)

    def follow(self, state: bytes, packed: bytes, depth: int, event: Event, how: Callable[..., None]) -> None:
        world = load(packed)
        self.found.events += 1
        self.judge(world, state, event, lambda event: how(world, event))
        after = digest(world)
        self.all_before.setdefault(after, set()).add(state)
        if after not in self.before:
            self.before[after] = (state, event)
            self.frontier.append((after, dump(world), depth + 1))

    def judge(self, world: World, state: bytes, event: Event, act: Callable[[Event], None]) -> None:
        try:
            act(event)
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"{type(error).__name__}: {error}\n{self.trace(state, event)}") from error

    def trace(self, state: bytes, last: Event) -> str:
        """The shortest way to what went wrong, told by playing it again."""
        events = [last]
        while self.before[state][0]:
            state, event = self.before[state]
            events.append(event)
        world = self.first()
        told = []
        for number, event in enumerate(reversed(events)):
            told.append(f"{number + 1:4}. {tell(world, event)}")
            try:
                (World.disturb if event in world.disturbances() else World.apply)(world, event)
            except Exception:  # noqa: BLE001 (told already)
                break
        return "\n".join(told)


def tell(world: World, event: Event) -> str:
    """An event in words, with the message that arrives."""
    kind, *where = event
    told = " ".join([kind.replace("_", " "), *map(str, where)])
    if kind in ("deliver", "lose", "repeat", "replay", "refuse"):
        link = world.links[where[0]]
        entry = link.queue(where[1] if len(where) > 1 else "up")[0]
        key = f" attempt {entry.attempt}" if isinstance(entry, RequestMessage) else ""
        told += f": {type(entry).__name__}{key}"
    return told
