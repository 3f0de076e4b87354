"""Which worker holds which blocks: what the workers tell, and nothing else."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.block_hashes import SHORT_NAME_BYTES, BlockHash, block_hashes
from common.contract.ids import Incarnation
from common.contract.messages import MAX_CACHE_EVENTS, CacheEvents, Message
from common.engine.block_pool import BlockPool
from common.engine.cache_feed import CacheFeed
from gateway.serving.attempt import Place
from gateway.workers.prefix_index import PrefixIndex

A, B = Place("a:1", Incarnation("A")), Place("b:1", Incarnation("B"))
GATEWAY, OTHER_GATEWAY = Incarnation("G"), Incarnation("H")


def names(*token_ids: int) -> list[BlockHash]:
    """One block for each number."""
    return block_hashes(token_ids, 1)


def short(block_hashes: list[BlockHash]) -> bytes:
    return b"".join(name[:SHORT_NAME_BYTES] for name in block_hashes)


def events(
    stored: list[BlockHash] | None = None, removed: list[BlockHash] | None = None, *, begins: bool = False
) -> CacheEvents:
    return CacheEvents(begins=begins, stored=short(stored or []), removed=short(removed or []))


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
    reborn = Place(A.address, Incarnation("A2"))
    index.apply(A, events(names(1, 2)))
    index.apply(reborn, events(names(1)))
    assert index.longest(names(1, 2)) == {A: 2, reborn: 1}
    index.forget(A)
    index.forget(A)
    assert index.longest(names(1, 2)) == {reborn: 1}


# --- what a worker tells ---------------------------------------------------------------------------------------------


class Wire:
    """What a worker's feed sends, by gateway."""

    def __init__(self, pool: BlockPool) -> None:
        self.feed = CacheFeed(pool, self.send)
        self.sent: dict[Incarnation, list[Message]] = {GATEWAY: [], OTHER_GATEWAY: []}

    def send(self, peer: Incarnation, message: Message) -> None:
        self.sent[peer].append(message)

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
    wire.feed.publish()
    assert wire.sent == {GATEWAY: [], OTHER_GATEWAY: []}
    wire.feed.begin(GATEWAY)
    assert wire.sent[GATEWAY] == [events(names(1), begins=True)]
    pool.name(pool.allocate(1), names(2))
    wire.feed.publish()
    assert wire.sent[GATEWAY][1:] == [events(names(2))]
    wire.feed.end(GATEWAY)
    wire.feed.end(OTHER_GATEWAY)
    pool.name(pool.allocate(1), names(3))
    wire.feed.publish()
    assert len(wire.sent[GATEWAY]) == 2


def test_nothing_new_is_no_message() -> None:
    wire = Wire(BlockPool(4))
    wire.feed.begin(GATEWAY)
    wire.feed.publish()
    assert wire.sent[GATEWAY] == [events(begins=True)], "an empty cache is told, too: what was told before is void"


def test_a_large_cache_is_told_in_parts() -> None:
    num_blocks = 2 * MAX_CACHE_EVENTS + 1
    pool = BlockPool(num_blocks)
    chain = names(*range(num_blocks))
    pool.name(pool.allocate(num_blocks), chain)
    wire, index = Wire(pool), PrefixIndex()
    index.apply(A, events(names(-1 % 2**60)))
    wire.feed.begin(GATEWAY)
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
                wire.feed.publish()
            case "deliver":
                for gateway, index in indices.items():
                    if index is not None:
                        wire.deliver(gateway, index)
            case "break":
                gateway = draw.choice(list(indices))
                indices[gateway] = None
                wire.sent[gateway].clear()
                wire.feed.end(gateway)
            case "open":
                gateway = draw.choice(list(indices))
                if indices[gateway] is None:
                    indices[gateway] = PrefixIndex()
                wire.sent[gateway].clear()  # lost, and noticed: the session begins anew
                wire.feed.begin(gateway)
        pool.check_invariants()
    wire.feed.publish()
    for gateway, index in indices.items():
        if index is not None:
            wire.deliver(gateway, index)
            assert index._held[A] == {name[:SHORT_NAME_BYTES] for name in pool.named()}
