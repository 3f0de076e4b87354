"""What clients write, and their keys, appear in no log and in no metric of any process, however much is logged."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from stack import Process, Workers

MODEL = "tiny"
KEY = "baton-canarykey"
SECRET = "canary7391"
"""In every prompt and in everything else that a client writes; no other string holds it."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SCHEMA = {"type": "object", "properties": {SECRET: {"const": SECRET}}, "required": [SECRET]}


def _bodies() -> Iterator[tuple[str, Any]]:
    """Requests, good and bad."""
    said = {"role": "user", "content": f"my password is {SECRET}"}
    chat = {"messages": [{"role": "system", "content": SECRET}, said], "max_tokens": 8}
    completion = {"prompt": f"my password is {SECRET}", "max_tokens": 8}
    for path, body in ((CHAT, chat), (COMPLETIONS, completion)):
        for change in (
            {},
            {"stream": True, "n": 3},
            {"stop": [SECRET], "user": SECRET, "cache_salt": SECRET},
            {"guided_regex": f"{SECRET}[0-9]+"},
            {"guided_choice": [SECRET, "no"]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
            {"guided_regex": f"({SECRET}"},
            {"guided_grammar": f"start: {SECRET}"},
            {"guided_json": f'{{"type": "{SECRET}"}}'},
            {"model": SECRET},
            {"service_tier": SECRET},
            {"temperature": SECRET},
            {"logit_bias": {SECRET: 1}},
            {"tools": [{"type": "function", "function": {"name": SECRET}}]},
            {"metadata": {"x": SECRET}, "some_field": SECRET},
            {"prediction": {"type": "content", "content": SECRET}},
            {"prediction": SECRET},
            {"max_tokens": 100_000},
        ):
            yield path, body | change
    yield CHAT, {"messages": [{"role": SECRET, "content": "x"}]}
    yield CHAT, {"messages": [{"role": "user", "content": {"type": SECRET}}]}
    yield CHAT, {"messages": [{"role": "user", "content": f"{SECRET} \ud800"}]}
    yield COMPLETIONS, {"prompt": f"{SECRET} " * 2000}
    yield COMPLETIONS, f'{{"prompt": "{SECRET}'.encode()
    yield COMPLETIONS, f"{SECRET}: {{".encode()
    yield "/tokenize", {"prompt": SECRET}
    yield "/tokenize", {"messages": SECRET}
    yield f"/v1/{SECRET}", {}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n')
    return file


async def _send_raw(port: int, data: bytes) -> None:
    """What is no HTTP from some point on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await asyncio.wait_for(reader.read(), 30)
    writer.close()


async def _leave(session: aiohttp.ClientSession, url: str) -> None:
    """In the middle of a stream."""
    body = {"prompt": f"my password is {SECRET}", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with session.post(url + COMPLETIONS, json=body) as response:
        await response.content.readuntil(b"\n\n")


async def _talk(gateway: Process) -> dict[int, int]:
    """How many requests got which status."""
    statuses: dict[int, int] = {}
    url = gateway.facts["url"]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        for path, body in _bodies():
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(url + path, data=data) as response:
                await response.read()
                statuses[response.status] = statuses.get(response.status, 0) + 1
        await _leave(session, url)
        async with session.get(f"{url}/v1/models/{SECRET}") as response:
            assert response.status == 404
        async with session.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}{SECRET}"}) as response:
            assert response.status == 401
    port = int(url.rpartition(":")[2])
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    for rest in (
        f"Transfer-Encoding: chunked\r\n\r\n5\r\n{SECRET}{SECRET}\r\n",
        f"{SECRET}\r\n\r\n",
        f"Content-Length: {SECRET}\r\n\r\n",
        f"X: {SECRET}\0\r\n\r\n",
        f"Content-Length: 3\r\nConnection: close\r\n\r\n{{}} {SECRET}",
    ):
        await _send_raw(port, (head + rest).encode())
    await _send_raw(port, f"{SECRET}\r\n\r\n".encode())
    return statuses


async def test_nothing_of_it_is_told(pool: Callable[..., Workers], keys: Path) -> None:
    workers = pool("debug", options=("--log-level", "debug"))
    options = ("--served-model-name", MODEL, "--log-level", "debug", "--local-prefill-tokens", "0")
    with workers.gateway(*options, "--api-keys", str(keys)) as gateway:
        statuses = await _talk(gateway)
        told = [each.get(path) for each in (gateway, *workers.all) for path in ("/metrics", "/ready")]
        for worker in workers.all:
            assert worker.metric("baton_requests_ended_total", end="finished") >= 10, "the workers have seen them"
    assert statuses[200] >= 14, statuses
    assert statuses[400] >= 20, statuses
    assert not [status for status in statuses if status >= 500], statuses
    logs = [line for each in (gateway, *workers.all) for line in each.log]
    assert any("DEBUG" in line for line in gateway.log), "it is a debug log"
    assert any("some_field" in line for line in gateway.log), "a name that a client chose is there, and no value"
    for text in (*map(str, told), *logs):
        assert SECRET not in text
        assert KEY not in text
