"""States of the model: how objects are kept, and what tells one state from another.

A state is a pickle of real objects, and is known by a 128-bit digest of everything in them that can make a difference.
States that differ only in stories, counters, times and the forecasts of schedulers are one: with one request at a time,
nothing is decided by them.

What happens to a worker depends on the worker alone. So each state of each worker is kept once (`Kept`), with what
follows from each event, and a world refers to it.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import marshal
import pickle
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from types import FunctionType, MethodType
from typing import Any

from handoff_bounds import Bounds, Parts
from handoff_ids import drawing
from handoff_worker import Facts, Read, Sent, View, Worker, slices_in

from common.contract.codec import MESSAGES
from common.contract.ids import Incarnation
from common.contract.messages.gateway import Source
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from common.runtime.config import DecodeSettings, PrefillSettings
from common.scheduling.chunked_prefill import ChunkQueue
from common.scheduling.costs import Costs
from common.scheduling.fair_queue import FairQueue
from common.scheduling.lazy_heap import LazyHeap
from common.scheduling.trials import TrialFeed
from common.worker.agenda import Agenda
from common.worker.events import PlannedStep
from common.worker.front import Front
from decode_worker.admission import Admission
from decode_worker.answers import Answers
from decode_worker.core import DecodeCore
from decode_worker.entrance import Entrance
from decode_worker.local_prompts import LocalPrompts
from decode_worker.migration import Arrivals, Departures
from decode_worker.policy import Policy
from decode_worker.preemption import Preemption
from decode_worker.request import DecodeChoice, DecodeRequest, LocalPrompt
from decode_worker.running_batch import RunningBatch
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequences import Sequences
from decode_worker.step import Step
from decode_worker.steps import DecodeSteps
from decode_worker.swap_space import SwapSpace
from decode_worker.view import DecodeTotals
from gateway.serving import generation
from gateway.serving.attempt import Attempt
from gateway.serving.flow import Flow
from gateway.workers.worker_life import WorkerLife
from kv_transfer.lease import Lease
from kv_transfer.lease_table import LeaseTable
from kv_transfer.lender import Lender
from kv_transfer.pull import Pull
from kv_transfer.pull_times import PullTimes
from kv_transfer.pulls import Pulls
from prefill_worker.core import PrefillCore
from prefill_worker.prefix_pulls import PrefixPulls
from prefill_worker.request import PrefillRequest
from prefill_worker.room import Backlog, TierHoldings
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.steps import PrefillPlan, PrefillSteps

# --- what never changes ------------------------------------------------------------------------------------------

_VALUES = (*MESSAGES, Source, SamplingParams, WorkerLife, Bounds, Parts)
"""Kinds whose equal values are one."""
_numbers: dict[Any, int] = {}
_values: list[Any] = []


def _number(value: Any) -> int:
    kind = type(value)
    known = (kind, value) if kind in _VALUES else (kind, id(value))
    if known not in _numbers:
        _numbers[known] = len(_values)
        _values.append(value)
    return _numbers[known]


def _value(number: int) -> Any:
    return _values[number]


def _reduce(value: Any) -> tuple[Any, tuple[int]]:
    return _value, (_number(value),)


def forget_values() -> None:
    """Begin anew: no state is kept any more."""
    _numbers.clear()
    _values.clear()


@dataclass(eq=False)
class Kept:
    """A state of a worker."""

    packed: bytes
    view: View
    after: dict[tuple[Any, ...], tuple[Kept, tuple[Sent, ...]]] = field(default_factory=dict)
    """What happens to the worker → its next state, and what it sends."""


class Workers:
    """Every state of every worker that a search has met."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._kept: dict[bytes, Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def first(self, me: Incarnation) -> Kept:
        """A worker that has just started."""
        return self._keep(Worker(self._bounds, me))

    def after(self, kept: Kept, *event: Any) -> tuple[Kept, tuple[Sent, ...]]:
        """The state after `event`, the name of a method of `Worker` and its arguments, and what the worker sends.
        Raises whatever is broken then."""
        known = kept.after.get(event)
        if known is None:
            worker: Worker = pickle.loads(kept.packed)
            name, *args = event
            with drawing(worker):
                getattr(worker, name)(*args)
            sent, worker.sent = tuple(worker.sent), []
            known = kept.after[event] = self._keep(worker), sent
        return known

    def _keep(self, worker: Worker) -> Kept:
        known = digest(worker)
        if known not in self._kept:
            self._kept[known] = Kept(dump(worker), worker.view())
        return self._kept[known]


# --- pickles -----------------------------------------------------------------------------------------------------

_SAME = (generation.Generation, Facts, Costs, PrefillSettings, DecodeSettings, Kept, Workers)
"""Kinds whose objects are not copied."""
_DISPATCH = dict.fromkeys((*_VALUES, *_SAME), _reduce)


class _Pickler(pickle.Pickler):
    dispatch_table = _DISPATCH

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and "<lambda>" in value.__qualname__:
            assert all(type(cell.cell_contents) in (*_VALUES, int) for cell in value.__closure__ or ()), value
            return _reduce(value)
        if isinstance(value, itertools.count):
            return itertools.count, (int(repr(value)[len("count(") : -1]),)
        return NotImplemented


def dump(value: Any) -> bytes:
    """A world or a worker as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(value)
    return buffer.getvalue()


load = pickle.loads

# --- digests -----------------------------------------------------------------------------------------------------

_PLAIN = frozenset({int, str, bool, float, type(None), bytes})
_NO_DIFFERENCE: dict[type, str] = {
    Agenda: "now _due _actions _deciding",
    Attempt: "generation _tally",
    DecodeCore: "settings engine totals _policy",
    DecodeRequest: "chain order story deadline",
    DecodeScheduler: "_pool _policy",
    Entrance: "_pool _policy _costs _num_orders _looked_at num_prefix_queried num_prefix_hit",
    Flow: "generation story tally",
    Front: "_ended _settings _pool requests finished",
    DecodeChoice: "chain order rank timings",
    Lease: "story",
    LeaseTable: "_epoch num_expired num_reclaimed",
    Lender: "_num_prefixes_lent",
    LocalPrompt: "urgency",
    LocalPrompts: "_policy _costs",
    Preemption: "_pool _policy num_recomputed num_revoked",
    PrefillCore: "settings engine",
    PrefillPlan: "number",
    PrefillRequest: "urgency block_hashes story deadline",
    PrefillScheduler: "_pool _costs _num_admitted num_prefix_queried num_prefix_hit",
    Pull: "story",
    Arrivals: "_pool _policy num_tail_blocks",
    Departures: "_pool num_moved",
    Sequences: "_pool _policy",
    Step: "number decoding",
    SwapSpace: "_policy _costs num_swapped",
    Read: "read_id",
    Worker: "num_drawn sent runs_ahead",
}
"""Fields that do not tell states apart: stories, counters, numbers that are only compared, and constants."""


class _Reader:
    """Makes a nested tuple of objects; equal objects make equal tuples."""

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
        """A list, tuple, array or queue."""
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
        """Steps are numbered from the oldest that matters."""
        first = min((*pool._in_flight, *pool._limbo.values()), default=pool._last_step)
        limbo = tuple((block, step - first) for block, step in pool._limbo.items())
        steps = tuple(step - first for step in pool._in_flight)
        return tuple(pool._ref_counts), tuple(pool._free), limbo, steps, pool._last_step - first

    def heap(self, heap: LazyHeap[Any]) -> Any:
        """The items in their order. What orders them is only compared."""
        return self.items([item for _, _, item in sorted(heap._entries.values())])

    def queue(self, queue: FairQueue[Any]) -> Any:
        """The items that wait. There is one tenant, so no account of service decides anything."""
        return self.items(queue)

    def chunks(self, queue: ChunkQueue[Any]) -> Any:
        """Prompts in their order, and their chunks in flight."""
        return self.items(queue), self.mapping(queue._in_flight)

    def batch(self, batch: RunningBatch) -> Any:
        """Sequences with the steps until they need a block, and sequences that are ready."""
        running = [(self.read(each), batch._due[each] - batch.step) for each in batch.running()]
        return tuple(running), self.items(batch.ready())

    def admission(self, admission: Admission) -> Any:
        """Sequences with blocks. What is expected of them matters to others only, and there are none."""
        return self.items(admission.keys())

    def pulls(self, pulls: Pulls) -> Any:
        """Reads in their order, and whether each one is of its source's last offer, instead of the offers' numbers."""
        current = [
            each.offer is not None and each.offer == pulls._offers.get(each.pull.source.incarnation)
            for each in pulls._reads.values()
        ]
        reads = [(self.read(each.pull), each.start) for each in pulls._reads.values()]
        sources = self.items([(address, found.source) for address, found in pulls._sources.items()])
        under_way = self.items([(pull, fits is None) for pull, fits in pulls._pulls.values()])
        return sources, under_way, self.items(pulls._quarantine), tuple(reads), tuple(current)

    def times(self, times: PullTimes) -> Any:
        """What has happened, whenever it was."""
        return tuple(at is None for at in (times.told_at, times.reserved_at, times.read_at))

    def work(self, work: PlannedStep) -> Any:
        """A step in flight."""
        slices = [
            (each.start, len(each.token_ids), tuple(each.block_table), each.follows, len(each.samples))
            for each in slices_in(work)
        ]
        return self.read(work.plan), tuple(slices)


def _nothing(_: _Reader, value: object) -> str:
    return type(value).__name__


def _reader_for(kind: type) -> Callable[[_Reader, Any], Any]:
    if issubclass(kind, Enum):
        return lambda _, value: str(value.value)
    if kind in _DISPATCH:
        return lambda _, value: ("#", _number(value))
    for base, reader in _READERS_OF.items():
        if issubclass(kind, base):
            return reader
    if kind in (FunctionType, MethodType):
        return lambda _, value: value.__qualname__
    if kind is type:
        return lambda _, value: value.__name__
    return _object_reader(kind)


def _object_reader(kind: type) -> Callable[[_Reader, Any], Any]:
    """By its fields: those of its slots, and whatever else an instance has."""
    ignored = {name for base in kind.__mro__ for name in _NO_DIFFERENCE.get(base, "").split()}
    slots = [name for name in copyreg._slotnames(kind) if name not in ignored]  # type: ignore[attr-defined]

    def reader(self: _Reader, value: Any) -> Any:
        known = self.seen.get(id(value))
        if known is not None:
            return ("=", known)
        self.seen[id(value)] = len(self.seen)
        read = self.read
        found = [read(getattr(value, name)) for name in slots]
        found += [read(each) for name, each in getattr(value, "__dict__", {}).items() if name not in ignored]
        return (kind.__name__, *found)

    return reader


_READERS_OF: dict[type, Callable[[_Reader, Any], Any]] = {
    BlockPool: _Reader.pool,
    LazyHeap: _Reader.heap,
    FairQueue: _Reader.queue,
    ChunkQueue: _Reader.chunks,
    RunningBatch: _Reader.batch,
    Admission: _Reader.admission,
    Pulls: _Reader.pulls,
    PullTimes: _Reader.times,
    PlannedStep: _Reader.work,
    Answers: _nothing,  # holds nothing between events
    DecodeSteps: _nothing,  # has copies of what sequences have
    DecodeTotals: _nothing,  # counts what has happened
    PrefillSteps: _nothing,
    Policy: _nothing,
    Backlog: _nothing,  # counts what is elsewhere
    CacheFeed: _nothing,  # its messages are not sent
    TrialFeed: _nothing,
    PrefixPulls: _nothing,  # no prefix is pulled
    TierHoldings: lambda self, value: self.mapping(value._holdings),
    itertools.count: _nothing,
    dict: _Reader.mapping,
    set: _Reader.unordered,
    frozenset: _Reader.unordered,
    list: _Reader.items,
    tuple: _Reader.items,
    deque: _Reader.items,
    array: _Reader.items,
}
_READERS: dict[type, Callable[[_Reader, Any], Any]] = {}


def digest(value: Any) -> bytes:
    """What tells one state from another."""
    return blake2b(marshal.dumps(_Reader().read(value), 2), digest_size=16).digest()
