"""The handoff as two parties play it: real leases, pulls and pools, and a memory that says what each block holds.

Both sides keep what they have for prompts that begin alike: a sink does not read what it holds, and may pull a prefix
that only the source has.

A run is an interleaving of what can happen to one source, its sinks and the wires between them: messages wait, are lost
(then the sink attaches again) or come twice; either side aborts; leases expire; freed blocks are written by others;
reads copy each block at some moment of their own, late ones included; caches evict. Whatever the interleaving:

* what is admitted, and what is cached, holds exactly the right content of the right sequence, and keeps it;
* a block that a read may still write to is nobody else's;
* once everything has ended, every block of every pool is free again;
* and with messages no longer lost, no pull waits for ever.

Settling, quarantine, limbo and the pin on what is lent are each shown to be needed: without it, the same run breaks a
promise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.contract.block_hashes import BlockHash, block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Attach,
    AttachPrefix,
    BlocksReady,
    Detach,
    Message,
    OfferWithdrawn,
    PrefillDone,
    RequestMessage,
    Settle,
    Settled,
    Source,
    Tokens,
)
from common.engine.block_pool import BlockPool
from kv_transfer import events
from kv_transfer import lease as offers
from kv_transfer import lease_table as leases
from kv_transfer import pull as pulls
from kv_transfer.lease_table import LeaseTable
from kv_transfer.pull import Pull, PullAction

REQUESTS = tuple(RequestId(f"r{number}") for number in range(3))
NUM_BLOCKS = {RequestId("r0"): 1, RequestId("r1"): 2, RequestId("r2"): 3}
"""Blocks of each request's prompt."""
NAMES = {request: block_hashes(range(num), 1, request) for request, num in NUM_BLOCKS.items()}
"""The names of those blocks."""
SOURCE_BLOCKS = 6
SINK_BLOCKS = 4
TTL_S = 10.0
LENT_S = 20.0
BUDGET_S = 60.0
AT = Source(address="p:1", incarnation=Incarnation("p"))

Content = tuple[str, int]
"""(whose, which of its blocks)."""
Hello = frozenset[RequestKey]
"""What a sink says of its pulls when a session opens."""
Choose = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Without:
    """What this world leaves out, to show that it is needed."""

    settle: bool = False
    quarantine: bool = False
    limbo: bool = False
    loan: bool = False
    """The pin on lent blocks."""


# --- the source --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Prefill:
    key: RequestKey
    blocks: list[int]
    num_ready: int = 0


class Prefiller:
    """A prefill worker without messages: scheduler, engine, pool, memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pool = BlockPool(SOURCE_BLOCKS)
        self.memory: dict[int, Content] = {}
        self.table = LeaseTable(unattached_ttl_s=TTL_S)
        self.running: dict[RequestId, Prefill] = {}
        self.newest: dict[RequestId, int] = {}
        """The newest attempt at each prompt that has come in: no older one does after it."""
        self.step: tuple[int, list[tuple[Prefill, int]]] | None = None
        """The step in flight: its number, and (prefill, blocks that are ready after it)."""
        self.strangers: list[list[int]] = []
        """Blocks of sequences that have nothing to do with this."""
        self.cached: dict[Content, int] = {}
        """What is kept for prompts that begin alike, each with a reference."""

    def start(self, key: RequestKey) -> None:
        """Admit a prompt; a newer attempt ends the older one."""
        num = NUM_BLOCKS[key.request]
        if key.attempt <= self.newest.get(key.request, 0):
            return
        self.end(key.request, Cause.SUPERSEDED)
        while self.cached and self.pool.num_free < num:
            self.evict()
        if self.pool.num_free < num:
            return
        self.newest[key.request] = key.attempt
        prefill = self.running[key.request] = Prefill(key, self.pool.allocate(num))
        self.pool.share(prefill.blocks)
        self.do(self.table.open(key, prefill.blocks, self.world.now + BUDGET_S, self.world.now))

    def end(self, request: RequestId, cause: Cause = Cause.CANCELLED) -> None:
        """Abort: the computation and the lease."""
        prefill = self.running.pop(request, None)
        if prefill is not None:
            self.pool.release(prefill.blocks)
        self.do(self.table.withdraw(request, cause, "aborted", now=self.world.now))

    def begin_step(self, chunks: Iterable[tuple[Prefill, int]]) -> None:
        number = 0 if self.world.without.limbo else self.pool.step_started()
        self.step = (number, list(chunks))

    def end_step(self) -> None:
        """The device writes every block of the step, whoever has been aborted meanwhile."""
        assert self.step is not None
        (number, chunks), self.step = self.step, None
        for prefill, num_ready in chunks:
            for index in range(prefill.num_ready, num_ready):
                self.memory[prefill.blocks[index]] = (prefill.key.request, index)
        if not self.world.without.limbo:
            self.pool.step_finished(number)
        for prefill, num_ready in chunks:
            if self.running.get(prefill.key.request) is prefill:
                self.progress(prefill, num_ready)

    def progress(self, prefill: Prefill, num_ready: int) -> None:
        request, attempt = prefill.key
        for index in range(prefill.num_ready, num_ready):
            if (request, index) not in self.cached:
                self.cached[request, index] = prefill.blocks[index]
                self.pool.share([prefill.blocks[index]])
        prefill.num_ready = num_ready
        self.do(self.table.blocks_ready(request, num_ready, now=self.world.now))
        if num_ready == len(prefill.blocks):
            del self.running[request]
            self.pool.release(prefill.blocks)
            token = Tokens(request=request, attempt=attempt, choice=0, position=9, token_ids=(1,))
            self.do(self.table.complete(request, [token]))

    def evict(self) -> None:
        """The cache gives up what it has had longest."""
        self.pool.release([self.cached.pop(next(iter(self.cached)))])

    def lend(self, message: AttachPrefix, sink: Incarnation) -> None:
        """Offer as much of a prefix as is cached."""
        now = self.world.now
        if message.request in self.table:
            self.do(self.table.attach(message, sink, now))
            return
        blocks = cached_prefix(self.cached, message.block_hashes)
        if not blocks:
            gone = offers.withdrawn(message.key, Cause.LEASE_LOST, "not here")
            self.do([events.Send(sink, gone)])
            return
        if not self.world.without.loan:
            self.pool.share(blocks)
        self.do(self.table.lend(message.key, blocks, sink, now + LENT_S, now))

    def write_elsewhere(self) -> None:
        """Others take every free block and write to it."""
        blocks = self.pool.allocate(self.pool.num_free)
        self.strangers.append(blocks)
        self.memory.update({block: ("stranger", block) for block in blocks})

    def write_everywhere(self) -> None:
        """Others take what the cache holds, too."""
        while self.cached:
            self.evict()
        self.write_elsewhere()

    def check(self) -> None:
        self.pool.check_invariants()
        self.table.check_invariants()
        for block in (block for blocks in self.strangers for block in blocks):
            assert self.memory[block] == ("stranger", block), "a step writes to another's block"
        for content, block in self.cached.items():
            assert self.memory[block] == content, "a step writes to a cached block"

    def hear(self, message: Message | Hello, sink: Incarnation) -> None:
        match message:
            case frozenset():
                self.do(self.table.sink_said_hello(sink, message, self.world.now))
            case Attach():
                self.do(self.table.attach(message, sink, self.world.now))
            case AttachPrefix():
                self.lend(message, sink)
            case Settle():
                self.do(self.table.settle(message, sink))
            case Detach():
                self.do(self.table.detach(message, sink, self.world.now))
            case _:
                raise AssertionError(message)

    def do(self, actions: Iterable[leases.LeaseAction]) -> None:
        for action in actions:
            match action:
                case events.Send(sink, message):
                    self.world.sinks[sink].from_source.append(message)
                case events.Unpinned(_, block_ids):
                    self.pool.release(block_ids)
                case events.Released(block_ids):
                    if not self.world.without.loan:
                        self.pool.release(block_ids)
                case events.LeaseDropped(key, _, _):
                    self.end(key.request)


def cached_prefix(cached: dict[Content, int], names: Iterable[bytes]) -> list[int]:
    """The leading blocks of these names that a cache holds."""
    blocks = []
    for index, name in enumerate(names):
        [request] = [request for request, theirs in NAMES.items() if name in theirs]
        if (request, index) not in cached:
            break
        blocks.append(cached[request, index])
    return blocks


# --- a sink ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Read:
    """A read under way: each block is copied at a moment of its own."""

    pull: Pull | None
    """None if its blocks were released too early: nobody hears of the read any more."""
    start: int
    source_blocks: tuple[int, ...]
    sink_blocks: tuple[int, ...]
    copied: int = 0


@dataclass(eq=False)
class Decoder:
    """A decode worker without an engine: pulls, reads, pool, memory, and the wires to and from the source."""

    world: World
    name: Incarnation
    pool: BlockPool = field(default_factory=lambda: BlockPool(SINK_BLOCKS))
    memory: dict[int, Content | None] = field(default_factory=dict)
    pulls: dict[RequestId, Pull] = field(default_factory=dict)
    wanting: list[Pull] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    admitted: dict[RequestKey, tuple[int, ...]] = field(default_factory=dict)
    cached: dict[Content, int] = field(default_factory=dict)
    """What is kept for prompts that begin alike, each with a reference."""
    num_fetched: int = 0
    """Prefixes that it has begun to pull: each has a name of its own."""
    to_source: deque[Message | Hello] = field(default_factory=deque)
    from_source: deque[Message] = field(default_factory=deque)

    def start(self, key: RequestKey, offered: int | None = None) -> None:
        """A Decode arrives; a newer attempt ends the older one. It may be for what an older Prefill has `offered`."""
        self.end(key.request)
        pull = self.pulls[key.request] = Pull(key, AT, offered=offered)
        self.do(pull, pull.attach())

    def fetch(self, request: RequestId) -> None:
        """Pull what the source has cached of a prompt."""
        self.num_fetched += 1
        key = RequestKey(RequestId(f"prefix {self.num_fetched} of {self.name}"), 1)
        pull = self.pulls[key.request] = Pull(key, AT, NAMES[request])
        self.do(pull, pull.attach())

    def end(self, request: RequestId) -> None:
        """Abort."""
        pull = self.pulls.get(request)
        if pull is not None:
            self.do(pull, pull.abandon(None, "aborted"))

    def say_hello(self) -> None:
        """The session with the source is opened again after a loss."""
        quarantined = (read.pull for read in self.reads if read.pull is not None)
        self.to_source.append(frozenset(pull.key for pull in (*self.pulls.values(), *quarantined)))
        for pull in list(self.pulls.values()):
            self.do(pull, pull.attach())

    def give_room(self) -> None:
        while self.wanting:
            pull = self.wanting[0]
            assert pull.num_blocks is not None
            held = cached_prefix(self.cached, names_of(pull))[: pull.num_blocks]
            missing = pull.num_blocks - len(held)
            self.pool.share(held)
            while self.cached and self.pool.num_free < missing:
                self.evict()
            if self.pool.num_free < missing:
                self.pool.release(held)
                return
            self.wanting.remove(pull)
            self.do(pull, pull.reserve([*held, *self.pool.allocate(missing)], len(held)))

    def evict(self) -> None:
        """The cache gives up what it has had longest."""
        self.pool.release([self.cached.pop(next(iter(self.cached)))])

    def keep(self, request: RequestId, block_ids: Iterable[int]) -> None:
        """Blocks that hold a prompt's beginning, and are no longer used, go into the cache, but for doubles."""
        for index, block in enumerate(block_ids):
            if (request, index) in self.cached:
                self.pool.release([block])
            else:
                self.cached[request, index] = block

    def copy(self, read: Read) -> None:
        """The next block of a read arrives: whatever the source's memory holds now."""
        block = read.sink_blocks[read.copied]
        assert self.pool.ref_count(block) == 1, "a read writes to a free block"
        assert not any(block in blocks for blocks in self.admitted.values()), "a read writes to another's block"
        assert block not in self.cached.values(), "a read writes to a cached block"
        assert not any(block in other.sink_blocks for other in self.reads if other is not read), "two reads, one block"
        self.memory[block] = self.world.source.memory.get(read.source_blocks[read.copied])
        read.copied += 1

    def end_read(self, read: Read, error: str | None) -> None:
        assert error is not None or read.copied == len(read.sink_blocks)
        self.reads.remove(read)
        if read.pull is not None:
            self.do(read.pull, read.pull.read_done(read.start, error))

    def finish(self, key: RequestKey) -> None:
        """An admitted sequence has generated its last token."""
        self.keep(key.request, self.admitted.pop(key))

    def hear(self, message: Message) -> None:
        assert isinstance(message, RequestMessage)
        pull = self.pulls.get(message.request)
        if pull is None or pull.key != message.key:
            return
        match message:
            case BlocksReady():
                self.do(pull, pull.blocks_ready(message))
            case PrefillDone():
                self.do(pull, pull.prefill_done(message))
            case Settled():
                self.do(pull, pull.settled(message))
            case OfferWithdrawn():
                self.do(pull, pull.withdrawn(message))
            case _:
                raise AssertionError(message)

    def do(self, pull: Pull, actions: Iterable[PullAction]) -> None:
        for action in actions:
            match action:
                case pulls.ToSource(Settle() as message) if self.world.without.settle:
                    self.hear(Settled(**asdict(message), valid=True))
                case pulls.ToSource(message):
                    self.to_source.append(message)
                case pulls.WantBlocks():
                    self.wanting.append(pull)
                case pulls.ReadBlocks(start, source_blocks, sink_blocks, _):
                    self.reads.append(Read(pull, start, source_blocks, sink_blocks))
                case pulls.Admit(block_ids, first_tokens):
                    del self.pulls[pull.key.request]
                    self.world.num_admitted += bool(first_tokens)
                    if first_tokens:
                        self.admitted[pull.key] = block_ids
                    else:
                        self.take_prefix(pull, block_ids)
                case pulls.Release(block_ids):
                    self.pool.release(block_ids)
                case pulls.Abandoned():
                    self.wanting = [each for each in self.wanting if each is not pull]
                    del self.pulls[pull.key.request]
                    if self.world.without.quarantine:
                        self.pool.release(pull.quarantined)
                        for read in self.reads:
                            read.pull = None if read.pull is pull else read.pull

    def take_prefix(self, pull: Pull, block_ids: tuple[int, ...]) -> None:
        [request] = [request for request, names in NAMES.items() if tuple(names) == pull.block_hashes]
        held = [self.memory.get(block) for block in block_ids]
        assert held == [(request, index) for index in range(len(held))], f"{self.name} takes {held} for a prefix"
        self.world.num_prefixes += 1
        self.keep(request, block_ids)

    def check(self) -> None:
        self.pool.check_invariants()
        for content, block in self.cached.items():
            assert self.memory[block] == content, "a read writes to a cached block"
        for pull in self.pulls.values():
            pull.check_invariants()
        for (request, attempt), blocks in self.admitted.items():
            expected = [(request, index) for index in range(NUM_BLOCKS.get(request, 0))]
            held = [self.memory.get(block) for block in blocks[: len(expected)]]
            assert held == expected, f"{self.name} decodes attempt {attempt} at {request} from {held}"


def names_of(pull: Pull) -> Iterable[BlockHash]:
    """What a pull's blocks are named."""
    return pull.block_hashes or NAMES[pull.key.request]


# --- the world ---------------------------------------------------------------------------------------------------


class World:
    """One source, two sinks, a gateway's attempts, and time."""

    def __init__(self, without: Without | None = None) -> None:
        self.without = without or Without()
        self.now = 0.0
        self.source = Prefiller(self)
        self.sinks = {name: Decoder(self, name) for name in (Incarnation("d0"), Incarnation("d1"))}
        self.attempts = dict.fromkeys(REQUESTS, 0)
        self.num_admitted = 0
        self.num_prefixes = 0

    def check(self) -> None:
        """What holds between any two events."""
        self.source.check()
        for sink in self.sinks.values():
            sink.check()

    def deliver_all(self) -> None:
        """Every message in flight arrives, and what it leads to."""
        while any(sink.to_source or sink.from_source for sink in self.sinks.values()):
            for sink in self.sinks.values():
                while sink.to_source:
                    self.source.hear(sink.to_source.popleft(), sink.name)
                while sink.from_source:
                    sink.hear(sink.from_source.popleft())

    def read_all(self) -> None:
        """Every read ends; what waits for room gets it if there is any."""
        for sink in self.sinks.values():
            sink.give_room()
            for read in list(sink.reads):
                while read.copied < len(read.sink_blocks):
                    sink.copy(read)
                sink.end_read(read, None)
                self.check()

    def settle_down(self) -> None:
        """Nothing is lost any more, nothing new begins, and time passes: every pull must come to an end."""
        if self.source.step is not None:
            self.source.end_step()
        for sink in self.sinks.values():
            sink.say_hello()
        for _ in range(20):
            self.deliver_all()
            self.read_all()
            self.check()
        self.now += 10 * BUDGET_S
        self.source.do(self.source.table.expire(self.now))
        self.deliver_all()
        self.read_all()
        self.deliver_all()
        self.check()

    def end(self) -> None:
        """Everything is aborted: every block must come back."""
        if self.source.step is not None:
            self.source.end_step()
        for sink in self.sinks.values():
            for request in list(sink.pulls):
                sink.end(request)
            for read in list(sink.reads):
                sink.end_read(read, "fenced")
            for key in list(sink.admitted):
                sink.finish(key)
            while sink.cached:
                sink.evict()
            sink.say_hello()
        for request in REQUESTS:
            self.source.end(request)
        self.deliver_all()
        self.source.do(self.source.table.expire(self.now + 10 * BUDGET_S))
        self.deliver_all()
        for blocks in self.source.strangers:
            self.source.pool.release(blocks)
        while self.source.cached:
            self.source.evict()
        self.check()
        for pool in (self.source.pool, *(sink.pool for sink in self.sinks.values())):
            assert pool.num_free == pool.num_blocks, "a block was lost"
        table = self.source.table
        assert (len(table), table.num_parked, table.num_readers) == (0, 0, 0)


class Play:
    """Chooses what happens next in a world."""

    def __init__(self, world: World, choose: Choose) -> None:
        self.world = world
        self.choose = choose
        self.calm: int = choose([3, 10, 30])

    def pick(self, options: Iterable[Any]) -> Any:
        return self.choose(list(options))

    def steps(self) -> list[Callable[[], None]]:
        """What can happen now: what leads on `self.calm` times as often as what disturbs."""
        world, source = self.world, self.world.source
        onward: list[Callable[[], None]] = []
        disturbing: list[Callable[[], None]] = [self.wait, self.lose_session, self.new_attempt, self.prefill]
        if self.idle:
            onward.append(self.new_request)
        if source.step is not None:
            onward += [source.end_step] * 2
        elif source.running:
            onward += [self.begin_step] * 2
        if len(source.table) or source.running:
            disturbing.append(self.abort_prefill)
        if source.pool.num_free:
            disturbing.append(source.write_elsewhere)
        if source.cached:
            disturbing += [source.evict] + [self.fetch] * 4
        if source.strangers:
            onward.append(self.free_strangers)
        for sink in world.sinks.values():
            onward += [self.to_source(sink)] * (2 * bool(sink.to_source))
            onward += [self.from_source(sink)] * (2 * bool(sink.from_source))
            onward += [sink.give_room] * (2 * bool(sink.wanting)) + [self.read(sink)] * (2 * bool(sink.reads))
            disturbing += [self.lose(wire) for wire in (sink.to_source, sink.from_source) if wire]
            disturbing += [sink.say_hello, self.abort_pull(sink)] if sink.pulls else []
            disturbing += [self.finish(sink)] if sink.admitted else []
            disturbing += [sink.evict] if sink.cached else []
        return onward * self.calm + disturbing

    @property
    def idle(self) -> list[RequestId]:
        """Requests that no sink knows."""
        known = {request for sink in self.world.sinks.values() for request in sink.pulls}
        known |= {key.request for sink in self.world.sinks.values() for key in sink.admitted}
        return [request for request in REQUESTS if request not in known]

    def new_request(self) -> None:
        self.attempt(self.pick(self.idle), prefill=True)

    def fetch(self) -> None:
        """A sink that pulls little pulls a prefix."""
        sink = min(self.world.sinks.values(), key=lambda sink: len(sink.pulls))
        if len(sink.pulls) < 2:
            sink.fetch(self.pick(REQUESTS))

    def new_attempt(self) -> None:
        self.attempt(self.pick(REQUESTS), prefill=self.pick([True, False]))

    def attempt(self, request: RequestId, *, prefill: bool) -> None:
        """The gateway's next attempt at a request, with a prefill or on the lease that is there."""
        self.world.attempts[request] += 1
        sink = self.world.sinks[self.pick(self.world.sinks)]
        key = RequestKey(request, self.world.attempts[request])
        standing = self.world.source.newest.get(request, key.attempt)
        sink.start(key, None if prefill else self.pick([standing, standing, key.attempt]))
        if prefill:
            self.prefill_for(request)

    def prefill(self) -> None:
        self.prefill_for(self.pick(REQUESTS))

    def prefill_for(self, request: RequestId) -> None:
        known = self.world.source.running.get(request)
        attempt = max(1, self.world.attempts[request])
        if known is None or known.key.attempt < attempt:
            self.world.source.start(RequestKey(request, attempt))

    def begin_step(self) -> None:
        chunks = []
        for prefill in self.world.source.running.values():
            num_ready = self.pick(range(prefill.num_ready, len(prefill.blocks) + 1))
            chunks.append((prefill, num_ready))
        self.world.source.begin_step(chunks)

    def abort_prefill(self) -> None:
        self.world.source.end(self.pick(REQUESTS))

    def abort_pull(self, sink: Decoder) -> Callable[[], None]:
        return lambda: sink.end(self.pick(sink.pulls))

    def free_strangers(self) -> None:
        source = self.world.source
        if source.strangers:
            source.pool.release(source.strangers.pop())

    def wait(self) -> None:
        self.world.now += self.pick([1.0, 6.0, 30.0])
        self.world.source.do(self.world.source.table.expire(self.world.now))
        self.world.source.do(self.world.source.table.reclaim(self.pick([0, 2]), self.world.now - 1.0))

    def lose_session(self) -> None:
        """The source thinks a sink lost; what was in flight is gone. The sink may not even notice."""
        sink = self.world.sinks[self.pick(self.world.sinks)]
        sink.to_source.clear()
        sink.from_source.clear()
        self.world.source.do(self.world.source.table.sink_said_hello(sink.name, (), self.world.now))

    def lose(self, wire: deque[Any]) -> Callable[[], None]:
        def lose_or_repeat() -> None:
            index = self.pick(range(len(wire)))
            if self.pick([True, False]):
                del wire[index]
            else:
                wire.insert(index, wire[index])

        return lose_or_repeat

    def to_source(self, sink: Decoder) -> Callable[[], None]:
        return lambda: self.world.source.hear(sink.to_source.popleft(), sink.name)

    def from_source(self, sink: Decoder) -> Callable[[], None]:
        return lambda: sink.hear(sink.from_source.popleft())

    def read(self, sink: Decoder) -> Callable[[], None]:
        def one_step() -> None:
            read = self.pick(sink.reads)
            if self.pick([False] * 9 + [True]):
                sink.end_read(read, "the connection broke")
            elif read.copied < len(read.sink_blocks):
                sink.copy(read)
            else:
                sink.end_read(read, None)

        return one_step

    def finish(self, sink: Decoder) -> Callable[[], None]:
        return lambda: sink.finish(self.pick(sink.admitted))


def play(world: World, choose: Choose, num_events: int) -> None:
    """A run, with every promise checked after each event."""
    game = Play(world, choose)
    for _ in range(num_events):
        choose(game.steps())()
        world.check()


def chosen_by(data: st.DataObject) -> Choose:
    """Hypothesis chooses, and finds the shortest run that fails."""
    return lambda options: data.draw(st.sampled_from(options))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data(), st.integers(20, 90))
def test_what_is_admitted_is_right_and_every_block_comes_back(data: st.DataObject, num_events: int) -> None:
    world = World()
    play(world, chosen_by(data), num_events)
    world.end()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data(), st.integers(10, 60))
def test_no_pull_waits_for_ever(data: st.DataObject, num_events: int) -> None:
    world = World()
    play(world, chosen_by(data), num_events)
    world.settle_down()
    for sink in world.sinks.values():
        assert not sink.pulls, [(pull.key, pull.story) for pull in sink.pulls.values()]
    world.end()


@pytest.mark.long
def test_many_long_runs() -> None:
    """Deeper than the runs that can be shrunk; a failure names the seed."""
    num_admitted = num_prefixes = 0
    for seed in range(400):
        world = World()
        try:
            play(world, Random(seed).choice, 300)
            num_admitted += world.num_admitted
            num_prefixes += world.num_prefixes
            if seed % 2:
                world.settle_down()
                assert not any(sink.pulls for sink in world.sinks.values()), "a pull waits for ever"
            world.end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert num_admitted > 400, f"only {num_admitted} pulls were admitted: the runs show nothing"
    assert num_prefixes > 200, f"only {num_prefixes} prefixes were pulled: the runs show nothing"


# --- what each rule of the handoff is for ------------------------------------------------------------------------


def reading(world: World, request: RequestId) -> tuple[Decoder, Read]:
    """A complete offer whose single read has begun, with nothing copied yet."""
    sink = world.sinks[Incarnation("d0")]
    key = RequestKey(request, 1)
    world.source.start(key)
    prefill = world.source.running[request]
    world.source.begin_step([(prefill, len(prefill.blocks))])
    world.source.end_step()
    sink.start(key)
    world.deliver_all()
    sink.give_room()
    [read] = sink.reads
    return sink, read


def finish_read(world: World, sink: Decoder, read: Read) -> None:
    while read.copied < len(read.sink_blocks):
        sink.copy(read)
        world.check()
    sink.end_read(read, None)
    world.deliver_all()
    world.check()


def read_of_a_lease_that_ends(without: Without) -> World:
    """The lease ends while the read is under way, and others write to the source's blocks."""
    world = World(without)
    sink, read = reading(world, REQUESTS[2])
    sink.copy(read)
    world.source.end(REQUESTS[2])
    sink.from_source.clear()  # the withdrawal is still on its way
    world.source.write_everywhere()
    finish_read(world, sink, read)
    return world


def test_a_read_is_void_when_its_lease_has_ended() -> None:
    world = read_of_a_lease_that_ends(Without())
    assert not any(sink.admitted or sink.pulls for sink in world.sinks.values())
    world.end()


def test_without_settling_a_sequence_would_be_decoded_from_the_blocks_of_others() -> None:
    with pytest.raises(AssertionError, match=r"decodes attempt 1 at r2 from \[\('r2', 0\), \('stranger'"):
        read_of_a_lease_that_ends(Without(settle=True))


def read_of_a_pull_that_is_aborted(without: Without) -> World:
    """The pull is aborted while its read is under way; another sequence takes every block that is free then."""
    world = World(without)
    sink, late = reading(world, REQUESTS[1])
    sink.end(REQUESTS[1])
    world.deliver_all()
    sink.admitted[RequestKey(RequestId("other"), 1)] = tuple(sink.pool.allocate(sink.pool.num_free))
    finish_read(world, sink, late)
    return world


def test_a_late_read_writes_to_nobodys_block() -> None:
    world = read_of_a_pull_that_is_aborted(Without())
    world.end()


def test_without_quarantine_a_late_read_would_write_to_the_blocks_of_others() -> None:
    with pytest.raises(AssertionError, match="a read writes to"):
        read_of_a_pull_that_is_aborted(Without(quarantine=True))


def step_of_a_prefill_that_is_aborted(without: Without) -> World:
    """A prompt is aborted while a step computes it; others take every block that is free then."""
    world = World(without)
    key = RequestKey(REQUESTS[2], 1)
    world.source.start(key)
    world.source.begin_step([(world.source.running[key.request], 3)])
    world.source.end(key.request)
    world.source.write_elsewhere()
    world.source.end_step()
    world.check()
    return world


def test_a_step_in_flight_writes_to_no_block_that_is_in_use_again() -> None:
    world = step_of_a_prefill_that_is_aborted(Without())
    world.end()


def test_without_limbo_a_step_in_flight_would_write_to_the_blocks_of_others() -> None:
    with pytest.raises(AssertionError, match="a step writes to another's block"):
        step_of_a_prefill_that_is_aborted(Without(limbo=True))


@pytest.mark.parametrize("when", ["waiting", "offered", "pulling"])
def test_a_newer_attempt_that_met_the_older_lease(when: str) -> None:
    """If it waits for its own Prefill, which its Attach has overtaken, it goes on under the lease of that one.

    If it was to take over what the older attempt has left, and that ends now, it is void: the gateway must hear of it.
    """
    world = World()
    older, newer = RequestKey(REQUESTS[2], 1), RequestKey(REQUESTS[2], 2)
    sink = world.sinks[Incarnation("d1")]
    world.source.start(older)
    world.source.begin_step([(world.source.running[older.request], 1)])
    world.source.end_step()
    sink.start(newer, None if when == "waiting" else 1)
    world.deliver_all()
    assert bool(sink.wanting) is (when != "waiting")
    if when == "pulling":
        sink.give_room()
        assert sink.reads
    world.source.start(newer)
    world.deliver_all()
    world.source.begin_step([(world.source.running[newer.request], 3)])
    world.source.end_step()
    for _ in range(3):
        world.deliver_all()
        world.read_all()
    assert newer.request not in sink.pulls
    assert (newer in sink.admitted) is (when == "waiting")
    world.end()


def test_another_sink_takes_over_what_the_first_one_was_offered() -> None:
    """The decode worker has failed in the middle of its read: nothing is computed again."""
    world = World()
    sink, read = reading(world, REQUESTS[2])
    sink.copy(read)
    sink.end(REQUESTS[2])
    key = RequestKey(REQUESTS[2], 2)
    other = world.sinks[Incarnation("d1")]
    other.start(key, 1)
    world.deliver_all()
    world.read_all()
    world.deliver_all()
    assert key in other.admitted
    assert not world.source.running
    late = world.sinks[Incarnation("d0")]
    late.start(RequestKey(REQUESTS[2], 3), 1)
    world.deliver_all()
    assert not late.pulls, "it waits for what cannot come"
    world.end()


def read_of_a_prefix_that_is_evicted(without: Without) -> World:
    """The source evicts what it has lent, and others take every block that is free then."""
    world = World(without)
    key = RequestKey(REQUESTS[2], 1)
    world.source.start(key)
    world.source.begin_step([(world.source.running[key.request], 3)])
    world.source.end_step()
    world.source.end(key.request)
    sink = world.sinks[Incarnation("d0")]
    sink.fetch(key.request)
    world.deliver_all()
    sink.give_room()
    [read] = sink.reads
    sink.copy(read)
    world.source.write_everywhere()
    finish_read(world, sink, read)
    return world


def test_a_prefix_that_is_lent_is_not_evicted_while_it_is_read() -> None:
    world = read_of_a_prefix_that_is_evicted(Without())
    assert world.num_prefixes == 1
    world.end()


def test_without_the_pin_a_lent_prefix_would_be_settled_with_the_blocks_of_others() -> None:
    with pytest.raises(AssertionError, match=r"takes \[\('r2', 0\), \('stranger'.* for a prefix"):
        read_of_a_prefix_that_is_evicted(Without(loan=True))


def test_a_pull_that_settles_outlives_the_loss_of_its_session_at_the_source() -> None:
    """The lease was held all the while, so what was read is good: it must not be read, or computed, again."""
    world = World()
    sink, read = reading(world, REQUESTS[2])
    while read.copied < len(read.sink_blocks):
        sink.copy(read)
    sink.end_read(read, None)
    assert isinstance(sink.to_source.pop(), Settle)
    world.source.do(world.source.table.sink_said_hello(sink.name, (), world.now))
    sink.say_hello()
    world.deliver_all()
    assert RequestKey(REQUESTS[2], 1) in sink.admitted
    world.end()


def test_what_a_sink_holds_is_not_read_again() -> None:
    world = World()
    sink, read = reading(world, REQUESTS[2])
    finish_read(world, sink, read)
    [key] = sink.admitted
    sink.finish(key)
    del sink.cached[REQUESTS[2], 2]
    sink.pool.release([read.sink_blocks[2]])
    world.source.start(RequestKey(key.request, 2))
    world.source.begin_step([(world.source.running[key.request], 3)])
    world.source.end_step()
    sink.start(RequestKey(key.request, 2))
    world.deliver_all()
    sink.give_room()
    [again] = sink.reads
    assert (again.start, len(again.sink_blocks)) == (2, 1)
    finish_read(world, sink, again)
    assert RequestKey(key.request, 2) in sink.admitted
    world.end()


@pytest.mark.parametrize("left_out", ["settle", "quarantine", "limbo", "loan"])
def test_the_model_finds_out_by_itself_what_is_left_out(left_out: str) -> None:
    def search() -> None:
        for seed in range(3000):
            play(World(Without(**{left_out: True})), Random(seed).choice, 200)

    broken = r"decodes attempt|a read writes to|two reads, one block|a step writes to|for a prefix"
    with pytest.raises(AssertionError, match=broken):
        search()
