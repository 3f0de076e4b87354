"""Limits of an API key under any sequence of requests: never more than the rate and one bucket, and no longer wait
than is said."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.access.rate_limits import Allowance, KeyLimits, KeyMeter, Limit, TokenBucket

SLACK = 1e-6
steps_s = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.floats(1.0, 1e4))


@given(
    st.integers(1, 10**6),
    st.floats(0, 1e6),
    st.lists(st.tuples(steps_s, st.floats(0, 1)), max_size=60),
)
def test_no_window_admits_more_than_the_rate_and_one_bucket(
    per_minute: int, start_s: float, asked: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(per_minute, start_s)
    now_s = start_s
    taken: list[tuple[float, int]] = []
    for step_s, share in asked:
        now_s += step_s
        amount = math.ceil(share * per_minute)
        wait_s = bucket.wait_s(amount, now_s)
        assert wait_s >= 0
        if not wait_s:
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
        bucket.check_invariants()
    for first in range(len(taken)):
        total = 0
        for at_s, amount in taken[first:]:
            total += amount
            most = per_minute * (1 + (at_s - taken[first][0]) / 60)
            assert total <= most * (1 + SLACK) + SLACK


@given(st.integers(1, 10**6), st.lists(st.tuples(steps_s, st.integers(0, 10**6)), max_size=20), st.floats(0, 1))
def test_who_waits_as_long_as_is_said_is_let_in_and_no_sooner(
    per_minute: int, charged: list[tuple[float, int]], share: float
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now_s = 0.0
    for step_s, amount in charged:
        now_s += step_s
        bucket.take(amount, now_s)
    amount = math.ceil(share * per_minute)
    wait_s = bucket.wait_s(amount, now_s)
    if wait_s > SLACK:
        assert bucket.wait_s(amount, now_s + wait_s * 0.99) > 0
    assert bucket.wait_s(amount, now_s + wait_s * (1 + SLACK) + SLACK) == 0


@given(st.integers(1, 10**4), st.integers(0, 10**5), st.integers(1, 10**4), st.floats(0, 600))
def test_a_bucket_of_another_size_lacks_as_much(old: int, amount: int, new: int, step_s: float) -> None:
    bucket = TokenBucket(old, 0.0)
    bucket.take(amount, 0.0)
    missing = max(0.0, amount - step_s * old / 60)
    other = bucket.resized(new, step_s)
    other.check_invariants()
    assert math.isclose(other.allowance(step_s).reset_s, missing / new * 60, rel_tol=1e-6, abs_tol=1e-6)


@given(st.integers(1, 10**4), st.integers(0, 10**5), st.integers(0, 10**6), steps_s)
def test_what_is_given_back_fills_a_bucket_and_never_overfills_it(
    per_minute: int, taken: int, given_back: int, step_s: float
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(taken, 0.0)
    missing = max(0.0, taken - step_s * per_minute / 60)
    bucket.give_back(given_back, step_s)
    bucket.check_invariants()
    allowance = bucket.allowance(step_s)
    expected = max(0.0, missing - given_back) / per_minute * 60
    assert math.isclose(allowance.reset_s, expected, rel_tol=1e-6, abs_tol=1e-6)
    assert allowance.remaining <= per_minute
    bucket.take(per_minute, step_s)
    assert bucket.allowance(step_s).remaining == 0, "no more than one bucket at once"


@given(st.integers(1, 10**4), st.lists(st.floats(-1e4, 1e4), max_size=20), st.integers(1, 10**4))
def test_a_clock_that_goes_back_fills_no_bucket(per_minute: int, moves_s: list[float], other_size: int) -> None:
    """It is filled for the time beyond the latest moment that it has been told of, once."""
    now_s = latest_s = 1e5
    bucket = TokenBucket(per_minute, now_s)
    missing = float(per_minute)
    bucket.take(per_minute, now_s)
    for move_s in moves_s:
        now_s += move_s
        missing = max(0.0, missing - max(0.0, now_s - latest_s) * per_minute / 60)
        latest_s = max(latest_s, now_s)
        allowance = bucket.allowance(now_s)
        assert math.isclose(allowance.reset_s, missing / per_minute * 60, rel_tol=1e-6, abs_tol=1e-6)
    other = bucket.resized(other_size, now_s - 60)
    assert math.isclose(other.allowance(latest_s).reset_s, missing / other_size * 60, rel_tol=1e-6, abs_tol=1e-6)


def test_a_prompt_that_has_been_paid_for_is_let_in_whatever_the_key_has_used_since() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=100), 0.0)
    assert meter.admit(40, 0.0) is None
    meter.charge(500, 0.0)
    assert meter.admit(40, 0.0, num_taken=40) is None
    assert meter.admit(41, 0.0, num_taken=40) is not None


def level(tokens: Allowance) -> float:
    """What a bucket holds, negative on credit."""
    return tokens.limit * (1 - tokens.reset_s / 60)


class OneKey(RuleBasedStateMachine):
    """What was let in, counted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.limits = KeyLimits()
        self.meter = KeyMeter(self.limits, 0.0)
        self.num_open = 0

    @rule(step_s=steps_s)
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @rule()
    def begin(self) -> None:
        before = self.meter.allowances(self.now_s)
        refusal = self.meter.begin(self.now_s)
        if refusal is None:
            self.num_open += 1
            assert self.limits.max_concurrency is None or self.num_open <= self.limits.max_concurrency
            assert Limit.REQUESTS not in before or before[Limit.REQUESTS].remaining >= 1
        elif refusal.limit is Limit.CONCURRENCY:
            assert self.limits.max_concurrency is not None
            assert self.num_open >= self.limits.max_concurrency
            assert self.meter.allowances(self.now_s) == before
        else:
            assert refusal.limit is Limit.REQUESTS
            assert refusal.wait_s is not None
            assert before[Limit.REQUESTS].remaining == 0
            assert self.meter.allowances(self.now_s) == before

    @precondition(lambda self: self.num_open)
    @rule()
    def end(self) -> None:
        self.meter.end()
        self.num_open -= 1

    @rule(share=st.floats(0, 1), paid=st.just(0.0) | st.floats(0, 2))
    def admit(self, share: float, paid: float) -> None:
        """A prompt of which a part, all, or more than it turns out to have, was charged before."""
        num_tokens = max(1, int(share * (self.meter.most_tokens or 1000)))
        num_taken = int(paid * num_tokens)
        start = self.meter.allowances(self.now_s)
        self.meter.charge(num_taken, self.now_s)
        before = self.meter.allowances(self.now_s)
        refusal = self.meter.admit(num_tokens, self.now_s, num_taken)
        after = self.meter.allowances(self.now_s)
        if Limit.TOKENS not in start:
            assert refusal is None
            return
        tokens = before[Limit.TOKENS]
        if refusal is None:
            charged = level(start[Limit.TOKENS]) - level(after[Limit.TOKENS])
            assert math.isclose(charged, num_tokens, rel_tol=SLACK, abs_tol=SLACK)
            assert num_taken >= num_tokens or num_tokens - num_taken <= level(tokens) + SLACK * tokens.limit
        else:
            assert refusal.limit is Limit.TOKENS
            assert num_taken < num_tokens, "it has been paid for"
            assert tokens.remaining < num_tokens - num_taken
            assert refusal.wait_s is not None
            wait_s = (num_tokens - level(tokens)) / tokens.limit * 60
            assert math.isclose(refusal.wait_s, wait_s, rel_tol=SLACK, abs_tol=SLACK), "who comes again pays for all"
            assert after == before

    @rule(num_tokens=st.integers(0, 1000))
    def charge(self, num_tokens: int) -> None:
        self.meter.charge(num_tokens, self.now_s)

    @rule(num_tokens=st.integers(0, 1000))
    def give_back(self, num_tokens: int) -> None:
        self.meter.give_back(num_tokens, self.now_s)

    @rule(
        requests=st.none() | st.integers(1, 50),
        tokens=st.none() | st.integers(1, 5000),
        concurrency=st.none() | st.integers(1, 4),
    )
    def set_limits(self, requests: int | None, tokens: int | None, concurrency: int | None) -> None:
        self.limits = KeyLimits(requests_per_minute=requests, tokens_per_minute=tokens, max_concurrency=concurrency)
        self.meter.set_limits(self.limits, self.now_s)

    @invariant()
    def holds(self) -> None:
        self.meter.check_invariants()
        assert self.meter.num_open == self.num_open
        allowances = self.meter.allowances(self.now_s)
        assert (Limit.REQUESTS in allowances) == (self.limits.requests_per_minute is not None)
        assert (Limit.TOKENS in allowances) == (self.limits.tokens_per_minute is not None)
        for allowance in allowances.values():
            assert 0 <= allowance.remaining <= allowance.limit
            assert allowance.reset_s >= 0


TestOneKey = OneKey.TestCase
