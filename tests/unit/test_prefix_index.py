"""Which worker holds which blocks: what the workers tell, and nothing else."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.block_hashes import SHORT_NAME_BYTES, BlockHash, block_hashes
from common.contract.ids import Incarnation
from common.contract.messages.fields import MAX_CACHE_EVENTS, Message
from common.contract.messages.session import Role
from common.contract.messages.worker import CacheEvents
from common.engine.block_pool import BlockPool
from common.runtime.config import PrefillSettings
from common.scheduling.trials import Trials
from common.worker.agenda import Agenda
from common.worker.events import SessionOpened
from common.worker.front import Front
from gateway.workers.prefix_index import NUM_PARTS, PrefixIndex
from gateway.workers.worker_life import WorkerLife
from kv_transfer.regions import RankPart, Region

A, B = WorkerLife("a:1", Incarnation("A")), WorkerLife("b:1", Incarnation("B"))
GATEWAY, OTHER_GATEWAY = Incarnation("G"), Incarnation("H")
SETTINGS = PrefillSettings().on("cpu")
REGION = Region(parts=(RankPart(1, 0, 1),), num_blocks=1, block_bytes=1)


def names(*token_ids: int) -> list[BlockHash]:
    """One block for each number."""
    return block_hashes(token_ids, 1)


def short(block_hashes: list[BlockHash]) -> bytes:
    return b"".join(name[:SHORT_NAME_BYTES] for name in block_hashes)


def events(
    stored: list[BlockHash] | None = None, removed: list[BlockHash] | None = None, *, begins: bool = False
) -> CacheEvents:
    return CacheEvents(begins=begins, stored=short(stored or []), removed=short(removed or []))


def held_by(index: PrefixIndex, life: WorkerLife) -> set[bytes]:
    """All that a worker holds, as far as the index knows."""
    bit = index._bits.get(life, 0)
    return {name for part in index._parts for name, holders in part.items() if holders & bit}


def test_it_knows_who_holds_how_much() -> None:
    index = PrefixIndex()
    index.apply(A, events(names(1, 2, 3)))
    index.apply(B, events(names(1, 2)))
    assert index.longest(names(1, 2, 3, 4)) == {A: 3, B: 2}
    assert index.longest(names(1, 2, 9)) == {A: 2, B: 2}
    assert index.longest(names(1)) == {A: 1, B: 1}
    assert index.longest(names(2, 3)) == {}
    assert index.longest([]) == {}
    assert index.num_blocks == 5


def test_what_is_removed_is_gone_and_what_comes_after_it_is_of_no_use() -> None:
    index = PrefixIndex()
    index.apply(A, events(names(1, 2, 3)))
    index.apply(A, events(removed=names(1, 2)[1:]))
    assert index.longest(names(1, 2, 3)) == {A: 1}
    index.apply(A, events(names(1, 2)[1:]))
    assert index.longest(names(1, 2, 3)) == {A: 3}


def test_a_new_beginning_voids_what_was_told_before() -> None:
    index = PrefixIndex()
    index.apply(A, events(names(1, 2, 3)))
    index.apply(B, events(names(1)))
    index.apply(A, events(names(7), begins=True))
    assert index.longest(names(1, 2, 3)) == {B: 1}
    assert index.longest(names(7)) == {A: 1}


def test_another_salt_is_another_prefix() -> None:
    index = PrefixIndex()
    index.apply(A, events(block_hashes((1, 2), 1, "one")))
    assert index.longest(block_hashes((1, 2), 1, "another")) == {}


def test_a_life_that_is_forgotten_holds_nothing() -> None:
    index = PrefixIndex()
    reborn = WorkerLife(A.address, Incarnation("A2"))
    index.apply(A, events(names(1, 2)))
    index.apply(reborn, events(names(1)))
    assert index.longest(names(1, 2)) == {A: 2, reborn: 1}
    index.forget(A)
    index.forget(A)
    assert index.longest(names(1, 2)) == {reborn: 1}


# --- what it takes ---------------------------------------------------------------------------------------------------


def worker(number: int) -> WorkerLife:
    return WorkerLife(f"w{number}:1", Incarnation(f"W{number}"))


def by_part(number: int) -> list[BlockHash]:
    """Names that fall into the same part of the index, as many as wanted."""
    chain = block_hashes(range(300 * number), 1)
    return [name for name in chain if name[0] == 0]


def test_a_block_that_many_hold_is_stored_once() -> None:
    chain = names(*range(4000))
    index = PrefixIndex()
    tracemalloc.start()
    try:
        for number in range(40):
            for start in range(0, len(chain), 64):
                index.apply(worker(number), events(chain[start : start + 64]))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    index.check_invariants()
    assert (index.num_names, index.num_blocks) == (4000, 40 * 4000)
    assert taken < 10 * index.num_blocks, "bytes for each block and worker"
    assert index.longest(chain) == {worker(number): 4000 for number in range(40)}


def test_a_full_index_forgets_what_was_not_used_for_the_longest() -> None:
    names_of_part = by_part(20)
    asked, reported, unused, new = names_of_part[:4], names_of_part[4:8], names_of_part[8:16], names_of_part[16:18]
    index = PrefixIndex(16 * NUM_PARTS)
    for life in (A, B):
        index.apply(life, events([*asked, *reported, *unused]))
    assert index.longest(asked) == {A: 4, B: 4}
    index.apply(B, events(reported))
    assert index.num_forgotten == 0
    index.apply(A, events(new))
    index.check_invariants()
    assert index.num_forgotten == 2
    assert (index.num_names, index.num_blocks) == (16, 14 * 2 + 2)
    assert held_by(index, B) == {name[:SHORT_NAME_BYTES] for name in [*asked, *reported, *unused[2:]]}
    assert held_by(index, A) == held_by(index, B) | {name[:SHORT_NAME_BYTES] for name in new}
    index.apply(A, events(removed=unused[:1]))
    index.apply(A, events(unused[:1]))
    assert index.longest(unused[:1]) == {A: 1}, "B has it too, which the index no longer knows"
    index.check_invariants()


def test_sessions_that_open_again_and_again_leave_nothing_behind() -> None:
    index = PrefixIndex()
    for number in range(5 * NUM_PARTS):
        index.apply(B, events(names(1, 2, number), begins=True))
        index.apply(worker(number), events(names(1)))
        index.forget(worker(number))
        index.check_invariants()
        assert index.num_blocks == 3
    assert index._num_bits <= 5 * NUM_PARTS
    for _ in range(2 * NUM_PARTS):
        index.apply(B, events())
    index.check_invariants()
    assert index.num_names == 3, "what nobody holds is gone"
    assert index._dead == 0


WORKERS = tuple(map(worker, range(4)))
CHAINS = [names(*range(start, start + 6)) for start in range(0, 60, 6)]
OTHERS = by_part(3)[:8]
"""Names of one part, so that it gets full."""


@settings(max_examples=200, deadline=None)
@given(
    in_part=st.sampled_from((2, 3, 1000)),
    happening=st.lists(
        st.tuples(
            st.sampled_from(("store", "store", "store", "remove", "begin", "forget", "ask")),
            st.sampled_from(WORKERS),
            st.sampled_from((*CHAINS, OTHERS)),
            st.integers(0, 8),
            st.integers(0, 8),
        ),
        max_size=80,
    ),
)
def test_it_says_what_sets_of_names_would_or_less_if_it_was_full(
    in_part: int, happening: list[tuple[str, WorkerLife, list[BlockHash], int, int]]
) -> None:
    index = PrefixIndex(in_part * NUM_PARTS)
    told: dict[WorkerLife, set[BlockHash]] = {life: set() for life in WORKERS}
    for what, life, chain, start, num in happening:
        some = chain[start : start + num]
        match what:
            case "store":
                index.apply(life, events(some))
                told[life] |= set(some)
            case "remove":
                index.apply(life, events(removed=some))
                told[life] -= set(some)
            case "begin":
                index.apply(life, events(some, begins=True))
                told[life] = set(some)
            case "forget":
                index.forget(life)
                told[life] = set()
        index.check_invariants()
        known = {
            each: sum(1 for _ in itertools.takewhile(told[each].__contains__, chain))
            for each in WORKERS
            if chain[0] in told[each]
        }
        found = index.longest(chain)
        if index.num_forgotten == 0:
            assert found == known
            assert index.num_blocks == sum(map(len, told.values()))
        assert all(num <= known[each] for each, num in found.items())
        assert max(map(len, index._parts)) <= in_part


# --- what a worker tells ---------------------------------------------------------------------------------------------


class Wire:
    """What a worker sends of its cache, by gateway."""

    def __init__(self, pool: BlockPool) -> None:
        agenda = Agenda(lambda event: None)
        agenda.send = self.send  # type: ignore[method-assign]
        self.front: Front[Any] = Front(agenda, SETTINGS, 1, pool, Trials(), REGION, lambda names: ())
        self.sent: dict[Incarnation, list[Message]] = {GATEWAY: [], OTHER_GATEWAY: []}

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent[peer].append(message)

    def begin(self, gateway: Incarnation) -> None:
        """A session opens."""
        self.front.handle(SessionOpened(gateway, Role.GATEWAY))

    def deliver(self, gateway: Incarnation, index: PrefixIndex) -> int:
        """Everything that is under way arrives; how many messages that was."""
        messages, self.sent[gateway] = self.sent[gateway], []
        for message in messages:
            assert isinstance(message, CacheEvents)
            index.apply(A, message)
        return len(messages)


def test_only_gateways_with_a_session_are_told() -> None:
    pool = BlockPool(4)
    wire = Wire(pool)
    pool.name(pool.allocate(1), names(1))
    wire.front.tell_cache()
    assert wire.sent == {GATEWAY: [], OTHER_GATEWAY: []}
    wire.begin(GATEWAY)
    assert wire.sent[GATEWAY] == [events(names(1), begins=True)]
    pool.name(pool.allocate(1), names(2))
    wire.front.tell_cache()
    assert wire.sent[GATEWAY][1:] == [events(names(2))]
    wire.front.lost(GATEWAY)
    wire.front.lost(OTHER_GATEWAY)
    pool.name(pool.allocate(1), names(3))
    wire.front.tell_cache()
    assert len(wire.sent[GATEWAY]) == 2


def test_nothing_new_is_no_message() -> None:
    wire = Wire(BlockPool(4))
    wire.begin(GATEWAY)
    wire.front.tell_cache()
    assert wire.sent[GATEWAY] == [events(begins=True)], "an empty cache is told, too: what was told before is void"


def test_a_large_cache_is_told_in_parts() -> None:
    num_blocks = 2 * MAX_CACHE_EVENTS + 1
    pool = BlockPool(num_blocks)
    chain = names(*range(num_blocks))
    pool.name(pool.allocate(num_blocks), chain)
    wire, index = Wire(pool), PrefixIndex()
    index.apply(A, events(names(-1 % 2**60)))
    wire.begin(GATEWAY)
    assert wire.deliver(GATEWAY, index) == 3
    assert index.num_blocks == num_blocks
    assert index.longest(chain) == {A: num_blocks}


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(1, 12))
def test_every_gateway_knows_what_the_pool_holds(seed: int, num_blocks: int) -> None:
    """Whatever is allocated, named, released and evicted; broken sessions lose what is under way, and begin anew."""
    draw = random.Random(seed)
    pool = BlockPool(num_blocks)
    wire = Wire(pool)
    indices: dict[Incarnation, PrefixIndex | None] = {GATEWAY: None, OTHER_GATEWAY: None}
    held: list[list[int]] = []
    for _ in range(60):
        match draw.choice(["take", "take", "name", "release", "publish", "deliver", "break", "open"]):
            case "take" if pool.num_free:
                held.append(pool.allocate(draw.randint(1, min(3, pool.num_free))))
            case "name" if held:
                blocks = draw.choice(held)
                start = draw.randrange(6)
                pool.name(blocks, names(*range(start, start + len(blocks))))
            case "release" if held:
                pool.release(held.pop(draw.randrange(len(held))))
            case "publish":
                wire.front.tell_cache()
            case "deliver":
                for gateway, index in indices.items():
                    if index is not None:
                        wire.deliver(gateway, index)
            case "break":
                gateway = draw.choice(list(indices))
                indices[gateway] = None
                wire.sent[gateway].clear()
                wire.front.lost(gateway)
            case "open":
                gateway = draw.choice(list(indices))
                if indices[gateway] is None:
                    indices[gateway] = PrefixIndex()
                wire.sent[gateway].clear()  # lost, and noticed: the session begins anew
                wire.begin(gateway)
        pool.check_invariants()
    wire.front.tell_cache()
    for gateway, index in indices.items():
        if index is not None:
            wire.deliver(gateway, index)
            index.check_invariants()
            assert held_by(index, A) == {name[:SHORT_NAME_BYTES] for name in pool.named()}
