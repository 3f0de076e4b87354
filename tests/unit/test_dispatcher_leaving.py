"""Many streams leave a decode worker that drains: a few in each turn of the loop, each once, whatever else happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from dispatcher_bench import D2, D3, Bench, D, P, Time, heartbeat, settle, text

from common.contract.ids import RequestKey
from common.contract.messages.gateway import Decode
from common.contract.messages.session import Phase
from common.contract.messages.worker import Cut
from common.contract.sampling import MAX_CHOICES
from common.contract.tiers import Tier
from gateway.dispatch import leaving
from gateway.dispatch.dispatcher import _MOST_A_TURN
from gateway.serving.attempts import Attempts
from gateway.serving.generation import Delta

MANY = 100
Asked = tuple[RequestKey, asyncio.Task[list[Delta]]]


@pytest.fixture
async def make() -> AsyncIterator[Any]:
    """Benches in the test's own time; nothing may be left of them."""
    benches = []
    time = Time()

    def make_bench(prefill: tuple[str, ...] = (), decode: tuple[str, ...] = (D, D2), **options: Any) -> Bench:
        benches.append(Bench(prefill, decode, clock=time, **options))
        return benches[-1]

    yield make_bench
    for bench in benches:
        await turns_until_all_are_looked_at(bench)
        await bench.close()


async def streams(bench: Bench, num: int = MANY, *, n: int = 1) -> list[Asked]:
    """Requests that run at D, where each choice has its first token; D2 opens after them and has room for all."""
    bench.lose(D2)
    asked = [await bench.request(n=n) for _ in range(num)]
    for key, _ in asked:
        for choice in range(n):
            bench.tokens(D, key, 0, 10, choice=choice)
    bench.open(D2)
    bench.say(D2, heartbeat(total=100_000))
    await settle()
    return asked


def moves(bench: Bench, address: str = D2) -> list[Decode]:
    """What was sent to a worker to pull a running sequence, in order."""
    return [work for work in bench.sent(address, Decode) if isinstance(work, Decode) and work.moving]


def pulled(bench: Bench, address: str = D2) -> list[RequestKey | None]:
    return [work.offered for work in moves(bench, address)]


async def turns_until_all_are_looked_at(bench: Bench) -> list[int]:
    """How many moves began in each turn of the loop."""
    begun = []
    while bench.dispatcher.placement.leaving:
        before = len(moves(bench))
        await asyncio.sleep(0)
        begun.append(len(moves(bench)) - before)
        assert len(begun) < 10_000, "it does not come to an end"
    return begun


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Attempts]:
    """The attempts of every flow that has been asked for what can leave a worker."""
    asked: list[Attempts] = []
    movable = Attempts.movable

    def spy(attempts: Attempts, address: str) -> Any:
        asked.append(attempts)
        return movable(attempts, address)

    monkeypatch.setattr(Attempts, "movable", spy)
    return asked


# --- what a turn costs -----------------------------------------------------------------------------------------------


async def test_many_leave_a_worker_a_few_in_each_turn_of_the_loop_in_order_and_once(make: Any) -> None:
    bench = make()
    asked = await streams(bench)
    refuges: list[int] = []
    refuge = bench.dispatcher.placement.leaving.refuge

    def count(*args: Any) -> Any:
        refuges.append(len(refuges))
        return refuge(*args)

    bench.dispatcher.placement.leaving.refuge = count
    bench.say(D, heartbeat(Phase.DRAINING))
    assert 0 < len(moves(bench)) <= _MOST_A_TURN
    most = len(refuges)
    while len(moves(bench)) < MANY:
        before = len(refuges)
        await asyncio.sleep(0)
        most = max(most, len(refuges) - before)
        bench.say(D, heartbeat(Phase.DRAINING))  # it says so again and again
    assert most <= _MOST_A_TURN, "more choices of a worker in one turn"
    await turns_until_all_are_looked_at(bench)
    assert pulled(bench) == [key for key, _ in asked], "each once, the oldest first"
    assert bench.in_flight(D, D2) == (MANY, MANY)


async def test_where_there_is_no_room_for_a_sequence_none_is_sought_for_others_as_long_of_its_tier(make: Any) -> None:
    bench = make()
    bench.lose(D2)
    urgent, _ = await bench.request(tier=Tier.INTERACTIVE)
    bench.tokens(D, urgent, 0, 10)
    asked = await streams(bench)
    bench.say(D2, replace(heartbeat(total=100_000), places=2, sequences=(0, 2, 0), running=2))
    tiers: list[Tier] = []
    refuge = bench.dispatcher.placement.leaving.refuge

    def count(*args: Any) -> Any:
        tiers.extend(arg for arg in args if isinstance(arg, Tier))
        return refuge(*args)

    bench.dispatcher.placement.leaving.refuge = count
    bench.say(D, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    assert tiers == [Tier.INTERACTIVE, Tier.STANDARD]
    assert pulled(bench) == [urgent], "lower tiers give way to it"
    bench.say(D2, heartbeat(total=100_000))
    bench.say(D, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    assert pulled(bench) == [urgent, *(key for key, _ in asked)], "it is sought anew in each round"


async def test_that_none_has_room_that_can_hold_a_sequence_to_its_end_keeps_no_other_one_as_long(make: Any) -> None:
    bench = make(decode=(D, D2, D3))
    bench.lose(D2)
    bench.lose(D3)
    (large, _), (small, _) = [await bench.request(max_tokens=most) for most in (99, 9)]
    for key in (large, small):
        bench.tokens(D, key, 0, 10)
    bench.open(D2, max_sequence_tokens=50)
    bench.say(D2, heartbeat())
    bench.open(D3)
    bench.say(D3, heartbeat(used=100, total=100))
    bench.say(D, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    assert (pulled(bench), pulled(bench, D3)) == ([small], [])


async def test_choices_of_one_request_leave_a_few_in_each_turn_too(make: Any) -> None:
    bench = make()
    await streams(bench, 1, n=MAX_CHOICES)
    bench.say(D, heartbeat(Phase.DRAINING))
    first = len(moves(bench))
    begun = await turns_until_all_are_looked_at(bench)
    assert 0 < first <= _MOST_A_TURN
    assert max(begun) <= _MOST_A_TURN
    assert [work.choices for work in moves(bench)] == [(choice,) for choice in range(MAX_CHOICES)]


async def test_of_many_that_are_elsewhere_a_few_are_looked_at_in_each_turn(
    make: Any, looked_at: list[Attempts], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    monkeypatch.setattr(leaving, "MOST_LOOKED_AT", 4)
    num = 3 * 4 * _MOST_A_TURN
    bench.lose(D)
    for key, _ in [await bench.request() for _ in range(num)]:
        bench.tokens(D2, key, 0, 10)
    bench.open(D)
    bench.lose(D2)  # they go on at D
    while len(bench.sent(D, Decode)) < num:
        await asyncio.sleep(0)
    bench.open(D2)
    bench.say(D, heartbeat(total=100_000))
    await settle()
    bench.say(D2, heartbeat(Phase.DRAINING))
    most = len(looked_at)
    while len(looked_at) < num:
        before = len(looked_at)
        await asyncio.sleep(0)
        if len(looked_at) < num:
            bench.say(D2, heartbeat(Phase.DRAINING))  # it says so again and again
        most = max(most, len(looked_at) - before)
    assert 0 < most <= 4 * _MOST_A_TURN // 2, "each with its attempt"
    await turns_until_all_are_looked_at(bench)
    assert len(looked_at) == num, "each once"


async def test_a_prefill_worker_that_drains_lets_nobody_be_looked_at(make: Any, looked_at: list[Attempts]) -> None:
    bench = make(prefill=(P,))
    bench.say(D2, heartbeat(total=100_000))
    bench.say(P, heartbeat(Phase.DRAINING))
    await bench.request()
    bench.say(P, heartbeat(Phase.DRAINING))
    await settle()
    assert not looked_at


async def test_those_that_wait_and_those_that_leave_share_the_turn(make: Any) -> None:
    """Neither has to wait for all of the others."""
    bench = make(decode=(D, D2, D3))
    bench.lose(D3)
    asked = await streams(bench)
    bench.lose(D2)
    bench.open(D3)
    others = [await bench.request() for _ in range(MANY)]
    stranded = [key for key, _ in others if set(bench.work[key]) == {D3}]
    assert len(stranded) > 3 * _MOST_A_TURN
    for key in stranded:
        bench.tokens(D3, key, 0, 10)
    bench.open(D2)
    bench.say(D2, heartbeat(total=100_000))
    await settle()
    bench.lose(D3)
    bench.say(D, heartbeat(Phase.DRAINING))
    for number in range(1, 4):
        await asyncio.sleep(0)
        assert len(moves(bench)) >= number, "those that leave"
        assert len(bench.sent(D2, Decode)) - len(moves(bench)) >= number * _MOST_A_TURN // 2, "those that wait"
        assert len(bench.sent(D2, Decode)) <= (number + 1) * _MOST_A_TURN
    await turns_until_all_are_looked_at(bench)
    assert {key for key, _ in asked} <= set(pulled(bench))
    assert all(bench.newest(key)[0].attempt == 2 for key in stranded)


# --- what happens meanwhile ------------------------------------------------------------------------------------------


async def begin_to_leave(bench: Bench, num: int = MANY) -> tuple[list[Asked], int]:
    """Streams of which some have begun to leave D; how many have."""
    asked = await streams(bench, num)
    bench.say(D, heartbeat(Phase.DRAINING))
    begun = len(moves(bench))
    assert 0 < begun < num // 2
    return asked, begun


async def test_who_has_ended_meanwhile_does_not_move(make: Any) -> None:
    bench = make()
    asked, _ = await begin_to_leave(bench)
    (done, complete), (gone, cancelled) = asked[MANY // 2], asked[MANY // 2 + 1]
    bench.tokens(D, done, 1, 11, reason="stop")
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await turns_until_all_are_looked_at(bench)
    assert await text(complete) == [10, 11]
    assert pulled(bench) == [key for key, _ in asked if key not in (done, gone)]


@pytest.mark.parametrize("how", ["one ends", "all end", "the client leaves"])
async def test_choices_that_have_ended_meanwhile_do_not_move(make: Any, how: str) -> None:
    bench = make()
    ((key, task),) = await streams(bench, 1, n=MAX_CHOICES)
    if how == "the client leaves":
        task.cancel()  # which is noticed after this turn, and before the next few move
    bench.say(D, heartbeat(Phase.DRAINING))
    begun = len(moves(bench))
    assert 0 < begun < MAX_CHOICES - 1
    match how:
        case "one ends":
            bench.tokens(D, key, 1, 11, reason="stop", choice=MAX_CHOICES - 1)
        case "all end":
            for choice in range(MAX_CHOICES):
                bench.tokens(D, key, 1, 11, reason="stop", choice=choice)
    await turns_until_all_are_looked_at(bench)
    last = MAX_CHOICES - 1 if how == "one ends" else begun
    assert [work.choices for work in moves(bench)] == [(choice,) for choice in range(last)]


@pytest.mark.parametrize("comes_back", [False, True])
async def test_who_has_not_left_a_worker_that_dies_goes_on_elsewhere(make: Any, comes_back: bool) -> None:
    bench = make()
    asked, begun = await begin_to_leave(bench)
    bench.lose(D, crashed=True)
    if comes_back:
        bench.open(D, restarted=True)
        bench.say(D, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    assert len(moves(bench)) == begun, "there is nothing left to pull"
    for key, task in asked[begun:]:
        newest, work = bench.newest(key)
        assert (newest.attempt, set(work), work[D2].token_ids[-1]) == (2, {D2}, 10)
        bench.tokens(D2, newest, 1, 11, reason="stop")
        assert await text(task) == [10, 11]
    for key, task in asked[:begun]:  # the worker that pulls finds out, and says so
        newest, _ = bench.newest(key)
        bench.tokens(D2, newest, 1, 11, reason="stop")
        assert await text(task) == [10, 11]


async def test_who_has_not_left_a_worker_that_serves_again_stays(make: Any) -> None:
    bench = make()
    asked, begun = await begin_to_leave(bench)
    bench.say(D, heartbeat())
    await turns_until_all_are_looked_at(bench)
    await settle()
    assert len(moves(bench)) == begun
    for key, task in asked[begun:]:
        bench.tokens(D, key, 1, 11, reason="stop")
        assert await text(task) == [10, 11]
    for key, _ in asked[:begun]:
        bench.say(D, Cut(request=key.request, attempt=1, choice=0, position=bench.work[key][D].prompt_len + 1))
    for work, (_, task) in zip(moves(bench), asked[:begun], strict=True):
        bench.tokens(D2, work.key, 1, 11, reason="stop")
        assert await text(task) == [10, 11]


async def test_a_worker_that_drains_again_is_left_again(make: Any) -> None:
    bench = make()
    asked, _ = await begin_to_leave(bench)
    bench.say(D, heartbeat())
    await settle()
    bench.say(D, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    assert pulled(bench) == [key for key, _ in asked]


@pytest.mark.parametrize("how", ["dies", "drains", "is full"])
async def test_the_rest_leaves_for_another_worker_once_one_can_take_it(make: Any, how: str) -> None:
    bench = make(decode=(D, D2, D3))
    bench.lose(D3)
    asked, begun = await begin_to_leave(bench)
    match how:
        case "dies":
            bench.lose(D2)
        case "drains":
            bench.say(D2, heartbeat(Phase.DRAINING))
        case "is full":
            bench.say(D2, heartbeat(used=100, total=100))
    await turns_until_all_are_looked_at(bench)
    assert len(moves(bench)) == begun
    bench.open(D3)
    bench.say(D3, heartbeat(total=100_000))
    bench.say(D, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    rest = asked if how == "dies" else asked[begun:]
    assert pulled(bench, D3) == [key for key, _ in rest]


async def test_who_begins_meanwhile_leaves_with_the_next_heartbeat(make: Any) -> None:
    bench = make()
    asked = await streams(bench, MANY - 1)
    late, _ = await bench.request()
    at = next(iter(bench.work[late]))
    assert at == D2, "it is the emptier one"
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.tokens(D2, late, 0, 10)
    await turns_until_all_are_looked_at(bench)
    assert pulled(bench) == [key for key, _ in asked]
    bench.say(D, heartbeat(total=100_000))
    bench.say(D2, heartbeat(Phase.DRAINING))
    await turns_until_all_are_looked_at(bench)
    assert pulled(bench, D) == [late], "those that are moving there do so first"
