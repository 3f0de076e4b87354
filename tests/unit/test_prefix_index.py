"""Which worker probably holds which blocks: exact while there is room, then forgotten from the far end."""

from __future__ import annotations

import sys
from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.block_hashes import BlockHash, block_hashes
from common.contract.ids import Incarnation
from gateway.attempt import Place
from gateway.prefix_index import MAX_PLACES, PrefixIndex, Trail

A, B = Place("a:1", Incarnation("A")), Place("b:1", Incarnation("B"))
SIZE = 4
MANY = 1000


def names(*token_ids: int) -> list[BlockHash]:
    """One block for each number."""
    return block_hashes(token_ids, 1)


def test_it_knows_who_holds_how_much() -> None:
    index = PrefixIndex(MANY)
    index.add(names(1, 2, 3), A)
    index.add(names(1, 2), B)
    assert index.longest(names(1, 2, 3, 4)) == {A: 3, B: 2}
    assert index.longest(names(1, 2, 9)) == {A: 2, B: 2}
    assert index.longest(names(1)) == {A: 1, B: 1}
    assert index.longest(names(2, 3)) == {}
    assert index.longest([]) == {}
    assert len(index) == 3


def test_another_salt_is_another_prefix() -> None:
    index = PrefixIndex(MANY)
    index.add(block_hashes((1, 2), 1, "one"), A)
    assert index.longest(block_hashes((1, 2), 1, "another")) == {}


def test_another_life_is_another_place() -> None:
    index = PrefixIndex(MANY)
    reborn = Place(A.address, Incarnation("A2"))
    index.add(names(1, 2), A)
    index.add(names(1), reborn)
    assert index.longest(names(1, 2)) == {A: 2, reborn: 1}


def test_the_end_of_what_was_not_confirmed_for_longest_is_forgotten_first() -> None:
    index = PrefixIndex(4)
    index.add(names(1, 2), A)
    index.add(names(3, 4), A)
    index.add(names(1, 2), A)
    index.add(names(5), A)
    assert [index.longest(names(*ids)) for ids in ((1, 2), (3, 4), (5,))] == [{A: 2}, {A: 1}, {A: 1}]


def test_of_a_sequence_that_is_too_long_the_beginning_is_kept() -> None:
    index = PrefixIndex(3)
    index.add(names(1, 2, 3, 4, 5), A)
    index.check_invariants()
    assert index.longest(names(1, 2, 3, 4, 5)) == {A: 3}


def test_a_block_that_everyone_holds_is_remembered_with_the_last_few() -> None:
    index = PrefixIndex(MANY)
    crowd = [Place(f"w{i}:1", Incarnation(str(i))) for i in range(MAX_PLACES + 3)]
    for place in crowd:
        index.add(names(1), place)
    assert set(index.longest(names(1))) == set(crowd[-MAX_PLACES:])
    index.check_invariants()


def test_a_worker_that_is_no_longer_listed_with_a_common_beginning_still_holds_what_follows() -> None:
    """Every worker has the system's prompt; who has this conversation is found all the same."""
    index = PrefixIndex(MANY)
    index.add(names(1, 2, 3), A)
    for i in range(MAX_PLACES):
        index.add(names(1, 90 + i), Place(f"w{i}:1", Incarnation(str(i))))
    assert A not in index.longest(names(1))
    assert index.longest(names(1, 2, 3))[A] == 3


class Naive:
    """The same, by lists and searches."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.recent: list[tuple[int, ...]] = []
        """Prefixes, the least recently confirmed first."""
        self.places: dict[tuple[int, ...], list[Place]] = {}

    def add(self, token_ids: tuple[int, ...], place: Place) -> None:
        for length in range(min(len(token_ids), self.max_blocks), 0, -1):
            prefix = token_ids[:length]
            self.recent = [other for other in self.recent if other != prefix] + [prefix]
            held = [other for other in self.places.get(prefix, []) if other != place]
            self.places[prefix] = [*held, place][-MAX_PLACES:]
        for gone in self.recent[: -self.max_blocks]:
            del self.places[gone]
        self.recent = self.recent[-self.max_blocks :]

    def longest(self, token_ids: tuple[int, ...]) -> dict[Place, int]:
        prefixes = [token_ids[:length] for length in range(1, len(token_ids) + 1)]
        known = list(takewhile(self.places.__contains__, prefixes))
        return {place: len(prefix) for prefix in known for place in self.places[prefix]}


PLACES = [Place(f"w{number}:1", Incarnation(str(number))) for number in range(MAX_PLACES + 2)]
TOKENS = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    max_blocks=st.sampled_from([1, 3, 8, 30, MANY]),
    added=st.lists(st.tuples(TOKENS, st.sampled_from(PLACES)), max_size=40),
    asked=st.lists(TOKENS, max_size=5),
)
def test_it_agrees_with_a_naive_one(
    max_blocks: int, added: list[tuple[tuple[int, ...], Place]], asked: list[tuple[int, ...]]
) -> None:
    index, naive = PrefixIndex(max_blocks), Naive(max_blocks)
    ever: dict[Place, set[tuple[int, ...]]] = {place: set() for place in PLACES}
    for token_ids, place in added:
        index.add(names(*token_ids), place)
        naive.add(token_ids, place)
        ever[place] |= {token_ids[:length] for length in range(1, len(token_ids) + 1)}
        index.check_invariants()
        assert len(index) == len(naive.recent)
        assert index.longest(names(*token_ids)).get(place, 0) == min(len(token_ids), max_blocks), "just confirmed"
        for question in [*asked, token_ids]:
            answer = index.longest(names(*question))
            assert answer == naive.longest(question)
            assert all(question[:length] in ever[place] for place, length in answer.items())


def test_a_long_sequence_costs_what_its_blocks_cost() -> None:
    index = PrefixIndex(2**18)

    def calls_per_block(chain: list[BlockHash]) -> float:
        num_calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            index.add(chain, A)
            length = index.longest(chain)[A]
        finally:
            sys.setprofile(None)
        assert length == len(chain)
        return num_calls / len(chain)

    assert calls_per_block(names(*range(100_000))) < 1.1 * calls_per_block(names(*range(2_000)))


# --- a request's trail -----------------------------------------------------------------------------------------------


def test_a_request_finds_what_an_earlier_one_left() -> None:
    index = PrefixIndex(MANY)
    first = Trail(index, SIZE, "", range(10))
    assert first.cached() == {}
    first.prompt_computed(A)
    assert Trail(index, SIZE, "", range(10)).cached() == {A: 8}
    assert Trail(index, SIZE, "", (*range(8), 99)).cached() == {A: 8}
    assert Trail(index, SIZE, "", (*range(4), *[99] * 10)).cached() == {A: 4}
    assert Trail(index, SIZE, "salt", range(10)).cached() == {}


def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    index = PrefixIndex(MANY)
    Trail(index, SIZE, "", range(8)).prompt_computed(A)
    assert Trail(index, SIZE, "", range(8)).cached() == {A: 4}
    assert Trail(index, SIZE, "", range(9)).cached() == {A: 8}
    assert Trail(index, SIZE, "", range(1)).cached() == {}


def test_output_leaves_all_but_its_last_token() -> None:
    index = PrefixIndex(MANY)
    trail = Trail(index, SIZE, "", range(6))
    trail.append((6,))
    trail.append((7, 8))
    trail.decoded(B)
    assert Trail(index, SIZE, "", range(20)).cached() == {B: 8}
    trail = Trail(index, SIZE, "", range(100, 106))
    trail.append((106, 107))
    trail.decoded(B)
    assert Trail(index, SIZE, "", range(100, 120)).cached() == {B: 4}, "the KV of 107 was never computed"
