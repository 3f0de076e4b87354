"""The scripted server that stands behind a forwarder: requests, steps and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.event_client import post
from benchmarks.scripted_batch import Batch, Script, Sequence
from benchmarks.scripted_upstream import ScriptedUpstream, chunk, encoded_events

EVENTS = encoded_events(["a", "b", "c"], "model")
WAIT_S = 20.0


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[ScriptedUpstream, int]]:
    upstream = ScriptedUpstream(EVENTS, 2, script)
    port = int((await upstream.bind()).rpartition(":")[2])
    running = asyncio.create_task(upstream.run())
    try:
        async with asyncio.timeout(WAIT_S):
            yield upstream, port
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("cut", [1, 20, 90, -1])
async def test_a_request_may_come_in_pieces_and_its_answer_has_every_token(cut: int) -> None:
    script = Script((5, 6, 7))
    request = post("/v1/completions", {"prompt": [0, 1, 2]})
    async with serving(script) as (upstream, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request[:cut])
        await asyncio.sleep(0)
        assert upstream.sequences() == []
        writer.write(request[cut:])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readexactly(len(EVENTS[0])) == EVENTS[0], "the first token comes without a step"
        [(batch, sequence)] = upstream.sequences()
        assert (sequence.prompt, sequence.num_sent, batch.num_sent) == ((0, 1, 2), 1, 0)
        script.interval_s = 0.001
        for index in (1, 2, 0, 1):
            assert await reader.readexactly(len(EVENTS[index])) == EVENTS[index]
        script.last_step = True
        rest = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert rest.endswith(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        assert batch.num_sent == sequence.num_sent - 1
        assert upstream.sequences() == []
        writer.close()


async def test_a_client_that_leaves_is_sent_nothing_more() -> None:
    async with serving(Script((5, 6, 7))) as (upstream, port):
        writers = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post("/", {"prompt": [1]}))
            await reader.readuntil(b"\r\n\r\n")
            writers.append(writer)
        assert [len(batch) for batch in upstream.batches] == [2, 2]
        writers[0].close()
        while len(upstream.sequences()) > 3:
            await asyncio.sleep(0.001)
        for writer in writers[1:]:
            writer.close()


def test_the_step_of_the_second_token_is_kept() -> None:
    """A decode worker repeats the first token, which was the prefill worker's; the scripted server has sent it."""
    sent: list[tuple[str, int, int, bool]] = []

    def sequence(name: str, num_sent: int) -> Sequence:
        return Sequence((1,), lambda *what: sent.append((name, *what)), num_sent=num_sent)

    script = Script((5,))
    batch = Batch[str](script, sequences={"worker": sequence("worker", 0)})
    batch._step()
    batch.sequences["server"] = late = sequence("server", 1)
    batch._step()
    script.last_step = True
    batch._step()
    assert sent == [
        ("worker", 0, 2, False),
        ("worker", 2, 3, False),
        ("server", 1, 2, False),
        ("worker", 3, 4, True),
        ("server", 2, 3, True),
    ]
    assert (late.first_step, len(batch), batch.num_sent, len(batch.step_times)) == (1, 0, 5, 3)
