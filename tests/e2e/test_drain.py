"""A decode worker that drains: its streams go on elsewhere, with the same tokens, and nothing is computed again."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from stack import BLOCK_BYTES, Answer, Process, Workers, answer, avoided, generation, prompt, until

from common.contract.errors import Cause
from gateway.routing.dispatcher import Dispatcher
from gateway.serving.generation import GenerationFailed
from gateway.workers.registry import Registry

LONG = {"max_tokens": 1000, "ignore_eos": True}
"""A stream that goes on for longer than anything here takes to be noticed."""


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes long sequences."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("long"), seed=7, max_position_embeddings=8192)


@pytest.fixture
def workers(pool: Callable[..., Workers], long_context: Path, pools: dict[str, Workers]) -> Workers:
    """One prefill and two decode workers, which each test leaves serving."""
    if "migration" not in pools:
        pools["migration"] = Workers.start(
            long_context, decode=2, options=("--checksums",), prefill_options=("--chunk-size", "512")
        )
    return pool("migration")


@asynccontextmanager
async def streaming(
    workers: Workers, dispatcher: Dispatcher, registry: Registry, length: int, **sampling: Any
) -> AsyncIterator[tuple[asyncio.Task[Answer], list[int]]]:
    """A stream on the first decode worker that has got some tokens; the task, and the tokens so far."""
    work = generation(prompt(length, length), **(LONG | sampling))
    seen: list[int] = []

    async def collect() -> Answer:
        result = Answer([[] for _ in range(work.num_choices)], [None] * work.num_choices, [])
        async for delta in dispatcher.generate(work):
            seen.extend(delta.token_ids)
            result.tokens[delta.choice].extend(delta.token_ids)
            result.reasons[delta.choice] = delta.finish_reason
            result.deltas.append(delta)
        return result

    with avoided(registry, workers.decode[1]):
        task = asyncio.create_task(collect())
        await until(lambda: len(seen) > 20 or task.done(), "nothing is generated")
    try:
        yield task, seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def has_moved_before(workers: Workers, dispatcher: Dispatcher, registry: Registry) -> None:
    """The first read from a worker takes as long as many tokens: the connection is made."""
    if workers.decode[1].metric("baton_move_tail_blocks_total"):
        return
    address = workers.decode[0].facts["control"]
    async with streaming(workers, dispatcher, registry, 50) as (task, _):
        dispatcher.tell(address, drain=True)
        await asyncio.wait_for(task, 60)
    dispatcher.tell(address, drain=False)
    await until(lambda: registry.workers[address].usable, "it does not resume")


def computed_by(workers: Workers) -> float:
    """Prompt tokens, and tokens computed again after a preemption."""
    again = sum(worker.metric("baton_tokens_recomputed_total") for worker in workers.decode)
    return workers.metric("baton_prompt_tokens_computed_total") + again


@pytest.mark.parametrize("length", [500, 4000])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_k": 20, "seed": 5, "logprobs": 2}], ids=["greedy", "sampled"]
)
async def test_a_stream_moves_and_computes_nothing_again(
    workers: Workers, length: int, sampling: dict[str, Any]
) -> None:
    registry = workers.registry()
    leaving, other = workers.decode
    async with workers.dispatcher(registry) as dispatcher:
        expected = await answer(dispatcher, generation(prompt(length, length), **(LONG | sampling)))
        address = leaving.facts["control"]
        await has_moved_before(workers, dispatcher, registry)
        tail = other.metric("baton_move_tail_blocks_total")
        async with streaming(workers, dispatcher, registry, length, **sampling) as (task, _):
            computed, moves = computed_by(workers), dispatcher.recovery.moves["moved"]
            assert dispatcher.tell(address, drain=True)
            found = await asyncio.wait_for(task, 60)
        assert found.tokens == expected.tokens
        assert found.reasons == ["length"]
        numbers, wanted = ([each for d in a.deltas for each in d.logprobs or ()] for a in (found, expected))
        assert len(numbers) == (LONG["max_tokens"] if "logprobs" in sampling else 0)
        assert [each.logprob for each in numbers] == pytest.approx([each.logprob for each in wanted], abs=1e-3)
        assert computed_by(workers) == computed, "something was computed again"
        assert dispatcher.recovery.moves == {"moved": moves + 1}
        assert other.metric("baton_move_tail_blocks_total") - tail <= 3, "the pause grows with the sequence"
        await until(lambda: leaving.get("/ready")["safe_to_delete"], "it is not drained")
        assert leaving.get("/ready")["phase"] == "drained"
        dispatcher.tell(address, drain=False)
        await until(lambda: leaving.get("/ready")["phase"] == "serving", "it does not resume")
        assert leaving.get("/ready")["ready"]


async def test_every_choice_moves_by_itself(workers: Workers) -> None:
    registry = workers.registry()
    leaving = workers.decode[0]
    sampling = {"temperature": 1.0, "top_k": 20, "seed": 5, "n": 3}
    async with workers.dispatcher(registry) as dispatcher:
        expected = await answer(dispatcher, generation(prompt(80, 80), **(LONG | sampling)))
        async with streaming(workers, dispatcher, registry, 80, **sampling) as (task, _):
            computed = computed_by(workers)
            dispatcher.tell(leaving.facts["control"], drain=True)
            found = await asyncio.wait_for(task, 60)
        assert found.tokens == expected.tokens
        assert computed_by(workers) == computed
        assert dispatcher.recovery.moves == {"moved": 3}
        dispatcher.tell(leaving.facts["control"], drain=False)
        await until(lambda: leaving.get("/ready")["phase"] == "serving", "it does not resume")


async def test_without_another_worker_a_stream_finishes_where_it_is(workers: Workers) -> None:
    registry = workers.registry()
    first, second = (process.facts["control"] for process in workers.decode)
    async with workers.dispatcher(registry) as dispatcher:
        dispatcher.tell(second, drain=True)
        await until(lambda: not registry.workers[second].usable, "it does not drain")
        async with streaming(workers, dispatcher, registry, 100) as (task, _):
            dispatcher.tell(first, drain=True)
            await until(lambda: not registry.workers[first].usable, "it does not drain")
            with pytest.raises(GenerationFailed) as refused:
                await answer(dispatcher, generation(prompt(1, 9)))
            assert refused.value.cause is Cause.WORKER_LOST
            found = await asyncio.wait_for(task, 60)
        assert found.reasons == ["length"]
        assert len(found.tokens[0]) == LONG["max_tokens"]
        for address in (first, second):
            dispatcher.tell(address, drain=False)
        await until(lambda: not registry.missing(), "they do not resume")


async def test_sigterm_drains(long_context: Path) -> None:
    workers = Workers.start(long_context, decode=2, options=("--checksums", "--drain-grace-s", "20"))
    registry = workers.registry()
    leaving = workers.decode[0]
    try:
        async with workers.dispatcher(registry) as dispatcher:
            expected = await answer(dispatcher, generation(prompt(100, 100), **LONG))
            async with streaming(workers, dispatcher, registry, 100) as (task, _):
                leaving.signal()
                found = await asyncio.wait_for(task, 60)
            assert found.tokens == expected.tokens
            assert await asyncio.to_thread(leaving.wait) == 0
            assert dispatcher.recovery.moves == {"moved": 1}
            assert not dispatcher.recovery.failovers
    finally:
        workers.signal()
        workers.wait()


async def test_what_does_not_leave_in_time_fails_with_a_clear_error(long_context: Path) -> None:
    workers = Workers.start(long_context, options=("--drain-grace-s", "0.1"))
    try:
        async with workers.dispatcher(patience_s=0.5) as dispatcher:
            task = asyncio.create_task(answer(dispatcher, generation(prompt(5, 50), max_tokens=4000, ignore_eos=True)))
            await until(lambda: workers.decode[0].get("/ready")["running"] == 1, "it does not run")
            workers.decode[0].signal()
            with pytest.raises(GenerationFailed) as failed:
                await asyncio.wait_for(task, 30)
            assert failed.value.cause is Cause.WORKER_LOST
            assert "before" in failed.value.message
            assert await asyncio.to_thread(workers.decode[0].wait) == 0
    finally:
        workers.signal()
        workers.wait()


async def test_a_prefill_worker_that_drains_hands_its_queue_back(long_context: Path) -> None:
    small = ("--kv-cache-bytes", str(80 * BLOCK_BYTES), "--chunk-size", "64", "--token-budget", "64")
    workers = Workers.start(long_context, prefill=2, prefill_options=small)
    registry = workers.registry()
    leaving, other = workers.prefill
    try:
        async with workers.dispatcher(registry) as dispatcher:
            prompts = [prompt(seed, 900) for seed in range(6)]
            expected = [await answer(dispatcher, generation(each)) for each in prompts]
            with avoided(registry, other):
                tasks = [asyncio.create_task(answer(dispatcher, generation(each, cache_salt="b"))) for each in prompts]
                await until(lambda: leaving.get("/ready")["waiting"] > 0, "nobody waits")
            dispatcher.tell(leaving.facts["control"], drain=True)
            found = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert dispatcher.recovery.failovers[Cause.DRAINING] > 0
            await until(lambda: leaving.get("/ready")["safe_to_delete"], "it is not drained")
    finally:
        workers.signal()
        workers.wait()


def _post(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_an_operator_drains_by_the_admin_port(workers: Workers) -> None:
    leaving: Process = workers.decode[0]
    worker = leaving.facts["control"]
    with workers.gateway("--admin-port", "0") as gateway:
        admin = gateway.fact("admin")

        def seen() -> dict[str, Any]:
            with urllib.request.urlopen(f"{admin}/workers", timeout=10) as response:
                return {each["id"]: each for each in json.loads(response.read())["workers"]}

        assert {each["phase"] for each in seen().values()} <= {"serving", None}
        assert _post(f"{admin}/workers/{worker}/drain") == (202, {"id": worker, "told": "drain"})
        _wait(lambda: seen()[worker]["safe_to_delete"])
        assert leaving.get("/ready")["phase"] == "drained"
        assert _post(f"{admin}/workers/{worker}/resume")[0] == 202
        _wait(lambda: seen()[worker]["phase"] == "serving")
        assert _post(f"{admin}/workers/nobody:1/drain")[0] == 404


def _wait(condition: Callable[[], bool]) -> None:
    from stack import wait_until

    wait_until(condition, "it does not come about")
