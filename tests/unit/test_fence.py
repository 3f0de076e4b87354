"""The attempt fence: each attempt once, none older than the newest, and a bounded memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from common.contract.ids import RequestId, RequestKey
from common.runtime import fence
from common.runtime.fence import REMEMBERED_S, AttemptFence


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def key(request: str, attempt: int) -> RequestKey:
    return RequestKey(RequestId(request), attempt)


def test_each_attempt_is_let_in_once() -> None:
    gate = AttemptFence(Clock())
    assert gate.admits(key("a", 1))
    assert not gate.admits(key("a", 1))


def test_a_newer_attempt_shuts_out_every_older_one() -> None:
    gate = AttemptFence(Clock())
    assert gate.admits(key("a", 3))
    assert [gate.admits(key("a", attempt)) for attempt in (1, 2, 3)] == [False] * 3
    assert gate.admits(key("a", 4))
    assert not gate.admits(key("a", 3))


def test_attempts_may_be_skipped_and_the_largest_is_a_bound() -> None:
    gate = AttemptFence(Clock())
    assert gate.admits(key("a", 2**31))
    assert not gate.admits(key("a", 2**31))


def test_requests_do_not_fence_each_other() -> None:
    gate = AttemptFence(Clock())
    assert gate.admits(key("a", 9))
    assert gate.admits(key("b", 1))
    assert not gate.admits(key("a", 1))


def test_an_attempt_below_the_first_is_never_let_in() -> None:
    assert not AttemptFence(Clock()).admits(key("a", 0))


def test_what_is_old_is_forgotten_and_nothing_sooner() -> None:
    clock = Clock()
    gate = AttemptFence(clock)
    assert gate.admits(key("a", 1))
    clock.now += REMEMBERED_S - 1
    assert gate.admits(key("b", 1))
    for _ in range(3):
        assert not gate.admits(key("a", 1))
        assert not gate.admits(key("b", 1))
        clock.now += REMEMBERED_S / 3 - 1
    clock.now += 2 * REMEMBERED_S
    assert gate.admits(key("a", 1)), "nobody sends it so late"
    assert len(gate) == 1


def test_a_newer_attempt_is_remembered_from_then_on() -> None:
    clock = Clock()
    gate = AttemptFence(clock)
    assert gate.admits(key("a", 1))
    clock.now += REMEMBERED_S
    assert gate.admits(key("a", 2))
    clock.now += REMEMBERED_S
    assert not gate.admits(key("a", 2)), "after twice the time since the first"
    assert not gate.admits(key("a", 1))


def test_the_memory_follows_the_rate_and_does_not_grow_with_time() -> None:
    clock = Clock()
    gate = AttemptFence(clock)
    most = []
    for number in range(10_000):
        clock.now += 0.1
        assert gate.admits(key(str(number), 1))
        most.append(len(gate))
    assert max(most) <= 2 * (REMEMBERED_S / 0.1 + 1)
    assert max(most[5000:]) == max(most[:5000])


def test_however_quickly_they_come_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "MAX_REMEMBERED", 6)
    gate = AttemptFence(Clock())
    for number in range(20):
        assert gate.admits(key(str(number), 1))
        assert len(gate) <= 6
        for last in range(max(0, number - 2), number + 1):
            assert not gate.admits(key(str(last), 1)), "of the last three"


def test_replays_do_not_push_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "MAX_REMEMBERED", 6)
    gate = AttemptFence(Clock())
    assert gate.admits(key("a", 1))
    assert gate.admits(key("b", 1))
    for _ in range(10):
        assert not gate.admits(key("b", 1))
    assert not gate.admits(key("a", 1))


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_fence_that_forgets_nothing_while_nothing_is_old(seed: int) -> None:
    """Against the plain rule, over random attempts; the clock goes on by less than what is remembered."""
    draw, clock = random.Random(seed), Clock()
    gate, newest = AttemptFence(clock), dict[str, int]()
    for _ in range(500):
        clock.now += draw.uniform(0, REMEMBERED_S / 500)
        request, attempt = draw.choice("abcdefgh"), draw.randint(1, 40)
        assert gate.admits(key(request, attempt)) == (attempt > newest.get(request, 0))
        newest[request] = max(attempt, newest.get(request, 0))
