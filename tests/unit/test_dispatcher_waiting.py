"""Requests that wait: for room, for a worker that can hold them, for any worker; and what many of them cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from dispatcher_bench import D2, D3, P2, PROMPT, Bench, D, P, Time, failure, heartbeat, settle, text, welcome

from common.contract.errors import Cause
from common.contract.ids import RequestKey
from common.contract.messages.gateway import Decode, Prefill
from common.contract.messages.session import Phase, Role
from gateway.dispatch.dispatcher import _MOST_A_TURN
from gateway.serving.generation import Delta, GenerationFailed

PATIENCE_S = 10.0
MANY = 100
Asked = tuple[RequestKey, asyncio.Task[list[Delta]]]


@pytest.fixture
async def time() -> Time:
    return Time()


@pytest.fixture
async def make(time: Time) -> AsyncIterator[Any]:
    """Benches in the test's own time; nothing may be left of them."""
    benches = []

    def make_bench(prefill: tuple[str, ...] = (), decode: tuple[str, ...] = (D, D2), **options: Any) -> Bench:
        benches.append(Bench(prefill, decode, clock=time, patience_s=PATIENCE_S, **options))
        return benches[-1]

    yield make_bench
    for bench in benches:
        await bench.close()
        bench.dispatcher.placement.waiting.check_invariants()


class Counts:
    """How often the dispatcher asks what it costs something to ask."""

    def __init__(self, bench: Bench) -> None:
        dispatcher: Any = bench.dispatcher
        self.num_looked_up = self.num_places = self.num_routed = 0
        router = dispatcher.placement._router
        self._looked_up, self._places, self._routed = dispatcher.links._index.longest, router.takers, router.choose
        dispatcher.links._index.longest = self._look_up
        router.takers = self._ask_for_places
        router.choose = self._route

    def _look_up(self, *args: Any) -> Any:
        self.num_looked_up += 1
        return self._looked_up(*args)

    def _ask_for_places(self, *args: Any) -> Any:
        self.num_places += 1
        return self._places(*args)

    def _route(self, *args: Any, **options: Any) -> Any:
        self.num_routed += 1
        return self._routed(*args, **options)

    @contextmanager
    def nothing(self) -> Iterator[None]:
        """What is done here costs nothing, however many wait."""
        before = self.num_looked_up, self.num_places, self.num_routed
        yield
        assert (self.num_looked_up, self.num_places, self.num_routed) == before


async def streams(bench: Bench, num: int = MANY, address: str = D, **options: Any) -> list[Asked]:
    """Requests that run at a decode worker, each with its first token; nobody else is there."""
    asked = [await bench.request(**options) for _ in range(num)]
    for key, _ in asked:
        bench.tokens(address, key, 0, 10)
    return asked


def decodes(bench: Bench, address: str) -> int:
    return len(bench.sent(address, Decode))


def open_without_bound(bench: Bench, address: str, **says: Any) -> None:
    """A decode worker's session opens, and it has places for as many sequences as there are."""
    bench.open(address, **says)
    bench.say(address, heartbeat())


async def turns(until: Callable[[], bool]) -> int:
    """How many turns of the loop it takes."""
    for number in range(10_000):
        if until():
            return number
        await asyncio.sleep(0)
    raise AssertionError("it does not come about")


# --- what many cost --------------------------------------------------------------------------------------------------


async def test_heartbeats_cost_nothing_while_many_wait_for_a_decode_worker(make: Any) -> None:
    bench = make(prefill=(P, P2))
    bench.lose(D2)
    asked = [await bench.request() for _ in range(MANY)]
    for key, _ in asked:
        bench.tokens(D, key, 0, 10)
    counts = Counts(bench)
    bench.lose(D)
    await turns(lambda: counts.num_places >= MANY)
    await settle()
    assert counts.num_looked_up == 0, "nobody is there to whom it would matter who has the prompt"
    assert counts.num_places == MANY
    with counts.nothing():
        for address in (P, P2) * 3:
            bench.say(address, heartbeat())
            await settle()
    open_without_bound(bench, D, restarted=True)
    await turns(lambda: decodes(bench, D) == 2 * MANY)
    assert counts.num_places == counts.num_looked_up + MANY == counts.num_routed + MANY == 2 * MANY


async def test_heartbeats_cost_nothing_while_many_wait_for_workers_of_their_own_weights(make: Any) -> None:
    """A rollout: the workers of the old weights are gone, requests that have begun with them wait."""
    bench = make(prefill=(P,))
    bench.lose(D2)
    asked = [await bench.request() for _ in range(MANY)]
    for key, _ in asked:
        bench.tokens(D, key, 0, 10)
    for address in (P, D):
        bench.lose(address)
    for address in (P, D2):
        bench.open(address, restarted=True, weights_hash="new")
        bench.say(address, heartbeat())
    counts = Counts(bench)
    await settle()
    await turns(lambda: not bench.dispatcher.placement.waiting._new)
    assert counts.num_looked_up == 0
    with counts.nothing():
        for _ in range(3):
            for address in (P, D2):
                bench.say(address, heartbeat())
                await settle()
    new, _ = await bench.request()
    assert set(bench.work[new]) == {P, D2}, "who begins now does so at once"


@pytest.mark.parametrize("why", ["full", "other weights"])
async def test_heartbeats_cost_nothing_while_many_are_to_leave_a_worker_and_nobody_can_take_them(
    make: Any, why: str
) -> None:
    bench = make()
    bench.lose(D2)
    await streams(bench)
    bench.open(D2, weights_hash="new" if why == "other weights" else "w")
    bench.say(D2, heartbeat(used=100 if why == "full" else 0, total=100))
    leaving: Any = bench.dispatcher.placement.leaving
    leaving.refuge = None
    for _ in range(3):
        bench.say(D, heartbeat(Phase.DRAINING))
        assert not leaving, "nobody is to be looked at"
    del leaving.refuge
    bench.lose(D2)
    bench.open(D2)
    bench.say(D2, heartbeat(total=10_000))
    bench.say(D, heartbeat(Phase.DRAINING))
    await turns(lambda: decodes(bench, D2) == MANY)


async def test_many_go_on_a_few_in_each_turn_of_the_loop(make: Any) -> None:
    bench = make()
    bench.lose(D2)
    await streams(bench)
    bench.lose(D)
    await turns(lambda: not bench.dispatcher.placement.waiting._new)
    open_without_bound(bench, D2)
    most, before = 0, 0
    while before < MANY:
        now = decodes(bench, D2)
        most, before = max(most, now - before), now
        await asyncio.sleep(0)
    assert 0 < most <= _MOST_A_TURN


async def test_many_that_lose_their_worker_go_on_a_few_in_each_turn_of_the_loop(make: Any) -> None:
    bench = make()
    bench.lose(D2)
    await streams(bench)
    open_without_bound(bench, D2)
    bench.lose(D)
    assert decodes(bench, D2) <= _MOST_A_TURN
    assert await turns(lambda: decodes(bench, D2) == MANY) >= MANY // _MOST_A_TURN - 1


async def test_who_leaves_costs_the_others_nothing(make: Any) -> None:
    bench = make()
    bench.lose(D2)
    asked = await streams(bench)
    bench.lose(D)
    await turns(lambda: not bench.dispatcher.placement.waiting._new)
    counts = Counts(bench)
    with counts.nothing():
        for _, task in asked[::2]:
            task.cancel()
        await settle()
    assert len(bench.dispatcher.placement.waiting) == MANY // 2
    bench.dispatcher.placement.waiting.check_invariants()


# --- full workers ----------------------------------------------------------------------------------------------------


async def test_a_stream_waits_for_a_worker_that_drains_until_its_own_time_is_up(make: Any, time: Time) -> None:
    bench = make()
    bench.lose(D2)
    key, task = await bench.request(budget_s=60)
    bench.tokens(D, key, 0, 10)
    bench.open(D2)
    bench.lose(D)
    bench.fail(D2, bench.newest(key)[0], Cause.DRAINING)
    await time.advance(59)
    assert not task.done()
    await time.advance(3)
    assert await failure(task) is Cause.DEADLINE


async def test_a_new_request_asks_each_full_worker_once(make: Any) -> None:
    bench = make(decode=(D, D2, D3))
    key, task = await bench.request()
    asked = set()
    for _ in range(3):
        newest, work = bench.newest(key)
        asked |= set(work)
        (address,) = work
        assert not work[address].admitted
        bench.fail(address, newest, Cause.CAPACITY)
    assert asked == {D, D2, D3}
    assert await failure(task) is Cause.CAPACITY
    assert len(bench.work) == 3


async def test_that_a_worker_refuses_new_requests_keeps_nobody_else_waiting(make: Any) -> None:
    bench = make()
    running, _ = await bench.request()
    (address,) = bench.work[running]
    bench.tokens(address, running, 0, 10)
    other = D2 if address == D else D
    new, _ = await bench.request()
    assert set(bench.work[new]) == {other}
    bench.fail(other, new, Cause.CAPACITY)
    bench.lose(address)
    assert set(bench.newest(running)[1]) == {other}


# --- workers that come back ------------------------------------------------------------------------------------------

PLACES = 40
"""Sequences that each decode worker has places for: less than half of those that wait."""


def come_back(bench: Bench, address: str) -> None:
    """A decode worker has started again, later than any was lost."""
    assert isinstance(bench.clock, Time)
    bench.clock.now += 0.001
    bench.open(address, restarted=True)
    bench.say(address, replace(heartbeat(), places=PLACES))


either_way_lost = pytest.mark.parametrize("crashed", [False, True])


async def streams_of_lost_workers(bench: Bench, crashed: bool, **options: Any) -> list[Asked]:
    """Streams whose decode workers, D and D2, are both gone. After a crash all of them are suspects."""
    bench.lose(D2, crashed=crashed)
    asked = await streams(bench, **options)
    bench.lose(D, crashed=crashed)
    await turns(lambda: not bench.dispatcher.placement.waiting._new)
    assert len(bench.dispatcher.placement.waiting) == len(asked)
    return asked


async def placed(bench: Bench) -> tuple[int, int]:
    """How many streams D and D2 have got since they were lost, once nobody is to be looked at any more."""
    await turns(lambda: not bench.dispatcher.placement.waiting._new)
    return decodes(bench, D) - MANY, decodes(bench, D2)


@either_way_lost
async def test_the_first_of_the_lost_workers_that_is_back_does_not_get_all_that_wait(
    make: Any, time: Time, crashed: bool
) -> None:
    bench = make()
    await streams_of_lost_workers(bench, crashed)
    await time.advance(0.5 * PATIENCE_S)
    come_back(bench, D)
    assert await placed(bench) == (PLACES, 0)
    for _ in range(5):
        await time.advance(0.1)
        bench.say(D, replace(heartbeat(), places=PLACES))
    assert await placed(bench) == (PLACES, 0)
    come_back(bench, D2)
    assert await placed(bench) == (MANY // 2, MANY // 2), "nobody else is to come, so they need not have places"


@either_way_lost
@pytest.mark.parametrize("places", [16, 90])
async def test_who_waits_goes_to_places_that_a_worker_has_told(
    make: Any, time: Time, places: int, crashed: bool
) -> None:
    """Its first heartbeat comes a moment after its session has opened."""
    bench = make()
    await streams_of_lost_workers(bench, crashed)
    await time.advance(0.1)
    bench.open(D, restarted=True)
    assert await placed(bench) == (0, 0)
    await time.advance(0.25)
    bench.say(D, replace(heartbeat(), places=places))
    assert await placed(bench) == (places, 0)
    come_back(bench, D2)
    assert sum(await placed(bench)) == MANY


async def test_room_where_the_connection_has_broken_sends_nobody_to_a_full_worker(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2, D3))
    bench.lose(D3)
    await streams_of_lost_workers(bench, crashed=False)
    await time.advance(0.1)
    bench.open(D, restarted=True)
    bench.dispatcher.links.on_broken(bench.link(D))
    bench.open(D2, restarted=True)
    bench.say(D2, replace(heartbeat(), places=PLACES, sequences=(0, PLACES, 0), running=PLACES))
    bench.say(D, replace(heartbeat(), places=PLACES))
    assert await placed(bench) == (0, 0)
    bench.dispatcher.links.hello(bench.link(D))
    bench.dispatcher.links.on_resync(bench.link(D), welcome(Role.DECODE))
    bench.say(D, replace(heartbeat(), places=PLACES))
    num_back, _ = await placed(bench)
    assert num_back == PLACES, "its room counts again"


@pytest.mark.parametrize("broken", [False, True])
async def test_room_where_a_stream_has_just_failed_does_not_send_it_to_a_full_worker(make: Any, broken: bool) -> None:
    """It waits for the one that comes back, as if the worker that it avoids were full, too."""
    bench = make(decode=(D, D2, D3))
    bench.lose(D2)
    bench.lose(D3)
    ((key, _),) = await streams(bench, 1)
    come_back(bench, D2)
    bench.say(D2, replace(heartbeat(), places=PLACES, sequences=(0, PLACES, 0), running=PLACES))
    if broken:
        bench.dispatcher.links.on_broken(bench.link(D2))
    bench.say(D, replace(heartbeat(), places=PLACES))
    bench.fail(D, key, Cause.INTERNAL)
    await placed(bench)
    assert (decodes(bench, D), decodes(bench, D2)) == (1, 0)
    come_back(bench, D3)
    await placed(bench)
    assert set(bench.newest(key)[1]) == {D3}


@either_way_lost
async def test_those_that_wait_for_a_worker_that_stays_away_go_on_after_a_while(
    make: Any, time: Time, crashed: bool
) -> None:
    bench = make()
    await streams_of_lost_workers(bench, crashed)
    come_back(bench, D)
    assert await placed(bench) == (PLACES, 0)
    await time.advance(2.9)
    counts = Counts(bench)
    with counts.nothing():
        for _ in range(3):
            bench.say(D, replace(heartbeat(), places=PLACES))
            await settle()
    assert await placed(bench) == (PLACES, 0)
    await time.advance(0.2)
    bench.say(D, replace(heartbeat(), places=PLACES))
    assert await placed(bench) == (MANY, 0)


@pytest.mark.parametrize("why", ["long ago", "not listed", "never there"])
async def test_nobody_waits_for_a_worker_that_is_not_expected(make: Any, time: Time, why: str) -> None:
    bench = make(opened=False)
    bench.open(D)
    if why != "never there":
        bench.open(D2)
        bench.lose(D2)
    await streams(bench, budget_s=10_000)
    if why == "long ago":
        await time.advance(700)
    if why == "not listed":
        bench.registry.relist(Role.DECODE, {D: True})
    bench.lose(D)
    come_back(bench, D)
    assert await placed(bench) == (MANY, 0)


@either_way_lost
async def test_who_waits_for_a_worker_that_comes_back_has_no_more_time_for_it(
    make: Any, time: Time, crashed: bool
) -> None:
    bench = make()
    asked = await streams_of_lost_workers(bench, crashed, budget_s=1.0)
    come_back(bench, D)
    assert await placed(bench) == (PLACES, 0)
    await time.advance(2.1)  # a worker would have been the first to say so
    assert [task.done() for _, task in asked] == [True] * MANY
    assert not bench.dispatcher.placement.waiting


# --- workers that leave ----------------------------------------------------------------------------------------------


async def test_a_stream_waits_for_the_only_worker_to_serve_again(make: Any, time: Time) -> None:
    bench = make(decode=(D,))
    key, task = await bench.request(budget_s=300)
    bench.tokens(D, key, 0, 10)
    bench.fail(D, key, Cause.DRAINING)
    await time.advance(3 * PATIENCE_S)
    bench.say(D, heartbeat(Phase.DRAINING))
    await time.advance(3 * PATIENCE_S)
    assert len(bench.work) == 1
    assert not task.done()
    bench.say(D, heartbeat())
    key, _ = bench.newest(key)
    bench.tokens(D, key, 1, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_patience_begins_when_nobody_is_there_any_more(make: Any, time: Time) -> None:
    bench = make(decode=(D,))
    key, task = await bench.request(budget_s=300)
    bench.tokens(D, key, 0, 10)
    bench.fail(D, key, Cause.DRAINING)
    await time.advance(3 * PATIENCE_S)
    bench.lose(D, "it has left")
    await time.advance(PATIENCE_S - 0.1)
    assert not task.done()
    await time.advance(0.2)
    assert await failure(task) is Cause.WORKER_LOST


async def test_patience_begins_anew_when_somebody_has_been_there(make: Any, time: Time) -> None:
    bench = make(decode=(D,))
    key, task = await bench.request(budget_s=300)
    bench.tokens(D, key, 0, 10)
    bench.lose(D)
    for _ in range(4):
        await time.advance(0.9 * PATIENCE_S)
        assert not task.done()
        bench.open(D, restarted=True)
        newest, _ = bench.newest(key)
        bench.fail(D, newest, Cause.DRAINING)
        bench.lose(D)
    await time.advance(1.1 * PATIENCE_S)
    assert await failure(task) is Cause.WORKER_LOST


async def test_a_new_request_that_nobody_takes_waits_no_longer_than_patience(make: Any, time: Time) -> None:
    bench = make(decode=(D,))
    key, task = await bench.request(budget_s=300)
    bench.fail(D, key, Cause.DRAINING)
    bench.say(D, heartbeat(Phase.DRAINING))
    await time.advance(1.1 * PATIENCE_S)
    assert await failure(task) is Cause.WORKER_LOST


# --- small workers ---------------------------------------------------------------------------------------------------


async def test_a_stream_that_a_small_worker_cannot_hold_goes_on_at_a_large_one(make: Any) -> None:
    bench = make()
    bench.lose(D2)
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10)
    bench.open(D2)
    bench.lose(D)
    key, work = bench.newest(key)
    assert set(work) == {D2}
    bench.fail(D2, key, Cause.TOO_LARGE)
    assert not task.done()
    bench.open(D, restarted=True)
    key, work = bench.newest(key)
    assert set(work) == {D}
    bench.tokens(D, key, 1, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_a_stream_goes_where_it_can_end_though_a_small_worker_is_emptier(make: Any) -> None:
    bench = make()
    bench.lose(D2)
    asked = await streams(bench, 3)
    bench.open(D2, max_sequence_tokens=50)
    for key, _ in asked:
        bench.fail(D, key, Cause.LEASE_LOST)
    assert [set(bench.newest(key)[1]) for key, _ in asked] == [{D}] * 3
    new, _ = await bench.request()
    assert set(bench.work[new]) == {D}


async def test_several_choices_that_a_small_worker_cannot_hold_go_to_a_large_one(make: Any) -> None:
    bench = make()
    key, _ = await bench.request(n=8)
    (address,) = bench.work[key]
    bench.fail(address, key, Cause.TOO_LARGE)
    newest, work = bench.newest(key)
    assert set(work) == {D2 if address == D else D}
    assert (newest.attempt, work.popitem()[1].choices) == (2, tuple(range(8)))


async def test_what_no_worker_can_hold_is_refused_once_all_have_said_so(make: Any) -> None:
    bench = make()
    key, task = await bench.request()
    for address in (D, D2):
        assert not task.done()
        bench.fail(address, bench.newest(key)[0], Cause.TOO_LARGE)
    assert await failure(task) is Cause.TOO_LARGE


async def test_a_stream_that_only_small_workers_could_go_on_with_says_so_in_the_end(make: Any, time: Time) -> None:
    bench = make()
    bench.lose(D2)
    key, task = await bench.request(budget_s=300)
    bench.tokens(D, key, 0, 10)
    bench.open(D2)
    bench.lose(D)
    bench.fail(D2, bench.newest(key)[0], Cause.TOO_LARGE)
    await time.advance(PATIENCE_S - 0.1)
    assert not task.done(), "a larger one may come"
    await time.advance(0.2)
    assert await failure(task) is Cause.TOO_LARGE


async def test_a_prompt_that_a_prefill_worker_cannot_hold_is_computed_elsewhere(make: Any) -> None:
    bench = make(prefill=(P, P2))
    bench.open(P, max_sequence_tokens=2)
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P2, D}, "it says so"
    bench.fail(P2, key, Cause.TOO_LARGE)
    assert set(bench.newest(key)[1]) == {D}, "it has said so"
    assert len(bench.sent(P, Prefill)) == 0


async def test_the_longest_sequence_is_what_the_largest_decode_worker_takes(make: Any) -> None:
    bench = make(prefill=(P,))
    bench.open(P, max_sequence_tokens=10)
    bench.open(D, max_sequence_tokens=100)
    bench.open(D2, max_sequence_tokens=200)
    assert bench.dispatcher.ready().max_sequence_tokens == 200
    assert bench.dispatcher.ready().usual_sequence_tokens == 200
    bench.lose(D2)
    assert bench.dispatcher.ready().max_sequence_tokens == 100
    bench.lose(D)
    readiness = bench.dispatcher.ready()
    assert (readiness.max_sequence_tokens, readiness.usual_sequence_tokens) == (None, None)
    with pytest.raises(GenerationFailed):
        await bench.request()


async def test_a_sequence_of_no_given_length_may_go_to_each_of_nearly_the_same_size(make: Any) -> None:
    """What GPUs have free differs by a block or two."""
    bench = make(prefill=(), decode=(D, D2, D3))
    for address, size in ((D, 25_664), (D2, 25_600), (D3, 22_455)):
        bench.open(address, max_sequence_tokens=size)
    readiness = bench.dispatcher.ready()
    assert (readiness.max_sequence_tokens, readiness.usual_sequence_tokens) == (25_664, 25_600)
    length = readiness.usual_sequence_tokens - len(PROMPT)
    asked = [await bench.request(max_tokens=length) for _ in range(10)]
    assert {address for key, _ in asked for address in bench.work[key]} == {D, D2}, "7/8 of the largest are 22,456"
    longest = [await bench.request(max_tokens=length + 1) for _ in range(2)]
    assert {address for key, _ in longest for address in bench.work[key]} == {D}, "clients may ask for more"
