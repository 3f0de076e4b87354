"""What admission rests on, against models that take every step: forecast, profile of lengths, heap."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.contract.tiers import Tier
from common.scheduling.lazy_heap import LazyHeap
from decode_worker.forecast import Forecast
from decode_worker.output_profile import OutputProfile

NEWCOMER = st.tuples(st.integers(1, 40), st.integers(0, 12))
"""Steps it is expected to take, blocks that it alone holds."""
KEY = st.sampled_from("abcdefgh")


def simulated(block_size: int, num_used: int | Fraction, sequences: list[tuple[int, Fraction]]) -> int:
    """The peak of the blocks in use, found by taking every step; each sequence is (steps left, blocks it holds)."""
    most, in_use = Fraction(num_used), Fraction(num_used)
    grown = Fraction(0)
    for step in range(1, max((left for left, _ in sequences), default=0) + 1):
        grown += Fraction(1, block_size)
        alive = [left for left, _ in sequences if left >= step]
        in_use += Fraction(len(alive), block_size)
        most = max(most, in_use)
        for left, held in sequences:
            if left == step:
                in_use -= held + grown
    return math.ceil(most)


class ForecastMachine(RuleBasedStateMachine):
    """Sequences come, begin to grow, end, and live longer than was expected."""

    def __init__(self) -> None:
        super().__init__()
        self.block_size = 4
        self.forecast: Forecast[str] = Forecast(4)
        self.step = 0
        self.growing: dict[str, tuple[int, Fraction, int]] = {}
        """Step since when it grows, blocks it held then, step at which it is expected to end."""
        self.held: dict[str, tuple[int, int, int]] = {}
        """Step since when it is here, blocks, steps it is expected to take."""

    @initialize(block_size=st.sampled_from([1, 2, 3, 4, 7, 16]), step=st.integers(0, 10_000))
    def begin(self, block_size: int, step: int) -> None:
        self.block_size, self.step = block_size, step
        self.forecast = Forecast(block_size)

    @rule(key=KEY, num_steps=st.integers(1, 40), num_private=st.integers(0, 20))
    def hold(self, key: str, num_steps: int, num_private: int) -> None:
        self.remove(key)
        self.held[key] = self.step, num_private, num_steps
        self.forecast.hold(key, num_steps=num_steps, num_private=num_private)
        assert self.forecast.held(key) == (num_steps, num_private)

    @rule(key=KEY, num_steps=st.integers(1, 40), num_private=st.integers(0, 20))
    def put(self, key: str, num_steps: int, num_private: int) -> None:
        if key in self.growing:
            self.remove(key)
        self.held.pop(key, None)
        self.growing[key] = self.step, Fraction(num_private), self.step + num_steps
        self.forecast.put(key, step=self.step, end_step=self.step + num_steps, num_private=num_private)

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), num_steps=st.integers(1, 40))
    def postpone(self, data: st.DataObject, num_steps: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.growing)))
        since, num_private, _ = self.growing[key]
        self.growing[key] = since, num_private, self.step + num_steps
        self.forecast.move(key, self.step + num_steps)

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), num_tokens=st.integers(1, 15))
    def hurry(self, data: st.DataObject, num_tokens: int) -> None:
        """It gets several tokens in one step."""
        key = data.draw(st.sampled_from(sorted(self.growing)))
        since, num_private, end = self.growing[key]
        end = max(end - num_tokens, self.step + 1)
        self.growing[key] = since, num_private + Fraction(num_tokens, self.block_size), end
        self.forecast.move(key, end, num_tokens)

    @precondition(lambda self: self.growing)
    @rule(data=st.data(), num_private=st.integers(0, 20))
    def stop(self, data: st.DataObject, num_private: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.growing)))
        _, _, end = self.growing.pop(key)
        self.held[key] = self.step, num_private, max(1, end - self.step)
        self.forecast.stop(key, step=self.step, num_private=num_private)

    @rule(key=KEY)
    def remove(self, key: str) -> None:
        self.growing.pop(key, None)
        self.held.pop(key, None)
        self.forecast.remove(key)

    @rule(num_steps=st.integers(1, 30))
    def advance(self, num_steps: int) -> None:
        self.step += num_steps

    @rule(newcomers=st.lists(NEWCOMER, max_size=3), num_others=st.integers(0, 50))
    def ask(self, newcomers: list[tuple[int, int]], num_others: int) -> None:
        self.compare(newcomers, num_others)

    @invariant()
    def agrees(self) -> None:
        assert set(self.forecast) == self.growing.keys() | self.held.keys()
        assert len(self.forecast) == len(self.growing) + len(self.held)
        assert all(key in self.forecast for key in self.forecast)
        self.compare([], 7)

    def compare(self, newcomers: list[tuple[int, int]], num_others: int) -> None:
        by_key = {
            key: (max(1, end - self.step), num_private + Fraction(self.step - since, self.block_size))
            for key, (since, num_private, end) in self.growing.items()
        }
        by_key |= {key: (num_steps, Fraction(num_private)) for key, (_, num_private, num_steps) in self.held.items()}
        coming = [(num_steps, Fraction(num_private)) for num_steps, num_private in newcomers]
        sequences = [*by_key.values(), *coming]
        num_used = num_others + math.ceil(sum(held for _, held in sequences))
        expected = simulated(self.block_size, num_used, sequences)
        found = self.forecast.peak(self.step, num_used, newcomers)
        # Those who came in this step may count as if they never ended.
        entered = self.growing | self.held
        recent = [key for key, (since, _, _) in entered.items() if since == self.step]
        others = [*(sequence for key, sequence in by_key.items() if key not in recent), *coming]
        growth = sum((Fraction(by_key[key][0], self.block_size) for key in recent), Fraction(0))
        at_most = simulated(self.block_size, num_used + growth, others)
        # Only fractions of powers of two are exact: with others a whole number may come out a little above itself.
        exact = self.block_size & (self.block_size - 1) == 0
        assert expected <= found <= max(expected, at_most) + (not exact), (sequences, num_used)
        if all(end >= self.step for _, _, end in self.growing.values()):
            assert self.forecast.most(self.step, num_used, newcomers) >= expected, "the bound on the peak is below it"


ForecastMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestForecast = ForecastMachine.TestCase


def test_blocks_that_a_sequence_has_grown_by_drafts_come_back_when_it_ends() -> None:
    forecast: Forecast[str] = Forecast(4)
    forecast.put("drafted", step=0, end_step=5, num_private=0)
    forecast.put("long", step=0, end_step=40, num_private=0)
    forecast.move("drafted", 1, 4)
    assert forecast.peak(0, 1) == 1 + 40 / 4 - 1


@given(
    st.sampled_from([1, 2, 4, 5, 16]),
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=12),
)
def test_whole_blocks_are_never_further_off_than_one_for_each_sequence(
    block_size: int, sequences: list[tuple[int, int]]
) -> None:
    """The forecast counts fractions; block tables grow by whole blocks. Each sequence is (tokens, steps left)."""

    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // block_size)

    forecast: Forecast[int] = Forecast(block_size)
    for index, (num_tokens, num_steps) in enumerate(sequences):
        forecast.put(index, step=0, end_step=num_steps, num_private=blocks(num_tokens))
    num_used = sum(blocks(num_tokens) for num_tokens, _ in sequences)
    real = max(
        sum(blocks(num_tokens + step) for num_tokens, num_steps in sequences if num_steps >= step) for step in range(61)
    )
    assert abs(forecast.peak(0, num_used) - real) <= len(sequences)


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(list(Tier)), st.integers(1, 50)), max_size=120),
    st.integers(0, 60),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 60),
)
def test_the_profile_draws_from_the_recent_lengths_that_are_still_possible(
    window: int, seen: list[tuple[Tier, int]], num_output: int, rank: float, max_output: int
) -> None:
    profile = OutputProfile(window)
    recent: defaultdict[Tier, list[int]] = defaultdict(list)
    for tier, length in seen:
        profile.observe(tier, length)
        recent[tier] = [*recent[tier], length][-window:]
    for tier in Tier:
        found = profile.predict(tier, num_output, rank, max_output)
        if num_output >= max_output:
            assert found == max_output
            continue
        assert num_output < found <= max_output
        longer = sorted(length for length in recent[tier] if length > num_output)
        if len(recent[tier]) >= 32:
            known = longer[int(rank * len(longer))] if longer else 2 * num_output + 1
            assert found == min(known, max_output)
        elif not recent[tier]:
            assert found == min(
                range(num_output + 1, max_output + 1)[int(rank * (max_output - num_output))], max_output
            )


@given(
    st.lists(st.tuples(st.sampled_from(list(Tier)), st.integers(1, 50)), max_size=80),
    st.integers(0, 60),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    st.integers(1, 100),
)
def test_a_higher_rank_is_no_shorter_answer(
    seen: list[tuple[Tier, int]], num_output: int, ranks: list[float], max_output: int
) -> None:
    profile = OutputProfile()
    for tier, length in seen:
        profile.observe(tier, length)
    low, high = sorted(ranks)
    for tier in Tier:
        assert profile.predict(tier, num_output, low, max_output) <= profile.predict(tier, num_output, high, max_output)


class LazyHeapMachine(RuleBasedStateMachine):
    """Against a list that is sorted anew each time; the sort is stable, so equal keys keep their order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: LazyHeap[int] = LazyHeap()
        self.items: list[tuple[int, int]] = []
        """(key, item), in the order of arrival."""

    @property
    def in_order(self) -> list[int]:
        return [item for _, item in sorted(self.items, key=lambda entry: entry[0])]

    @rule(item=st.integers(0, 30), key=st.integers(0, 5))
    def add(self, item: int, key: int) -> None:
        if item not in self.heap:
            self.heap.add(item, key)
            self.items.append((key, item))

    @rule(item=st.integers(0, 30))
    def discard(self, item: int) -> None:
        self.heap.discard(item)
        self.items = [entry for entry in self.items if entry[1] != item]

    @rule()
    def take_first(self) -> None:
        first = self.heap.first()
        assert first == (self.in_order[0] if self.items else None)
        if first is not None:
            self.discard(first)

    @rule(num=st.integers(0, 40))
    def smallest(self, num: int) -> None:
        assert self.heap.smallest(num) == self.in_order[:num]

    @invariant()
    def agrees(self) -> None:
        self.heap.check_invariants()
        assert len(self.heap) == len(self.items)
        assert set(self.heap) == {item for _, item in self.items}
        assert self.heap.first() == (self.in_order[0] if self.items else None)


LazyHeapMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestLazyHeap = LazyHeapMachine.TestCase
