"""Completions of many prompts: those that begin late are part of one request, and cost little until then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from dispatcher_bench import Bench, D, Time, heartbeat, settle
from gateway_fixtures import COMPLETION, ScriptedGenerator, tokenizer
from test_rate_limits import client_of

from common.contract.errors import Cause
from common.contract.ids import RequestKey
from common.contract.messages.gateway import Abort
from common.contract.messages.session import Phase
from common.contract.sampling import MAX_CHOICES, SamplingParams
from gateway.answer import choice_stream
from gateway.answer.choice_stream import stream_pieces
from gateway.intake.request_intake import Job
from gateway.serving.generation import Admittance, Delta, Generation, GenerationFailed, PromptDelta
from gateway.serving.waterfall import Stage
from gateway.text import stop_strings
from gateway.text.choice_text import ChoiceText, Piece

AT_ONCE = 32


def job_of(num_prompts: int, *, n: int = 1, stops: tuple[str, ...] = (), budget_s: float = 30.0) -> Job:
    admittance = Admittance()
    generations = tuple(
        Generation(
            token_ids=(7, 8, 9),
            num_choices=n,
            sampling=SamplingParams(max_tokens=9),
            budget_s=budget_s,
            admittance=admittance,
        )
        for _ in range(num_prompts)
    )
    return Job(generations=generations, stops=stops, echoes=("",) * num_prompts, stream=True, include_usage=False)


@pytest.mark.parametrize("n", [1, 2, 3, MAX_CHOICES])
async def test_the_choices_of_a_prompt_are_made_when_its_turn_comes(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many choices each prompt has, no more than `AT_ONCE` are generated at a time."""
    made: list[int] = []

    class Counted(ChoiceText):
        def __init__(self, choice: int, *arguments: Any, **more: Any) -> None:
            super().__init__(choice, *arguments, **more)
            made.append(choice)

    monkeypatch.setattr(choice_stream, "ChoiceText", Counted)
    generator = ScriptedGenerator(hang=True)
    pieces = stream_pieces(generator, tokenizer(), job_of(500, n=n))
    assert not made
    reader = asyncio.ensure_future(anext(pieces))
    while len(generator.generations) < AT_ONCE // n:
        await asyncio.sleep(0)
    await settle()
    assert sorted(made) == list(range(AT_ONCE // n * n))
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await pieces.aclose()


async def test_the_tables_of_stop_strings_are_made_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    tables = stop_strings._fallbacks

    def counted(stop: str) -> Any:
        made.append(stop)
        return tables(stop)

    monkeypatch.setattr(stop_strings, "_fallbacks", counted)
    pieces = [each async for each in stream_pieces(ScriptedGenerator(), tokenizer(), job_of(9, n=4, stops=("x", "yz")))]
    assert len({piece.choice for piece in pieces}) == 36
    assert sorted(made) == ["x", "yz"]


@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_stop_string_has_ended_is_given_up_before_its_client_reads_the_end(n: int) -> None:
    generator = ScriptedGenerator(text="hello fox again")
    pieces = stream_pieces(generator, tokenizer(), job_of(1, n=n, stops=("fox",)))
    ended = [await anext(pieces)]
    while ended[-1].finish_reason is None:
        ended.append(await anext(pieces))
    assert generator.given_up == [ended[-1].choice]
    await pieces.aclose()


class Read:
    """One more prompt than are generated at once, on the only decode worker."""

    def __init__(self, bench: Bench, job: Job) -> None:
        self.bench = bench
        self.pieces: list[Piece] = []
        self.task = asyncio.create_task(self._read(job))

    async def _read(self, job: Job) -> None:
        async for piece in stream_pieces(self.bench.dispatcher, tokenizer(), job):
            self.pieces.append(piece)

    async def begun(self, number: int) -> list[RequestKey]:
        """The attempts once there are so many."""
        async with asyncio.timeout(30):
            while len(self.bench.work) < number and not self.task.done():
                await asyncio.sleep(0)
        return list(self.bench.work)

    async def finish(self, keys: list[RequestKey], *refused: RequestKey) -> None:
        for key in keys:
            self.bench.tokens(D, key, 0, 10, 11, reason="stop")
        await self.task
        assert sum(piece.finish_reason == "stop" for piece in self.pieces) == AT_ONCE + 1
        aborts = [message.key for message in self.bench.sent(D, Abort) if isinstance(message, Abort)]
        assert aborts == list(refused)


async def test_a_prompt_that_begins_while_the_only_worker_drains_waits_for_another() -> None:
    bench = Bench((), (D,), clock=Time())
    read = Read(bench, job_of(AT_ONCE + 1))
    first, *others = await read.begun(AT_ONCE)
    bench.say(D, heartbeat(Phase.DRAINING))
    bench.tokens(D, first, 0, 10, 11, reason="stop")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not read.task.done(), read.task.exception()
    assert len(bench.work) == AT_ONCE
    bench.say(D, heartbeat(Phase.SERVING))
    keys = await read.begun(AT_ONCE + 1)
    assert bench.work[keys[-1]][D].admitted
    await read.finish([*others, keys[-1]])
    await bench.close()


async def test_a_prompt_that_the_only_worker_refuses_for_want_of_room_is_tried_again() -> None:
    """It belongs to a request that was let in: a worker that refuses it has failed."""
    bench = Bench((), (D,), clock=Time())
    read = Read(bench, job_of(AT_ONCE + 1))
    first, *others = await read.begun(AT_ONCE)
    bench.tokens(D, first, 0, 10, 11, reason="stop")
    keys = await read.begun(AT_ONCE + 1)
    refused = keys[-1]
    bench.fail(D, refused, Cause.CAPACITY)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not read.task.done(), read.task.exception()
    keys = await read.begun(AT_ONCE + 2)
    await read.finish([*others, keys[-1]], refused)
    await bench.close()


async def test_a_request_without_a_worker_is_refused_whatever_prompts_it_has() -> None:
    bench = Bench((), (D,), opened=False)
    with pytest.raises(GenerationFailed) as caught:
        await Read(bench, job_of(AT_ONCE + 1)).task
    assert caught.value.cause is Cause.WORKER_LOST
    await bench.close()


async def test_the_budget_is_that_of_the_request_whenever_its_prompts_begin() -> None:
    time = Time()
    bench = Bench((), (D,), clock=time)
    read = Read(bench, job_of(AT_ONCE + 1, budget_s=30.0))
    first, *_ = await read.begun(AT_ONCE)
    await time.advance(20.0)
    bench.tokens(D, first, 0, 10, 11, reason="stop")
    keys = await read.begun(AT_ONCE + 1)
    assert bench.work[keys[-1]][D].budget_s == pytest.approx(10.0)
    bench.tokens(D, keys[-1], 0, 10)
    time.now += 11.5
    async with asyncio.timeout(30):
        with pytest.raises(GenerationFailed) as caught:
            await read.task
    assert caught.value.cause is Cause.DEADLINE
    await bench.close()


async def test_the_time_until_a_prompts_turn_is_no_intake() -> None:
    """The request was read long before; its other prompts went first."""
    time = Time()
    bench = Bench((), (D,), clock=time)
    job = job_of(AT_ONCE + 1)
    for generation in job.generations:
        generation.waterfall.arrived("id", time.now)
    read = Read(bench, job)
    first, *others = await read.begun(AT_ONCE)
    time.now += 20.0
    bench.tokens(D, first, 0, 10, 11, reason="stop")
    keys = await read.begun(AT_ONCE + 1)
    await read.finish([*others, keys[-1]])
    waterfall = job.generations[-1].waterfall
    waterfall.ended(time.now, finished=True)
    assert waterfall.stages_ns() == {Stage.PLACEMENT: 20 * 10**9}
    await bench.close()


async def test_a_prompt_whose_turn_comes_after_the_requests_time_is_given_to_nobody() -> None:
    time = Time()
    bench = Bench((), (D,), clock=time)
    with pytest.raises(GenerationFailed) as caught:
        await bench.request(budget_s=30.0, admittance=Admittance(taken=True, opened_at=time.now - 30.0))
    assert caught.value.cause is Cause.DEADLINE
    assert not bench.work
    await bench.close()


class Scores(ScriptedGenerator):
    """Tells log probabilities of prompts, and has no room for the last."""

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        if len(self.generations) == 9:
            raise GenerationFailed(Cause.CAPACITY, "full")
        async for delta in super().generate(generation):
            generation.admittance.taken = True
            yield delta


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_computed_of_prompts_is_not_given_back(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice_stream, "_CHOICES_AT_ONCE", 1)
    body = {"prompt": [[5] * 20] * 10, "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    async with client_of(tmp_path, "tokens_per_minute = 1000", Scores()) as client:
        status, _, _ = await client.ask(COMPLETION | body)
        assert status == (200 if stream else 429)
        headers = (await client.ask({"prompt": [5]}, "/tokenize"))[2]
        assert int(headers["x-ratelimit-remaining-tokens"]) <= 800


async def test_a_request_that_was_refused_at_once_is_given_back(tmp_path: Path) -> None:
    generator = ScriptedGenerator(failure=GenerationFailed(Cause.CAPACITY, "full"))
    async with client_of(tmp_path, "tokens_per_minute = 1000", generator) as client:
        status, _, headers = await client.ask(COMPLETION | {"prompt": [[5] * 20] * 10})
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (429, "1000")
