"""What the dashboard is told of workers and requests, as the dispatcher goes through its events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from dispatcher_bench import D2, P2, Bench, D, P, heartbeat

from common.contract.errors import Cause
from common.contract.messages.session import Phase, Role
from common.contract.messages.worker import Cut
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from gateway.dashboard.pool_view import MAX_REQUESTS, Names, pool_view
from gateway.serving.generation import Generation

NAMES = Names(b"secret")


def seen(bench: Bench) -> Any:
    dispatcher = bench.dispatcher
    view = pool_view(
        dispatcher.worker_views(), dispatcher.open_flows(), dispatcher.handoffs, bench.clock() + 1.5, NAMES
    )
    return json.loads(json.dumps(view))


def stage(bench: Bench) -> tuple[str, str | None, str | None, int]:
    (request,) = seen(bench)["requests"]
    return request["stage"], request["prefill"], request["decode"], request["tokens"]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    subject = Bench()
    yield subject
    await subject.close()


async def test_a_request_goes_from_prefill_to_decode(bench: Bench) -> None:
    assert (seen(bench)["requests"], seen(bench)["in_flight"], seen(bench)["handoffs"]) == ([], 0, [])
    key, task = await bench.request()
    assert stage(bench) == ("prefill", P, D, 0)
    assert seen(bench)["requests"][0]["age_s"] == pytest.approx(1.5, abs=1)
    bench.tokens(P, key, 0, 10)
    assert stage(bench) == ("handoff", P, D, 1)
    assert seen(bench)["handoffs"] == []
    bench.tokens(D, key, 0, 10, 11)
    bench.tokens(D, key, 2, 12)
    assert stage(bench) == ("decode", P, D, 3)
    assert seen(bench)["handoffs"] == [{"prefill": P, "decode": D, "count": 1}]
    assert bench.counted("handoffs_total") == 1
    bench.tokens(D, key, 3, 13, reason="stop")
    assert seen(bench)["requests"] == [], "it has ended, though its client may not have been told yet"
    await task


async def test_all_choices_of_a_request_are_one_handoff(bench: Bench) -> None:
    key, task = await bench.request(n=4)
    for choice in range(4):
        bench.tokens(P, key, 0, 10, choice=choice)
        bench.tokens(D, key, 0, 10, 11, choice=choice, reason="stop")
    await task
    assert seen(bench)["handoffs"] == [{"prefill": P, "decode": D, "count": 1}]
    assert bench.counted("handoffs_total") == 1


async def test_a_decode_worker_alone_hands_nothing_off() -> None:
    bench = Bench(prefill=())
    key, task = await bench.request()
    assert stage(bench) == ("prefill", None, D, 0)
    bench.tokens(D, key, 0, 10)
    assert stage(bench) == ("decode", None, D, 1)
    assert seen(bench)["handoffs"] == []
    task.cancel()
    await bench.close()


async def test_a_request_that_lost_its_worker_recovers() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    key, _ = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.lose(D)
    assert stage(bench) == ("recovering", P, D2, 1)
    newest, _ = bench.newest(key)
    bench.tokens(D2, newest, 0, 10, 11)
    assert stage(bench) == ("decode", P, D2, 2)
    bench.lose(D2)
    assert stage(bench) == ("recovering", None, None, 2)
    await bench.close()


async def test_a_sequence_moves_between_decode_workers() -> None:
    bench = Bench(decode=(D, D2))
    for address in (D, D2):
        bench.say(address, heartbeat())
    key, _ = await bench.request()
    (address,) = set(bench.work[key]) - {P}
    other = D2 if address == D else D
    bench.tokens(P, key, 0, 10)
    bench.tokens(address, key, 0, 10, 11)
    bench.say(address, heartbeat(Phase.DRAINING))
    assert stage(bench) == ("moving", None, other, 2)
    assert seen(bench)["requests"][0]["moving_from"] == address
    bench.say(address, Cut(request=key.request, attempt=key.attempt, choice=0, position=5))
    newest, _ = bench.newest(key)
    bench.tokens(other, newest, 1, 11, 12)
    assert stage(bench) == ("decode", None, other, 3)
    assert len(seen(bench)["handoffs"]) == 1, "a move is no handoff"
    await bench.close()


async def test_workers_say_what_they_do(bench: Bench) -> None:
    bench.say(
        P, replace(heartbeat(used=3, total=12), running=1, waiting=2, queued_tokens=(7, 70, 0), prompt_tokens=100)
    )
    (prefill, decode) = seen(bench)["workers"]
    assert (prefill["profile"], decode["profile"]) == (None, "throughput"), "only decode workers have one"
    assert (prefill["id"], prefill["role"], prefill["usable"], prefill["phase"]) == (P, "prefill", True, "serving")
    assert (prefill["blocks_used"], prefill["blocks_total"], prefill["running"]) == (3, 12, 1)
    assert (prefill["waiting"], prefill["queued_tokens"], prefill["prompt_tokens"]) == (2, 77, 100)
    assert (decode["connected"], decode["running"], decode["phase"]) == (True, None, "serving")
    bench.lose(P)
    lost = seen(bench)["workers"][0]
    assert (lost["connected"], lost["usable"], lost["phase"], lost["prompt_tokens"]) == (False, False, None, None)


async def test_a_worker_that_serves_and_is_not_ready_is_told_of(bench: Bench) -> None:
    """As one whose kubelet cannot reach it, so that the list of workers says that it is not ready."""

    def told() -> list[object]:
        worker = seen(bench)["workers"][1]
        return [worker[name] for name in ("phase", "connected", "listed", "ready", "usable")]

    assert told() == ["serving", True, True, True, True]
    bench.registry.relist(Role.DECODE, {D: False})
    assert told() == ["serving", True, True, False, False]
    bench.registry.relist(Role.DECODE, {D: True})
    assert told() == ["serving", True, True, True, True]
    bench.registry.relist(Role.DECODE, {})
    assert told() == ["serving", True, False, True, False]


async def test_restarts_show_in_the_view_in_what_operators_are_told_and_as_a_metric(bench: Bench) -> None:
    bench.lose(D)
    bench.open(D, restarted=True)
    assert [worker["restarts"] for worker in seen(bench)["workers"]] == [0, 1]
    told = bench.dispatcher.links.workers()
    assert {worker["id"]: worker["restarts"] for worker in told} == {P: 0, D: 1}
    assert [worker["phase"] for worker in told] == ["serving", "serving"], "it has said so in its Welcome"
    assert [bench.counted("worker_restarts_total", role=role) for role in ("prefill", "decode")] == [0, 1]


async def test_the_list_is_bounded_and_the_count_is_not(bench: Bench) -> None:
    for _ in range(MAX_REQUESTS + 3):
        await bench.request()
    view = seen(bench)
    assert (view["in_flight"], len(view["requests"])) == (MAX_REQUESTS + 3, MAX_REQUESTS)
    assert len({request["id"] for request in view["requests"]}) == MAX_REQUESTS


async def test_nothing_is_told_of_what_is_asked_or_by_whom(bench: Bench) -> None:
    generation = Generation(
        token_ids=(31337, 31338),
        num_choices=1,
        sampling=SamplingParams(max_tokens=9),
        budget_s=5.0,
        tier=Tier.BATCH,
        tenant="acme",
        cache_salt="pepper",
    )
    answers = bench.dispatcher.generate(generation)
    reading = asyncio.ensure_future(anext(answers))
    while not bench.work:
        await asyncio.sleep(0)
    (key,) = bench.work
    text = json.dumps(seen(bench))
    assert "batch" in text
    for secret in ("acme", "pepper", "31337", key.request, bench.links[P].worker):
        assert secret not in text
    first, again = (seen(bench)["requests"][0]["id"] for _ in range(2))
    assert first == again != Names(b"another").of(key.request)
    bench.fail(P, key, Cause.INVALID)
    with pytest.raises(Exception, match="why"):
        await reading
