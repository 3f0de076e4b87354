"""Pairs of workers between which a handoff has failed are not used for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from dispatcher_bench import D2, D3, P2, Bench, D, P, Time, heartbeat, role_of, settle, text, welcome
from flow_run import life

from common.contract.errors import Cause
from common.contract.messages.gateway import Decode
from common.contract.messages.session import Profile
from gateway.dispatch.ask import Ask
from gateway.dispatch.broken_paths import BrokenPaths
from gateway.dispatch.router import Handoff, Router
from gateway.workers.registry import Registry


@pytest.fixture
async def time() -> Time:
    return Time()


@pytest.fixture
async def make(time: Time) -> AsyncIterator[Any]:
    """Benches in the test's own time; nothing may be left of them."""
    benches = []

    def make_bench(prefill: tuple[str, ...] = (P,), decode: tuple[str, ...] = (D,)) -> Bench:
        benches.append(Bench(prefill, decode, clock=time))
        return benches[-1]

    yield make_bench
    for bench in benches:
        await bench.close()


def test_a_path_is_tried_by_one_request_and_paused_for_twice_as_long_when_it_fails() -> None:
    paths, now = BrokenPaths(), 100.0
    for pause_s in (10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 320.0):
        assert paths.failed(life(P), life(D), now) == pause_s
        assert paths.failed(life(P), life(D), now + pause_s / 2) == 0.0, "a request that was on the way"
        paths.tries(life(P), life(D), now + pause_s / 2)  # for want of another one
        assert paths.avoided(life(P), now + pause_s - 1.0) == {life(D)}
        now += pause_s
        assert paths.avoided(life(P), now) == frozenset()
        paths.tries(life(P), life(D), now)
        assert paths.avoided(life(P), now + pause_s - 1.0) == {life(D)}, "the others wait for what comes of it"
        now += 5.0


def test_a_try_of_which_nothing_is_heard_is_followed_by_another() -> None:
    """The client has left, say."""
    paths = BrokenPaths()
    paths.failed(life(P), life(D), 0.0)
    paths.tries(life(P), life(D), 12.0)
    assert paths.avoided(life(P), 21.0) == {life(D)}
    assert paths.avoided(life(P), 22.0) == frozenset()


def test_a_path_that_works_is_forgotten() -> None:
    paths = BrokenPaths()
    for reader in (D, D2):
        paths.failed(life(P), life(reader), 0.0)
    paths.works(life(P), life(D))
    assert paths.avoided(life(P), 1.0) == {life(D2)}
    paths.works(life(P), life(D2))
    paths.works(life(P2), life(D2))
    assert not paths.sources()
    assert paths.failed(life(P), life(D), 2.0) == 10.0, "as at first"


def test_a_path_that_nobody_tries_is_forgotten() -> None:
    paths = BrokenPaths()
    for number in range(1000):
        paths.failed(life(P, number), life(D), 100.0 * number)
    assert len(paths.sources()) == 1
    assert paths.num_broken(99_900.0 + 69.0) == 1
    assert paths.num_broken(99_900.0 + 71.0) == 0
    assert not paths.sources()


def test_only_the_path_of_these_two_processes_is_avoided() -> None:
    paths = BrokenPaths()
    paths.failed(life(P), life(D), 0.0)
    assert paths.avoided(life(P2), 1.0) == frozenset()
    assert paths.avoided(life(P, 2), 1.0) == frozenset()
    assert life(D2) not in paths.avoided(life(P), 1.0)


async def broken(bench: Any, time: Time, source: str, reader: str, cause: Cause = Cause.WORKER_LOST) -> None:
    """A request is handed over from `source` to `reader`, which cannot read. It goes on elsewhere, and ends."""
    bench.say(reader, heartbeat())
    key, task = await bench.request()
    assert set(bench.work[key]) == {source, reader}
    bench.fail(reader, key, cause)
    await time.advance(1.0)  # whether the source has crashed is clear by then
    key, work = bench.newest(key)
    for worker in work:
        bench.tokens(worker, key, 0, 10, reason="stop")
    assert await text(task) == [10]


@pytest.mark.parametrize("cause", [Cause.WORKER_LOST, Cause.TRANSFER, Cause.FINGERPRINT])
async def test_the_next_request_goes_to_another_decode_worker(make: Any, time: Time, cause: Cause) -> None:
    """However busy that one is: the idle one cannot read."""
    bench = make(decode=(D, D2))
    bench.say(D2, heartbeat(used=90, total=100))
    await broken(bench, time, P, D, cause)
    bench.say(D, heartbeat())
    bench.say(D2, heartbeat(used=90, total=100))
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P, D2}
    await time.advance(10.0)
    bench.say(D, heartbeat())
    bench.say(D2, heartbeat(used=90, total=100))
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P, D}, "after the pause one request tries it"
    other, _ = await bench.request()
    assert set(bench.work[other]) == {P, D2}
    bench.tokens(P, key, 0, 10)
    bench.tokens(D, key, 0, 10, 11)
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P, D}, "it works"


async def test_a_prefill_worker_from_which_nobody_can_read_gets_no_prompts(make: Any, time: Time) -> None:
    bench = make(prefill=(P, P2), decode=(D,))
    first, task = await bench.request()
    (unread,) = bench.work[first].keys() - {D}
    bench.fail(D, first, Cause.WORKER_LOST)
    await time.advance(1.0)
    key, work = bench.newest(first)
    assert set(work) == {P, P2, D} - {unread}
    for worker in work:
        bench.tokens(worker, key, 0, 10, reason="stop")
    assert await text(task) == [10]
    for _ in range(3):
        key, _ = await bench.request()
        assert set(bench.work[key]) == {P, P2, D} - {unread}, "though the other one is idle"


async def test_without_a_path_decode_workers_compute_the_prompts(make: Any, time: Time) -> None:
    bench = make(prefill=(P,), decode=(D,))
    await broken(bench, time, P, D)
    key, task = await bench.request()
    assert set(bench.work[key]) == {D}
    bench.tokens(D, key, 0, 10, reason="stop")
    assert await text(task) == [10]
    assert bench.counted("local_prefills_total", reason="refused") == 2
    assert bench.counted("broken_paths") == 1
    await time.advance(10.0)
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P, D}


async def test_an_offer_goes_to_a_worker_that_can_read_it(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2, D3))
    for other in (D2, D3):
        bench.say(other, heartbeat(used=90, total=100))
    await broken(bench, time, P, D)
    bench.say(D, heartbeat(used=99, total=100))
    bench.say(D2, heartbeat())
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P, D2}
    bench.say(D, heartbeat())
    before = len(bench.sent(D, Decode))
    bench.lose(D2)
    await settle()
    _, work = bench.newest(key)
    assert set(work) == {D3}
    assert len(bench.sent(D, Decode)) == before


@pytest.mark.parametrize("cause", [Cause.DRAINING, Cause.CAPACITY, Cause.TOO_LARGE])
async def test_an_offer_goes_to_a_worker_that_could_not_read_if_there_is_no_other(
    make: Any, time: Time, cause: Cause
) -> None:
    """Nobody has let the request in yet, so it may be refused; but not for that."""
    bench = make(decode=(D, D2))
    bench.say(D2, heartbeat(used=90, total=100))
    await broken(bench, time, P, D)
    key, task = await bench.request()
    assert set(bench.work[key]) == {P, D2}
    bench.fail(D2, key, cause)
    await settle()
    key, work = bench.newest(key)
    assert set(work) == {D}
    bench.tokens(D, key, 0, 10, reason="stop")
    assert await text(task) == [10]


async def test_a_worker_whose_source_is_lost_is_not_avoided(make: Any, time: Time) -> None:
    """The gateway has lost the source, too: it is no fault of the path."""
    bench = make(prefill=(P, P2), decode=(D,))
    key, _ = await bench.request()
    source = next(iter(set(bench.work[key]) - {D}))
    bench.tokens(source, key, 0, 10)  # else the attempt ends with the source
    bench.lose(source)
    bench.fail(D, key, Cause.WORKER_LOST)
    await time.advance(1.0)
    assert bench.counted("broken_paths") == 0


async def test_a_full_reader_is_not_preferred_to_another_source_for_one_with_room(make: Any, time: Time) -> None:
    bench = make(prefill=(P, P2), decode=(D, D2))
    full = replace(heartbeat(used=90, total=100), sequences=(0, 12, 0), places=8, sequence_s=1.0)
    for worker in (D, D2):
        bench.say(worker, heartbeat() if worker == D else full)
    key, _ = await bench.request()
    (source,) = bench.work[key].keys() - {D}
    bench.fail(D, key, Cause.WORKER_LOST)
    await time.advance(1.0)
    bench.say(D, heartbeat())
    bench.say(D2, full)
    for _ in range(3):
        key, _ = await bench.request()
        assert set(bench.work[key]) == {P, P2, D} - {source}


def test_a_reader_of_the_other_profile_is_better_than_none() -> None:
    """The tier asks for a worker for throughput; the only one cannot read."""
    registry = Registry((P,), (D, D2), "c")
    for address in (P, D, D2):
        profile = Profile.LATENCY if address == D2 else Profile.THROUGHPUT
        registry.opened(address, life(address).incarnation, replace(welcome(role_of(address)), profile=profile))
        registry.heartbeat(address, heartbeat(), 0.0)
    router = Router(registry)
    ask = Ask(num_tokens=100)
    route = router.choose(ask, {})
    assert isinstance(route, Handoff)
    assert route.decode.address == D
    router.paths.failed(life(P), life(D), 0.0)
    route = router.choose(ask, {})
    assert isinstance(route, Handoff)
    assert route.decode.address == D2


def test_what_fails_as_a_worker_is_lost_is_no_path_of_it() -> None:
    paths = BrokenPaths()
    for source, reader in ((P, D), (P2, D), (P2, D2)):
        paths.failed(life(source), life(reader), 0.0)
    paths.forget(D)
    assert paths.num_broken(1.0) == 1
    paths.forget(P2)
    assert not paths.sources()
