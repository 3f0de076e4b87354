"""What the holder of an API key is told when it has used up its share, and that it is charged for what it uses."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    ScriptedGenerator,
    Server,
    assert_error,
    encode,
    serve,
    settings,
)
from waiting import StandingClock

from common.contract.errors import Cause
from common.contract.ids import RequestId, RequestKey
from gateway.access.api_keys import Keyring
from gateway.api_settings import ApiSettings
from gateway.serving.generation import Delta, Generation, GenerationFailed, PromptDelta

HELLO = 1 + len(encode("hello"))
"""Tokens of the prompt of `COMPLETION`."""
WORLD = len(encode("hello world"))
"""Tokens of the scripted answer."""
ANSWER_TIMEOUT_S = 60.0
"""A request that hangs for longer was let in where it should have been refused."""


@dataclass
class Client:
    """One key's holder, and the time that the gateway goes by."""

    server: Server
    session: aiohttp.ClientSession
    time: StandingClock
    file: Path

    async def ask(
        self, body: dict[str, Any] | None = None, path: str = COMPLETIONS_PATH, key: str = "k"
    ) -> tuple[int, Any, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        asked = self.session.post(self.server.url + path, json=body or COMPLETION, headers=headers)
        async with asyncio.timeout(ANSWER_TIMEOUT_S), asked as response:
            raw = await response.read()
            stream = response.content_type == "text/event-stream"
            return response.status, raw.decode() if stream else json.loads(raw), response.headers

    def limited(self, reason: str, key: str = "alice") -> float:
        value = self.server.metrics.registry.get_sample_value(
            "baton_gateway_requests_limited_total", {"key": key, "reason": reason}
        )
        return value or 0.0


def entry(name: str, key: str, limits: str) -> str:
    return f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{limits}\n'


@asynccontextmanager
async def client_of(
    tmp_path: Path, limits: str, generator: ScriptedGenerator | None = None, api_settings: ApiSettings | None = None
) -> AsyncIterator[Client]:
    """A client whose key, "k" of alice, has these limits; "other" of bob has none."""
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice", "k", limits) + entry("bob", "other", ""))
    time = StandingClock()
    keyring = Keyring(file, clock=time)
    api_settings = api_settings or settings()
    async with serve(generator or ScriptedGenerator(), api_settings, clock=time, keyring=keyring) as server:
        async with aiohttp.ClientSession() as session:
            yield Client(server, session, time, file)


async def test_requests_a_minute(tmp_path: Path) -> None:
    async with client_of(tmp_path, "requests_per_minute = 3") as client:
        for left in (2, 1, 0):
            status, _, headers = await client.ask()
            assert status == 200
            assert headers["x-ratelimit-limit-requests"] == "3"
            assert headers["x-ratelimit-remaining-requests"] == str(left)
            assert headers["x-ratelimit-reset-requests"] == {2: "20s", 1: "40s", 0: "1m0s"}[left]
            assert "x-ratelimit-limit-tokens" not in headers
        for path in (COMPLETIONS_PATH, CHAT_PATH, "/tokenize"):
            status, answer, headers = await client.ask(CHAT, path)
            assert status == 429
            assert_error(answer, None, "requests_per_minute")
            assert answer["error"]["type"] == "rate_limit_error"
            assert headers["Retry-After"] == "20"
            assert headers["x-ratelimit-remaining-requests"] == "0"
        assert client.limited("requests_per_minute") == 3
        assert (await client.ask(key="other"))[0] == 200
        client.time.now += 19.9
        status, _, headers = await client.ask()
        assert (status, headers["Retry-After"]) == (429, "1")
        client.time.now += 0.1
        assert (await client.ask())[0] == 200
        assert (await client.ask())[0] == 429


async def test_a_request_that_fails_counts(tmp_path: Path) -> None:
    async with client_of(tmp_path, "requests_per_minute = 1") as client:
        assert (await client.ask({"prompt": ""}))[0] == 400
        assert (await client.ask())[0] == 429


async def test_what_has_no_limits_says_nothing_of_them(tmp_path: Path) -> None:
    async with client_of(tmp_path, "requests_per_minute = 1") as client:
        _, _, headers = await client.ask(key="other")
        assert not [name for name in headers if name.lower().startswith("x-ratelimit")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_prompt_and_output_tokens_are_charged(tmp_path: Path, stream: bool, n: int) -> None:
    async with client_of(tmp_path, "tokens_per_minute = 600") as client:
        status, _, headers = await client.ask(COMPLETION | {"stream": stream, "n": n})
        assert status == 200
        used = HELLO + n * WORLD
        _, _, headers = await client.ask({"prompt": 5})
        assert headers["x-ratelimit-limit-tokens"] == "600"
        assert headers["x-ratelimit-remaining-tokens"] == str(600 - used)
        assert headers["x-ratelimit-reset-tokens"] == (f"{used * 100}ms" if used < 10 else f"{-(-used // 10)}s")


async def test_a_stream_begins_with_the_headers(tmp_path: Path) -> None:
    async with client_of(tmp_path, "requests_per_minute = 2\ntokens_per_minute = 600") as client:
        status, text, headers = await client.ask(COMPLETION | {"stream": True})
        assert status == 200
        assert "[DONE]" in text
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert 600 - HELLO - WORLD <= int(headers["x-ratelimit-remaining-tokens"]) <= 600 - HELLO


async def test_tokens_a_minute(tmp_path: Path) -> None:
    """The output is on credit, and the next prompt waits until that is paid back."""
    limit = HELLO + 1
    async with client_of(tmp_path, f"tokens_per_minute = {limit}") as client:
        assert (await client.ask())[0] == 200
        level = limit - HELLO - WORLD
        assert level < 0
        status, answer, headers = await client.ask()
        assert status == 429
        assert_error(answer, None, "tokens_per_minute")
        assert answer["error"]["type"] == "rate_limit_error"
        wait_s = -(-(HELLO - level) * 60 // limit)
        assert headers["Retry-After"] == str(wait_s)
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        assert client.limited("tokens_per_minute") == 1
        client.time.now += wait_s - 1
        assert (await client.ask())[0] == 429
        client.time.now += 1
        assert (await client.ask())[0] == 200


@pytest.mark.parametrize(("cause", "expected"), [(Cause.CAPACITY, 429), (Cause.WORKER_LOST, 503)])
async def test_a_prompt_that_is_refused_is_not_charged(cause: Cause, expected: int, tmp_path: Path) -> None:
    """Who comes back when it is told to must find its tokens there."""
    generator = ScriptedGenerator()
    async with client_of(tmp_path, f"tokens_per_minute = {HELLO + WORLD}", generator) as client:
        generator.failure = GenerationFailed(cause, "the workers are busy, or there are none", retry_after_s=1)
        for stream in (False, True, False):
            status, answer, headers = await client.ask(COMPLETION | {"stream": stream})
            assert (status, headers["Retry-After"]) == (expected, "1")
            assert_error(answer, None, cause)
            assert headers["x-ratelimit-remaining-tokens"] == str(HELLO + WORLD)
        generator.failure = None
        assert (await client.ask())[0] == 200


async def test_a_prompt_that_a_worker_has_got_is_charged(tmp_path: Path) -> None:
    """Some of it may have been computed before the worker was lost."""

    class Placed(ScriptedGenerator):
        async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
            generation.waterfall.began(RequestKey(RequestId("a"), 1), [0], 0.0, decode="d:1")
            async for delta in super().generate(generation):
                yield delta

    generator = Placed(failure=GenerationFailed(Cause.WORKER_LOST, "gone"))
    async with client_of(tmp_path, "tokens_per_minute = 600", generator) as client:
        status, _, headers = await client.ask()
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (503, str(600 - HELLO))


async def test_a_prompt_that_could_never_be_let_in(tmp_path: Path) -> None:
    async with client_of(tmp_path, "tokens_per_minute = 20") as client:
        status, answer, _ = await client.ask({"prompt": [5] * 21})
        assert status == 400
        assert_error(answer, None, "tokens_per_minute")
        assert "21" in answer["error"]["message"]
        assert "20" in answer["error"]["message"]
        assert (await client.ask({"prompt": [[5] * 10, [5] * 11]}))[0] == 400
        assert client.limited("tokens_per_minute") == 0
        assert (await client.ask({"prompt": [5] * 20}))[0] == 200


async def test_requests_at_once(tmp_path: Path) -> None:
    generator = ScriptedGenerator(hang=True)
    async with client_of(tmp_path, "max_concurrency = 2", generator) as client:
        held = [asyncio.create_task(client.ask(CHAT, CHAT_PATH)) for _ in range(2)]
        async with asyncio.timeout(10):
            while len(generator.generations) < 2:
                await asyncio.sleep(0.01)
        status, answer, headers = await client.ask()
        assert status == 429
        assert_error(answer, None, "concurrency")
        assert headers["Retry-After"] == "1", "nobody knows when"
        assert client.limited("concurrency") == 1
        generator.hang = False
        assert (await client.ask(key="other"))[0] == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        async with asyncio.timeout(10):
            while (await client.ask())[0] != 200:
                await asyncio.sleep(0.01)


async def test_a_failure_gives_the_place_back(tmp_path: Path) -> None:
    generator = ScriptedGenerator(failure=ValueError("broken"))
    async with client_of(tmp_path, "max_concurrency = 1", generator) as client:
        bodies: list[tuple[dict[str, Any], int]] = [
            (COMPLETION, 500),
            ({"prompt": 5}, 400),
            (COMPLETION | {"model": "other"}, 404),
        ]
        for body, status in bodies * 2:
            assert (await client.ask(body))[0] == status


async def test_limits_that_change_keep_what_was_used(tmp_path: Path) -> None:
    async with client_of(tmp_path, "requests_per_minute = 2") as client:
        assert (await client.ask())[0] == 200
        client.file.write_text(entry("alice", "k", "requests_per_minute = 3"))
        client.time.now += 1
        _, _, headers = await client.ask()
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        client.file.write_text(entry("alice", "k", ""))
        client.time.now += 1
        for _ in range(5):
            assert (await client.ask())[0] == 200
        client.file.write_text(entry("alice", "new", "requests_per_minute = 1"))
        client.time.now += 1
        assert (await client.ask())[0] == 401
        assert (await client.ask(key="new"))[0] == 200
