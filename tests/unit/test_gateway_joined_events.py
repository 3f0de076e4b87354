"""Events whose tokens have come together travel together, and none waits for a token that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp.http_writer import StreamWriter
from dispatcher_bench import Bench, D, settle
from gateway_fixtures import COMPLETION, COMPLETIONS_PATH, ScriptedGenerator, encode, serve, tokenizer
from tool_models import tokens_of, tool_tokenizer

from common.contract.errors import Cause
from common.contract.messages.worker import Tokens
from gateway.serving.generation import Delta, Generation, GenerationFailed, PromptDelta
from gateway.text.answer_parts import AnswerParts, AnswerPlan
from gateway.text.choice_text import ChoiceText, Piece
from gateway.text.stop_strings import StopTables
from gateway.text.tool_parsers import HermesParser

HALF = encode("ж")[0]
"""A token that ends within a character, and so has no text."""


class Joined(ScriptedGenerator):
    """Says of all deltas but the last one before the script's pause, or its end, that another one is there."""

    def _rounds(self, generation: Any) -> list[list[Delta]]:
        rounds = super()._rounds(generation)
        last = (self.num_before or len(rounds)) - 1
        return [[replace(delta, more=number != last) for delta in each] for number, each in enumerate(rounds)]


async def chunks_of(response: aiohttp.ClientResponse) -> list[bytes]:
    """The answer as it was written: HTTP's chunks, each of which is one write."""
    chunks, chunk = [], b""
    async for data, ended in response.content.iter_chunks():
        chunk += data
        if ended:
            chunks.append(chunk)
            chunk = b""
    return chunks


async def test_events_that_come_together_are_one_write() -> None:
    generator = Joined(text="hello world the end of the story")
    num_tokens = len(encode(generator.text))
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        body = COMPLETION | {"stream": True, "max_tokens": 100}
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            (written,) = await chunks_of(response)
    assert written.count(b"data: {") == num_tokens
    assert written.endswith(b"data: [DONE]\n\n")


async def test_the_head_leaves_with_the_first_event_and_the_end_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call costs as much as all else that is done for a token."""
    writes: list[bytes] = []

    def counted(name: str, joined: Callable[[Any], bytes]) -> None:
        write = getattr(StreamWriter, name)

        def wrapper(self: StreamWriter, data: Any) -> None:
            writes.append(joined(data))
            write(self, data)

        monkeypatch.setattr(StreamWriter, name, wrapper)

    counted("_write", bytes)
    counted("_writelines", b"".join)
    body = COMPLETION | {"stream": True, "max_tokens": 100, "stream_options": {"include_usage": True}}
    async with serve(ScriptedGenerator(token_ids=encode("hello hello"))) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            await response.read()
    served = [data for data in writes if (b"POST" not in data and b"hello" in data) or b"[DONE]" in data]
    assert len(served) == 2, writes
    assert served[0].startswith(b"HTTP/1.1 200 OK")
    assert b'"usage":{' in served[1]
    assert served[1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_nothing_waits_for_a_token_without_text() -> None:
    assert tokenizer().decode([HALF]) == "\N{REPLACEMENT CHARACTER}"
    tokens = [*encode("hello hello hello"), HALF]
    generator = Joined(token_ids=[*tokens, 5], hang=True, num_before=len(tokens))
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        body = COMPLETION | {"stream": True, "max_tokens": 100}
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            got = b""
            async with asyncio.timeout(10):
                while got.count(b"data: {") < len(tokens) - 1:
                    got += await response.content.readany()


async def test_nothing_waits_for_a_token_behind_a_stop_string() -> None:
    """Its generation is closed there, so that nothing comes of what has come with it; another prompt may take long."""

    class OneOfTwo(Joined):
        async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
            if generation.token_ids[-1] == encode("b")[-1]:
                await asyncio.Event().wait()
            async for delta in super().generate(generation):
                yield delta

    generator = OneOfTwo(text="hello world the end of the story")
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        body = COMPLETION | {"prompt": ["a", "b"], "stream": True, "stop": " end", "max_tokens": 100}
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            got = b""
            async with asyncio.timeout(10):
                while b'"finish_reason":"stop"' not in got:
                    got += await response.content.readany()


def test_the_last_piece_waits_for_nothing() -> None:
    """Whatever ends the choice: a stop string, or the one call that there may be."""
    call = '<tool_call>{"name": "is-noon"}</tool_call>'
    plan = AnswerPlan(
        decoder=tool_tokenizer("hermes"),
        calls=HermesParser,
        names=frozenset({"is-noon"}),
        most_calls=1,
        reasons=False,
        opened=False,
        include_reasoning=True,
    )
    for text, stops in [("hello the end of", (" end",)), (f"hello {call} and", ())]:
        for tokens_per_delta in (1, 1000):
            choice = AnswerParts(ChoiceText(0, tool_tokenizer("hermes"), StopTables(stops), 0), plan)
            token_ids = tokens_of(text)
            pieces: list[Piece] = []
            for start in range(0, len(token_ids), tokens_per_delta):
                if not choice.ended:
                    part = tuple(token_ids[start : start + tokens_per_delta])
                    pieces += choice.pieces(
                        Delta(choice=0, token_ids=part, logprobs=None, finish_reason=None, more=True)
                    )
            assert pieces[-1].finish_reason is not None
            assert [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [False]


async def test_an_error_comes_after_what_was_held_back() -> None:
    class Failing(Joined):
        def _rounds(self, generation: Any) -> list[list[Delta]]:
            return [[replace(delta, more=True) for delta in each] for each in super()._rounds(generation)]

    tokens = encode("hello hello hello")
    generator = Failing(
        token_ids=[*tokens, 5], num_before=len(tokens), failure=GenerationFailed(Cause.WORKER_LOST, "gone")
    )
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        body = COMPLETION | {"stream": True, "max_tokens": 100}
        async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
            events = (await response.read()).decode().split("\n\n")
    assert [event[:6] for event in events[: len(tokens)]] == ["data: "] * len(tokens)
    assert events[len(tokens)].startswith('data: {"error":')
    assert events[len(tokens) + 1 :] == [""]


async def test_the_dispatcher_says_what_is_there() -> None:
    bench = Bench((), (D,))
    key, task = await bench.request()
    message = Tokens(request=key.request, attempt=1, choice=0, position=3, token_ids=(1,))
    for position in range(3):
        bench.say(D, replace(message, position=3 + position))
    await settle()
    bench.say(D, replace(message, position=6))
    await settle()
    bench.say(D, replace(message, position=7, finish_reason="stop"))
    assert [delta.more for delta in await task] == [True, True, False, False, True]  # after the last one: the end
    await bench.close()


async def test_with_several_choices_nothing_waits() -> None:
    """A choice that has ended by a stop string swallows what comes for it: another one's event must not wait there."""
    bench = Bench((), (D,))
    key, task = await bench.request(n=2)
    for choice in (0, 1):
        bench.tokens(D, key, 0, 1, 2, choice=choice)
        bench.tokens(D, key, 2, 3, choice=choice, reason="stop")
    assert not any(delta.more for delta in await task)
    await bench.close()
