"""The profile of the decode workers that a request is sent to, and the batches of those with the profile latency."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decode_bench import EAGER, Bench, request
from hypothesis import given
from hypothesis import strategies as st
from test_registry_router import load, view

from common.contract.messages.session import Profile, Role
from common.contract.tiers import Target, Tier
from common.runtime.config import DecodeSettings
from common.scheduling.row_times import RowTimes
from decode_worker.batch_bound import BatchBound
from decode_worker.policy import Policy
from decode_worker.scheduler import DecodeScheduler
from gateway.dispatch.ask import Ask
from gateway.dispatch.profiles import of_profile
from gateway.dispatch.router import Router
from gateway.workers.load_table import LoadTable
from gateway.workers.registry import Registry
from gateway.workers.worker_view import WorkerView

LATENCY, THROUGHPUT = Profile.LATENCY, Profile.THROUGHPUT
INTERACTIVE, STANDARD, BATCH = Tier
TARGET = Target(ttft_s=1.0, itl_s=0.1)
AT_ONCE, IN_TIME, NO_ROOM, SLOW = (0.25, 0.1), (1.0, 0.1), (1.1, 0.0), (0.0, 0.11)
"""(seconds to wait, seconds between tokens) at a worker."""


def decode(address: str, profile: Profile, itl_s: float = 0.0, **loaded: Any) -> WorkerView:
    worker = view(address, Role.DECODE, load=replace(load(**loaded), itl_s=itl_s))
    assert worker.welcome is not None
    worker.welcome = replace(worker.welcome, profile=profile)
    return worker


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "latency", "throughput", "expected"),
    [
        # each in time: the profile of the tier
        (INTERACTIVE, IN_TIME, IN_TIME, {LATENCY}),
        (STANDARD, IN_TIME, IN_TIME, {THROUGHPUT}),
        (BATCH, IN_TIME, IN_TIME, {THROUGHPUT}),
        # the profile of the tier is full, or slow: the other one
        (INTERACTIVE, NO_ROOM, IN_TIME, {THROUGHPUT}),
        (INTERACTIVE, SLOW, IN_TIME, {THROUGHPUT}),
        (STANDARD, IN_TIME, NO_ROOM, {LATENCY}),
        (STANDARD, IN_TIME, SLOW, {LATENCY}),
        (BATCH, IN_TIME, NO_ROOM, {LATENCY}),
        (BATCH, IN_TIME, SLOW, {LATENCY}),
        # the other one is late: no matter
        (INTERACTIVE, IN_TIME, SLOW, {LATENCY}),
        (STANDARD, NO_ROOM, IN_TIME, {THROUGHPUT}),
        (BATCH, SLOW, IN_TIME, {THROUGHPUT}),
        # only an interactive request spills over before it is late
        (INTERACTIVE, AT_ONCE, AT_ONCE, {LATENCY}),
        (INTERACTIVE, IN_TIME, AT_ONCE, {THROUGHPUT}),
        (INTERACTIVE, SLOW, AT_ONCE, {THROUGHPUT}),
        (STANDARD, AT_ONCE, IN_TIME, {THROUGHPUT}),
        (BATCH, AT_ONCE, IN_TIME, {THROUGHPUT}),
        # nobody is in time: whoever has room soonest, of all
        (INTERACTIVE, NO_ROOM, SLOW, {LATENCY, THROUGHPUT}),
        (STANDARD, NO_ROOM, NO_ROOM, {LATENCY, THROUGHPUT}),
        (BATCH, SLOW, NO_ROOM, {LATENCY, THROUGHPUT}),
    ],
)
def test_a_tier_is_sent_to_its_profile_as_long_as_that_is_in_time(
    tier: Tier, latency: tuple[float, float], throughput: tuple[float, float], expected: set[Profile]
) -> None:
    workers = [decode("a:1", LATENCY, latency[1]), decode("b:1", THROUGHPUT, throughput[1])]
    table = LoadTable(workers)
    chosen = of_profile(table, np.arange(2), tier, TARGET, np.array([latency[0], throughput[0]]))
    assert {worker.profile for worker in table.views(chosen)} == expected


@given(
    st.lists(st.tuples(st.sampled_from(Profile), st.floats(0, 2), st.floats(0, 0.2)), min_size=1, max_size=6),
    st.sampled_from(Tier),
)
def test_somebody_always_remains_and_nobody_is_late_if_anybody_is_in_time(
    workers: list[tuple[Profile, float, float]], tier: Tier
) -> None:
    table = LoadTable(decode(f"{index}:1", profile, itl_s) for index, (profile, _, itl_s) in enumerate(workers))
    wait_s = np.array([each[1] for each in workers])
    chosen = of_profile(table, np.arange(len(workers)), tier, TARGET, wait_s).tolist()
    assert chosen
    if len({profile for profile, _, _ in workers}) == 1:
        assert chosen == list(range(len(workers)))
        return
    in_time = {row for row, (_, wait, itl_s) in enumerate(workers) if wait <= 1.0 and itl_s <= 0.1}
    assert not in_time or set(chosen) <= in_time


@pytest.mark.parametrize("profile", Profile)
def test_workers_of_one_profile_are_not_told_apart(profile: Profile) -> None:
    table = LoadTable([decode("a:1", profile, 5.0), decode("b:1", profile)])
    assert of_profile(table, np.arange(2), INTERACTIVE, TARGET, np.array([9.0, 0.0])).tolist() == [0, 1]


def test_of_those_that_are_in_time_one_is_chosen_by_its_load() -> None:
    workers = [
        decode("a:1", LATENCY, places=2, sequences=(2, 0, 0), sequence_s=5.0, used=1),
        decode("b:1", LATENCY, places=8, sequences=(1, 0, 0), used=5),
        decode("c:1", LATENCY, places=8, used=2),
        decode("d:1", THROUGHPUT, places=64, used=0),
    ]
    registry = Registry((), tuple(worker.address for worker in workers), "c")
    registry.workers = {worker.address: worker for worker in workers}
    router = Router(registry, targets=dict.fromkeys(Tier, TARGET))

    def taker(tier: Tier) -> str:
        ask = Ask(num_tokens=100, tier=tier)
        route = router.choose(ask, {})
        assert route is not None
        assert router.taker(registry.usable_rows(Role.DECODE), ask, {}) is route.decode
        return route.decode.address

    assert {tier: taker(tier) for tier in Tier} == {INTERACTIVE: "c:1", STANDARD: "d:1", BATCH: "d:1"}
    registry.lost("d:1")
    assert taker(BATCH) == "c:1", "the pool for throughput is gone"


def test_a_request_that_would_be_refused_may_go_to_any_profile() -> None:
    """Its own profile is in time, but the margin allows less, and the other one has room at once."""
    workers = [
        decode("a:1", LATENCY, places=2, sequences=(2, 0, 0), sequence_s=1.0),
        decode("b:1", THROUGHPUT, 0.2, places=64),
    ]
    registry = Registry((), tuple(worker.address for worker in workers), "c")
    registry.workers = {worker.address: worker for worker in workers}
    router = Router(registry, targets=dict.fromkeys(Tier, TARGET))

    def chosen(ask: Ask) -> str:
        route = router.choose(ask, {})
        assert route is not None
        assert route.expected.wait_s < TARGET.ttft_s
        return route.decode.address

    ask = Ask(num_tokens=100, tier=INTERACTIVE)
    assert chosen(ask) == "a:1"
    assert chosen(ask._replace(least_wait=True)) == "b:1"


def test_a_large_batch_is_not_a_crowd_beside_small_ones() -> None:
    """No worker is in time, and the one with room at once has many requests, as its profile asks for."""
    workers = [
        decode("a:1", LATENCY, places=2, sequences=(5, 0, 0), sequence_s=1.0),
        decode("b:1", THROUGHPUT, 0.2, places=64, sequences=(30, 0, 0)),
    ]
    registry = Registry((), tuple(worker.address for worker in workers), "c")
    registry.workers = {worker.address: worker for worker in workers}
    for worker, num in zip(workers, (3, 30), strict=True):
        worker.in_flight = num
    route = Router(registry, targets=dict.fromkeys(Tier, TARGET)).choose(Ask(num_tokens=100, tier=INTERACTIVE), {})
    assert route is not None
    assert (route.decode.address, route.expected.wait_s) == ("b:1", 0.0)


# --- the worker ------------------------------------------------------------------------------------------------------


TIMES = RowTimes(rows=(1, 101), seconds=(0.01, 0.11), token_s=1e-5)
"""A row takes 1 ms, and each of 100 tokens that it attends to as much."""


def policy(target_s: float | None, most: int = 64) -> Policy:
    return Policy(block_size=4, max_num_seqs=most, max_sequence_tokens=10_000, step_target_s=target_s)


@pytest.mark.parametrize(
    ("target_s", "num_tokens", "expected"),
    [(0.05, 0, 31), (0.05, 100, 15), (0.05, 10_000, 1), (0.001, 100, 1), (10.0, 100, 64), (None, 10_000, 64)],
)
def test_a_batch_is_as_large_as_keeps_four_fifths_of_the_target(
    target_s: float | None, num_tokens: int, expected: int
) -> None:
    bench = Bench(100_000, memory_reserve=EAGER)
    bound = BatchBound(policy(target_s), TIMES)
    [choice] = bench.enter(request("long", num_tokens - 1)) if num_tokens else [None]
    bound.update([] if choice is None else [choice])
    assert bound.num == expected
    bound.update([])
    assert bound.num == expected, "the next sequences are taken to be as long"
    assert bound.num_holding == expected + max(2, expected // 4)


def test_what_steps_take_moves_the_bound() -> None:
    bench = Bench(1000, memory_reserve=EAGER)
    choices = bench.enter(request("one", 99))
    bound = BatchBound(policy(0.05), replace(TIMES))
    bound.update(choices)
    assert (bound.num, bound.fixed) == (15, False)
    for _ in range(100):
        bound.observe(choices, 0.022, 0.0)  # twice as long as measured
    bound.update(choices)
    assert bound.num == 5
    for _ in range(100):
        bound.observe(choices, 0.022, 0.008)  # and clients wait for what lies between steps, too
    bound.update(choices)
    assert bound.num == 3


def test_a_bound_without_a_target_learns_nothing() -> None:
    times = replace(TIMES)
    bound = BatchBound(policy(None), times)
    bench = Bench(1000, memory_reserve=EAGER)
    bound.observe(bench.enter(request("one", 99)), 1.0, 1.0)
    assert (bound.num, bound.fixed, times) == (64, True, TIMES)


def test_nobody_joins_beyond_the_bound_and_nobody_has_to_leave() -> None:
    bench = Bench(4000, memory_reserve=EAGER, max_num_seqs=64, step_target_s=0.05)
    bench.scheduler = DecodeScheduler(bench.pool, bench.policy, bench.scheduler.prompts._costs, None, TIMES)
    for index in range(20):
        bench.want(request(f"{index}", 100))
    bench.reserve()
    for reserved in list(bench.pulling.values()):
        bench.settle(reserved.request)
    batch, bound = bench.scheduler.batch, bench.scheduler.bound
    assert len(bench.step().decodes) == bound.num == 15
    assert batch.num_ready == 5, "whoever was let in before their lengths were known"
    for _ in range(60):
        bench.step()
    assert bound.num < 15, "the sequences are longer now"
    assert batch.num_running == 15
    [first, *_] = batch.running()
    bench.forget(first.request)
    bench.step()
    assert batch.num_running == 14, "nobody takes the place"


def test_who_was_refused_comes_in_once_the_bound_has_risen_again() -> None:
    """Although nobody has left, and no block has become free."""
    bench, times = Bench(4000, memory_reserve=EAGER, max_num_seqs=64, step_target_s=0.05), replace(TIMES)
    bench.scheduler = DecodeScheduler(bench.pool, bench.policy, bench.scheduler.prompts._costs, None, times)
    for index in range(8):
        bench.enter(request(f"{index}", 20))
    bench.step()
    times.scale = 4.0  # a neighbour is busy
    bench.step()
    assert bench.reserve(request("late", 20)) == []
    bench.step()
    assert not bench.pulling
    times.scale = 1.0
    bench.step()
    assert list(bench.pulling) == ["late"]


def test_of_higher_tiers_a_place_is_taken_within_the_bound() -> None:
    bench = Bench(4000, memory_reserve=EAGER, max_num_seqs=64, step_target_s=0.02)
    bench.scheduler = DecodeScheduler(bench.pool, bench.policy, bench.scheduler.prompts._costs, None, TIMES)
    for index in range(6):
        bench.enter(request(f"batch {index}", 20, tier=BATCH))
    bench.step()
    num_running = bench.scheduler.batch.num_running
    assert num_running == bench.scheduler.bound.num
    [urgent] = bench.enter(request("urgent", 20, tier=INTERACTIVE))
    assert urgent in bench.step().decodes
    assert bench.scheduler.batch.num_running == num_running


def test_those_that_have_waited_long_get_their_share_of_the_bound() -> None:
    """Not of the places that the setting allows: those of higher tiers would get none."""
    bench = Bench(4000, memory_reserve=EAGER, max_num_seqs=64, step_target_s=0.02, ageing_s=1.0)
    bench.scheduler = DecodeScheduler(bench.pool, bench.policy, bench.scheduler.prompts._costs, None, TIMES)
    for index in range(6):
        bench.enter(request(f"batch {index}", 20, tier=BATCH))
    bench.now += 10.0
    bench.step()
    assert 1 < bench.scheduler.bound.num < 8
    assert len(bench.scheduler.batch._aged) == 1
    urgent = [bench.enter(request(f"urgent {index}", 20, tier=INTERACTIVE))[0] for index in range(2)]
    assert set(urgent) <= set(bench.step().decodes)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "off"),
        ({"profile": "latency"}, "lookup"),
        ({"profile": "latency", "draft_model": "x"}, "auto"),
        ({"profile": "latency", "speculation": "off"}, "off"),
        ({"profile": "throughput", "draft_model": "x"}, "off"),
        ({"speculation": "draft", "draft_model": "x"}, "draft"),
    ],
)
def test_drafts_are_by_default_those_of_the_profile(options: dict[str, str], expected: str) -> None:
    assert DecodeSettings(model="m", **options).drafts_by == expected  # type: ignore[arg-type]


def test_only_the_profile_latency_bounds_the_batch_by_the_target() -> None:
    settings = {profile: DecodeSettings(model="m", profile=profile, interactive_itl_s=0.07) for profile in Profile}
    targets = {profile: Policy.of(each, 100, 16, 0).step_target_s for profile, each in settings.items()}
    assert targets == {THROUGHPUT: None, LATENCY: 0.07}
