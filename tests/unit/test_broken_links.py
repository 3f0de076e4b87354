"""A worker whose connection has broken: it may have crashed, or be back in a moment. Other workers are preferred."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from channel_bench import FINGERPRINT, PATIENT, Worker
from dispatcher_bench import D2, P2, Bench, D, P, heartbeat, role_of, settle, welcome
from waiting import eventually

from common.contract.errors import Cause
from common.contract.ids import RequestKey, new_incarnation
from common.contract.messages.session import Heartbeat
from common.runtime.channel import ends
from common.runtime.clock import monotonic
from gateway.dispatch.dispatcher import Dispatcher
from gateway.workers.registry import Registry


@pytest.mark.parametrize(
    ("prefill", "decode", "busy"),
    [
        ((), (D, D2), heartbeat(used=50)),
        ((P, P2), (D,), replace(heartbeat(), queued_tokens=(0, 1000, 0), token_s=0.001)),
    ],
    ids=["decode", "prefill"],
)
async def test_it_gets_a_request_only_if_there_is_no_other(
    prefill: tuple[str, ...], decode: tuple[str, ...], busy: Heartbeat
) -> None:
    bench = Bench(prefill, decode)
    links = bench.dispatcher.links
    idle, other = prefill or decode
    bench.say(idle, heartbeat())
    bench.say(other, busy)
    keys: list[RequestKey] = []

    async def chosen() -> set[str]:
        key, _ = await bench.request()
        keys.append(key)
        return bench.work[key].keys() & {idle, other}

    assert await chosen() == {idle}
    links.on_broken(bench.link(idle))
    assert await chosen() == {other}
    links.hello(bench.link(idle))
    links.on_resync(bench.link(idle), welcome(role_of(idle), keys[:1]))
    assert await chosen() == {idle}, "its session goes on"
    links.on_broken(bench.link(idle))
    bench.lose(other)
    await settle()
    assert await chosen() == {idle}
    await bench.close()


@pytest.mark.parametrize("why", ["too short", "it has failed it"])
async def test_a_prefill_worker_is_taken_if_the_others_do_not_take_the_prompt(why: str) -> None:
    """Else a decode worker would have to compute the whole of it."""
    bench = Bench((P, P2))
    if why == "too short":
        bench.open(P, max_sequence_tokens=2)
        bench.dispatcher.links.on_broken(bench.link(P2))
        key, _ = await bench.request()
    else:
        key, _ = await bench.request()
        assert set(bench.work[key]) == {P, D}
        bench.dispatcher.links.on_broken(bench.link(P2))
        bench.fail(P, key, Cause.CAPACITY)
    assert set(bench.newest(key)[1]) == {P2, D}
    await bench.close()


async def test_a_decode_worker_that_has_just_failed_a_request_does_not_get_it_instead() -> None:
    """The other one is back in a moment, as a rule; the same fault would come again at once."""
    bench = Bench((), (D, D2))
    bench.say(D, heartbeat())
    bench.say(D2, heartbeat(used=50))
    key, _ = await bench.request()
    assert set(bench.work[key]) == {D}
    bench.dispatcher.links.on_broken(bench.link(D2))
    bench.fail(D, key, Cause.INTERNAL)
    assert set(bench.newest(key)[1]) == {D2}
    await bench.close()


async def test_a_gateway_knows_at_once_that_a_connection_has_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "RECONNECT_S", 3600.0)
    worker = Worker(monotonic, PATIENT, FINGERPRINT, 0, True, "127.0.0.1", None)
    registry = Registry((), (worker.address,), FINGERPRINT.config_hash)
    dispatcher = Dispatcher(new_incarnation(), registry, monotonic, PATIENT)
    linking = asyncio.create_task(dispatcher.links.run())
    view = registry.workers[worker.address]
    try:
        await eventually(lambda: view.usable)
        assert view.broken_at is None
        await worker.stop(goodbye=False)
        await eventually(lambda: view.broken_at is not None)
        assert view.usable, "it is not known to have crashed"
    finally:
        linking.cancel()
        await asyncio.wait([linking])
        await worker.stop()
