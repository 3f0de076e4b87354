"""The gateway's benchmark, for a moment: every token of every stream is an event, and has a time."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from benchmarks.gateway import Streams
from benchmarks.pinned_processes import Through, model_folder, through_forwarder, through_gateway, tokens_with_text
from benchmarks.scripted_batch import Script

BOTH: list[Through] = [partial(through_gateway, options=["--log-level", "warning"]), through_forwarder]


@pytest.mark.parametrize("through", BOTH)
async def test_every_token_is_an_event(tmp_path: Path, through: Through) -> None:
    folder = model_folder(tmp_path)
    async with through(folder, 2, Script(tokens_with_text(folder))) as (pool, process, port):
        streams = await Streams.open(pool, process, port, 5, seed=0)
        figures, taken = await streams.added(0.02, 1.0)
        assert len(taken) > 5
        assert min(taken) > 0
        assert figures["received_per_s"] > 0
        assert figures["cpu_us_per_token"] > 0
        pool.script.interval_s = 0.0002  # more than it can pass on: what is behind is joined, and nothing is lost
        await asyncio.sleep(0.5)
        await streams.caught_up()
        await streams.finish()


async def events(port: int, number: int) -> list[bytes]:
    """The first events of a stream."""
    body = {"prompt": [0, 0, 7], "max_tokens": 2**19, "ignore_eos": True, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        return [await response.content.readuntil(b"\n\n") for _ in range(number)]


def split(event: bytes) -> tuple[str, int]:
    """The text of an event, and the bytes around the text."""
    [choice] = json.loads(event.removeprefix(b"data: "))["choices"]
    return choice["text"], len(event) - len(json.dumps(choice["text"], ensure_ascii=False).encode())


async def test_the_forwarder_s_events_are_those_of_the_gateway(tmp_path: Path) -> None:
    """A gateway may join the tokens of an event that is late, so texts are compared as a whole."""
    folder = model_folder(tmp_path)
    found = []
    for through in BOTH:
        script = Script(tokens_with_text(folder), interval_s=0.005)
        async with through(folder, 1, script) as (_, _, port):
            found.append([split(event) for event in await events(port, 50)])
    texts = ["".join(text for text, _ in each) for each in found]
    assert min(map(len, texts)) >= 50
    assert texts[0].startswith(texts[1]) or texts[1].startswith(texts[0])
    ours, plain = ({around for _, around in each} for each in found)
    assert len(ours) == 1
    assert ours == plain
