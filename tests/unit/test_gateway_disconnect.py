"""A client that leaves, or reads nothing, closes its generations at once."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import MODEL, ScriptedGenerator, Server, serve, settings

from gateway.access.connections import ConnectionBounds

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 100}


async def connect(server: Server, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return reader, writer


def counted(server: Server, sample: str) -> bool:
    return sample in server.metrics.exposition().decode()


@pytest.mark.parametrize("half", [False, True], ids=["closes", "closes its sending side"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "hello again"]])
async def test_nothing_is_written_and_the_client_leaves(half: bool, stream: bool, num_before: int, prompt: Any) -> None:
    generator = ScriptedGenerator(text="hello world the end of the story", hang=True, num_before=num_before)
    async with serve(generator) as server:
        reader, writer = await connect(server, BODY | {"stream": stream, "prompt": prompt})
        async with asyncio.timeout(30):
            await generator.hanging.wait()
            while generator.num_open < (1 if prompt == "hello" else 2):
                await asyncio.sleep(0.005)
        if half:
            writer.write_eof()
            async with asyncio.timeout(20):
                await reader.read()  # the server closes the connection
        writer.close()
        async with asyncio.timeout(20):
            await generator.closed_early.wait()
            while generator.num_open or not counted(server, 'requests_failed_total{cause="cancelled"} 1.0'):
                await asyncio.sleep(0.005)
        assert counted(server, 'baton_gateway_requests_total{code="499",endpoint="/v1/completions"} 1.0')
        assert counted(server, "baton_gateway_requests_in_flight 0.0")


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_stream_is_cut_while_it_is_written(num_prompts: int) -> None:
    generator = ScriptedGenerator(token_ids=[5] * 200, pause_s=0.002)
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        body = BODY | {"stream": True, "prompt": ["hello"] * num_prompts, "max_tokens": 200}
        async with session.post(server.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        async with asyncio.timeout(20):
            await generator.closed_early.wait()
            while generator.num_open:
                await asyncio.sleep(0.005)
        assert generator.num_deltas < 200 * num_prompts


@pytest.mark.parametrize("tokens_per_delta", [1, 500])
async def test_a_client_that_reads_nothing_is_disconnected(tokens_per_delta: int) -> None:
    """Single tokens are written at once while little waits to be read; then their stream waits for the client, too."""

    class Endless(ScriptedGenerator):
        def _rounds(self, generation: Any) -> Any:
            (delta,) = super()._rounds(generation)[0]
            while True:
                yield [delta]

    generator = Endless(token_ids=[5, 6] * 500, tokens_per_delta=tokens_per_delta)
    bounds = ConnectionBounds(stall_timeout_s=0.3)
    async with serve(generator, settings(max_sequence_tokens=100_000), bounds=bounds, send_buffer_bytes=4096) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
            data = json.dumps(BODY | {"stream": True, "max_tokens": 50_000}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)
            await asyncio.get_running_loop().sock_sendall(deaf, head + data)
            async with asyncio.timeout(60):
                await generator.closed_early.wait()
        while not counted(server, 'requests_failed_total{cause="cancelled"} 1.0'):
            await asyncio.sleep(0.005)
    assert (generator.num_taken > 0) == (tokens_per_delta == 1)


async def test_the_server_goes_on_after_a_disconnect() -> None:
    generator = ScriptedGenerator(hang=True)
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        _, writer = await connect(server, BODY)
        await asyncio.wait_for(generator.hanging.wait(), 5)
        writer.close()
        await asyncio.wait_for(generator.closed_early.wait(), 20)
        generator.hang = False
        async with session.post(server.url + "/v1/completions", json=BODY) as response:
            assert (await response.json())["choices"][0]["text"] == "hello world"


async def test_shutdown_cancels_what_is_left() -> None:
    generator = ScriptedGenerator(hang=True)
    async with serve(generator) as server:
        _, writer = await connect(server, BODY)
        await asyncio.wait_for(generator.hanging.wait(), 5)
    assert generator.closed_early.is_set()
    writer.close()
