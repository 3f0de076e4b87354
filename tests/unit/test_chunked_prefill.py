"""Chunks of prompts under a token budget: sizes, order, shares, and prompts that go while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from common.contract.tiers import Tier
from common.scheduling.chunked_prefill import Chunk, ChunkQueue, Urgency

INTERACTIVE, STANDARD, BATCH = Tier
_NUMBERS = iter(range(10**9))


@dataclass(eq=False)
class Piece:
    name: str
    num_tokens: int
    tier: Tier = STANDARD
    deadline: float = 0.0
    num_computed: int = 0
    number: int = field(default_factory=lambda: next(_NUMBERS))

    @property
    def token_ids(self) -> Sequence[int]:
        return range(self.num_tokens)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def urgency(self) -> Urgency:
        return self.tier.rank, self.deadline, self.number


class Bench:
    def __init__(self, token_budget: int = 12, chunk_size: int = 8, ageing_s: float = 10.0) -> None:
        self.queue: ChunkQueue[Piece] = ChunkQueue(ageing_s=ageing_s)
        self.token_budget = token_budget
        self.chunk_size = chunk_size

    def add(self, *pieces: Piece, now: float = 0.0) -> None:
        for piece in pieces:
            self.queue.add(piece, now)

    def schedule(self, now: float = 0.0) -> list[Chunk[Piece]]:
        chunks = self.queue.schedule(self.token_budget, self.chunk_size, now)
        self.queue.check_invariants()
        return chunks

    def done(self, chunks: Sequence[Chunk[Piece]]) -> str:
        live = self.queue.step_done(chunks)
        self.queue.check_invariants()
        return show(live)

    def step(self, now: float = 0.0) -> str:
        return self.done(self.schedule(now))

    @property
    def num_uncomputed(self) -> int:
        return sum(piece.num_uncomputed for piece in self.queue)


def show(chunks: Sequence[Chunk[Piece]]) -> str:
    return " ".join(f"{c.prompt.name}[{c.start},{c.end}{']' if c.last else ')'}" for c in chunks)


def test_a_prompt_is_computed_chunk_by_chunk_and_leaves() -> None:
    bench = Bench()
    piece = Piece("a", 19, num_computed=1)
    bench.add(piece)
    assert (len(bench.queue), bench.num_uncomputed, piece in bench.queue) == (1, 18, True)
    assert [bench.step() for _ in range(4)] == ["a[1,9)", "a[9,17)", "a[17,19]", ""]
    assert (len(bench.queue), bench.num_uncomputed, piece in bench.queue) == (0, 0, False)
    assert piece.num_computed == 19


def test_several_prompts_share_a_step_within_the_budget() -> None:
    bench = Bench(token_budget=12, chunk_size=8)
    bench.add(Piece("a", 10), Piece("b", 3), Piece("c", 9))
    assert bench.step() == "a[0,8) b[0,3] c[0,1)"
    assert bench.step() == "a[8,10] c[1,9]"


def test_tiers_come_before_deadlines_and_deadlines_before_arrival() -> None:
    bench = Bench(token_budget=100)
    bench.add(
        Piece("batch", 1, BATCH, deadline=0.0),
        Piece("late", 1, deadline=2.0),
        Piece("soon", 1, deadline=1.0),
        Piece("soon too", 1, deadline=1.0),
        Piece("urgent", 1, INTERACTIVE, deadline=3.0),
    )
    assert [piece.name for piece in bench.queue] == ["urgent", "soon", "soon too", "late", "batch"]
    assert [piece.name for piece in bench.queue.from_rank(STANDARD.rank)] == ["soon", "soon too", "late", "batch"]
    assert bench.step() == "urgent[0,1] soon[0,1] soon too[0,1] late[0,1] batch[0,1]"


def test_more_urgent_ones_pass_between_two_chunks() -> None:
    bench = Bench(token_budget=8)
    bench.add(Piece("long", 32, deadline=3.0))
    assert bench.step() == "long[0,8)"
    bench.add(Piece("short", 4, deadline=1.0), Piece("typed", 12, INTERACTIVE, deadline=9.0))
    assert bench.step() == "typed[0,8)"
    assert bench.step() == "typed[8,12] short[0,4]"
    assert bench.step() == "long[8,16)"


@pytest.mark.parametrize("token_budget", [1, 7, 8, 9, 100])
def test_a_step_takes_all_that_it_can(token_budget: int) -> None:
    bench = Bench(token_budget=token_budget, chunk_size=8)
    bench.add(*(Piece(f"{number}", 20) for number in range(3)))
    sizes = [chunk.end - chunk.start for chunk in bench.schedule()]
    assert sum(sizes) == min(token_budget, 24)
    assert max(sizes) <= 8


def test_a_removed_prompt_s_chunk_in_flight_counts_for_nothing() -> None:
    bench = Bench()
    gone, stays = Piece("gone", 8), Piece("stays", 20)
    bench.add(gone, stays)
    chunks = bench.schedule()
    bench.queue.remove(gone)
    bench.queue.remove(gone)
    assert bench.done(chunks) == "stays[0,4)"
    assert (gone.num_computed, bench.num_uncomputed) == (0, 16)


def test_a_prompt_that_has_come_back_is_not_taken_for_the_one_in_the_step() -> None:
    bench = Bench()
    piece = Piece("a", 20)
    bench.add(piece)
    chunks = bench.schedule()
    bench.queue.remove(piece)
    bench.add(piece)
    assert not bench.queue.in_flight(piece)
    assert bench.done(chunks) == ""
    assert piece.num_computed == 0
    assert bench.step() == "a[0,8)"


def test_steps_that_are_planned_while_others_run_go_on_where_those_will_end() -> None:
    bench = Bench()
    first, second = Piece("a", 20), Piece("b", 6)
    bench.add(first, second)
    one, two = bench.schedule(), bench.schedule()
    assert (show(one), show(two)) == ("a[0,8) b[0,4)", "a[8,16) b[4,6]")
    assert bench.queue.in_flight(first)
    assert bench.num_uncomputed == 26, "nothing is computed yet"
    assert bench.done(one) == "a[0,8) b[0,4)"
    assert bench.queue.in_flight(first)
    three = bench.schedule()
    assert show(three) == "a[16,20]"
    assert bench.done(two) == "a[8,16) b[4,6]"
    assert second not in bench.queue
    assert bench.done(three) == "a[16,20]"
    assert (len(bench.queue), bench.num_uncomputed) == (0, 0)


def test_a_removed_prompt_s_later_chunks_count_for_nothing_either() -> None:
    bench = Bench()
    piece = Piece("a", 20)
    bench.add(piece)
    one, two = bench.schedule(), bench.schedule()
    assert bench.done(one) == "a[0,8)"
    bench.queue.remove(piece)
    bench.add(piece)
    three = bench.schedule()
    assert show(three) == "a[8,16)"
    assert bench.done(two) == ""
    assert bench.done(three) == "a[8,16)"


# --- ageing ------------------------------------------------------------------------------------------------------


def test_an_aged_tier_gets_an_eighth_of_every_step() -> None:
    bench = Bench(token_budget=64, chunk_size=64)
    bench.add(Piece("i", 10**6, INTERACTIVE))
    bench.add(Piece("b", 20, BATCH))
    assert bench.step(now=10.0) == "i[0,64)"
    assert bench.step(now=10.5) == "i[64,120) b[0,8)"
    assert bench.step(now=11.0) == "i[120,176) b[8,16)"
    assert bench.step(now=11.5) == "i[176,236) b[16,20]"
    assert bench.step(now=12.0) == "i[236,300)"


def test_each_aged_tier_has_its_own_share() -> None:
    bench = Bench(token_budget=64, chunk_size=64)
    bench.add(Piece("i", 1000, INTERACTIVE), Piece("s", 1000, STANDARD), Piece("b", 1000, BATCH))
    assert bench.step(now=20.0) == "i[0,48) s[0,8) b[0,8)"


def test_the_share_goes_to_the_most_urgent_of_the_tier() -> None:
    bench = Bench(token_budget=64, chunk_size=6)
    bench.add(*(Piece(f"i{number}", 6, INTERACTIVE) for number in range(20)))
    bench.add(Piece("old", 100, BATCH, deadline=5.0))
    bench.add(Piece("young", 100, BATCH, deadline=1.0), now=19.0)
    assert bench.step(now=20.0).endswith(" young[0,6) old[0,2)")


def test_small_budgets_add_up_to_a_share() -> None:
    bench = Bench(token_budget=3, chunk_size=3)
    bench.add(Piece("i", 1000, INTERACTIVE), Piece("s", 1000, STANDARD), Piece("b", 1000, BATCH))
    computed = {"i": 0, "s": 0, "b": 0}
    for _ in range(80):
        chunks = bench.schedule(now=20.0)
        assert sum(chunk.end - chunk.start for chunk in chunks) == 3
        for chunk in chunks:
            computed[chunk.prompt.name] += chunk.end - chunk.start
        bench.done(chunks)
    assert computed == {"i": 180, "s": 30, "b": 30}


def test_two_shares_that_fall_due_at_once_do_not_break_the_budget() -> None:
    bench = Bench(token_budget=1, chunk_size=1)
    bench.add(Piece("i", 1000, INTERACTIVE), Piece("s", 1000, STANDARD), Piece("b", 1000, BATCH))
    steps = "".join(bench.step(now=20.0)[0] for _ in range(17))
    assert steps == "iiiiiiisbiiiiiisb"


def test_an_aged_tier_that_comes_first_anyway_has_no_share_apart() -> None:
    bench = Bench(token_budget=64, chunk_size=64)
    bench.add(Piece("s", 1000, STANDARD), Piece("t", 1000, STANDARD))
    assert bench.step(now=20.0) == "s[0,64)"


def test_a_share_and_what_is_left_over_make_one_chunk() -> None:
    bench = Bench(token_budget=64, chunk_size=40)
    bench.add(Piece("i", 20, INTERACTIVE), Piece("b", 100, BATCH))
    assert bench.step(now=20.0) == "i[0,20] b[0,40)"


# --- where a step ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "lengths", "expected"),
    [(5, (4, 3, 6), 7), (4, (4, 3, 6), 4), (0, (4, 3), 4), (99, (4, 3), 7), (5, (9, 3, 2), 11), (5, (9, 9), 16)],
)
def test_as_many_tokens_as_there_are_up_to_the_end_of_a_prompt(
    least: int, lengths: Sequence[int], expected: int
) -> None:
    """Chunks have at most 8 tokens."""
    bench = Bench()
    bench.add(*(Piece(f"p{number}", length, deadline=number) for number, length in enumerate(lengths)))
    assert bench.queue.num_up_to_end(least, 8, 0.0) == expected


def test_a_prompt_that_ends_with_the_step_before_is_no_end() -> None:
    bench = Bench(token_budget=4)
    bench.add(Piece("in flight", 4, deadline=1.0))
    chunks = bench.schedule()
    bench.add(Piece("longer than a chunk", 20), Piece("last", 3, deadline=2.0))
    assert bench.queue.num_up_to_end(5, 8, 0.0) == 11
    assert bench.done(chunks)


def test_beside_the_share_of_an_aged_tier_no_prompt_ends_a_step() -> None:
    bench = Bench()
    bench.add(Piece("batch", 6, tier=BATCH), now=0.0)
    bench.add(Piece("standard", 5), now=20.0)
    assert bench.queue.num_up_to_end(1, 8, 5.0) == 5
    assert bench.queue.num_up_to_end(1, 8, 20.0) == 11


def test_the_earliest_deadline_may_be_of_a_lower_tier() -> None:
    bench = Bench()
    bench.add(Piece("batch", 6, tier=BATCH, deadline=3.0), Piece("interactive", 5, tier=INTERACTIVE, deadline=9.0))
    assert bench.queue.due_at == 3.0
    bench.add(Piece("standard", 5, deadline=2.0))
    assert bench.queue.due_at == 2.0
