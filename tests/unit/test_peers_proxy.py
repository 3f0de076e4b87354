"""The proxy before a vLLM pair, between two stand-ins that record what they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load.client import IDLE_CONNECTION_S
from benchmarks.peers.proxy import Proxy, application

KV = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]], "do_remote_prefill": True}
PIECES = (b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")


class Pair:
    """A prefill and a decode instance that say what is expected of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any], str]] = []
        self.prefill_status = 200
        self.both_in_prefill: asyncio.Barrier | None = None

    async def prefill(self, request: web.Request) -> web.Response:
        self.seen.append(("prefill", await request.json(), request.headers["X-Request-Id"]))
        if self.both_in_prefill:
            await self.both_in_prefill.wait()
        return web.json_response({"kv_transfer_params": KV}, status=self.prefill_status)

    async def decode(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(("decode", await request.json(), request.headers["X-Request-Id"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in PIECES:
            await response.write(piece)
        return response


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
async def url(pair: Pair) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        urls = []
        for handler in (pair.prefill, pair.decode):
            app = web.Application()
            app.router.add_post("/v1/completions", handler)
            server = await stack.enter_async_context(TestServer(app))
            urls.append(str(server.make_url("")).rstrip("/"))
        front = await stack.enter_async_context(TestServer(application(*urls)))
        yield str(front.make_url("/v1/completions"))


async def post(url: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        return answer.status, answer.content_type, await answer.read()


async def test_one_request_becomes_two_legs(pair: Pair, url: str) -> None:
    body = {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "min_tokens": 9,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert await post(url, body) == (200, "text/event-stream", b"".join(PIECES))
    (first, short, first_id), (second, whole, second_id) = pair.seen
    assert (first, second) == ("prefill", "decode")
    assert first_id == second_id
    assert (short["max_tokens"], short["min_tokens"], short["stream"]) == (1, 1, False)
    assert "stream_options" not in short
    assert short["prompt"] == body["prompt"]
    assert short["kv_transfer_params"]["do_remote_decode"] is True
    assert whole == body | {"kv_transfer_params": KV}


async def test_a_refusal_by_prefill_is_the_answer(pair: Pair, url: str) -> None:
    pair.prefill_status = 400
    status, _, _ = await post(url, {"prompt": [1], "max_tokens": 1})
    assert status == 400
    assert [leg for leg, _, _ in pair.seen] == ["prefill"]


async def test_requests_do_not_wait_for_each_other(pair: Pair, url: str) -> None:
    pair.both_in_prefill = asyncio.Barrier(4)
    answers = await asyncio.gather(*(post(url, {"prompt": [n], "max_tokens": 2, "stream": True}) for n in range(4)))
    assert all(status == 200 for status, _, _ in answers)
    seen = [(leg, request_id, body["prompt"]) for leg, body, request_id in pair.seen]
    for _, request_id, prompt in seen:
        assert ("prefill", request_id, prompt) in seen
        assert ("decode", request_id, prompt) in seen


async def test_connections_are_not_kept_for_longer_than_vllm_keeps_them() -> None:
    """vLLM closes one that was idle for 5 s: a request that is sent on it meanwhile fails, and counts against vLLM."""
    proxy = Proxy("http://127.0.0.1:1", "http://127.0.0.1:1")
    lifetime = proxy.lifetime(web.Application())
    await anext(lifetime)
    assert proxy._session.connector is not None
    assert proxy._session.connector._keepalive_timeout == IDLE_CONNECTION_S < 5
    await anext(lifetime, None)
