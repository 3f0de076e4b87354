"""The dispatcher keeps the account of a request's time: in the test's own time, to the nanosecond."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from dispatcher_bench import D2, P2, Bench, D, P, Time, heartbeat, settle

from common.contract.errors import Cause
from common.contract.ids import RequestKey
from common.contract.messages.session import Phase
from common.contract.messages.worker import DecodeTimes, PromptTimes, Timings
from gateway.serving.waterfall import Stage, Waterfall


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


async def ask(bench: Bench, time: Time, **options: Any) -> tuple[RequestKey, Waterfall]:
    """A request that arrived an eighth of a second ago."""
    key, _ = await bench.request(**options)
    [client] = bench.dispatcher._open
    waterfall = client.flow.generation.waterfall
    waterfall.arrived("cmpl-1", time.now - 0.125)
    return key, waterfall


def computed(queue: float, prefill: float, num_cached: int = 0) -> PromptTimes:
    return PromptTimes(queue_s=queue, prefix_pull_s=0.0, prefill_s=prefill, num_cached=num_cached)


def decoded(num_drafted: int = 0, num_accepted: int = 0, **spent: float) -> DecodeTimes:
    stages = ("wait", "reserve", "pull", "settle", "queue", "decode", "preempted", "read", "hidden_read")
    seconds: dict[str, Any] = {f"{stage}_s": spent.get(stage, 0.0) for stage in stages}
    return DecodeTimes(**seconds, pull_bytes=64, num_drafted=num_drafted, num_accepted=num_accepted)


def tell(
    bench: Bench,
    address: str,
    key: RequestKey,
    prompt: PromptTimes | None = None,
    decode: DecodeTimes | None = None,
    choice: int | None = None,
) -> None:
    bench.say(address, Timings(request=key.request, attempt=key.attempt, choice=choice, prompt=prompt, decode=decode))


def spent(waterfall: Waterfall, time: Time) -> dict[str, float]:
    """Stages in seconds, of a request that has ended now."""
    waterfall.ended(time.now, finished=True)
    return {stage.value: duration / 1e9 for stage, duration in waterfall.stages_ns().items()}


async def test_a_request_that_is_handed_off(make: Any, time: Time) -> None:
    bench = make()
    key, waterfall = await ask(bench, time)
    time.now += 4.0
    tell(bench, P, key, computed(1.0, 2.5))
    bench.tokens(P, key, 0, 1)
    time.now += 8.0
    tell(bench, D, key, computed(1.0, 2.5), decoded(wait=3.75, pull=1.0, settle=0.5, queue=2.0, decode=4.25), choice=0)
    bench.tokens(D, key, 0, 1, 2, reason="stop")
    await settle()
    time.now += 0.5
    assert spent(waterfall, time) == {
        "intake": 0.125,
        "queue": 1.0,
        "prefill": 2.5,
        "first_token": 0.5,
        "pull": 1.0,
        "settle": 0.5,
        "decode_queue": 2.0,
        "decode": 4.25,
        "transit": 0.25,
        "delivery": 0.5,
    }
    assert waterfall.first_token_at == time.now - 8.5
    assert [each.pull_bytes for each in waterfall.pulls] == [64]
    assert [(leg.prefill_address, leg.decode_address) for leg in waterfall.legs] == [(P, D)]


async def test_of_two_choices_the_one_that_ends_last_counts(make: Any, time: Time) -> None:
    bench = make()
    key, waterfall = await ask(bench, time, n=2)
    time.now += 1.0
    tell(bench, P, key, computed(0.0, 1.0))
    for choice in (0, 1):
        bench.tokens(P, key, 0, 1, choice=choice)
    for choice, decode_s in ((1, 2.0), (0, 5.0)):
        time.now += 3.0
        tell(bench, D, key, computed(0.0, 1.0), decoded(wait=1.0, decode=decode_s), choice=choice)
        bench.tokens(D, key, 1, 2, reason="stop", choice=choice)
    await settle()
    assert spent(waterfall, time) == {"intake": 0.125, "prefill": 1.0, "decode": 5.0, "transit": 1.0}


async def test_an_attempt_is_lost_until_its_first_failure_is_noticed(make: Any, time: Time) -> None:
    """That the offer has gone, too, is no other failure."""
    bench = make()
    key, waterfall = await ask(bench, time)
    bench.tokens(P, key, 0, 1)
    time.now += 2.0
    bench.lose(D)
    bench.lose(P)
    time.now += 3.0
    bench.open(D, restarted=True)
    newest, work = bench.newest(key)
    assert set(work) == {D}
    time.now += 4.0
    bench.tokens(D, newest, 1, 2, reason="stop")
    await settle()
    assert spent(waterfall, time) == {"intake": 0.125, "first_token": 4.0, "lost": 2.0, "recovery": 3.0}
    assert (bench.counted("resume_seconds_count"), bench.counted("resume_seconds_sum")) == (1, 7.0)


async def test_another_decode_worker_takes_over_what_is_computed_meanwhile(make: Any, time: Time) -> None:
    """What the prefill worker did before is not of this attempt: it is as much as that has waited for."""
    bench = make(decode=(D, D2))
    key, waterfall = await ask(bench, time)
    first = next(address for address in (D, D2) if address in bench.work[key])
    time.now += 2.0
    bench.fail(first, key, Cause.CAPACITY)
    await settle()
    second, work = bench.newest(key)
    (other,) = work
    time.now += 3.0
    tell(bench, P, key, computed(1.0, 3.5))
    bench.tokens(P, key, 0, 1)
    time.now += 2.0
    tell(bench, other, second, computed(1.0, 3.5), decoded(wait=2.5, pull=0.5, decode=1.0), choice=0)
    bench.tokens(other, second, 0, 1, 2, reason="stop")
    await settle()
    assert spent(waterfall, time) == {
        "intake": 0.125,
        "lost": 2.0,
        "prefill": 2.5,
        "first_token": 0.5,
        "pull": 0.5,
        "decode": 1.0,
        "transit": 0.5,
    }
    assert waterfall.excess_ns == 0


async def test_what_was_computed_before_another_decode_worker_takes_over_counts_once(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2))
    key, waterfall = await ask(bench, time)
    first = next(address for address in (D, D2) if address in bench.work[key])
    time.now += 4.0
    tell(bench, P, key, computed(1.0, 2.5))
    bench.tokens(P, key, 0, 1)
    time.now += 1.0
    bench.fail(first, key, Cause.CAPACITY)
    await settle()
    second, work = bench.newest(key)
    (other,) = work
    time.now += 2.0
    tell(bench, other, second, computed(1.0, 2.5), decoded(wait=0.25, pull=0.5, decode=1.0), choice=0)
    bench.tokens(other, second, 0, 1, 2, reason="stop")
    await settle()
    assert spent(waterfall, time) == {
        "intake": 0.125,
        "queue": 1.0,
        "prefill": 2.5,
        "first_token": 0.5,
        "lost": 1.0,
        "pull": 0.5,
        "decode": 1.0,
        "transit": 0.5,
    }


async def test_a_worker_that_is_lost_has_not_told_what_it_decoded(make: Any, time: Time) -> None:
    """The gateway has seen it: up to the last token. What follows until the loss is noticed brought nothing."""
    bench = make(prefill=(P, P2), decode=(D, D2))
    key, waterfall = await ask(bench, time)
    *_, prefill, decode = bench.work[key]
    time.now += 1.0
    tell(bench, prefill, key, computed(0.0, 1.0))
    bench.tokens(prefill, key, 0, 1)
    time.now += 1.0
    tell(bench, decode, key, computed(0.0, 1.0), decoded(wait=1.0, pull=0.5, decode=0.5), choice=0)
    bench.tokens(decode, key, 0, 1, 2)
    time.now += 3.0
    bench.tokens(decode, key, 2, 3)
    time.now += 1.5
    bench.lose(decode)
    await settle()
    second, work = bench.newest(key)
    *_, prefill, decode = work
    time.now += 2.0
    tell(bench, prefill, second, computed(0.0, 2.0))
    bench.tokens(prefill, second, 3, 4, reason="stop")
    await settle()
    assert spent(waterfall, time) == {"intake": 0.125, "prefill": 3.0, "pull": 0.5, "decode": 3.5, "lost": 1.5}


async def test_a_sequence_that_moves_is_decoded_until_it_is_cut(make: Any, time: Time) -> None:
    bench = make(decode=(D, D2))
    key, waterfall = await ask(bench, time)
    leaving = next(address for address in (D, D2) if address in bench.work[key])
    time.now += 1.0
    tell(bench, P, key, computed(0.0, 1.0, num_cached=16))
    bench.tokens(P, key, 0, 1)
    tell(bench, leaving, key, computed(0.0, 1.0, num_cached=16), decoded(3, 1, wait=1.0), choice=0)
    bench.tokens(leaving, key, 0, 1, 2)
    time.now += 2.0
    for address in (D, D2):
        bench.say(address, heartbeat(Phase.DRAINING if address == leaving else Phase.SERVING))
    bench.say(leaving, heartbeat(Phase.DRAINING))
    second, work = bench.newest(key)
    (other,) = work
    assert other != leaving
    time.now += 3.0
    bench.tokens(leaving, key, 2, 3)
    time.now += 1.0
    tell(bench, other, second, None, decoded(10, 4, wait=3.25, pull=0.25, settle=0.125, decode=0.5), choice=0)
    bench.tokens(other, second, 3, 4, reason="stop")
    await settle()
    assert spent(waterfall, time) == {
        "intake": 0.125,
        "prefill": 1.0,
        "decode": 5.5,
        "pull": 0.25,
        "settle": 0.125,
        "transit": 0.125,
    }
    assert [leg.decode_address for leg in waterfall.legs] == [leaving, other]
    assert waterfall.num_cached == 16, "whoever pulls it computes nothing"
    assert waterfall.draft_outcomes == (1 + 4, 2 + 6), "right and wrong, as both workers have told"


async def test_what_was_cached_is_told_by_the_attempt_that_serves(make: Any, time: Time) -> None:
    """Not by one that has brought nothing, nor by one whose worker is lost."""
    bench = make(prefill=(P, P2), decode=(D, D2))
    key, waterfall = await ask(bench, time)
    assert waterfall.num_cached == 0
    *_, prefill, decode = bench.work[key]
    tell(bench, prefill, key, computed(0.0, 1.0, num_cached=32))
    assert waterfall.num_cached == 0, "it has brought nothing yet"
    bench.tokens(prefill, key, 0, 1)
    assert waterfall.num_cached == 32
    bench.tokens(decode, key, 0, 1, 2)
    time.now += 1.0
    bench.lose(decode)
    await settle()
    second, work = bench.newest(key)
    *_, prefill, decode = work
    assert waterfall.num_cached == 32, "nor has this one"
    tell(bench, prefill, second, computed(0.0, 1.0, num_cached=48))
    bench.tokens(prefill, second, 2, 3)
    assert waterfall.num_cached == 48
    bench.tokens(decode, second, 2, 3, 4, reason="stop")
    await settle()
    assert waterfall.num_cached == 48


async def test_what_comes_too_late_changes_nothing(make: Any, time: Time) -> None:
    bench = make()
    key, waterfall = await ask(bench, time)
    time.now += 1.0
    bench.tokens(P, key, 0, 1, reason="stop")
    await settle()
    stale = bench.counted("stale_messages_total")
    tell(bench, P, key, computed(0.5, 0.5))
    assert bench.counted("stale_messages_total") == stale + 1
    assert spent(waterfall, time) == {"intake": 0.125, Stage.FIRST_TOKEN.value: 1.0}
