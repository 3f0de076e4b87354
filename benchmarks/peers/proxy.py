"""A proxy in front of a prefill/decode pair of vLLM: it sends each request to both and returns the second answer.

    python -m benchmarks.peers.proxy --prefill URL --decode URL --port N

1. The prefill instance gets the request with one token to generate, marked as one that another instance will decode.
2. Its answer names the place of the KV. The decode instance gets the client's request with that place added.
3. The answer of the decode instance is forwarded to the client as it arrives, byte for byte.

If the client leaves, the request to the instance that is at work ends. There are no retries, and no bound on concurrent
requests: the measurement's load is the bound.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any
from uuid import uuid4

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.command import call
from benchmarks.load.client import IDLE_CONNECTION_S

MAX_BODY_BYTES = 64 * 2**20
_TO_BE_DECODED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The request for the prefill instance: one token, not streamed, its KV kept for another instance."""
    short = {**body, "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": _TO_BE_DECODED}
    short.pop("stream_options", None)
    if "max_completion_tokens" in short:
        short["max_completion_tokens"] = 1
    return short


def decode_body(body: dict[str, Any], prefilled: dict[str, Any]) -> dict[str, Any]:
    """The request for the decode instance: the client's request, with the place of its KV."""
    return {**body, "kv_transfer_params": prefilled["kv_transfer_params"]}


class Proxy:
    """The HTTP handlers, and the client session that they share."""

    _session: aiohttp.ClientSession

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Hold the client session while the application runs; no limit on connections or on the length of a stream. A
        connection is used again for as long as the load's client does: vLLM closes one that was idle for 5 s."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**18) as self._session:
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Serve a completion: ask the prefill instance, then the decode instance."""
        body = json.loads(await request.read())
        headers = {"X-Request-Id": uuid4().hex}
        first = self._session.post(self._prefill + request.path, json=prefill_body(body), headers=headers)
        async with first as answer:
            if answer.status != 200:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            prefilled = await answer.json()
        second = self._session.post(self._decode + request.path, json=decode_body(body, prefilled), headers=headers)
        async with second as answer:
            return await _through(request, answer)

    async def ask_decode(self, request: web.Request) -> web.StreamResponse:
        """Pass a request that is not a completion to the decode instance."""
        async with self._session.get(self._decode + request.path) as answer:
            return await _through(request, answer)

    async def healthy(self, request: web.Request) -> web.Response:
        """200 if both instances are healthy."""
        for url in (self._prefill, self._decode):
            async with self._session.get(url + "/health") as answer:
                if answer.status != 200:
                    return web.Response(status=503)
        return web.Response()


async def _through(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


def application(prefill: str, decode: str) -> web.Application:
    """The proxy's routes."""
    proxy = Proxy(prefill, decode)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.lifetime)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post("/v1/chat/completions", proxy.generate)
    app.router.add_get("/v1/models", proxy.ask_decode)
    app.router.add_get("/health", proxy.healthy)
    return app


Url = Annotated[str, "base URL of the instance"]


def main(*, prefill: Url, decode: Url, port: int) -> None:
    """Serve until SIGTERM."""
    uvloop.install()
    app = application(prefill, decode)
    web.run_app(app, host="127.0.0.1", port=port, handler_cancellation=True, access_log=None, print=None)


if __name__ == "__main__":
    call(main, __doc__)
