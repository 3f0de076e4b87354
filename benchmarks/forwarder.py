"""Forward HTTP answers as they come, and read nothing in them: the least that a process before a server has to do.

    python -m benchmarks.forwarder --upstream http://127.0.0.1:PORT --announce-fd FD

`benchmarks.gateway` measures it beside the gateway. It has the same event loop, and the same HTTP server, aiohttp.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from benchmarks.command import call
from common.runtime.lifecycle import Announcer, freeze_startup_objects, run


async def forward(request: web.Request, session: aiohttp.ClientSession, upstream: str) -> web.StreamResponse:
    """Answer with what the upstream server answers, over a connection of its own."""
    body = await request.read()
    async with session.post(upstream + request.path, data=body) as answer:
        response = web.StreamResponse(status=answer.status)
        response.content_type = answer.content_type
        await response.prepare(request)
        async for data in answer.content.iter_any():
            await response.write(data)
        await response.write_eof()
        return response


async def serve(upstream: str, announcer: Announcer, stop: asyncio.Event) -> None:
    """Serve on a free port until told to stop."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            return await forward(request, session, upstream)

        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        host, port = runner.addresses[0]
        freeze_startup_objects()
        announcer.say(ready=True, url=f"http://{host}:{port}")
        await stop.wait()
        await runner.cleanup()


def main(*, upstream: str, announce_fd: int | None = None) -> None:
    """Entry point."""
    run(lambda stop: serve(upstream, Announcer(announce_fd), stop))


if __name__ == "__main__":
    call(main, __doc__)
