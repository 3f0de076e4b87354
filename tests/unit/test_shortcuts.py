"""Tokens that are sent while the request's task waits: the client reads the same answer, whichever way they go."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import aiohttp
import pytest
from dispatcher_bench import Bench, D, P, settle, text
from gateway_fixtures import CHAT, CHAT_PATH, COMPLETION, COMPLETIONS_PATH, ScriptedGenerator, encode, serve

from gateway.serving.generation import Delta, Generation
from gateway.text.choice_text import ChoiceText, Piece

TEXT = "hello world the end of the story"
NUM_TOKENS = len(encode(TEXT))


async def streamed(generator: ScriptedGenerator, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without the ids and times of its request."""
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + path, json=body | {"stream": True, "max_tokens": 100}) as response:
            assert response.status == 200, await response.text()
            lines = (await response.read()).decode().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return [{**json.loads(event), "id": "", "created": 0} for event in events]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS_PATH, COMPLETION),
        (COMPLETIONS_PATH, COMPLETION | {"n": 2}),
        (COMPLETIONS_PATH, COMPLETION | {"stop": "of the"}),
        (COMPLETIONS_PATH, COMPLETION | {"stop": "of the", "n": 3}),
        (COMPLETIONS_PATH, COMPLETION | {"echo": True}),
        (COMPLETIONS_PATH, COMPLETION | {"return_token_ids": True}),
        (COMPLETIONS_PATH, COMPLETION | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (CHAT_PATH, CHAT),
    ],
)
async def test_the_answer_is_the_same(path: str, body: dict[str, Any]) -> None:
    taking, yielding = ScriptedGenerator(text=TEXT), ScriptedGenerator(text=TEXT, takes_shortcuts=False)
    assert await streamed(taking, path, body) == await streamed(yielding, path, body)
    assert taking.num_taken > 0
    assert yielding.num_taken == 0


async def test_tokens_within_a_character_are_taken_and_the_text_is_complete() -> None:
    token_ids = [*encode("a"), *encode("жжж"), *encode("b")]
    generator = ScriptedGenerator(token_ids=token_ids)
    events = await streamed(generator, COMPLETIONS_PATH, COMPLETION)
    assert "".join(event["choices"][0]["text"] for event in events) == "aжжжb"
    assert generator.num_taken == len(token_ids) - 2, "all but the first and the last one"


async def test_a_request_that_is_over_needs_no_garbage_collection() -> None:
    """Its objects form no cycle: a collection stops the gateway for the longer, the more there is to collect."""
    generator = ScriptedGenerator(text=TEXT)
    gc.collect()
    num_before = num_generations()
    gc.disable()
    try:
        for _ in range(5):
            await streamed(generator, COMPLETIONS_PATH, COMPLETION)
        generator.generations.clear()
        assert num_generations() == num_before
    finally:
        gc.enable()
    assert generator.num_taken > 0


def num_generations() -> int:
    return sum(type(each) is Generation for each in gc.get_objects())


async def test_several_prompts_go_the_long_way() -> None:
    """Their pieces are merged by a queue of its own."""
    generator = ScriptedGenerator(text=TEXT)
    body = COMPLETION | {"prompt": ["hello", "hello again"]}
    await streamed(generator, COMPLETIONS_PATH, body)
    assert generator.num_taken == 0


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
async def test_an_answer_without_chunks_goes_the_long_way_and_ends_with_its_connection(connection: bytes) -> None:
    generator = ScriptedGenerator(text=TEXT)
    async with serve(generator) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(COMPLETION | {"stream": True, "max_tokens": 100}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (connection, len(data))
        writer.write(head + data)
        async with asyncio.timeout(30):  # an idle connection is closed after 75 s
            answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    events = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line and "[DONE]" not in line]
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert generator.num_taken == 0


async def test_what_goes_wrong_on_the_way_ends_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised in the request's task, not in the link that the token came by."""
    push, num_pushed = ChoiceText.push, 0

    def spoiled(self: ChoiceText, delta: Delta) -> Piece:
        nonlocal num_pushed
        num_pushed += 1
        if num_pushed == 3:
            raise ZeroDivisionError
        return push(self, delta)

    monkeypatch.setattr(ChoiceText, "push", spoiled)
    generator = ScriptedGenerator(text=TEXT)
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        body = COMPLETION | {"stream": True, "max_tokens": 100}
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            answer = await response.text()
        assert b'requests_failed_total{cause="internal"} 1.0' in server.metrics.exposition()
    assert answer.split("\n\n")[-2].startswith('data: {"error":')
    assert (generator.num_taken, generator.num_deltas) == (1, 3)
    assert generator.closed_early.is_set()


async def test_only_what_the_reader_waits_for_is_taken() -> None:
    bench = Bench()
    taken: list[int] = []
    takes = True

    def shortcut(delta: Delta) -> bool:
        taken.extend(delta.token_ids * takes)
        return takes

    key, task = await bench.request(shortcut=shortcut)
    bench.tokens(P, key, 0, 10)
    bench.tokens(D, key, 0, 10)
    bench.tokens(D, key, 1, 11)
    assert taken == [], "the first token has not been read"
    await settle()
    bench.tokens(D, key, 2, 12)
    bench.tokens(D, key, 3, 13)
    takes = False
    bench.tokens(D, key, 4, 14)
    takes = True
    bench.tokens(D, key, 5, 15)
    assert taken == [12, 13], "the next one waits behind one that was not taken"
    await settle()
    bench.tokens(D, key, 6, 16)
    bench.tokens(D, key, 7, 17, reason="stop")
    assert taken == [12, 13, 16]
    assert await text(task) == [10, 11, 14, 15, 17]
    await bench.close()
