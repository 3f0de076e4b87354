"""Requests that were accepted and do not finish: a status before the first token, an event after it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from functools import partial
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    ScriptedGenerator,
    assert_error,
    post,
    serve,
    settings,
)

from common.contract.errors import Cause
from common.runtime.descriptors import allow_descriptors
from gateway.intake.request_intake import Intake
from gateway.serving.generation import Delta, GenerationFailed

STATUSES = {
    Cause.CANCELLED: 499,
    Cause.CAPACITY: 429,
    Cause.INVALID: 400,
    Cause.TOO_LARGE: 400,
    Cause.DEADLINE: 504,
    Cause.DRAINING: 503,
    Cause.WORKER_LOST: 503,
    Cause.LEASE_LOST: 503,
    Cause.TRANSFER: 503,
    Cause.FINGERPRINT: 503,
    Cause.SUPERSEDED: 503,
    Cause.POISON: 500,
    Cause.INTERNAL: 500,
}


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(cause: Cause, stream: bool) -> None:
    generator = ScriptedGenerator(failure=GenerationFailed(cause, "what happened"))
    status, answer, headers = await post(CHAT_PATH, CHAT | {"stream": stream}, generator)
    assert status == STATUSES[cause]
    assert_error(answer, "max_tokens" if cause is Cause.TOO_LARGE else None, cause.value)
    assert headers["Content-Type"].startswith("application/json")
    assert ("Retry-After" in headers) == (status in (429, 503))
    assert ("what happened" in answer["error"]["message"]) == (cause is not Cause.INTERNAL)


async def test_an_unexpected_exception_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(failure=ZeroDivisionError("secret detail"))
    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION, generator)
    assert status == 500
    assert_error(answer, None)
    assert "secret" not in json.dumps(answer)
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_failure_before_there_is_a_generation_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_threads(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        failed = partial(server.metrics.registry.get_sample_value, "baton_gateway_requests_failed_total")
        for body, status in ((COMPLETION | {"prompt": 1.5}, 400), (COMPLETION, 500), (COMPLETION, 500)):
            if status == 500:
                monkeypatch.setattr(Intake, "completion", no_threads)
            async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
                assert response.status == status
        assert failed({"cause": "internal"}) == 2
        assert failed({"cause": "invalid"}) in (None, 0)


@pytest.mark.parametrize("failure", [GenerationFailed(Cause.WORKER_LOST, "gone"), ZeroDivisionError("secret detail")])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)])
async def test_a_failure_in_mid_stream_is_an_error_event(failure: Exception, path: str, body: dict[str, Any]) -> None:
    """It has no name: clients with parsers of their own take `data:` off what is between two empty lines."""
    generator = ScriptedGenerator(failure=failure, num_before=3, text="hello world the end of the story")
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        request = body | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
        async with session.post(server.url + path, json=request) as response:
            assert response.status == 200
            text = (await response.read()).decode()
        events = text.strip().split("\n\n")
        assert len(events) == 4
        assert_error(json.loads(events[-1].removeprefix("data: ")), None)
        assert "[DONE]" not in text
        assert "secret" not in text
        for event in events[:-1]:
            (choice,) = json.loads(event.removeprefix("data: "))["choices"]
            assert choice["finish_reason"] is None
        exposition = server.metrics.exposition().decode()
    cause = failure.cause.value if isinstance(failure, GenerationFailed) else "internal"
    assert f'baton_gateway_requests_failed_total{{cause="{cause}"}} 1.0' in exposition


async def test_a_generation_that_just_stops_is_a_failure() -> None:
    class Quits(ScriptedGenerator):
        async def generate(self, generation: Any) -> Any:
            async for delta in super().generate(generation):
                assert isinstance(delta, Delta)
                yield dataclasses.replace(delta, finish_reason=None)

    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION, Quits())
    assert status == 500
    assert_error(answer, None, "internal")


async def test_too_many_requests_in_flight() -> None:
    generator = ScriptedGenerator(hang=True)
    async with serve(generator, settings(max_in_flight=2)) as server:
        async with aiohttp.ClientSession() as session:
            held = [asyncio.create_task(session.post(server.url + CHAT_PATH, json=CHAT)) for _ in range(2)]
            while len(generator.generations) < 2:
                await asyncio.sleep(0.01)
            async with session.post(server.url + CHAT_PATH, json=CHAT) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                assert_error(await response.json(), None, "capacity")
            async with session.get(server.url + "/health") as response:
                assert response.status == 200
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            generator.hang = False
            async with asyncio.timeout(30):
                while True:
                    async with session.post(server.url + CHAT_PATH, json=CHAT) as response:
                        if response.status == 200:
                            break
                    await asyncio.sleep(0.01)


async def test_a_refusal_is_counted_once_before_its_acceptance_and_after() -> None:
    generator = ScriptedGenerator(hang=True)
    async with serve(generator, settings(max_in_flight=1)) as server, aiohttp.ClientSession() as session:
        sample = server.metrics.registry.get_sample_value
        held = asyncio.create_task(session.post(server.url + CHAT_PATH, json=CHAT))
        while not generator.generations:
            await asyncio.sleep(0.01)
        async with session.post(server.url + CHAT_PATH, json=CHAT) as response:
            assert response.status == 429
        assert sample("baton_gateway_requests_failed_total", {"cause": "capacity"}) == 1
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        while sample("baton_gateway_requests_in_flight"):
            await asyncio.sleep(0.01)
        generator.hang, generator.failure = False, GenerationFailed(Cause.CAPACITY, "full")
        async with session.post(server.url + CHAT_PATH, json=CHAT) as response:
            assert response.status == 429
        assert sample("baton_gateway_requests_failed_total", {"cause": "capacity"}) == 2


@pytest.mark.usefixtures("limit_of_files_restored")
async def test_a_closed_loop_of_1024_clients_is_served() -> None:
    """By default none is refused, nor are those who ask again before the end of their last request is counted."""
    num_clients, generator = 1024, ScriptedGenerator(hang=True)
    num_files = 2 * num_clients + 512  # the ends of connections, and whatever else this process has open
    assert allow_descriptors(num_files) == num_files, "the system does not allow as many open files"
    async with serve(generator) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask() -> int:
                async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION) as response:
                    await response.read()
                    return response.status

            async with asyncio.timeout(60):
                first = [asyncio.create_task(ask()) for _ in range(num_clients)]
                while generator.num_open < num_clients:
                    await asyncio.sleep(0.01)
                generator.hang = False
                assert [await ask() for _ in range(8)] == [200] * 8
                for task in first:
                    task.cancel()
                await asyncio.gather(*first, return_exceptions=True)
