"""The dispatcher between clients and links: what it sends, whom it counts, and what a loss or a resync ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import pytest
from dispatcher_bench import D2, FINGERPRINT, P2, PROMPT, Bench, D, P, failure, heartbeat, settle, text, welcome

from common.contract.errors import Cause, FingerprintMismatchError
from common.contract.ids import RequestKey
from common.contract.messages.gateway import Abort, Ack, Decode, Drain, Prefill, PrefixHint, Resume, Source
from common.contract.messages.session import HelloRefused, Role
from common.contract.messages.worker import PromptLogprobs, Tokens, TokenScores
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.config import GatewaySettings, load
from gateway.__main__ import ttft_limits_of
from gateway.dispatch import dispatcher
from gateway.dispatch.ttft_limits import TtftLimits
from gateway.serving.flow import Flow
from gateway.serving.generation import Admittance, Delta, Generation, GenerationFailed
from gateway.serving.waterfall import Waterfall


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    subject = Bench()
    yield subject
    await subject.close()


async def test_a_request_goes_through(bench: Bench) -> None:
    key, task = await bench.request()
    assert bench.in_flight() == (1, 1)
    bench.tokens(P, key, 0, 10)
    assert bench.in_flight() == (0, 1), "its prompt is computed"
    bench.tokens(D, key, 0, 10, 11)
    bench.tokens(D, key, 2, 12, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,), (11,), (12,)]
    assert [message.key for message in bench.sent(D, Ack)] == [key]  # type: ignore[attr-defined]
    assert bench.sent(P, Abort) == bench.sent(D, Abort) == []
    assert bench.in_flight() == (0, 0)
    bench.tokens(D, key, 2, 12)
    assert bench.dispatcher.num_stale_messages == 1


async def test_a_client_that_leaves_frees_both_workers(bench: Bench) -> None:
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for address in (P, D):
        assert [message.key for message in bench.sent(address, Abort)] == [key]  # type: ignore[attr-defined]
    assert bench.in_flight() == (0, 0)


async def test_without_workers_a_request_fails_at_once(bench: Bench) -> None:
    bench.lose(D, "dead")
    generation = Generation(token_ids=PROMPT, num_choices=1, sampling=SamplingParams(max_tokens=9), budget_s=1.0)
    with pytest.raises(GenerationFailed, match="no decode worker"):
        await anext(bench.dispatcher.generate(generation))


async def test_the_gateway_s_own_deadline_comes_last(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_BUDGET_GRACE_S", 0.01)
    _, task = await bench.request(budget_s=0.01)
    await asyncio.wait([task])
    assert await failure(task) is Cause.DEADLINE
    assert len(bench.sent(P, Abort)) == len(bench.sent(D, Abort)) == 1


async def test_a_lost_worker_does_not_end_its_requests() -> None:
    bench = Bench(prefill=(P, P2), decode=(D, D2))
    key, task = await bench.request()
    bench.lose(P)
    key, work = bench.newest(key)
    assert set(work) == {P2, D}
    bench.tokens(P2, key, 0, 10)
    bench.tokens(D, key, 0, 10, 11)
    bench.lose(D)
    key, work = bench.newest(key)
    assert set(work) == {P2, D2}
    bench.tokens(D2, key, 2, 12, reason="stop")
    assert await text(task) == [10, 11, 12]
    assert bench.in_flight(P, P2, D, D2) == (0,) * 4
    await bench.close()


async def test_a_lost_prefill_worker_is_not_missed_after_its_first_token(bench: Bench) -> None:
    key, task = await bench.request()
    bench.tokens(P, key, 0, 10)
    bench.lose(P, "silent")
    bench.open(P)
    bench.tokens(D, key, 0, 10, 11, reason="length")
    assert [delta.token_ids for delta in await task] == [(10,), (11,)]
    assert bench.in_flight() == (0, 0)


@pytest.mark.parametrize("restarted", [False, True])
async def test_loads_balance_when_a_session_ends_and_opens_again(bench: Bench, restarted: bool) -> None:
    """The request outlives the prefill worker's session; it must not be taken from the next session's count."""
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10)
    bench.lose(P, "silent")
    bench.open(P, restarted=restarted)
    bench.tokens(D, key, 1, 11, reason="stop")
    await task
    assert bench.in_flight() == (0, 0)
    await bench.request()
    assert bench.in_flight() == (1, 1)


async def test_a_hello_to_a_worker_that_has_nothing_asks_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot be reached is said Hello every second, for as long as it is listed."""
    bench = Bench(decode=(D, D2))
    bench.lose(D2)
    keys = [(await bench.request())[0] for _ in range(20)]
    asked: list[str] = []
    keys_at = Flow.keys_at

    def counted(flow: Flow, address: str) -> list[RequestKey]:
        asked.append(address)
        return keys_at(flow, address)

    monkeypatch.setattr(Flow, "keys_at", counted)
    assert bench.dispatcher.links.hello(bench.link(D2)).open_requests == ()
    assert asked == []
    assert set(bench.dispatcher.links.hello(bench.link(D)).open_requests) == set(keys)
    await bench.close()
    assert not bench.dispatcher._at


async def test_as_many_choices_may_be_in_flight_as_a_hello_can_list(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has tokens, each may have an attempt of its own."""
    monkeypatch.setattr(dispatcher, "MAX_OPEN_REQUESTS", 20)
    _, task = await bench.request(n=16)
    with pytest.raises(GenerationFailed, match="16 choices in flight already") as failed:
        await bench.request(n=16)
    assert failed.value.cause is Cause.CAPACITY
    await bench.request(n=4)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await bench.request(n=16)


async def test_a_resync_begins_again_what_the_worker_has_forgotten(bench: Bench) -> None:
    key, task = await bench.request()
    assert bench.dispatcher.links.hello(bench.link(D)).open_requests == (key,)
    bench.dispatcher.links.on_resync(bench.link(D), welcome(Role.DECODE))
    newest, work = bench.newest(key)
    assert (newest.attempt, set(work)) == (2, {D})
    bench.tokens(D, newest, 0, 10, reason="stop")
    assert await text(task) == [10]


async def test_a_resync_does_not_begin_again_what_has_not_left_yet(bench: Bench) -> None:
    """While a connection is broken, or the worker does not read, what it is to do waits here: it cannot know of it."""
    key, task = await bench.request()
    bench.links[D].unsent_work = frozenset({key})
    assert bench.dispatcher.links.hello(bench.link(D)).open_requests == ()
    bench.links[D].unsent_work = frozenset()
    bench.dispatcher.links.on_resync(bench.link(D), welcome(Role.DECODE))
    assert bench.newest(key)[0] == key
    bench.tokens(D, key, 0, 10, reason="stop")
    assert await text(task) == [10]


async def test_an_order_that_was_lost_is_sent_again(bench: Bench) -> None:
    """The operator was told that the worker drains, or serves again."""
    links, link = bench.dispatcher.links, bench.link(D)
    links.hello(link)
    assert links.tell(D, drain=False)
    assert links.tell(D, drain=True)
    bench.say(D, replace(heartbeat(), received=1))
    link.sent.clear()
    links.on_resync(link, welcome(Role.DECODE))
    assert link.sent == [Drain()], "the last order alone"
    links.on_resync(link, welcome(Role.DECODE))
    assert link.sent == [Drain(), Drain()]
    bench.say(D, replace(heartbeat(), received=2))
    links.on_resync(link, welcome(Role.DECODE))
    assert link.sent == [Drain(), Drain()], "the worker has heard it"
    links.tell(D, drain=False)
    bench.lose(D)
    link.sent.clear()
    bench.open(D)
    assert link.sent == [Resume()], "it was lost with the session"
    link.sent.clear()
    bench.lose(D)
    bench.open(D, weights_hash="other")
    assert link.sent == [Resume()], "whatever else is wrong with it"
    bench.lose(D)
    bench.open(D)
    bench.say(D, replace(heartbeat(), received=2))
    links.tell(D, drain=False)
    bench.lose(D)
    bench.open(D, restarted=True)
    links.hello(bench.link(D))
    bench.link(D).sent.clear()
    links.on_resync(bench.link(D), welcome(Role.DECODE))
    assert bench.link(D).sent == [], "another process was meant"


async def test_a_resync_keeps_what_the_worker_knows(bench: Bench) -> None:
    key, task = await bench.request()
    bench.dispatcher.links.hello(bench.link(D))
    bench.dispatcher.links.on_resync(bench.link(D), welcome(Role.DECODE, [key]))
    bench.tokens(D, key, 0, 10, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,)]


@pytest.mark.parametrize("address", [P, D])
async def test_a_request_that_began_during_a_resync_is_not_judged_by_it(bench: Bench, address: str) -> None:
    """The worker had not heard of it when it answered: its Prefill and Decode left after the Hello."""
    role = Role.PREFILL if address == P else Role.DECODE
    assert bench.dispatcher.links.hello(bench.link(address)).open_requests == ()
    key, task = await bench.request()
    bench.dispatcher.links.on_resync(bench.link(address), welcome(role))
    bench.tokens(P, key, 0, 10)
    bench.tokens(D, key, 0, 10, 11, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,), (11,)]


async def test_a_hello_does_not_list_what_has_ended_here(bench: Bench) -> None:
    """The client may not have been given its end yet; the worker is to forget the request at once."""
    key, task = await bench.request()
    bench.tokens(D, key, 0, 10, reason="stop")
    assert bench.dispatcher.links.hello(bench.link(D)).open_requests == ()
    await task


async def test_messages_about_another_attempt_are_stale(bench: Bench) -> None:
    key, _ = await bench.request()
    message = Tokens(request=key.request, attempt=2, choice=0, position=len(PROMPT), token_ids=(10,))
    bench.dispatcher.links.on_message(bench.link(D), message)
    assert bench.dispatcher.num_stale_messages == 1


async def test_a_worker_that_refuses_gets_no_work(bench: Bench) -> None:
    bench.dispatcher.links.on_refused(bench.link(P), HelloRefused(cause=Cause.CAPACITY, message="full"))
    key, _ = await bench.request()
    assert set(bench.work[key]) == {D}
    bench.open(P)
    key, _ = await bench.request()
    assert set(bench.work[key]) == {P, D}
    bench.dispatcher.links.on_refused(bench.link(D), HelloRefused(cause=Cause.CAPACITY, message="full"))
    assert not bench.dispatcher.ready().ready


# --- a decode worker computes the prompt -----------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="gateway.dispatch")
    return caplog


async def test_a_gateway_without_prefill_workers_is_whole(log: pytest.LogCaptureFixture) -> None:
    bench = Bench(prefill=())
    readiness = bench.dispatcher.ready()
    assert (readiness.ready, readiness.reason, readiness.max_sequence_tokens) == (True, "ready", 10_000)
    await asyncio.wait_for(bench.dispatcher.links.wait_usable(), 20)
    key, task = await bench.request()
    (decode,) = bench.work[key].values()
    assert isinstance(decode, Decode)
    assert decode.source is None
    worker = bench.registry.workers[D]
    assert worker.in_flight == 1
    bench.tokens(D, key, 0, 10, reason="stop")
    assert [delta.token_ids for delta in await task] == [(10,)]
    assert worker.in_flight == 0
    assert bench.counted("local_prefills_total", reason="colocated") == 1
    assert [record for record in log.records if record.levelno > logging.INFO] == []
    bench.lose(D, "dead")
    assert bench.dispatcher.ready().reason == "no decode worker is usable"
    await bench.close()


async def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt(
    bench: Bench, log: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        bench.lose(P, "dead")
        readiness = bench.dispatcher.ready()
        assert readiness.ready
        assert readiness.reason.startswith("degraded: no prefill worker")
        for _ in range(3):
            key = await bench.whole(PROMPT, (10, 11))
            assert set(bench.work[key]) == {D}
        assert bench.in_flight() == (0, 0)
        assert bench.counted("local_prefills_total", reason="no_prefill_worker") == 3 * number
        assert len([r for r in log.records if r.levelno == logging.WARNING]) == number, "once for each outage"
        bench.open(P)
        assert bench.dispatcher.ready().reason == "ready"
        key, _ = await bench.request()
        assert set(bench.work[key]) == {P, D}
        assert len([r for r in log.records if "usable again" in r.getMessage()]) == number
        bench.tasks[-1].cancel()
        await asyncio.gather(bench.tasks[-1], return_exceptions=True)


async def test_with_no_worker_at_all_both_roles_are_named(bench: Bench) -> None:
    for address in (P, D):
        bench.lose(address, "dead")
    readiness = bench.dispatcher.ready()
    assert (readiness.ready, readiness.reason) == (False, "no prefill and no decode worker is usable")
    assert readiness.max_sequence_tokens is None


async def test_a_gateway_starts_once_each_role_has_a_worker() -> None:
    bench = Bench(opened=False)
    bench.open(D)
    assert bench.dispatcher.ready().ready
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.dispatcher.links.wait_usable(), 0.01)
    bench.open(P)
    await asyncio.wait_for(bench.dispatcher.links.wait_usable(), 20)
    await bench.close()


async def test_a_misfit_does_not_end_a_gateway_that_serves() -> None:
    other = replace(welcome(Role.PREFILL), fingerprint=replace(FINGERPRINT, weights_hash="other"))
    bench = Bench(opened=False)
    failure = bench.dispatcher.links._failure = asyncio.get_running_loop().create_future()
    bench.open(D)
    _, task = await bench.request()
    bench.dispatcher.links.on_open(bench.link(P), other)
    assert not failure.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    bench.dispatcher.links.on_open(bench.link(P), other)
    with pytest.raises(FingerprintMismatchError):
        await failure
    await bench.close()


@pytest.mark.parametrize("order", [(P, D), (D, P)], ids=["prefill first", "decode first"])
async def test_a_gateway_does_not_start_with_workers_that_differ(order: tuple[str, str]) -> None:
    bench = Bench(opened=False)
    failure = bench.dispatcher.links._failure = asyncio.get_running_loop().create_future()
    for address in order:
        assert not failure.done()
        bench.open(address, weights_hash=address)
    assert failure.done()
    with pytest.raises(FingerprintMismatchError, match=f"weights_hash: {D} at {D}, {P} at {P}"):
        await failure
    await bench.close()


async def test_a_prefill_worker_that_differs_does_not_end_a_gateway_that_has_started() -> None:
    bench = Bench()
    failure = bench.dispatcher.links._failure = asyncio.get_running_loop().create_future()
    bench.lose(D)
    bench.open(D, restarted=True, weights_hash="other")
    assert not failure.done()
    key, _ = await bench.request()
    assert set(bench.work[key]) == {D}, "it computes the prompt itself"
    await bench.close()


async def test_a_short_prompt_is_computed_by_the_decode_worker() -> None:
    bench = Bench(local_prefill_tokens=3)
    key = await bench.whole((7, 8, 9), (10, 11))
    assert set(bench.work[key]) == {D}
    key = await bench.whole((6, 7, 8, 9), (10, 11))
    assert set(bench.work[key]) == {P, D}
    assert bench.counted("local_prefills_total", reason="short") == 1
    assert bench.counted("local_prefills_total", reason="no_prefill_worker") == 0
    await bench.close()


# --- what the workers' caches hold -----------------------------------------------------------------------------------

PROMPT_1 = tuple(range(100, 140))
OUTPUT_1 = tuple(range(140, 160))
PROMPT_2 = (*PROMPT_1, *OUTPUT_1, *range(160, 180))
"""A conversation's next turn: 80 tokens, of which 59, in 3 full blocks of 16, are in the decode worker's cache."""
HELD = (*PROMPT_1, *OUTPUT_1)[:-1]


async def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whoever_holds_it() -> None:
    """Until its client has them: what is computed again after that may be pulled."""
    bench = Bench((P, P2), (D, D2))
    for address in (P, D, D2):
        bench.holds(address, PROMPT_1)
    key, task = await bench.request(PROMPT_1, prompt_logprobs=0)
    prefill, _ = bench.work[key]
    work = bench.work[key][prefill]
    assert isinstance(work, Prefill)
    assert (work.prefix, work.prompt_logprobs) == (None, 0)
    num = len(PROMPT_1) - 1
    for position, length in ((1, 16), (17, num - 16)):
        scores = TokenScores(logprobs=(-1.0,) * length, ranks=(1,) * length)
        bench.say(prefill, PromptLogprobs(request=key.request, attempt=1, position=position, scores=scores))
    await settle()
    assert [len(delta.scores) for delta in bench.told] == [16, num - 16], "as it comes"
    bench.lose(prefill)
    await settle()
    again, others = bench.newest(key)
    assert again != key
    assert all(each.prompt_logprobs is None for each in others.values())
    for address in others:
        bench.tokens(address, again, 0, 1, reason="stop")
    assert await text(task) == [1]
    assert sum(len(delta.scores) for delta in bench.told) == num
    await bench.close()


async def test_the_next_turn_is_told_where_the_last_one_was_decoded() -> None:
    bench = Bench()
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2))) is None
    bench.holds(D, HELD)
    key = await bench.whole(PROMPT_2, (1, 2))
    source = Source(address=D, incarnation=bench.links[D].worker)
    assert bench.hint(key) == PrefixHint(source=source, num_tokens=48)
    assert bench.counted("prefix_hints_total") == 1
    bench.holds(P, PROMPT_2)
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2))) is None, "by now the prefill worker has it itself"
    await bench.close()


@pytest.mark.parametrize(
    ("num_tokens", "num_held", "pulled_token_s", "num_computed"),
    [(8000, 7904, 5e-6, 96), (8000, 7904, 5e-5, 8000), (192, 96, 5e-6, 192)],
    ids=["cheaper to pull", "as dear to pull", "too short to pull"],
)
async def test_what_a_prefill_worker_pulls_does_not_count_as_computing_before_the_next_prompt(
    num_tokens: int, num_held: int, pulled_token_s: float, num_computed: int
) -> None:
    bench = Bench()
    bench.say(P, replace(heartbeat(), token_s=5e-5, pulled_token_s=pulled_token_s))
    bench.holds(D, tuple(range(num_held)))
    for _ in range(2):
        key, _ = await bench.request(range(num_tokens))
        hint = bench.hint(key)
        assert hint is not None
        assert hint.num_tokens == num_held
    assert [given.num_tokens for given in bench.registry.workers[P].unseen] == [num_computed] * 2
    await bench.close()


async def test_a_full_prefix_index_costs_hits_and_no_answer() -> None:
    bench = Bench(max_prefix_names=1)
    prompts = [tuple(range(start, start + 100)) for start in range(0, 100_000, 100)]
    for prompt in prompts:
        bench.holds(D, prompt)
    assert bench.counted("prefix_names") == bench.counted("prefix_blocks") <= 256, "one in each part"
    assert bench.counted("prefix_names_forgotten_total") == 6 * len(prompts) - bench.counted("prefix_names")
    first, last = await bench.whole(prompts[0], (1, 2)), await bench.whole(prompts[-1], (1, 2))
    assert bench.hint(first) is None
    assert bench.hint(last) is not None
    await bench.close()


async def test_the_next_turn_goes_where_the_last_one_was_decoded_if_little_is_left_to_compute() -> None:
    bench = Bench(decode=(D, D2), local_prefill_tokens=32)
    bench.holds(D, HELD)
    await bench.request(PROMPT_1)  # makes D the busier one
    assert bench.registry.workers[D].in_flight == 1
    key = await bench.whole(PROMPT_2, (1, 2))
    assert set(bench.work[key]) == {D}
    assert bench.counted("local_prefills_total", reason="short") == 2
    await bench.close()


async def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    bench.holds(D, HELD, salt="one")
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2), salt="another")) is None
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2))) is None
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2), salt="one")) is not None
    await bench.close()


async def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    bench = Bench()
    bench.holds(D, PROMPT_1)
    hint = bench.hint(await bench.whole(PROMPT_1[:32], (1, 2)))
    assert hint is not None
    assert hint.num_tokens == 16
    await bench.close()


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_a_worker_has_told_ends_with_its_session(restarted: bool) -> None:
    bench = Bench()
    bench.holds(D, HELD)
    bench.lose(D, "silent")
    bench.open(D, restarted=restarted)
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2))) is None
    bench.holds(D, HELD)
    assert bench.hint(await bench.whole(PROMPT_2, (1, 2))) is not None, "it tells it anew"
    await bench.close()


# --- admission -------------------------------------------------------------------------------------------------------


def limits() -> TtftLimits:
    return TtftLimits({Tier.INTERACTIVE: 1.0, Tier.STANDARD: 10.0, Tier.BATCH: 0.0})


async def test_a_fresh_installation_refuses_nobody_but_those_who_ask_for_an_answer_at_once() -> None:
    """A closed loop of 1,024 clients waits, before workers that need hours for what they have: no operator has said
    that it should not. Whoever says `interactive` is told rather than kept waiting."""
    bench = Bench(ttft_limits=ttft_limits_of(load(GatewaySettings, "baton gateway", [])))
    bench.say(P, replace(heartbeat(), queued_tokens=(10**6, 10**6, 10**6), token_s=0.01))
    bench.say(D, replace(heartbeat(), sequences=(0, 1000, 0), places=2, sequence_s=60.0))
    sampling = SamplingParams(max_tokens=9)
    generation = Generation(token_ids=PROMPT, num_choices=1, sampling=sampling, budget_s=1000.0)
    tiers = [*[Tier.STANDARD] * 1024, *[Tier.BATCH] * 16]

    async def ask(tier: Tier) -> list[Delta]:
        asked = replace(generation, tier=tier, admittance=Admittance(), waterfall=Waterfall())
        return [delta async for delta in bench.dispatcher.generate(asked) if isinstance(delta, Delta)]

    bench.tasks += [asyncio.create_task(ask(tier)) for tier in tiers]
    async with asyncio.timeout(30):
        while len(bench.sent(D, Decode)) < len(tiers):
            await settle()
    assert not any(task.done() for task in bench.tasks)
    with pytest.raises(GenerationFailed, match="service tier interactive"):
        await bench.request(tier=Tier.INTERACTIVE)
    assert bench.counted("refused_total", role="prefill", tier="interactive") == 1
    await bench.close()


async def test_who_would_wait_too_long_is_refused_at_once_and_told_when_to_come_back() -> None:
    bench = Bench(ttft_limits=limits())
    bench.say(P, replace(heartbeat(), queued_tokens=(0, 15_500, 99_000), token_s=0.001))
    with pytest.raises(GenerationFailed, match="to wait for a prompt's turn") as refusal:
        await bench.whole(PROMPT, (1, 2))
    assert (refusal.value.cause, refusal.value.retry_after_s) == (Cause.CAPACITY, 6)
    assert bench.work == {}, "no worker has heard of it"
    assert bench.counted("refused_total", role="prefill", tier="standard") == 1
    await bench.whole(PROMPT, (1, 2), tier=Tier.INTERACTIVE)
    await bench.whole(PROMPT, (1, 2), tier=Tier.BATCH)
    bench.say(P, replace(heartbeat(), queued_tokens=(0, 5_000, 0), token_s=0.001))
    await bench.whole(PROMPT, (1, 2))
    bench.say(D, replace(heartbeat(), sequences=(0, 9, 0), places=2, sequence_s=4.0))
    with pytest.raises(GenerationFailed, match="to wait for room in a batch"):
        await bench.whole(PROMPT, (1, 2))
    assert bench.counted("refused_total", role="decode", tier="standard") == 1
    await bench.close()


async def test_admission_learns_from_first_tokens_but_not_from_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[tuple[Tier, float]] = []
    monkeypatch.setattr(TtftLimits, "observe", lambda _, tier, expected, ttft_s, now: learnt.append((tier, ttft_s)))
    bench = Bench(decode=(D, D2), ttft_limits=limits())
    key, task = await bench.request(PROMPT)
    assert learnt == []
    bench.tokens(P, key, 0, 1)
    bench.tokens(D, key, 0, 1, 2, reason="stop")
    assert await text(task) == [1, 2]
    assert [tier for tier, _ in learnt] == [Tier.STANDARD]
    assert 0 <= learnt[0][1] < 1
    key, task = await bench.request(PROMPT)
    bench.lose(P)
    newest, work = bench.newest(key)
    bench.tokens(next(iter(work)), newest, 0, 1, reason="stop")
    assert await text(task) == [1]
    assert len(learnt) == 1, "it was late, or not, for another reason"
    await bench.close()


async def test_who_gives_up_waiting_for_the_first_token_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[float] = []
    monkeypatch.setattr(TtftLimits, "observe", lambda _, tier, expected, ttft_s, now: learnt.append(ttft_s))
    bench = Bench(ttft_limits=limits())
    _, task = await bench.request(PROMPT)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert len(learnt) == 1
    await bench.close()


async def test_before_anybody_is_refused_the_worker_where_least_is_waited_for_counts() -> None:
    """The one from which the first token is expected first is not the one that is free."""
    bench = Bench(prefill=(P, P2), ttft_limits=limits())
    bench.say(P, replace(heartbeat(), queued_tokens=(0, 11_000, 0), token_s=0.001))
    bench.say(P2, replace(heartbeat(), token_s=10.0))
    key, task = await bench.request(PROMPT)
    assert bench.newest(key)[1].keys() == {P2, D}
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await bench.close()


async def test_a_burst_is_refused_by_what_it_brings_itself() -> None:
    """No heartbeat comes between these: what was given counts at once."""
    bench = Bench(ttft_limits=limits())
    bench.say(P, replace(heartbeat(), token_s=0.01))
    for _ in range(3):
        await bench.request(range(300))
    with pytest.raises(GenerationFailed) as refusal:
        await bench.whole(range(300), (1, 2))
    assert refusal.value.cause is Cause.CAPACITY
    bench.say(P, replace(heartbeat(), token_s=0.01, queued_tokens=(0, 100, 0), received=3))
    await bench.whole(range(300), (1, 2))
    await bench.close()


async def test_the_prompts_of_one_request_are_let_in_together_or_not_at_all() -> None:
    """What its first prompt brings is not a queue for the others: it would never be let in."""
    bench = Bench(ttft_limits=limits())
    bench.say(P, replace(heartbeat(), token_s=0.01))
    together = Admittance()
    for _ in range(5):
        await bench.request(range(300), admittance=together)
    with pytest.raises(GenerationFailed):
        await bench.whole(range(300), (1, 2))
    assert bench.counted("refused_total", role="prefill", tier="standard") == 1
    number, refused = len(bench.work), Admittance()
    for _ in range(2):
        with pytest.raises(GenerationFailed):
            await bench.whole(range(300), (1, 2), admittance=refused)
        bench.say(P, replace(heartbeat(), token_s=0.01, received=5))
    assert len(bench.work) == number
    assert bench.counted("refused_total", role="prefill", tier="standard") == 2
    await bench.close()


async def test_a_request_that_has_begun_is_never_refused() -> None:
    bench = Bench(decode=(D, D2), ttft_limits=limits())
    key, task = await bench.request(PROMPT)
    bench.tokens(P, key, 0, 1)
    bench.tokens(D, key, 0, 1, 2)
    bench.say(P, replace(heartbeat(), queued_tokens=(99_000, 0, 0), token_s=0.001))
    bench.lose(D)
    newest, work = bench.newest(key)
    bench.tokens(next(iter(work)), newest, 2, 3, reason="stop")
    assert await text(task) == [1, 2, 3]
    await bench.close()
