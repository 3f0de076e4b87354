"""A worker answers heartbeats and aborts while a step runs, and a block waits for the step that names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from held_worker import decode_from, work, worker
from stack import gateway_of
from step_tokens import handles
from waiting import eventually

from common.contract.errors import Cause
from common.contract.ids import Incarnation, new_incarnation
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Decode, Prefill, Resume, Suspicion
from common.contract.messages.session import Heartbeat, Role
from common.contract.messages.worker import Cancelled, Failed, Finished, Tokens, Trial


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_heartbeats_and_aborts_are_answered_while_a_step_runs(
    role: Role, checkpoint: Callable[[str], Path]
) -> None:
    async with AsyncExitStack() as stack:
        prefill, prefill_runner, prefill_at, prefill_me = await stack.enter_async_context(
            worker(Role.PREFILL, checkpoint("llama"))
        )
        decode, decode_runner, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        p_gateway, p_link = await stack.enter_async_context(gateway_of(prefill_at))
        d_gateway, d_link = await stack.enter_async_context(gateway_of(decode_at))
        held = prefill_runner if role is Role.PREFILL else decode_runner
        tested, gateway, link = (prefill, p_gateway, p_link) if role is Role.PREFILL else (decode, d_gateway, d_link)
        held.hold()
        request = work(100, 50)
        p_link.send(Prefill(**request))
        d_link.send(decode_from(request, prefill_at, prefill_me))
        assert await asyncio.to_thread(held.in_step.wait, 20), "the step never began"
        steps = (await gateway.until(Heartbeat)).steps
        assert (await gateway.until(Heartbeat, 3)).steps == steps, "the engine was not held"
        link.send(Abort(request=request["request"], attempt=1))
        await gateway.until(Cancelled)
        assert held.in_step.is_set(), "the abort was answered after the step only"
        _, state = tested.ready()
        assert state["requests"] == 0
        assert state["blocks_limbo"] > 0, "blocks that the running step names are free already"
        tested.check_invariants()
        held.release()
        await eventually(lambda: tested.ready()[1]["blocks_limbo"] == 0)
        p_link.send(Abort(request=request["request"], attempt=1))
        d_link.send(Abort(request=request["request"], attempt=1))
        await eventually(lambda: all(w.ready()[1]["blocks_used"] == 0 for w in (prefill, decode)))
        assert sum(isinstance(message, Cancelled) for message in gateway.heard) == 1


async def test_an_engine_that_hangs_in_a_prompt_shows(checkpoint: Callable[[str], Path]) -> None:
    """The gateway judges workers that have work, and do no step; a prompt is work on a decode worker, too."""
    async with AsyncExitStack() as stack:
        _, held, address, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        gateway, link = await stack.enter_async_context(gateway_of(address))
        assert (await gateway.until(Heartbeat)).running == 0
        held.hold()
        link.send(Decode(**work(40, 5), handles=handles(), source=None))
        assert await asyncio.to_thread(held.in_step.wait, 20)
        assert (await gateway.until(Heartbeat, 2)).running == 1
        held.release()
        await gateway.until(Finished)


def run_of_the_worker() -> asyncio.Task[None]:
    """The task that runs the only worker."""
    tasks = asyncio.all_tasks()
    (running,) = [task for task in tasks if getattr(task.get_coro(), "__qualname__", "") == "WorkerShell.run"]
    return running


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_bug_in_a_core_ends_the_worker_whoever_called_it(
    role: Role, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback of the mover or of a timer raises into the event loop, which only logs that."""

    def handle(*event: object) -> None:
        raise ZeroDivisionError("a bug")

    async with worker(role, checkpoint("llama")) as (tested, *_):
        running = run_of_the_worker()
        with monkeypatch.context() as patch:
            patch.setattr(tested.core, "handle", handle)
            with pytest.raises(ZeroDivisionError):
                tested.on_message(Incarnation("somebody"), Resume())
            done, _ = await asyncio.wait([running], timeout=30)
        assert done, "it goes on"
        assert isinstance(running.exception(), ExceptionGroup)


@pytest.mark.parametrize("turns", range(5))
async def test_a_worker_ends_though_a_message_comes_just_then(turns: int, checkpoint: Callable[[str], Path]) -> None:
    """What waits for messages until a lease expires has been woken, and has not run yet, when it is cancelled."""
    async with AsyncExitStack() as stack:
        tested, _, at, me = await stack.enter_async_context(worker(Role.PREFILL, checkpoint("llama")))
        gateway, link = await stack.enter_async_context(gateway_of(at))
        link.send(Prefill(**work(20, 5)))
        await gateway.until(Tokens)
        assert tested.ready()[1]["leases"] == 1
        for _ in range(20):
            await asyncio.sleep(0.001)  # then its loops are at rest
        running = run_of_the_worker()
        tested.on_message(Incarnation(me), Resume())
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=30)
        assert done, "it goes on"


async def test_blocks_cross_while_the_prompt_is_still_computed(checkpoint: Callable[[str], Path]) -> None:
    """The third of four chunks is held: by then the decode worker has read the blocks of the first two."""
    async with AsyncExitStack() as stack:
        prefill, held, prefill_at, prefill_me = await stack.enter_async_context(
            worker(Role.PREFILL, checkpoint("llama"), chunk_size=64)
        )
        decode, _, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        p_gateway, p_link = await stack.enter_async_context(gateway_of(prefill_at))
        d_gateway, d_link = await stack.enter_async_context(gateway_of(decode_at))

        def num_blocks_read() -> float:
            samples = [sample for metric in decode.metrics() for sample in metric.samples]
            (num_bytes,) = (s.value for s in samples if s.name == "baton_transfer_bytes_total")
            return float(num_bytes / held.layout.block_bytes)

        request = work(200, 5)
        held.hold(after=2)
        p_link.send(Prefill(**request))
        d_link.send(decode_from(request, prefill_at, prefill_me))
        assert await asyncio.to_thread(held.in_step.wait, 20), "the third step never began"
        await eventually(lambda: num_blocks_read() == 2 * 64 / 16)
        assert held.in_step.is_set()
        assert (prefill.ready()[1]["running"], decode.ready()[1]["pulling"]) == (1, 1)
        assert not any(isinstance(message, Tokens) for message in (*p_gateway.heard, *d_gateway.heard))
        held.release()
        await d_gateway.until(Finished)
        assert num_blocks_read() == 13  # each block once
        await eventually(lambda: all(w.ready()[1]["blocks_used"] == 0 for w in (prefill, decode)))


async def test_a_replayed_or_older_attempt_is_inert_and_a_newer_one_fences(checkpoint: Callable[[str], Path]) -> None:
    async with AsyncExitStack() as stack:
        prefill, held, address, _ = await stack.enter_async_context(worker(Role.PREFILL, checkpoint("llama")))
        gateway, link = await stack.enter_async_context(gateway_of(address))
        request = work(40, 5)
        held.hold()
        link.send(Prefill(**(request | {"attempt": 2})))
        assert await asyncio.to_thread(held.in_step.wait, 20)
        link.send(Prefill(**(request | {"attempt": 2})))
        link.send(Prefill(**(request | {"attempt": 1})))
        link.send(Abort(request=request["request"], attempt=1))
        await gateway.until(Heartbeat, 2)
        assert prefill.ready()[1]["requests"] == 1
        link.send(Prefill(**(request | {"attempt": 3})))
        await gateway.until(Heartbeat, 2)
        assert prefill.ready()[1]["requests"] == 1
        held.release()
        first = await gateway.until(Tokens)
        assert first.attempt == 3
        await gateway.until(Heartbeat, 3)
        assert sum(isinstance(message, Tokens) for message in gateway.heard) == 1
        link.send(Abort(request=request["request"], attempt=3))
        await eventually(lambda: prefill.ready()[1]["blocks_used"] == 0)


async def test_an_offer_that_nobody_attaches_to_expires_and_says_so(checkpoint: Callable[[str], Path]) -> None:
    async with AsyncExitStack() as stack:
        prefill, _, address, _ = await stack.enter_async_context(
            worker(Role.PREFILL, checkpoint("llama"), unattached_ttl_s=2.0)
        )
        gateway, link = await stack.enter_async_context(gateway_of(address))
        request = work(40, 5)
        link.send(Prefill(**request))
        await gateway.until(Tokens)
        assert prefill.ready()[1]["leases"] == 1
        failed = await gateway.until(Failed)
        assert failed.cause is Cause.LEASE_LOST
        assert "waiting for a decode worker" in failed.message
        assert prefill.ready()[1]["blocks_used"] == prefill.ready()[1]["requests"] == 0


async def test_a_decode_whose_prefill_never_comes_fails_within_the_bound(checkpoint: Callable[[str], Path]) -> None:
    async with AsyncExitStack() as stack:
        prefill, _, prefill_at, prefill_me = await stack.enter_async_context(
            worker(Role.PREFILL, checkpoint("llama"), unattached_ttl_s=2.0)
        )
        decode, _, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        gateway, link = await stack.enter_async_context(gateway_of(decode_at))
        link.send(decode_from(work(40, 5), prefill_at, prefill_me))
        await eventually(lambda: prefill.ready()[1]["parked"] == 1)
        failed = await gateway.until(Failed)
        assert failed.cause is Cause.LEASE_LOST
        assert prefill.ready()[1]["parked"] == decode.ready()[1]["requests"] == 0


async def test_a_source_that_has_restarted_is_another_worker(checkpoint: Callable[[str], Path]) -> None:
    async with AsyncExitStack() as stack:
        _, _, prefill_at, _ = await stack.enter_async_context(worker(Role.PREFILL, checkpoint("llama")))
        decode, _, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        gateway, link = await stack.enter_async_context(gateway_of(decode_at))
        link.send(decode_from(work(40, 5), prefill_at, new_incarnation()))
        failed = await gateway.until(Failed)
        assert failed.cause is Cause.WORKER_LOST
        assert decode.ready()[1]["requests"] == 0


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_token_beyond_the_vocabulary_harms_nobody(role: Role, checkpoint: Callable[[str], Path]) -> None:
    async with AsyncExitStack() as stack:
        tested, _, address, me = await stack.enter_async_context(worker(role, checkpoint("llama")))
        gateway, link = await stack.enter_async_context(gateway_of(address))
        request = work(40, 5) | {"token_ids": (10, 10**6), "prompt_len": 2}
        if role is Role.PREFILL:
            link.send(Prefill(**request))
        else:
            link.send(decode_from(request, address, me))
        assert (await gateway.until(Failed)).cause is Cause.INVALID
        assert tested.ready()[1]["requests"] == 0


async def test_suspects_have_steps_of_their_own_and_their_gateways_know(checkpoint: Callable[[str], Path]) -> None:
    """Two gateways, a suspect each that is tried alone, and a third request that stands still meanwhile."""
    async with AsyncExitStack() as stack:
        decode, held, address, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        links = [await stack.enter_async_context(gateway_of(address)) for _ in range(3)]
        levels = (Suspicion.NONE, Suspicion.ALONE, Suspicion.ALONE)
        works = [work(40, 12) | {"suspicion": level, "source": None} for level in levels]

        def heard(index: int, kind: type[Message]) -> list[Any]:
            return [message for message in links[index][0].heard if isinstance(message, kind)]

        links[0][1].send(Decode(**works[0], handles=handles()))
        await links[0][0].until(Tokens, 3)
        held.hold()
        assert await asyncio.to_thread(held.in_step.wait, 20)
        for index in (1, 2):  # one after the other: they come by sessions of their own, which may overtake one another
            links[index][1].send(Decode(**works[index], handles=handles()))
            await eventually(lambda index=index: decode.ready()[1]["requests"] == index + 1)  # type: ignore[misc]
        num_before = sum(len(tokens.token_ids) for tokens in heard(0, Tokens))
        held.hold(after=1)  # the step of the first one; the first suspect's is held
        for index in range(3):
            await eventually(lambda index=index: bool(heard(index, Trial)))  # type: ignore[misc]
        told = [[(trial.num_requests, len(trial.requests)) for trial in heard(index, Trial)] for index in range(3)]
        assert told == [[(1, 0)], [(1, 1)], [(1, 0)]], "all are told before the step is over"
        held.release()
        for index in range(3):
            await eventually(lambda index=index: bool(heard(index, Finished)))  # type: ignore[misc]
        for index in range(3):  # nobody is on trial any more, whether or not there is another step
            await eventually(lambda index=index: heard(index, Trial)[-1].num_requests == 0)  # type: ignore[misc]
            each = [(trial.num_requests, len(trial.requests)) for trial in heard(index, Trial)]
            assert each == [(1, index == 1), (0, 0), (1, index == 2), (0, 0)]
        texts = [[token for tokens in heard(index, Tokens) for token in tokens.token_ids] for index in range(3)]
        assert texts == [texts[0]] * 3
        assert 0 < num_before < len(texts[0])


async def test_who_attaches_after_the_first_token_has_ended_the_request_tells_the_gateway(
    checkpoint: Callable[[str], Path],
) -> None:
    """It heard nothing of the prefill worker, perhaps: its first decode worker was lost, and with it the attempt."""
    async with AsyncExitStack() as stack:
        prefill, _, prefill_at, prefill_me = await stack.enter_async_context(worker(Role.PREFILL, checkpoint("llama")))
        decode, _, decode_at, _ = await stack.enter_async_context(worker(Role.DECODE, checkpoint("llama")))
        p_gateway, p_link = await stack.enter_async_context(gateway_of(prefill_at))
        d_gateway, d_link = await stack.enter_async_context(gateway_of(decode_at))
        request = work(40, 1)
        p_link.send(Prefill(**request))
        first = await p_gateway.until(Tokens)
        d_link.send(decode_from(request | {"attempt": 1}, prefill_at, prefill_me))
        again = replace(decode_from(request, prefill_at, prefill_me), attempt=2)
        d_link.send(again)
        await d_gateway.until(Finished)
        told = [message for message in d_gateway.heard if isinstance(message, Tokens) and message.attempt == 2]
        assert told == [replace(first, attempt=2)]
        assert first.finish_reason == "length"
        await eventually(lambda: all(w.ready()[1]["blocks_used"] == 0 for w in (prefill, decode)))
        assert decode.ready()[1]["requests"] == 0
