"""A decode worker that drains: its streams go on elsewhere, with the same tokens, and nothing is computed again.

The worker that is to drain stands still at a gate (`chaos.staged_worker`) until what a test waits for has come about.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chaos.theatre import Actor, staged
from checkpoints import make_checkpoint
from stack import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    Answer,
    Process,
    Workers,
    answer,
    avoided,
    generation,
    prompt,
    until,
    wait_until,
)

from common.contract.errors import Cause
from common.contract.messages.session import Role
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Delta, GenerationFailed
from gateway.workers.registry import Registry

LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}
NUM_BEFORE = 24
"""Steps that a stream has before its worker stands still."""


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes long sequences."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("long"), seed=7, max_position_embeddings=8192)


@dataclass
class Stage:
    """One prefill and two decode workers."""

    workers: Workers
    leaving: Actor
    """The decode worker that drains."""

    @property
    def address(self) -> str:
        """Of the worker that drains."""
        return self.leaving.address

    @property
    def other(self) -> Process:
        """The decode worker that the streams move to."""
        return self.workers.decode[1]

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[Dispatcher, Registry]]:
        """A gateway's dispatcher; afterwards nobody stands still or drains any more."""
        registry = self.workers.registry()
        async with self.workers.dispatcher(registry) as dispatcher:
            try:
                yield dispatcher, registry
            finally:
                for gate in self.leaving.closed.copy():
                    self.leaving.open(gate)
                for process in self.workers.decode:
                    dispatcher.links.tell(process.facts["control"], drain=False)
                await until(self.serves, "it does not resume")

    def serves(self) -> bool:
        """Whether both decode workers do."""
        return all(process.get("/ready")["phase"] == "serving" for process in self.workers.decode)


@pytest.fixture(scope="module")
def migration(long_context: Path, pools: dict[str, Workers], tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The workers, started once."""
    scratch, size = tmp_path_factory.mktemp("stage"), ("--kv-cache-bytes", str(64 * 2**20))
    options = ("--checksums", "--heartbeat-timeout-s", "10")  # of a test that is a gateway, and may stand still
    leaving = staged(Role.DECODE, long_context, scratch, *options, "--drain-grace-s", "60", *size)
    workers = Workers.start(long_context, options=options, prefill_options=("--chunk-size", "512"))
    leaving.ready()
    workers.decode.insert(0, leaving.process)
    pools["migration"] = workers
    return Stage(workers, leaving)


@pytest.fixture
def stage(migration: Stage, pool: Callable[..., Workers]) -> Stage:
    """The workers, which each test leaves serving."""
    pool("migration")
    return migration


@asynccontextmanager
async def streaming(
    stage: Stage, dispatcher: Dispatcher, registry: Registry, length: int, **sampling: Any
) -> AsyncIterator[asyncio.Task[Answer]]:
    """A stream whose client has some tokens, on the worker that is to leave, which stands still until `leave`."""
    work = generation(prompt(length, length), **(LONG | sampling))
    num_seen = 0

    async def collect() -> Answer:
        nonlocal num_seen
        result = Answer([[] for _ in range(work.num_choices)], [None] * work.num_choices, [])
        async for delta in dispatcher.generate(work):
            assert isinstance(delta, Delta)
            num_seen += len(delta.token_ids)
            result.tokens[delta.choice].extend(delta.token_ids)
            result.reasons[delta.choice] = delta.finish_reason
            result.deltas.append(delta)
        return result

    def stands_still() -> bool:
        return stage.leaving.waiting("step") == 1 and num_seen > NUM_BEFORE * work.num_choices

    stage.leaving.close("step", skip=NUM_BEFORE)
    with avoided(registry, stage.other):
        task = asyncio.create_task(collect())
        await until(stands_still, "it does not stand still amid the stream")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def leave(stage: Stage, num_sequences: int = 1) -> None:
    """Let the worker go on once others want its sequences, and have read what there was of them."""
    await until(lambda: stage.leaving.state()["parked"] == num_sequences, "nobody wants the sequence")
    stage.leaving.open("step")


def computed_by(workers: Workers) -> float:
    """Prompt tokens, and tokens computed again after a preemption."""
    again = sum(worker.metric("baton_tokens_recomputed_total") for worker in workers.decode)
    return workers.metric("baton_prompt_tokens_computed_total") + again


@pytest.mark.parametrize("length", [500, 4000])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "top_k": 20, "seed": 5, "logprobs": 2}], ids=["greedy", "sampled"]
)
async def test_a_stream_moves_and_computes_nothing_again(stage: Stage, length: int, sampling: dict[str, Any]) -> None:
    leaving, other = stage.leaving, stage.other
    async with stage.gateway() as (dispatcher, registry):
        expected = await answer(dispatcher, generation(prompt(length, length), **(LONG | sampling)))
        tail = other.metric("baton_move_tail_blocks_total")
        async with streaming(stage, dispatcher, registry, length, **sampling) as task:
            computed = computed_by(stage.workers)
            assert dispatcher.links.tell(stage.address, drain=True)
            await leave(stage)
            found = await asyncio.wait_for(task, 60)
        assert found.tokens == expected.tokens
        assert found.reasons == ["length"]
        numbers, wanted = ([each for d in a.deltas for each in d.logprobs or ()] for a in (found, expected))
        assert len(numbers) == (LONG["max_tokens"] if "logprobs" in sampling else 0)
        assert [each.logprob for each in numbers] == pytest.approx([each.logprob for each in wanted], abs=1e-3)
        assert computed_by(stage.workers) == computed, "something was computed again"
        assert dispatcher.recovery.tally.moves == {"moved": 1}
        assert other.metric("baton_move_tail_blocks_total") - tail <= 2, "the pause grows with the sequence"
        await until(lambda: leaving.state()["safe_to_delete"], "it is not drained")
        assert leaving.state()["phase"] == "drained"
        dispatcher.links.tell(stage.address, drain=False)
        await until(lambda: leaving.state()["phase"] == "serving", "it does not resume")
        assert leaving.state()["ready"]


async def test_every_choice_moves_by_itself(stage: Stage) -> None:
    sampling = {"temperature": 1.0, "top_k": 20, "seed": 5, "n": 3}
    async with stage.gateway() as (dispatcher, registry):
        expected = await answer(dispatcher, generation(prompt(80, 80), **(LONG | sampling)))
        async with streaming(stage, dispatcher, registry, 80, **sampling) as task:
            computed = computed_by(stage.workers)
            dispatcher.links.tell(stage.address, drain=True)
            await leave(stage, 3)
            found = await asyncio.wait_for(task, 60)
        assert found.tokens == expected.tokens
        assert computed_by(stage.workers) == computed
        assert dispatcher.recovery.tally.moves == {"moved": 3}


async def test_a_worker_whose_engine_hangs_gets_nothing_until_it_steps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once it has nothing any more, since its requests were taken away."""
    leaving = stage.leaving
    async with stage.gateway() as (dispatcher, registry):
        hung = registry.workers[stage.address]
        expected = await answer(dispatcher, generation(prompt(90, 90), **LONG))
        async with streaming(stage, dispatcher, registry, 90) as task:
            monkeypatch.setattr(registry, "_stall_s", 3.0)
            found = await asyncio.wait_for(task, 60)
        assert found.tokens == expected.tokens
        assert dispatcher.recovery.tally.failures == {Cause.WORKER_LOST: 1}
        assert not hung.usable
        await until(lambda: leaving.state()["running"] == 0, "its requests were not taken away")
        assert leaving.process.metric("baton_engine_step_age_seconds") > 3.0
        number = hung.load.number if hung.load else 0
        await until(lambda: hung.load is not None and hung.load.number > number + 3, "it tells nothing")
        assert not hung.usable, "the engine hangs still"
        assert (await answer(dispatcher, generation(prompt(91, 91)))).reasons == ["length"]
        leaving.open("step")
        await until(lambda: hung.usable, "it is not used again")
        assert leaving.process.metric("baton_engine_step_age_seconds") == 0


async def test_without_another_worker_a_stream_finishes_where_it_is(stage: Stage) -> None:
    first, second = (process.facts["control"] for process in stage.workers.decode)
    async with stage.gateway() as (dispatcher, registry):
        async with streaming(stage, dispatcher, registry, 100) as task:
            for address in (second, first):
                dispatcher.links.tell(address, drain=True)
            await until(lambda: not registry.usable(Role.DECODE), "they do not drain")
            with pytest.raises(GenerationFailed) as refused:
                await answer(dispatcher, generation(prompt(1, 9)))
            assert refused.value.cause is Cause.WORKER_LOST
            stage.leaving.open("step")
            found = await asyncio.wait_for(task, 60)
        assert found.reasons == ["length"]
        assert len(found.tokens[0]) == LONG["max_tokens"]


async def test_sigterm_drains(stage: Stage) -> None:
    leaving = stage.leaving
    async with stage.gateway() as (dispatcher, registry):
        expected = await answer(dispatcher, generation(prompt(100, 100), **LONG))
        async with streaming(stage, dispatcher, registry, 100) as task:
            leaving.process.signal()
            await leave(stage)
            found = await asyncio.wait_for(task, 60)
        assert found.tokens == expected.tokens
        assert await asyncio.to_thread(leaving.process.wait) == 0
        assert dispatcher.recovery.tally.moves == {"moved": 1}
        assert not dispatcher.recovery.tally.failures
        leaving.start()
        leaving.ready()
        stage.workers.decode[0] = leaving.process


async def test_what_does_not_leave_in_time_fails_with_a_clear_error(long_context: Path) -> None:
    workers = Workers.start(long_context, options=("--drain-grace-s", "0.1"))
    try:
        async with workers.dispatcher(patience_s=0.5) as dispatcher:
            task = asyncio.create_task(answer(dispatcher, generation(prompt(5, 50), max_tokens=8000, ignore_eos=True)))
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


async def test_a_prefill_worker_that_drains_hands_its_queue_back(
    stage: Stage, long_context: Path, tmp_path: Path
) -> None:
    small = (
        "--block-size",
        str(BLOCK_SIZE),
        "--kv-cache-bytes",
        str(80 * BLOCK_BYTES),
        "--chunk-size",
        "64",
        "--token-budget",
        "64",
    )
    leaving = staged(Role.PREFILL, long_context, tmp_path, "--checksums", *small)
    other = Process("prefill_worker", ["--model", str(long_context), "--num-threads", "1", "--checksums", *small])
    workers = Workers(long_context, [leaving.process, other], [stage.other])
    try:
        leaving.ready()
        other.fact("ready")
        registry = workers.registry()
        async with workers.dispatcher(registry) as dispatcher:
            prompts = [prompt(seed, 900) for seed in range(6)]
            expected = [await answer(dispatcher, generation(each)) for each in prompts]
            leaving.close("step")
            with avoided(registry, other):
                tasks = [asyncio.create_task(answer(dispatcher, generation(each, cache_salt="b"))) for each in prompts]
                await until(lambda: leaving.state()["waiting"] > 0, "nobody waits")
            dispatcher.links.tell(leaving.address, drain=True)
            await until(lambda: leaving.state()["phase"] == "draining", "it does not drain")
            leaving.open("step")
            found = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert dispatcher.recovery.tally.failures[Cause.DRAINING] > 0
            await until(lambda: leaving.state()["safe_to_delete"], "it is not drained")
    finally:
        started = Workers(long_context, workers.prefill)
        started.signal()
        started.wait()


def _post(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_an_operator_drains_by_the_admin_port(stage: Stage) -> None:
    worker = stage.address
    with stage.workers.gateway("--admin-port", "0") as gateway:
        admin = gateway.fact("admin")

        def seen() -> dict[str, Any]:
            with urllib.request.urlopen(f"{admin}/workers", timeout=10) as response:
                return {each["id"]: each for each in json.loads(response.read())["workers"]}

        wait_until(lambda: seen()[worker]["phase"] == "serving", "the gateway does not know it")
        assert _post(f"{admin}/workers/{worker}/drain") == (202, {"id": worker, "told": "drain"})
        wait_until(lambda: seen()[worker]["safe_to_delete"], "it does not drain")
        assert stage.leaving.state()["phase"] == "drained"
        assert _post(f"{admin}/workers/{worker}/resume")[0] == 202
        wait_until(lambda: seen()[worker]["phase"] == "serving", "it does not resume")
        assert _post(f"{admin}/workers/nobody:1/drain")[0] == 404
