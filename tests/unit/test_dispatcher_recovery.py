"""The dispatcher when workers fail or leave: who waits for what and how long, who is tried where, what moves away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from dispatcher_bench import (
    D2,
    D3,
    FINGERPRINT,
    LAYOUT,
    P2,
    PROMPT,
    Bench,
    D,
    P,
    Time,
    failure,
    heartbeat,
    settle,
    text,
    welcome,
)

from common.contract.block_hashes import SHORT_NAME_BYTES, block_hashes
from common.contract.errors import Cause
from common.contract.ids import RequestKey
from common.contract.messages.gateway import Abort, Decode, Prefill, Suspicion
from common.contract.messages.session import Phase, Role
from common.contract.messages.worker import CacheEvents, Cut, PromptLogprobs, Tokens, TokenScores
from common.runtime.channel import RECONNECT_S
from gateway.serving.flow_actions import FIRST_DELAY_S
from gateway.serving.generation import GenerationFailed

PATIENCE_S = 10.0


@pytest.fixture
async def time() -> Time:
    return Time()


@pytest.fixture
async def make(time: Time) -> AsyncIterator[Any]:
    """Benches in the test's own time; nothing may be left of them."""
    benches = []

    def make_bench(prefill: tuple[str, ...] = (P,), decode: tuple[str, ...] = (D,), **options: Any) -> Bench:
        benches.append(Bench(prefill, decode, clock=time, **options))
        return benches[-1]

    yield make_bench
    for bench in benches:
        await bench.close()


def decoded(bench: Bench, key: RequestKey, *token_ids: int, address: str = D) -> None:
    """Both workers bring the first token, and the decode worker the others."""
    bench.tokens(P, key, 0, token_ids[0])
    bench.tokens(address, key, 0, *token_ids)


# --- waiting ---------------------------------------------------------------------------------------------------------


async def test_who_finds_no_decode_worker_waits_for_one(make: Any, time: Time) -> None:
    bench = make()
    key, task = await bench.request()
    decoded(bench, key, 10, 11)
    bench.lose(D)
    await time.advance(PATIENCE_S - 1)
    assert len(bench.work) == 1
    bench.open(D, restarted=True)
    key, work = bench.newest(key)
    assert (set(work), work[D].token_ids) == ({P, D}, (*PROMPT, 10, 11))
    bench.tokens(D, key, 2, 12, reason="stop")
    assert await text(task) == [10, 11, 12]


async def test_who_waits_in_vain_is_told_after_a_while(make: Any, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = make()
    key, task = await bench.request()
    decoded(bench, key, 10, 11)
    bench.lose(D, "its process died")
    await time.advance(PATIENCE_S - 0.01)
    assert not task.done()
    await time.advance(0.02)
    await settle()
    with pytest.raises(
        GenerationFailed, match=r"no decode worker has been usable for 10.0 s.*its process died"
    ) as failed:
        await task
    assert D not in failed.value.message, "clients are told no addresses"
    assert f"worker_lost at {D}: the decode worker was lost: its process died; worker_lost: no decode" in caplog.text
    assert bench.in_flight() == (0, 0)


async def test_a_request_that_waits_goes_on_as_long_as_its_time_lasts(make: Any, time: Time) -> None:
    bench = make()
    _, task = await bench.request(budget_s=5)
    bench.lose(D)
    await time.advance(6.1)
    assert await failure(task) is Cause.DEADLINE
    assert bench.goodbyes(P) == list(bench.work)


async def test_the_time_that_is_left_is_passed_on(make: Any, time: Time) -> None:
    bench = make()
    key, _ = await bench.request(budget_s=30)
    await time.advance(12)
    bench.lose(P)
    key, work = bench.newest(key)
    assert work[D].budget_s == pytest.approx(18)
    await time.advance(3)
    bench.fail(D, key, Cause.TRANSFER)
    await time.advance(2 * FIRST_DELAY_S)
    assert bench.newest(key)[1][D].budget_s == pytest.approx(15 - 2 * FIRST_DELAY_S)


async def test_the_second_failure_in_a_row_is_followed_after_a_moment(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2))
    key, _ = await bench.request()
    bench.fail(P, key, Cause.INTERNAL)
    key, work = bench.newest(key)
    assert set(work) == {D}, "the prefill worker has just failed"
    bench.fail(D, key, Cause.INTERNAL)
    bench.say(D2, heartbeat())
    assert len(bench.work) == 2
    await time.advance(FIRST_DELAY_S + 0.001)
    key, work = bench.newest(key)
    assert set(work) == {D2}


async def test_who_finds_nobody_after_that_moment_is_not_forgotten(make: Any, time: Time) -> None:
    bench = make()
    key, _ = await bench.request()
    for address in (P, D):
        bench.fail(address, bench.newest(key)[0], Cause.TRANSFER)
    bench.lose(D)
    await time.advance(1)
    assert len(bench.work) == 2
    bench.open(D)
    assert bench.newest(key)[0].attempt == 3


@pytest.mark.parametrize("cause", [Cause.DRAINING, Cause.INTERNAL], ids=str)
async def test_nobody_waits_for_an_offer_that_a_prefill_worker_has_refused(make: Any, time: Time, cause: Cause) -> None:
    """It has refused after the decode worker has, while the request waits for another one."""
    bench = make(prefill=(P, P2))
    key, task = await bench.request()
    [refusing] = bench.work[key].keys() - {D}
    [other] = {P, P2} - {refusing}
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.fail(D, key, Cause.DRAINING)
    bench.fail(refusing, key, cause)
    assert len(bench.work) == 1
    bench.say(D, heartbeat())
    await time.advance(1.0)
    newest, work = bench.newest(key)
    assert set(work) == {other, D}
    assert work[D].source.address == other
    bench.tokens(other, newest, 0, 10)
    bench.tokens(D, newest, 0, 10, 11, reason="stop")
    assert await text(task) == [10, 11]


@pytest.mark.parametrize("cause", [Cause.INVALID, Cause.CAPACITY], ids=str)
async def test_an_offer_that_can_never_be_ends_the_request_that_waits_for_it(make: Any, cause: Cause) -> None:
    """As for want of room, where no decode worker is usable and the request was not let in."""
    bench = make()
    key, task = await bench.request()
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.fail(D, key, Cause.DRAINING)
    bench.fail(P, key, cause)
    assert await failure(task) is cause


async def test_a_worker_that_serves_again_is_found_by_its_heartbeat(make: Any) -> None:
    bench = make()
    key, _ = await bench.request()
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.fail(D, key, Cause.DRAINING)
    assert len(bench.work) == 1
    bench.say(D, heartbeat())
    assert bench.newest(key)[0].attempt == 2


async def test_who_has_ended_waits_for_nothing(make: Any, time: Time) -> None:
    """One choice fails for good, or the client leaves, while another waits for a moment."""
    for end in ("fail", "leave"):
        bench = make(prefill=(), decode=(D, D2))
        key, task = await bench.request(n=2)
        for choice in range(2):
            bench.tokens(D, key, 0, 10, choice=choice)
        bench.lose(D)
        _, first, second = bench.work
        bench.fail(D2, first, Cause.CAPACITY)
        if end == "fail":
            bench.fail(D2, second, Cause.INVALID)
            assert await failure(task) is Cause.INVALID
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await time.advance(2 * FIRST_DELAY_S)
        assert len(bench.work) == 3, "nobody wants it any more"


# --- offers that stand -----------------------------------------------------------------------------------------------


async def test_a_decode_worker_lost_before_it_has_spoken_is_replaced_alone(make: Any) -> None:
    bench = make(decode=(D, D2))
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.lose(D)
    newest, work = bench.newest(key)
    assert set(work) == {D2}
    assert bench.decode(D2).offered == key
    assert bench.goodbyes(P) == []
    assert bench.in_flight(P, D2) == (0, 1)
    bench.tokens(D2, newest, 0, 10, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_while_an_offer_stands_its_worker_is_told_that_it_is_wanted(make: Any) -> None:
    bench = make()
    key, _ = await bench.request()
    bench.lose(D)
    assert bench.dispatcher.links.hello(bench.link(P)).open_requests == (key,)
    assert bench.in_flight(P) == (1,)
    bench.open(D, restarted=True)
    assert bench.decode(D).offered == key
    assert len(bench.sent(P, Prefill)) == 1


async def test_who_leaves_while_an_offer_stands_frees_its_worker(make: Any) -> None:
    bench = make()
    key, task = await bench.request()
    bench.lose(D)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.goodbyes(P) == [key]
    assert bench.in_flight(P) == (0,)


async def test_a_lease_that_is_lost_while_an_offer_stands_is_held_against_nobody(make: Any, time: Time) -> None:
    """It ran out, or another prompt needed its blocks: the worker has the prompt in its cache."""
    bench = make()
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.lose(D)
    bench.fail(P, key, Cause.LEASE_LOST)
    assert bench.counted("failovers_total", cause="lease_lost") == 1
    bench.open(D, restarted=True)
    await time.advance(1.0)
    newest, work = bench.newest(key)
    assert set(work) == {P, D}
    bench.tokens(D, newest, 1, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_a_prompt_that_is_computed_while_its_offer_stands_is_no_suspect_when_its_worker_crashes(
    make: Any, time: Time
) -> None:
    bench = make()
    key, _ = await bench.request()
    bench.lose(D)
    assert bench.in_flight(P) == (1,)
    bench.tokens(P, key, 0, 10)
    assert bench.in_flight(P) == (0,)
    bench.lose(P, crashed=True)
    bench.open(P, restarted=True)
    bench.open(D, restarted=True)
    await time.advance(1.0)
    assert bench.decode(D).suspicion is Suspicion.NONE
    assert bench.counted("stale_messages_total") == 0


async def test_patience_goes_on_when_an_offer_falls(make: Any, time: Time) -> None:
    bench = make(patience_s=10.0)
    _, task = await bench.request()
    bench.lose(D)
    await time.advance(6)
    bench.lose(P)
    await time.advance(3.9)
    assert not task.done()
    await time.advance(0.2)
    assert await failure(task) is Cause.WORKER_LOST


async def test_an_offer_falls_with_a_worker_that_hangs(make: Any, time: Time) -> None:
    bench = make(patience_s=1000.0)
    key, _ = await bench.request(budget_s=1000)
    bench.lose(D)
    bench.say(P, replace(heartbeat(), running=1, steps=5))
    await time.advance(29)
    assert bench.goodbyes(P) == []
    await time.advance(2)
    bench.say(P, replace(heartbeat(), running=1, steps=5))
    assert bench.goodbyes(P) == [key]


async def test_an_offer_falls_with_its_worker(make: Any) -> None:
    bench = make()
    key, _ = await bench.request()
    bench.lose(D)
    bench.lose(P)
    bench.open(P, restarted=True)
    bench.open(D)
    newest, work = bench.newest(key)
    assert (set(work), bench.decode(D).offered) == ({P, D}, newest)
    assert bench.in_flight() == (1, 1)


async def test_an_offer_whose_worker_is_gone_is_done_without(make: Any) -> None:
    bench = make()
    key, _ = await bench.request()
    bench.lose(D)
    bench.lose(P)
    assert bench.goodbyes(P) == [key]
    bench.open(D)
    assert set(bench.newest(key)[1]) == {D}
    bench.open(P)
    assert bench.in_flight() == (0, 1), "the same life goes on"


@pytest.mark.parametrize("known", [True, False])
async def test_an_offer_falls_whose_worker_does_not_know_it_after_lost_messages(
    make: Any, time: Time, known: bool
) -> None:
    """The Prefill was lost, and nobody tells so: the next decode worker would wait for it as long as it can."""
    bench = make()
    key, task = await bench.request()
    bench.lose(D)
    bench.dispatcher.links.hello(bench.link(P))
    bench.dispatcher.links.on_resync(bench.link(P), welcome(Role.PREFILL, [key] if known else []))
    assert bench.goodbyes(P) == ([] if known else [key])
    assert bench.in_flight(P) == (1 if known else 0,)
    bench.open(D, restarted=True)
    await time.advance(1.0)
    newest, _ = bench.newest(key)
    assert newest != key
    assert bench.decode(D).offered == (key if known else newest)
    bench.tokens(P, key if known else newest, 0, 10)
    bench.tokens(D, newest, 0, 10, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_a_worker_that_is_back_lets_go_of_what_has_ended_since_it_was_greeted(make: Any) -> None:
    """What was said to it between the Hello and its answer was said to nobody."""
    bench = make()
    (key, task), (other, _) = [await bench.request() for _ in range(2)]
    for each in (key, other):
        bench.tokens(P, each, 0, 10)
    bench.lose(P)
    assert set(bench.dispatcher.links.hello(bench.link(P)).open_requests) == {key, other}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    before = len(bench.goodbyes(P))
    bench.open(P, key, other)
    assert bench.goodbyes(P)[before:] == [key]


# --- suspects --------------------------------------------------------------------------------------------------------


async def test_who_was_on_a_worker_when_it_crashed_goes_on_as_a_suspect(make: Any) -> None:
    bench = make(prefill=(), decode=(D, D2))
    requests = [await bench.request() for _ in range(4)]
    for number, (key, _) in enumerate(requests):
        bench.tokens(D if number % 2 == 0 else D2, key, 0, 10)
    first, other, second, another = (key for key, _ in requests)
    bench.lose(D, crashed=True)
    for suspect in (first, second):
        newest, work = bench.newest(suspect)
        told = newest.attempt, set(work), work[D2].suspicion
        assert told == (2, {D2}, Suspicion.GROUP), "whose turn it is the worker knows"
    assert (bench.newest(other)[0], bench.newest(another)[0]) == (other, another), "these were elsewhere"
    assert bench.counted("trials_total", level="group") == 2
    assert bench.counted("trials_total", level="alone") == 0


@pytest.mark.parametrize(
    ("begun_before_s", "suspicion"),
    [(RECONNECT_S - 0.01, Suspicion.NONE), (RECONNECT_S + 0.01, Suspicion.GROUP)],
)
async def test_what_began_after_the_crash_is_no_suspect(
    make: Any, time: Time, begun_before_s: float, suspicion: Suspicion
) -> None:
    """A crash is noticed when the time to reconnect has passed: the process died before all that."""
    bench = make(prefill=(), decode=(D, D2))
    key, _ = await bench.request()
    assert set(bench.work[key]) == {D}
    time.now += begun_before_s
    bench.dispatcher.links.on_lost(bench.link(D), "its process died", crashed=True)
    _, work = bench.newest(key)
    assert (set(work), work[D2].suspicion) == ({D2}, suspicion)


async def test_what_began_after_the_connection_broke_is_no_suspect_however_late_the_verdict(
    make: Any, time: Time
) -> None:
    """It has not left the gateway. The verdict is late if the event loop was blocked."""
    bench = make(prefill=(), decode=(D, D2))
    bench.lose(D2)
    before, _ = await bench.request()
    await time.advance(0.01)
    bench.dispatcher.links.on_broken(bench.link(D))
    await time.advance(0.05)
    after, _ = await bench.request()
    await time.advance(3 * RECONNECT_S)
    bench.open(D2)
    bench.dispatcher.links.on_lost(bench.link(D), "its process died", crashed=True)
    assert [bench.newest(key)[1][D2].suspicion for key in (before, after)] == [Suspicion.GROUP, Suspicion.NONE]


async def test_a_poison_is_refused_and_its_neighbours_finish(make: Any, time: Time) -> None:
    bench = make(prefill=(), decode=(D, D2))
    bench.lose(D2)
    (poison, refused), (neighbour, task) = [await bench.request() for _ in range(2)]
    for key in (poison, neighbour):
        bench.tokens(D, key, 0, 10)
    bench.lose(D, crashed=True)
    bench.open(D2)
    assert set(bench.newest(poison)[1]) == {D2}
    bench.trial(D2, bench.newest(poison)[0])
    bench.lose(D2, crashed=True)
    assert await failure(refused) is Cause.POISON
    bench.open(D, restarted=True)
    await time.advance(FIRST_DELAY_S)
    key, work = bench.newest(neighbour)
    assert (set(work), work[D].token_ids) == ({D}, (*PROMPT, 10)), "it waited there for its turn"
    bench.tokens(D, key, 1, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_a_poison_is_found_whose_reader_tells_first_that_its_read_has_failed(make: Any, time: Time) -> None:
    """It kills each prefill worker that computes it. The decode worker's read fails as soon as the connection breaks;
    the gateway waits a moment before it calls that a crash."""
    bench = make(prefill=(P, P2, "p:3", "p:4", "p:5", "p:6"))
    key, task = await bench.request()
    killed: list[str] = []
    while not task.done():
        newest, work = bench.newest(key)
        [address] = work.keys() - {D}
        killed.append(address)
        if work[address].suspicion is not Suspicion.NONE:
            bench.trial(address, newest)
        bench.fail(D, newest, Cause.TRANSFER)
        bench.lose(address, crashed=True)
        await time.advance(1.0)
    assert await failure(task) is Cause.POISON
    assert 2 <= len(killed) <= 3


async def test_a_read_that_fails_without_a_crash_is_followed_after_a_moment(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2))
    key, task = await bench.request()
    [address] = bench.work[key].keys() - {P}
    bench.fail(address, key, Cause.TRANSFER)
    assert bench.newest(key)[0] == key
    await time.advance(RECONNECT_S + 0.01)
    newest, work = bench.newest(key)
    assert set(work) == {D, D2} - {address}, "the offer stands"
    bench.tokens(next(iter(work)), newest, 0, 10, reason="stop")
    assert await text(task) == [10]


async def two_suspects_and_one_that_stands_by(make: Any) -> tuple[Bench, list[RequestKey]]:
    """All on D2, where the first two went on when their own worker crashed."""
    bench = make(prefill=(), decode=(D, D2))
    bench.lose(D2)
    suspects = [(await bench.request())[0] for _ in range(2)]
    for key in suspects:
        bench.tokens(D, key, 0, 10)
    bench.lose(D, crashed=True)
    bench.open(D2)
    other, _ = await bench.request()
    bench.tokens(D2, other, 0, 10)
    bench.open(D, restarted=True)
    return bench, [bench.newest(key)[0] for key in (*suspects, other)]


def levels(bench: Bench, keys: list[RequestKey], address: str) -> list[Suspicion]:
    """How these are tried at a worker."""
    return [bench.newest(key)[1][address].suspicion for key in keys]


async def test_a_group_that_crashes_its_worker_is_tried_singly_and_who_stood_by_is_not_suspected(make: Any) -> None:
    bench, keys = await two_suspects_and_one_that_stands_by(make)
    bench.trial(D2, *keys[:2])
    bench.lose(D2, crashed=True)
    assert levels(bench, keys, D) == [Suspicion.ALONE, Suspicion.ALONE, Suspicion.NONE]
    assert bench.counted("trials_total", level="alone") == 2


async def test_one_request_is_a_group_only_if_those_of_all_gateways_are_counted(make: Any) -> None:
    bench, keys = await two_suspects_and_one_that_stands_by(make)
    bench.trial(D2, keys[0], beside=1)
    bench.lose(D2, crashed=True)
    assert levels(bench, keys, D) == [Suspicion.ALONE, Suspicion.GROUP, Suspicion.NONE]


async def test_a_group_of_another_gateway_leaves_everybody_here_as_he_was(make: Any) -> None:
    bench, keys = await two_suspects_and_one_that_stands_by(make)
    bench.trial(D2, beside=7)
    bench.lose(D2, crashed=True)
    assert levels(bench, keys, D) == [Suspicion.GROUP, Suspicion.GROUP, Suspicion.NONE]


@pytest.mark.parametrize("how", ["over", "messages lost", "session lost"])
async def test_a_trial_that_is_over_or_of_which_news_may_be_lost_convicts_nobody(
    make: Any, time: Time, how: str
) -> None:
    bench, keys = await two_suspects_and_one_that_stands_by(make)
    bench.trial(D2, keys[0])
    match how:
        case "over":
            bench.trial(D2)
        case "messages lost":
            bench.dispatcher.links.hello(bench.link(D2))
            bench.dispatcher.links.on_resync(bench.link(D2), welcome(Role.DECODE, keys))
        case "session lost":
            bench.lose(D2)
            await time.advance(FIRST_DELAY_S)
            bench.open(D2)
            bench.lose(D)
            await time.advance(2 * FIRST_DELAY_S)
            assert levels(bench, keys, D2) == [Suspicion.GROUP, Suspicion.GROUP, Suspicion.NONE]
            bench.open(D)
    bench.lose(D2, crashed=True)
    await time.advance(4 * FIRST_DELAY_S)
    assert levels(bench, keys, D) == [Suspicion.GROUP] * 3


async def test_choices_of_one_request_are_tried_on_the_same_workers(make: Any) -> None:
    """Else each of them could crash a worker."""
    bench = make(prefill=(P, P2), decode=(D, D2, D3))
    key, _ = await bench.request(n=4)
    prefill, decode = sorted(bench.work[key], reverse=True)
    for choice in range(4):
        bench.tokens(prefill, key, 0, 10, choice=choice)
        bench.tokens(decode, key, 0, 10, 11, choice=choice)
    known = set(bench.work)
    bench.lose(decode, crashed=True)
    retried = [set(work) for each, work in bench.work.items() if each not in known]
    assert len(retried) == 4
    assert all(workers == retried[0] for workers in retried)
    assert decode not in retried[0]


async def test_the_gateway_s_own_verdict_on_a_source_comes_before_a_report(make: Any, time: Time) -> None:
    """A decode worker may notice sooner; but whether there are suspects is for the gateway to find out."""
    bench = make(prefill=(P, P2))
    key, _ = await bench.request()
    bench.dispatcher.links.on_broken(bench.link(P))
    bench.fail(D, key, Cause.WORKER_LOST)
    assert bench.newest(key)[0] == key, "not yet"
    bench.lose(P, crashed=True)
    await settle()
    _, work = bench.newest(key)
    assert (set(work), work[P2].suspicion) == ({P2, D}, Suspicion.GROUP)
    await time.advance(1.0)
    assert bench.newest(key)[0].attempt == 2, "the report is stale by now"


async def test_a_source_that_is_there_after_all_is_another_matter(make: Any, time: Time) -> None:
    bench = make(prefill=(P, P2))
    key, _ = await bench.request()
    links, link = bench.dispatcher.links, bench.link(P)
    links.on_broken(link)
    bench.fail(D, key, Cause.WORKER_LOST)
    links.hello(link)
    links.on_resync(link, welcome(Role.PREFILL, [key]))
    await time.advance(1.0)
    _, work = bench.newest(key)
    assert (set(work), work[P2].suspicion) == ({P2, D}, Suspicion.NONE)


async def test_a_request_goes_on_only_with_the_same_model(make: Any, time: Time) -> None:
    bench = make(prefill=(), decode=(D, D2), patience_s=PATIENCE_S)
    bench.lose(D2)
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10)
    bench.lose(D)
    bench.open(D2, weights_hash="other")
    await time.advance(1.0)
    assert bench.newest(key)[0] == key, "other weights would say something else"
    other, new = await bench.request()
    assert set(bench.work[other]) == {D2}, "who begins now begins there"
    await time.advance(PATIENCE_S)
    assert await failure(task) is Cause.WORKER_LOST
    new.cancel()


@pytest.mark.parametrize("why", ["drains", "is lost"])
async def test_a_request_of_which_nobody_has_anything_begins_anew_with_another_model(make: Any, why: str) -> None:
    """The last worker of the old weights ends."""
    bench = make(prefill=(), decode=(D, D2), patience_s=PATIENCE_S)
    bench.lose(D2)
    bench.open(D2, weights_hash="other")
    key, task = await bench.request()
    assert set(bench.work[key]) == {D}
    if why == "drains":
        bench.fail(D, key, Cause.DRAINING)
    else:
        bench.lose(D)
    newest, work = bench.newest(key)
    assert set(work) == {D2}
    bench.tokens(D, key, 0, 7)  # too late: it is of the attempt before
    bench.tokens(D2, newest, 0, 10, 11, reason="stop")
    assert await text(task) == [10, 11]


@pytest.mark.parametrize("has", ["token", "log probability"])
async def test_a_request_of_which_the_client_has_something_does_not(make: Any, time: Time, has: str) -> None:
    bench = make(prefill=(), decode=(D, D2), patience_s=PATIENCE_S)
    bench.lose(D2)
    bench.open(D2, weights_hash="other")
    key, task = await bench.request(prompt_logprobs=1 if has == "log probability" else None)
    assert set(bench.work[key]) == {D}
    if has == "token":
        bench.tokens(D, key, 0, 10)
    else:
        scores = TokenScores(logprobs=(-0.5,), ranks=(1,), top_token_ids=(5,), top_logprobs=(-0.5,))
        bench.say(D, PromptLogprobs(request=key.request, attempt=key.attempt, position=1, scores=scores))
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.fail(D, key, Cause.DRAINING)
    bench.lose(D)
    await time.advance(1.0)
    assert bench.newest(key)[0] == key, "other weights would say something else"
    await time.advance(PATIENCE_S)
    assert await failure(task) is Cause.WORKER_LOST


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["the others come first", "the others come last"])
async def test_an_offer_of_weights_that_no_decode_worker_has_is_given_up(
    make: Any, time: Time, told: bool, last: bool
) -> None:
    """Unless the client has tokens, which the other weights might contradict."""
    bench = make(prefill=(P,), decode=(D, D2), patience_s=PATIENCE_S)
    bench.lose(D2)
    if not last:
        bench.open(D2, weights_hash="other")
    key, task = await bench.request()
    assert set(bench.work[key]) == {P, D}
    if told:
        bench.tokens(P, key, 0, 10)
    bench.lose(D)
    if last:
        await time.advance(1.0)
        assert bench.newest(key)[0] == key, "nobody else is there"
        bench.open(D2, weights_hash="other")
        bench.say(D2, heartbeat())
    await time.advance(1.0)
    newest, work = bench.newest(key)
    if told:
        assert (newest, bench.sent(P, Abort)) == (key, [])
        await time.advance(PATIENCE_S)
        assert await failure(task) is Cause.WORKER_LOST
        return
    assert set(work) == {D2}
    assert len(bench.sent(P, Abort)) == 1
    bench.tokens(D2, newest, 0, 11, reason="stop")
    assert await text(task) == [11]


async def test_an_offer_stands_while_no_decode_worker_is_usable(make: Any, time: Time) -> None:
    """The prefill worker that offers is refused, for another one whose session is older."""
    bench = make(prefill=(P, P2), decode=(D,), patience_s=PATIENCE_S)
    bench.lose(P2)
    bench.open(P2, weights_hash="other")
    bench.lose(P)
    bench.open(P)
    key, task = await bench.request()
    assert set(bench.work[key]) == {P, D}
    bench.lose(D)
    await time.advance(1.0)
    assert bench.registry.workers[P].refused is not None
    assert bench.sent(P, Abort) == []
    bench.open(D)
    bench.say(D, heartbeat())
    await time.advance(1.0)
    newest, work = bench.newest(key)
    assert set(work) == {D}
    assert work[D].source is not None, "it takes the offer over"
    bench.tokens(D, newest, 0, 11, reason="stop")
    assert await text(task) == [11]


async def test_a_request_that_begins_anew_with_other_blocks_is_looked_up_by_these(make: Any) -> None:
    bench = make(prefill=(), decode=(D, D2))
    bench.lose(D2)
    prompt = range(100)
    key, _ = await bench.request(prompt)
    smaller = replace(FINGERPRINT, layout=replace(LAYOUT, block_size=4))
    link = bench.link(D2)
    bench.dispatcher.links.on_open(link, replace(welcome(Role.DECODE), fingerprint=smaller))
    stored = b"".join(name[:SHORT_NAME_BYTES] for name in block_hashes(prompt, 4))
    bench.say(D2, CacheEvents(begins=False, stored=stored, removed=b""))
    bench.lose(D)
    (request,) = bench.dispatcher._open
    assert set(bench.newest(key)[1]) == {D2}
    assert request.cached == {bench.registry.workers[D2].life: 96}


async def test_a_stream_leaves_a_decode_worker_that_reaches_no_prefill_worker(make: Any) -> None:
    bench = make(prefill=(P, P2), decode=(D, D2))
    key, task = await bench.request()
    source, reader = bench.work[key]
    bench.say(D2 if reader == D else D, heartbeat(used=99, total=100))
    bench.tokens(source, key, 0, 10)
    bench.fail(reader, key, Cause.WORKER_LOST)
    key, work = bench.newest(key)
    assert set(work) == {P, P2, D, D2} - {source, reader}, "however empty that one is"
    source, reader = work
    bench.tokens(source, key, 1, 11)
    bench.tokens(reader, key, 1, 11, 12, reason="stop")
    assert await text(task) == [10, 11, 12]


@pytest.mark.parametrize("decode", [(D,), (D, D2), (D, D2, D3)], ids=len)
@pytest.mark.parametrize("num_prefill", [1, 2, 9])
async def test_a_stream_whose_prompts_nobody_reads_is_computed_where_it_is_decoded(
    make: Any, time: Time, num_prefill: int, decode: tuple[str, ...]
) -> None:
    """Each prefill worker is tried with another decode worker, if there is one, but not more than three of them."""
    bench = make(prefill=tuple(f"p:{number}" for number in range(num_prefill)), decode=decode)
    key, task = await bench.request()
    readers: list[str] = []
    output: list[int] = []
    while len(bench.work[key]) > 1:
        source, reader = bench.work[key]
        readers.append(reader)
        bench.tokens(source, key, len(output), 10 + len(output))
        output.append(10 + len(output))
        bench.fail(reader, key, Cause.WORKER_LOST)
        await time.advance(1.0)
        key, _ = bench.newest(key)
        assert len(readers) <= 3, "it crawls, a token at a time"
    assert len(readers) == min(num_prefill, 3)
    assert len(set(readers)) == min(len(readers), len(decode)), "each time another one"
    [alone] = bench.work[key]
    bench.tokens(alone, key, len(output), 99, reason="stop")
    assert await text(task) == [*output, 99]
    assert bench.counted("local_prefills_total", reason="refused") == 1


@pytest.mark.parametrize("decode", [(D, D2), (D, D2, D3)], ids=len)
async def test_a_stream_leaves_decode_workers_whose_reads_fail(make: Any, time: Time, decode: tuple[str, ...]) -> None:
    bench = make(prefill=(P, P2), decode=decode)
    key, _ = await bench.request()

    async def read_fails(key: RequestKey) -> Any:
        *_, reader = bench.work[key]
        bench.fail(reader, key, Cause.TRANSFER)
        await time.advance(RECONNECT_S + 0.01)  # whether its source has crashed is clear by then
        await time.advance(1.0)
        return bench.newest(key)

    key, work = await read_fails(key)
    assert set(work) == {D2}, "the offer stands"
    key, work = await read_fails(key)
    assert len(work) == 2
    if D3 in decode:
        assert set(work) == {P2, D3}
    else:
        bench.tokens(P2, key, 0, 10)
        key, work = await read_fails(key)
        assert len(work) == 1, "nobody reads what any prefill worker computes"


# --- leaving workers -------------------------------------------------------------------------------------------------


async def test_a_draining_worker_gets_no_new_work(make: Any) -> None:
    bench = make(prefill=(P, P2), decode=(D, D2))
    for address in (P, D):
        bench.say(address, heartbeat(Phase.DRAINING))
    for _ in range(3):
        key, _ = await bench.request()
        assert set(bench.work[key]) == {P2, D2}
    bench.say(D, heartbeat(Phase.DRAINED))
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P2, D2}


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
async def test_a_request_that_gets_no_token_for_too_long_fails(make: Any, time: Time, num_tokens: int) -> None:
    """From its beginning, or its last token; however long it takes as a whole. It frees every worker."""
    bench = make(silence_s=60.0)
    key, task = await bench.request(budget_s=86400)
    for number in range(num_tokens):
        await time.advance(59)
        bench.tokens(P if number == 0 else D, key, number, 10 + number)
    await time.advance(59)
    assert not task.done()
    await time.advance(1.5)
    with pytest.raises(
        GenerationFailed, match="no token has come for 60 s; a prefill and a decode worker had it"
    ) as failed:
        await task
    assert failed.value.cause is Cause.DEADLINE
    assert bench.in_flight(P, D) == (0, 0)
    assert len(bench.sent(D, Abort)) == 1


async def test_a_choice_that_goes_on_is_enough(make: Any, time: Time) -> None:
    bench = make(silence_s=60.0)
    key, task = await bench.request(n=2, budget_s=86400)
    for choice in (0, 1):
        bench.tokens(P, key, 0, 10, choice=choice)
    for number in range(1, 4):
        await time.advance(59)
        bench.tokens(D, key, number, 10 + number, choice=0)
    assert not task.done()
    bench.tokens(D, key, 4, 14, choice=0, reason="stop")
    await time.advance(61)
    assert await failure(task) is Cause.DEADLINE, "the other one is as silent as before"


async def test_a_request_that_waits_for_a_worker_is_silent_too(make: Any, time: Time) -> None:
    bench = make(silence_s=60.0, patience_s=1000.0)
    key, task = await bench.request(budget_s=86400)
    decoded(bench, key, 10, 11)
    bench.lose(D)
    await time.advance(59)
    assert not task.done()
    await time.advance(2)
    assert await failure(task) is Cause.DEADLINE


async def test_running_sequences_leave_a_draining_worker(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2))
    key, task = await bench.request(budget_s=30)
    decoded(bench, key, 10, 11)
    bench.say(D2, heartbeat())
    assert bench.sent(D2, Decode) == []
    await time.advance(10)
    bench.say(D, heartbeat(Phase.DRAINING))
    work = bench.decode(D2)
    assert (work.moving, work.offered, work.token_ids) == (True, key, (*PROMPT, 10, 11))
    assert work.budget_s == pytest.approx(20)
    bench.say(D, heartbeat(Phase.DRAINING))
    assert len(bench.sent(D2, Decode)) == 1
    assert bench.in_flight(D, D2) == (1, 1)
    bench.tokens(D, key, 2, 12)
    bench.say(D, Cut(request=key.request, attempt=1, choice=0, position=len(PROMPT) + 3))
    await time.advance(0.25)
    bench.tokens(D2, work.key, 2, 12, 13)
    assert bench.counted("moves_total", end="moved") == 1
    assert bench.counted("move_pause_seconds_sum") == pytest.approx(0.25)
    assert bench.in_flight(D, D2) == (0, 1)
    assert bench.goodbyes(D) == [key]
    bench.tokens(D2, work.key, 4, 14, reason="stop")
    assert await text(task) == [10, 11, 12, 13, 14]
    assert bench.goodbyes(D2) == [work.key]


async def test_a_dead_worker_that_still_does_not_answer_changes_nothing(make: Any) -> None:
    """That is told at each timeout, as long as it is dead: nobody who waits is looked at for it."""
    bench = make(decode=(D, D2))
    key, _ = await bench.request()
    decoded(bench, key, 10)
    bench.lose(D)
    attempt = bench.newest(key)[0].attempt
    epoch = bench.registry.epoch
    for _ in range(3):
        bench.lose(D, "no answer")
    assert bench.registry.epoch == epoch
    assert bench.newest(key)[0].attempt == attempt
    bench.open(D)
    assert bench.registry.workers[D].usable


async def test_a_sequence_stays_where_it_is_if_nobody_has_room(make: Any) -> None:
    bench = make(decode=(D, D2))
    key, task = await bench.request()
    decoded(bench, key, 10, 11)
    bench.say(D, heartbeat(Phase.DRAINING))
    assert bench.sent(D2, Decode) == [], "nothing is known of its room"
    bench.say(D2, heartbeat(used=99, total=100))
    bench.say(D, heartbeat(Phase.DRAINING))
    assert bench.sent(D2, Decode) == []
    bench.say(D2, heartbeat(used=98, total=100))
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.fail(D2, bench.decode(D2).key, Cause.CAPACITY)
    assert bench.counted("moves_total", end="stayed") == 1
    assert bench.in_flight(D, D2) == (1, 0)
    bench.tokens(D, key, 2, 12, reason="stop")
    assert await text(task) == [10, 11, 12]
    assert not has_failovers(bench)


async def test_a_sequence_stays_if_the_worker_that_takes_it_over_brings_another_choice(make: Any) -> None:
    """That worker is at fault, and nobody else is harmed."""
    bench = make(prefill=(), decode=(D, D2))
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10, 11)
    bench.say(D2, heartbeat())
    bench.say(D, heartbeat(Phase.DRAINING))
    work = bench.decode(D2)
    bench.say(D2, Tokens(request=work.request, attempt=work.attempt, choice=5, position=5, token_ids=(12,)))
    assert bench.goodbyes(D2) == [work.key]
    assert bench.counted("moves_total", end="moved") == bench.counted("move_pause_seconds_count") == 0
    assert bench.counted("moves_total", end="stayed") == 1
    bench.tokens(D, key, 2, 12, reason="stop")
    assert await text(task) == [10, 11, 12]
    assert not has_failovers(bench)


async def test_a_choice_that_is_not_the_moving_one_does_not_count_as_moved(make: Any) -> None:
    """Nor does its first token, which has not come, count as the beginning of a pause."""
    bench = make(prefill=(), decode=(D, D2))
    key, _ = await bench.request(n=2)
    bench.tokens(D, key, 0, 10, 11)
    bench.say(D2, heartbeat())
    bench.say(D, heartbeat(Phase.DRAINING))
    work = bench.decode(D2)
    bench.say(D2, Tokens(request=work.request, attempt=work.attempt, choice=1, position=3, token_ids=(12,)))
    assert bench.goodbyes(D2) == [work.key]
    assert bench.counted("moves_total", end="moved") == bench.counted("move_pause_seconds_sum") == 0


async def test_a_decode_worker_that_begins_with_another_choice_has_taken_nothing_over(make: Any) -> None:
    bench = make()
    key, _ = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.say(D, Tokens(request=key.request, attempt=1, choice=5, position=len(PROMPT), token_ids=(12,)))
    assert bench.counted("handoffs_total") == 0
    assert bench.counted("failovers_total", cause="internal") == 1


@pytest.mark.parametrize("end", ["failed", "lost"])
async def test_a_sequence_that_was_cut_has_not_stayed(make: Any, end: str) -> None:
    bench = make(prefill=(), decode=(D, D2))
    key, _ = await bench.request()
    bench.tokens(D, key, 0, 10, 11)
    bench.say(D2, heartbeat())
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.say(D, Cut(request=key.request, attempt=1, choice=0, position=len(PROMPT) + 2))
    if end == "failed":
        bench.fail(D2, bench.decode(D2).key, Cause.LEASE_LOST)
    else:
        bench.lose(D2)
    assert bench.counted("moves_total", end="stayed") == bench.counted("moves_total", end="moved") == 0
    cause = "lease_lost" if end == "failed" else "worker_lost"
    assert bench.counted("failovers_total", cause=cause) == 1


@pytest.mark.parametrize("end", ["lost", "unknown"])
async def test_a_sequence_that_was_not_cut_has_stayed(make: Any, end: str) -> None:
    bench = make(prefill=(), decode=(D, D2))
    key, _ = await bench.request()
    bench.tokens(D, key, 0, 10, 11)
    bench.say(D2, heartbeat())
    bench.say(D, heartbeat(Phase.DRAINING))
    assert len(bench.sent(D2, Decode)) == 1
    if end == "lost":
        bench.lose(D2)
    else:
        bench.dispatcher.links.hello(bench.link(D2))
        bench.dispatcher.links.on_resync(bench.link(D2), welcome(Role.DECODE))
    assert bench.counted("moves_total", end="stayed") == 1
    assert not has_failovers(bench)


@pytest.mark.parametrize("until", ["it holds less", "some time has passed", "its session begins anew"])
async def test_a_worker_without_room_is_not_asked_again_with_each_heartbeat(make: Any, time: Time, until: str) -> None:
    """Each time all that run at the draining worker would be sent to it, with all their tokens."""
    bench = make(decode=(D, D2))
    key, _ = await bench.request()
    decoded(bench, key, 10, 11)
    bench.say(D2, heartbeat(used=50))
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.fail(D2, bench.decode(D2).key, Cause.CAPACITY)
    for _ in range(3):
        bench.say(D2, heartbeat(used=50))
        bench.say(D, heartbeat(Phase.DRAINING))
        await settle()
    assert len(bench.sent(D2, Decode)) == 1
    match until:
        case "it holds less":
            bench.say(D2, heartbeat(used=49))
        case "some time has passed":
            await time.advance(1.5)
            bench.say(D2, heartbeat(used=50))
        case _:
            bench.lose(D2)
            bench.open(D2)
            bench.say(D2, heartbeat(used=50))
    bench.say(D, heartbeat(Phase.DRAINING))
    await settle()
    assert len(bench.sent(D2, Decode)) == 2


@pytest.mark.parametrize("cause", [Cause.TRANSFER, Cause.WORKER_LOST])
async def test_a_worker_that_cannot_take_a_sequence_over_is_not_the_next_one_to_try(
    make: Any, time: Time, cause: Cause
) -> None:
    """It may be the only one that cannot reach the draining worker."""
    bench = make(decode=(D, D2, D3))
    key, _ = await bench.request()
    decoded(bench, key, 10, 11)
    for worker in (D2, D3):
        bench.say(worker, heartbeat())
    tried = []
    for _ in range(2):
        bench.say(D, heartbeat(Phase.DRAINING))
        await settle()
        tried += [worker for worker in (D2, D3) if bench.sent(worker, Decode) and worker not in tried]
        bench.fail(tried[-1], bench.decode(tried[-1]).key, cause)
        await time.advance(1.0)  # whether its source has crashed is clear by then
    assert sorted(tried) == [D2, D3]
    for _ in range(2):  # where all have failed, they are tried again after a while
        bench.say(D, heartbeat(Phase.DRAINING))
        await settle()
        assert len(bench.sent(D2, Decode)) + len(bench.sent(D3, Decode)) == 2
        await time.advance(0.5)
    bench.say(D, heartbeat(Phase.DRAINING))
    await settle()
    assert len(bench.sent(D2, Decode)) + len(bench.sent(D3, Decode)) == 3


async def test_a_move_that_fails_wherever_it_is_tried_is_tried_again_after_longer_and_longer_pauses(
    make: Any, time: Time
) -> None:
    """Each try takes blocks of a worker that is well, and a place."""
    bench = make(decode=(D, D2))
    key, _ = await bench.request(budget_s=1000.0)
    decoded(bench, key, 10, 11)
    bench.say(D2, heartbeat())
    for number, pause_s in enumerate((1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0), 1):
        bench.say(D, heartbeat(Phase.DRAINING))
        await settle()
        assert len(bench.sent(D2, Decode)) == number
        bench.fail(D2, bench.decode(D2).key, Cause.TRANSFER)
        await time.advance(0.5)  # whether its source has crashed is clear by then
        for _ in range(2):
            bench.say(D, heartbeat(Phase.DRAINING))
            await settle()
            assert len(bench.sent(D2, Decode)) == number
            await time.advance(0.5 * pause_s)


async def test_a_worker_that_nobody_has_tried_is_asked_in_the_pause_of_the_others(make: Any, time: Time) -> None:
    """A drain may end before the pause does."""
    bench = make(decode=(D, D2, D3))
    bench.lose(D3)
    key, _ = await bench.request(budget_s=1000.0)
    decoded(bench, key, 10, 11)
    bench.say(D2, heartbeat())
    bench.say(D, heartbeat(Phase.DRAINING))
    await settle()
    bench.fail(D2, bench.decode(D2).key, Cause.TRANSFER)
    await time.advance(0.5)
    bench.say(D, heartbeat(Phase.DRAINING))
    await settle()
    bench.open(D3)
    bench.say(D3, heartbeat())
    bench.say(D, heartbeat(Phase.DRAINING))
    await settle()
    assert (len(bench.sent(D2, Decode)), len(bench.sent(D3, Decode))) == (1, 1)


async def test_a_worker_that_could_not_take_a_sequence_over_is_asked_again_if_the_others_have_no_room(
    make: Any, time: Time
) -> None:
    bench = make(decode=(D, D2, D3))
    key, _ = await bench.request()
    decoded(bench, key, 10, 11)
    bench.say(D2, heartbeat())
    bench.say(D3, heartbeat(used=99, total=100))
    for number in (1, 2):
        bench.say(D, heartbeat(Phase.DRAINING))
        await settle()
        assert len(bench.sent(D2, Decode)) == number
        bench.fail(D2, bench.decode(D2).key, Cause.TRANSFER)
        await time.advance(1.0)
        bench.say(D, heartbeat(Phase.DRAINING))
        await time.advance(1.0)
    assert bench.sent(D3, Decode) == []


async def test_a_sequence_that_has_run_ahead_is_tried_again_with_the_next_heartbeat(make: Any) -> None:
    bench = make(decode=(D, D2))
    key, _ = await bench.request()
    decoded(bench, key, 10, 11)
    bench.say(D2, heartbeat())
    for number in range(1, 4):
        bench.say(D, heartbeat(Phase.DRAINING))
        await settle()
        assert len(bench.sent(D2, Decode)) == number
        bench.fail(D2, bench.decode(D2).key, Cause.LEASE_LOST)
        bench.say(D2, heartbeat())


def has_failovers(bench: Bench) -> bool:
    metrics = [metric for metric in bench.dispatcher.collect() if metric.name == "baton_gateway_failovers"]
    (samples,) = [metric.samples for metric in metrics]
    return any(sample.value for sample in samples)


async def test_a_long_sequence_without_a_refuge_does_not_keep_shorter_ones(make: Any) -> None:
    bench = make(decode=(D, D2), prefill=())
    bench.lose(D2)
    long, _ = await bench.request(range(100, 200))
    short, _ = await bench.request()
    for key in (long, short):
        bench.tokens(D, key, 0, 10)
    bench.open(D2)
    bench.say(D2, heartbeat(used=97, total=100))
    bench.say(D, heartbeat(Phase.DRAINING))
    (work,) = bench.sent(D2, Decode)
    assert work.offered == short


async def test_what_drains_one_after_the_other_moves_each_time(make: Any) -> None:
    bench = make(prefill=(), decode=(D, D2))
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10, 11)
    for address in (D, D2):
        bench.say(address, heartbeat())
    newest, output, here, there = key, [10, 11], D, D2
    for _ in range(4):
        bench.say(here, heartbeat(Phase.DRAINING))
        work = bench.decode(there)
        assert (work.moving, work.offered) == (True, newest)
        bench.say(here, Cut(request=newest.request, attempt=newest.attempt, choice=0, position=work.prompt_len))
        newest = work.key
        bench.tokens(there, newest, len(output), len(output))
        output.append(len(output))
        bench.say(here, heartbeat())
        here, there = there, here
    bench.tokens(here, newest, len(output), 99, reason="stop")
    assert await text(task) == [*output, 99]
    assert bench.counted("moves_total", end="moved") == 4


# --- what is counted -------------------------------------------------------------------------------------------------


async def test_what_recovery_costs_is_counted(make: Any, time: Time) -> None:
    bench = make()
    key, task = await bench.request()
    decoded(bench, key, 10, 11)
    bench.lose(D)
    assert bench.counted("failovers_total", cause="worker_lost") == 1, "while the request waits"
    await time.advance(3)
    bench.open(D, restarted=True)
    await time.advance(1)
    newest, _ = bench.newest(key)
    bench.tokens(P, newest, 2, 12)
    await time.advance(1)
    bench.tokens(D, newest, 2, 12, 13, reason="stop")
    await text(task)
    assert bench.counted("failovers_total", cause="worker_lost") == 1
    assert bench.counted("resume_seconds_count") == 1
    assert bench.counted("resume_seconds_sum") == pytest.approx(4)


async def test_a_stream_that_fails_twice_pauses_from_the_first_failure_on(make: Any, time: Time) -> None:
    bench = make(prefill=(), decode=(D,))
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10)
    bench.fail(D, key, Cause.LEASE_LOST)
    await time.advance(1)
    bench.fail(D, bench.newest(key)[0], Cause.LEASE_LOST)
    await time.advance(2)
    for position, token in enumerate((11, 12), start=1):
        bench.tokens(D, bench.newest(key)[0], position, token)
    assert (bench.counted("resume_seconds_count"), bench.counted("resume_seconds_sum")) == (1, 3)
    task.cancel()


async def test_a_request_that_nothing_happens_to_costs_no_recovery(make: Any) -> None:
    bench = make()
    await bench.whole(PROMPT, (10, 11))
    assert not has_failovers(bench)
    assert bench.counted("resume_seconds_count") == bench.counted("move_pause_seconds_count") == 0


# --- names -----------------------------------------------------------------------------------------------------------


async def test_choices_that_part_are_found_by_their_own_names(make: Any) -> None:
    bench = make(prefill=(), decode=(D, D2))
    key, task = await bench.request(n=2)
    for choice in range(2):
        bench.tokens(D, key, 0, 10 + choice, choice=choice)
    bench.lose(D)
    first, second = bench.sent(D2, Decode)
    assert len({key.request, first.request, second.request}) == 3
    bench.tokens(D2, second.key, 1, 21, choice=1, reason="stop")
    bench.tokens(D2, first.key, 1, 20, reason="stop")
    assert (await text(task), await text(task, 1)) == ([10, 20], [11, 21])
    assert bench.goodbyes(D2) == [second.key, first.key]
    bench.tokens(D2, first.key, 1, 20)
    assert bench.dispatcher.num_stale_messages == 1


async def test_what_an_older_attempt_brings_is_stale(make: Any) -> None:
    bench = make(prefill=())
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10)
    bench.fail(D, key, Cause.LEASE_LOST)
    newest, _ = bench.newest(key)
    bench.tokens(D, key, 1, 77)
    assert bench.dispatcher.num_stale_messages == 1
    bench.tokens(D, newest, 1, 11, reason="stop")
    assert await text(task) == [10, 11]


async def test_a_resync_judges_each_attempt_by_itself(make: Any, time: Time) -> None:
    bench = make(prefill=(), decode=(D,))
    key, _ = await bench.request()
    bench.fail(D, key, Cause.LEASE_LOST)
    newest, _ = bench.newest(key)
    assert bench.dispatcher.links.hello(bench.link(D)).open_requests == (newest,)
    bench.dispatcher.links.on_resync(bench.link(D), welcome(Role.DECODE, [newest]))
    assert bench.newest(key)[0] == newest
    bench.dispatcher.links.on_resync(bench.link(D), welcome(Role.DECODE, [key]))
    assert bench.goodbyes(D) == [key, newest]
    await time.advance(2 * FIRST_DELAY_S)
    assert bench.newest(key)[0].attempt == 3
