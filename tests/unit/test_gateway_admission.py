"""What is expected of a worker, and who is not let in for it."""

from __future__ import annotations

import heapq
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given as each_of
from hypothesis import settings
from hypothesis import strategies as st
from test_registry_router import LIFE, load, view, welcome

from common.contract.messages.session import Heartbeat, Role
from common.contract.tiers import Tier
from gateway.dispatch import estimates
from gateway.dispatch.placement import Placement
from gateway.dispatch.router import Expected
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.workers.load_table import LoadTable
from gateway.workers.registry import Registry
from gateway.workers.worker_view import Given, WorkerView

INTERACTIVE, STANDARD, BATCH = Tier
P, D = "p:1", "d:1"


def given(number: int, tier: Tier = STANDARD, *, tokens: int = 0, sequences: int = 0, blocks: int = 0) -> Given:
    return Given(number=number, tier=tier, num_tokens=tokens, num_sequences=sequences, num_blocks=blocks)


# --- estimates -------------------------------------------------------------------------------------------------------


def queue_s(worker: WorkerView, tier: Tier, now: float) -> float:
    return float(estimates.queue_s(LoadTable([worker]), tier, now)[0])


def prompt_s(worker: WorkerView, num_tokens: int, num_here: int, num_elsewhere: int = 0) -> float:
    return float(estimates.prompt_s(LoadTable([worker]), num_tokens, np.array([float(num_here)]), num_elsewhere)[0])


def room_s(worker: WorkerView, tier: Tier, num_sequences: int) -> float:
    return float(estimates.room_s(LoadTable([worker]), tier, num_sequences)[0])


def occupancy(worker: WorkerView) -> float:
    return float(LoadTable([worker]).occupancy[0])


def test_a_queue_is_what_comes_before_a_tier() -> None:
    worker = view(P, Role.PREFILL, load=load(queued=(100, 200, 400), token_s=0.01))
    assert [queue_s(worker, tier, 0.0) for tier in Tier] == pytest.approx([1.0, 3.0, 7.0])


def test_a_prompt_takes_what_is_not_cached_or_cheaper_to_pull() -> None:
    worker = view(P, Role.PREFILL, load=load(token_s=0.01, pulled_token_s=0.001))
    assert prompt_s(worker, 100, 0) == pytest.approx(1.0)
    assert prompt_s(worker, 100, 60) == pytest.approx(0.4)
    assert prompt_s(worker, 100, 0, 50) == pytest.approx(0.005 + 0.05 + 0.5)
    assert prompt_s(worker, 100, 60, 50) == pytest.approx(0.4), "it has more itself"
    dear = view(P, Role.PREFILL, load=load(token_s=0.01, pulled_token_s=0.02))
    assert prompt_s(dear, 100, 0, 50) == pytest.approx(1.0)


def test_room_is_there_while_places_are_and_then_as_fast_as_sequences_end() -> None:
    worker = view(D, Role.DECODE, load=load(sequences=(2, 1, 5), places=4, sequence_s=8.0))
    assert room_s(worker, INTERACTIVE, 2) == 0.0
    assert room_s(worker, INTERACTIVE, 3) == pytest.approx(2.0), "one too many, and four end in 8 s"
    assert room_s(worker, STANDARD, 1) == 0.0
    assert room_s(worker, BATCH, 1) == pytest.approx(10.0)
    assert room_s(view(D, Role.DECODE), BATCH, 99) == 0.0, "more than fit at all"
    unheard = view(D, Role.DECODE)
    unheard.unseen.append(given(1, sequences=70))
    assert room_s(unheard, STANDARD, 1) == pytest.approx(7 / 64), "it has not said how many fit: a batch, say"
    fresh = view(D, Role.DECODE, load=load(sequences=(0, 6, 0), places=4))
    assert room_s(fresh, STANDARD, 1) == pytest.approx(0.75), "nothing has ended there yet, and it is full"
    idle = view(D, Role.DECODE, load=load(places=4, sequence_s=8.0))
    assert room_s(idle, INTERACTIVE, 16) == 0.0, "more than it ever has places for: it begins with those that fit"


def test_what_a_worker_was_given_counts_until_it_has_reported_it() -> None:
    registry = Registry((P,), (D,), "c")
    registry.opened(P, LIFE, welcome(Role.PREFILL))
    registry.opened(D, LIFE, welcome(Role.DECODE))
    worker, decode = registry.workers[P], registry.workers[D]
    registry.heartbeat(P, load(token_s=0.01), 0.0)
    registry.took(P, given(1, tokens=100))
    registry.took(P, given(2, BATCH, tokens=50))
    assert queue_s(worker, STANDARD, 0.0) == pytest.approx(1.0)
    assert queue_s(worker, BATCH, 0.0) == pytest.approx(1.5)
    registry.heartbeat(P, load(token_s=0.01, queued=(0, 90, 0), received=1), 0.0)
    assert queue_s(worker, BATCH, 0.0) == pytest.approx(1.4), "the second had not arrived when that was said"
    registry.heartbeat(P, load(token_s=0.01, queued=(0, 30, 50), received=2), 0.0)
    assert queue_s(worker, BATCH, 0.0) == pytest.approx(0.8)

    registry.took(D, given(6, sequences=1))
    assert occupancy(decode) == 1.0, "it has not said how much room it has"
    registry.resynced(D)
    registry.heartbeat(D, load(places=2, sequence_s=1.0, total=100), 0.0)
    registry.took(D, given(7, sequences=2, blocks=30))
    assert room_s(decode, STANDARD, 1) == pytest.approx(0.5)
    assert occupancy(decode) == pytest.approx(0.3)
    over = given(8, sequences=1, blocks=5)
    registry.took(D, over)
    registry.left(D, LIFE, over)
    assert (room_s(decode, STANDARD, 1), occupancy(decode)) == pytest.approx((0.5, 0.3)), "it has ended"
    registry.resynced(D)
    assert (room_s(decode, STANDARD, 1), occupancy(decode)) == (0.0, 0.0)
    registry.took(D, given(1, sequences=2))
    registry.heartbeat(D, load(places=2, sequences=(1, 3, 0), sequence_s=1.0, received=1), 0.0)
    registry.left(D, LIFE, given(1, sequences=2))
    assert decode.sequences == [1, 2, 0], "the last one has ended; the others may have been counted off"
    registry.left(D, LIFE, given(1, sequences=2))
    assert decode.sequences == [1, 1, 0]
    registry.heartbeat(D, load(places=2, sequences=(1, 1, 0), sequence_s=1.0, received=1), 0.0)
    assert decode.sequences == [1, 1, 0]
    registry.left(D, LIFE, given(1, sequences=1))
    registry.lost(D)
    registry.opened(D, LIFE, welcome(Role.DECODE))
    assert decode.sequences == [0, 0, 0]


def test_what_a_worker_has_probably_done_since_its_report_counts_no_more() -> None:
    registry = Registry((P,), (D,), "c")
    registry.opened(P, LIFE, welcome(Role.PREFILL))
    worker = registry.workers[P]
    registry.heartbeat(P, load(token_s=0.01, queued=(50, 100, 100)), 10.0)
    assert queue_s(worker, STANDARD, 9.9) == pytest.approx(1.5), "asked about a moment before"
    assert queue_s(worker, STANDARD, 10.5) == pytest.approx(1.0)
    assert queue_s(worker, INTERACTIVE, 10.4) == pytest.approx(0.1)
    assert queue_s(worker, INTERACTIVE, 10.6) == 0.0
    assert queue_s(worker, STANDARD, 99.0) == pytest.approx(1.0), "one that is silent for long has perhaps stopped"
    registry.heartbeat(P, load(token_s=0.01, queued=(0, 10, 0)), 12.0)
    registry.took(P, Given(number=1, tier=STANDARD, num_tokens=20, at=12.2))
    registry.took(P, Given(number=2, tier=BATCH, num_tokens=100, at=12.2))
    registry.took(P, Given(number=3, tier=STANDARD, num_tokens=30, at=12.3))
    assert queue_s(worker, STANDARD, 12.4) == pytest.approx(0.3), "idle from 12.1 to 12.2: that is not made up for"
    registry.heartbeat(P, load(token_s=0.01, queued=(0, 12, 100), received=3), 12.5)
    assert queue_s(worker, STANDARD, 12.6) == pytest.approx(0.02)


def test_the_time_of_what_is_done_is_not_taken_off_what_comes_after_it() -> None:
    registry = Registry((P,), (D,), "c")
    registry.opened(P, LIFE, welcome(Role.PREFILL))
    worker = registry.workers[P]
    registry.heartbeat(P, load(token_s=0.01), 12.0)
    first, second = (Given(number=number, tier=STANDARD, num_tokens=20, at=12.0) for number in (1, 2))
    registry.took(P, first)
    registry.took(P, second)
    registry.left(P, LIFE, first, 12.2)
    assert queue_s(worker, STANDARD, 12.2) == pytest.approx(0.2)
    assert queue_s(worker, STANDARD, 12.3) == pytest.approx(0.1)
    registry.left(P, LIFE, second, 12.4)
    assert not worker.unseen
    assert queue_s(worker, STANDARD, 12.4) == 0.0


# --- admission -------------------------------------------------------------------------------------------------------

LIMITS = {INTERACTIVE: 1.0, STANDARD: 10.0, BATCH: 0.0}


def expected(*, queue: float = 0.0, prompt: float = 0.0, room: float = 0.0) -> Expected:
    return Expected(queue_s=queue, prompt_s=prompt, room_s=room)


@pytest.mark.parametrize(
    ("tier", "what", "retry_after_s"),
    [
        (INTERACTIVE, expected(), None),
        (INTERACTIVE, expected(queue=0.99), None),
        (INTERACTIVE, expected(queue=1.01), 1),
        (INTERACTIVE, expected(room=1.01), 1),
        (INTERACTIVE, expected(queue=3.0), 2),
        (INTERACTIVE, expected(queue=0.5, prompt=0.3), None),
        (INTERACTIVE, expected(queue=0.75, prompt=0.3), 1),
        (INTERACTIVE, expected(queue=0.49, prompt=60.0), None),
        (INTERACTIVE, expected(queue=0.51, prompt=60.0), 1),
        (STANDARD, expected(queue=1.01), None),
        (STANDARD, expected(queue=20.0, room=30.5), 21),
        (BATCH, expected(queue=1e6, room=1e6), None),
    ],
    ids=str,
)
def test_who_would_wait_too_long_is_not_let_in(tier: Tier, what: Expected, retry_after_s: int | None) -> None:
    refusal = TtftLimits(LIMITS).refusal(tier, what, 0.0)
    assert (None if refusal is None else refusal.retry_after_s) == retry_after_s


def test_a_refusal_says_what_there_is_to_wait_for_and_how_long() -> None:
    ttft_limits = TtftLimits(LIMITS)
    for what, what_for in ((expected(queue=3.0), "a prompt's turn"), (expected(room=3.0), "room in a batch")):
        refusal = ttft_limits.refusal(INTERACTIVE, what, 0.0)
        assert refusal is not None
        for said in (f"3.0 s to wait for {what_for}", "1.0 s", "interactive"):
            assert said in refusal.message


WAITED = expected(queue=0.3)


def test_who_was_late_makes_others_wait_less_for_a_time() -> None:
    ttft_limits = TtftLimits(LIMITS)
    assert ttft_limits.refusal(INTERACTIVE, expected(queue=0.95), 100.0) is None
    ttft_limits.observe(INTERACTIVE, WAITED, 0.99, 100.0)
    assert ttft_limits.margin(INTERACTIVE, 100.0) == pytest.approx(1.0), "that was in time"
    ttft_limits.observe(INTERACTIVE, WAITED, 1.01, 100.0)
    assert ttft_limits.margin(INTERACTIVE, 100.0) == pytest.approx(0.9)
    assert ttft_limits.refusal(INTERACTIVE, expected(queue=0.95), 100.0) is not None
    assert ttft_limits.margin(STANDARD, 100.0) == pytest.approx(1.0), "each tier by itself"
    assert ttft_limits.margin(INTERACTIVE, 105.0) == pytest.approx(0.935)
    assert ttft_limits.margin(INTERACTIVE, 500.0) == pytest.approx(1.0)
    assert ttft_limits.refusal(INTERACTIVE, expected(queue=0.95), 500.0) is None


@pytest.mark.parametrize(("ttft_s", "margin"), [(0.01, 1.0), (1.5, 0.9)])
def test_the_time_in_which_a_client_sends_its_request_is_not_the_workers(ttft_s: float, margin: float) -> None:
    ttft_limits, nothing = TtftLimits(LIMITS), cast(Any, None)
    generation = SimpleNamespace(tier=INTERACTIVE, waterfall=SimpleNamespace(arrived_at=95.0))
    request = SimpleNamespace(expected=WAITED, came_at=100.0, flow=SimpleNamespace(generation=generation))
    Placement(nothing, nothing, nothing, ttft_limits).answered(cast(Any, request), 100.0 + ttft_s)
    assert ttft_limits.margin(INTERACTIVE, 100.0 + ttft_s) == pytest.approx(margin)


def test_one_hiccup_counts_once() -> None:
    """All of these were let in before it was known that they would be late."""
    ttft_limits = TtftLimits(LIMITS)
    for number in range(20):
        ttft_limits.observe(INTERACTIVE, WAITED, 1.5 + 0.01 * number, 100.0 + 0.02 * number)
    assert ttft_limits.margin(INTERACTIVE, 100.4) == pytest.approx(0.9, abs=0.01)
    ttft_limits.observe(INTERACTIVE, WAITED, 1.1, 102.0)
    assert ttft_limits.margin(INTERACTIVE, 102.0) == pytest.approx(0.81, abs=0.03)


def test_the_margin_has_bounds() -> None:
    ttft_limits = TtftLimits(LIMITS)
    for number in range(50):
        ttft_limits.observe(INTERACTIVE, WAITED, 1.5, 2.0 * number)
    assert ttft_limits.margin(INTERACTIVE, 98.0) == pytest.approx(0.3), "something is always let in"
    assert ttft_limits.refusal(INTERACTIVE, expected(queue=0.29), 98.0) is None


@pytest.mark.parametrize(
    ("tier", "what"),
    [
        (INTERACTIVE, expected(queue=0.3, prompt=0.6)),
        (INTERACTIVE, expected()),
        (INTERACTIVE, expected(room=0.3)),
        (BATCH, expected(queue=0.3)),
    ],
    ids=["a prompt that takes long by itself", "none that waited", "none that waited for its turn", "no limit"],
)
def test_who_was_late_for_another_reason_says_nothing_of_waiting(tier: Tier, what: Expected) -> None:
    ttft_limits = TtftLimits(LIMITS)
    ttft_limits.observe(tier, what, 5.0, 100.0)
    assert ttft_limits.margin(tier, 100.0) == pytest.approx(1.0)


@each_of(bias=st.floats(0.5, 2.2), seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_few_are_late_however_far_off_what_is_expected_is(bias: float, seed: int) -> None:
    """Waits take `bias` times as long as expected, give or take; ten come in a second, and find any queue."""
    draw, ttft_limits, late, num, now = random.Random(seed), TtftLimits(LIMITS), 0, 0, 0.0
    coming: list[tuple[float, float, Expected]] = []
    while now < 600:
        now += 0.1
        while coming and coming[0][0] <= now:
            end, ttft_s, what = heapq.heappop(coming)
            ttft_limits.observe(INTERACTIVE, what, ttft_s, end)
            num, late = num + 1, late + (ttft_s > 1.0)
        what = expected(queue=draw.uniform(0.0, 1.0), prompt=0.1)
        if ttft_limits.refusal(INTERACTIVE, what, now) is None:
            ttft_s = 0.1 + what.queue_s * bias * draw.lognormvariate(0.0, 0.1)
            heapq.heappush(coming, (now + ttft_s, ttft_s, what))
    assert late / num <= 0.05


def test_the_heartbeat_of_a_worker_says_all_of_this() -> None:
    names = {"queued_tokens", "sequences", "places", "token_s", "pulled_token_s", "sequence_s", "received"}
    assert names <= set(Heartbeat.__dataclass_fields__)
