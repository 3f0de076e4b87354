"""An exhaustive, stateful search: every event in every state that can be reached, breadth first.

A state is the whole world of real objects. It is kept as a pickle, from which each event gets a world of its own, and
known by a 128-bit digest of everything in it that can make a difference: states that differ only in stories and
counters are one.
"""

from __future__ import annotations

import gc
import io
import marshal
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from types import MethodType
from typing import Any

import pytest
from handoff_world import Bounds, Event, Parts, World, draw_id

from common.contract import messages
from common.contract.ids import Handle
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from gateway.serving import attempt, flow
from gateway.serving.attempt import WorkerLife
from gateway.serving.generation import Generation
from kv_transfer import source

# --- states ------------------------------------------------------------------------------------------------------

_SHARED = (*messages.MESSAGES, messages.Source, SamplingParams, Generation, WorkerLife, Bounds, Parts)
"""What never changes is not copied: each value is kept once, and pickled as its number."""
_numbers: dict[Any, int] = {}
_values: list[Any] = []


def _number(value: Any) -> int:
    known = (type(value), value)
    if known not in _numbers:
        _numbers[known] = len(_values)
        _values.append(value)
    return _numbers[known]


def _value(number: int) -> Any:
    return _values[number]


def _reduce(value: Any) -> tuple[Any, tuple[int]]:
    return _value, (_number(value),)


_DISPATCH = dict.fromkeys(_SHARED, _reduce)


def dump(world: World) -> bytes:
    """A world as bytes."""
    world.forget_stories()
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = _DISPATCH
    pickler.dump(world)
    return buffer.getvalue()


load = pickle.loads

_COUNTERS = "story num_drawn num_expired num_reclaimed num_duplicates num_gaps failures num_moved"
_CONSTANTS = (
    "bounds parts world generation address _unattached_ttl_s _checksums _scheduler _pool _lender _send _checksum"
)
_NO_DIFFERENCE = frozenset(f"{_COUNTERS} {_CONSTANTS}".split())
"""Fields that do not tell states apart: stories, counters, and what is the same in all of a search."""
_PLAIN = frozenset({int, str, bool, float, type(None), bytes})


class _Reader:
    """Makes a nested tuple of a world; equal worlds make equal tuples."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def read(self, value: Any) -> Any:
        """One value."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        reader = _READERS.get(kind)
        if reader is None:
            reader = _READERS[kind] = _reader_for(kind)
        return reader(self, value)

    def items(self, values: Any) -> Any:
        """A list, tuple or queue."""
        read = self.read
        return tuple([each if type(each) in _PLAIN else read(each) for each in values])

    def mapping(self, value: dict[Any, Any]) -> Any:
        """A dictionary, in its order."""
        read = self.read
        return tuple([(read(key), read(each)) for key, each in value.items()])

    def unordered(self, value: Any) -> Any:
        """A set."""
        return tuple(sorted(map(repr, map(self.read, value))))

    def pool(self, pool: BlockPool) -> Any:
        """A pool: steps are numbered from the oldest that matters; which free block is taken does not matter."""
        first = min((*pool._in_flight, *pool._limbo.values()), default=pool._last_step)
        limbo = tuple((block, step - first) for block, step in pool._limbo.items())
        steps = tuple(step - first for step in pool._in_flight)
        return tuple(pool._ref_counts), tuple(pool._free), limbo, steps, pool._last_step - first


def _reader_for(kind: type) -> Callable[[_Reader, Any], Any]:
    if issubclass(kind, Enum):
        return lambda _, value: str(value.value)
    if kind in _DISPATCH:
        return lambda _, value: ("#", _number(value))
    if issubclass(kind, BlockPool):
        return _Reader.pool
    if issubclass(kind, dict):
        return _Reader.mapping
    if issubclass(kind, set | frozenset):
        return _Reader.unordered
    if issubclass(kind, list | tuple | deque):
        return _Reader.items
    if kind in (MethodType, type):
        return lambda _, value: value.__name__
    return _object_reader(kind)


def _object_reader(kind: type) -> Callable[[_Reader, Any], Any]:
    """By its fields: those of a dataclass, or whatever an instance has."""
    slots = [field.name for field in fields(kind)] if is_dataclass(kind) and not hasattr(kind, "__dict__") else None
    names = None if slots is None else [name for name in slots if name not in _NO_DIFFERENCE]

    def reader(self: _Reader, value: Any) -> Any:
        known = self.seen.get(id(value))
        if known is not None:
            return ("=", known)
        self.seen[id(value)] = len(self.seen)
        read = self.read
        if names is not None:
            return (kind.__name__, *[read(getattr(value, name)) for name in names])
        found = value.__dict__ if hasattr(value, "__dict__") else {f.name: getattr(value, f.name) for f in fields(kind)}
        return (kind.__name__, *[read(each) for name, each in found.items() if name not in _NO_DIFFERENCE])

    return reader


_READERS: dict[type, Callable[[_Reader, Any], Any]] = {}


def digest(world: World) -> bytes:
    """What tells one state from another."""
    return blake2b(marshal.dumps(_Reader().read(world), 2), digest_size=16).digest()


def take_apart(world: World) -> None:
    """End the cycles of a world that nobody needs any more."""
    for worker in world.workers.values():
        for job in (*getattr(worker, "jobs", {}).values(), *getattr(worker, "finished", {}).values()):
            job.running = None
        worker.__dict__.clear()
    world.__dict__.clear()


# --- the search --------------------------------------------------------------------------------------------------


class Violation(AssertionError):  # noqa: N818
    """A promise is broken; the message tells by which events."""


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    events: int = 0
    final: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False

    def __str__(self) -> str:
        end = "all of them" if self.complete else "not all of them"
        return (
            f"{self.states} states ({end}), {self.events} events, {self.final} final states, "
            f"depth {self.depth}, {self.seconds:.1f} s"
        )


@contextmanager
def counted_ids() -> Iterator[None]:
    """Ids are drawn by the world instead of at random. The model's workers name choices by their requests alone, so
    there is one handle for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "new_handle", lambda: Handle(0))
        patch.setattr(source, "new_lease_id", draw_id)
        patch.setattr(flow, "new_request_id", draw_id)
        yield


def search(bounds: Bounds, parts: Parts = Parts(), *, most_states: int = 10**9) -> Found:  # noqa: B008 (frozen)
    """Visit every state within `bounds`. Raises `Violation`."""
    with counted_ids():
        return _Search(bounds, parts, most_states).run()


class _Search:
    def __init__(self, bounds: Bounds, parts: Parts, most_states: int) -> None:
        self.bounds = bounds
        self.parts = parts
        self.most_states = most_states
        self.found = Found()
        self.before: dict[bytes, tuple[bytes, Event]] = {}
        """A state → the one before it on the shortest way, and the event."""
        self.frontier: deque[tuple[bytes, bytes, int]] = deque()

    def first(self) -> World:
        world = World(self.bounds, self.parts)
        world.begin()
        return world

    def run(self) -> Found:
        began = time.process_time()
        gc.collect()
        gc.disable()  # worlds are taken apart by hand: looking for cycles would cost more than all the rest
        try:
            self.visit_all()
        finally:
            gc.enable()
        self.found.states = len(self.before)
        self.found.complete = not self.frontier
        self.found.seconds = time.process_time() - began
        return self.found

    def visit_all(self) -> None:
        world = self.first()
        start = digest(world)
        self.before[start] = (b"", ())
        self.frontier.append((start, dump(world), 0))
        while self.frontier and len(self.before) < self.most_states:
            self.expand(*self.frontier.popleft())

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
        take_apart(world)
        for event in (*progress, *timers):
            self.follow(state, packed, depth, event, World.apply)
        for event in disturbances:
            self.follow(state, packed, depth, event, World.disturb)

    def follow(self, state: bytes, packed: bytes, depth: int, event: Event, how: Callable[..., None]) -> None:
        world = load(packed)
        self.found.events += 1
        self.judge(world, state, event, lambda event: how(world, event))
        after = digest(world)
        if after not in self.before:
            self.before[after] = (state, event)
            self.frontier.append((after, dump(world), depth + 1))
        take_apart(world)

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
        key = f" attempt {entry.attempt}" if isinstance(entry, messages.RequestMessage) else ""
        told += f": {type(entry).__name__}{key}"
    return told
