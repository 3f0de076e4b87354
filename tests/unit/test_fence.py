"""The attempt fence: each attempt once, none older than the newest, and a bounded memory."""

from __future__ import annotations

import pytest

from common.contract.ids import RequestId, RequestKey
from common.runtime import fence
from common.runtime.fence import MAX_REMEMBERED, AttemptFence


def key(request: str, attempt: int) -> RequestKey:
    return RequestKey(RequestId(request), attempt)


def test_each_attempt_is_let_in_once() -> None:
    gate = AttemptFence()
    assert gate.admits(key("a", 1))
    assert not gate.admits(key("a", 1))


def test_a_newer_attempt_shuts_out_every_older_one() -> None:
    gate = AttemptFence()
    assert gate.admits(key("a", 3))
    assert [gate.admits(key("a", attempt)) for attempt in (1, 2, 3)] == [False] * 3
    assert gate.admits(key("a", 4))
    assert not gate.admits(key("a", 3))


def test_attempts_may_be_skipped_and_the_largest_is_a_bound() -> None:
    gate = AttemptFence()
    assert gate.admits(key("a", 2**31))
    assert not gate.admits(key("a", 2**31))


def test_requests_do_not_fence_each_other() -> None:
    gate = AttemptFence()
    assert gate.admits(key("a", 9))
    assert gate.admits(key("b", 1))
    assert not gate.admits(key("a", 1))


def test_an_attempt_below_the_first_is_never_let_in() -> None:
    assert not AttemptFence().admits(key("a", 0))


def test_the_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "MAX_REMEMBERED", 3)
    gate = AttemptFence()
    for name in "abc":
        assert gate.admits(key(name, 1))
    assert gate.admits(key("a", 2)), "a newer attempt"
    assert gate.admits(key("d", 1)), "which makes b the oldest"
    assert not gate.admits(key("a", 2))
    assert not gate.admits(key("c", 1))
    assert not gate.admits(key("d", 1))
    assert len(gate._newest) == 3
    assert gate.admits(key("b", 1)), "b is forgotten"


def test_replays_do_not_push_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "MAX_REMEMBERED", 2)
    gate = AttemptFence()
    assert gate.admits(key("a", 1))
    assert gate.admits(key("b", 1))
    for _ in range(10):
        assert not gate.admits(key("b", 1))
    assert not gate.admits(key("a", 1))


def test_as_many_as_are_promised_are_remembered() -> None:
    gate = AttemptFence()
    for number in range(MAX_REMEMBERED):
        assert gate.admits(key(str(number), 1))
    assert not gate.admits(key("0", 1))
    assert gate.admits(key("one more", 1))
    assert not gate.admits(key("1", 1))
    assert len(gate._newest) == MAX_REMEMBERED
