"""Answers of tens of megabytes: bounded, and encoded while others are served."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETIONS_PATH,
    CONTEXT,
    MODEL,
    ScriptedGenerator,
    assert_error,
    byte_level,
    byte_level_backend,
    encode,
    post,
    serve,
    settings,
    wrap,
)
from transformers import PreTrainedTokenizerFast

from gateway.answer.choice_stream import stream_pieces
from gateway.answer.chunk_encoder import encode_in_pieces
from gateway.text.tokenizer import ModelTokenizer

LARGE = {"model": MODEL, "prompt": [[5, 6]] * 32, "n": 16, "max_tokens": 16, "logprobs": 20}
MOST_SPELLINGS_IN_A_TURN = 20_000
LONG_CONTEXT = 32_768
MOST_DECODED_IN_A_TURN = 1024


class CountingTokenizer(ModelTokenizer):
    """Counts the tokens that are spelt: most of the work of an answer with log probabilities."""

    num_spelt = 0

    def spelling(self, token_id: int) -> tuple[str, bytes]:
        self.num_spelt += 1
        return super().spelling(token_id)


class CountingBackend:
    """A tokenizer's backend that counts the tokens that become text, and those of them on the thread that made it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._thread = threading.get_ident()
        self.num_tokens = 0
        self.num_here = 0

    def decode(self, token_ids: Any, **options: Any) -> Any:
        self._count(len(token_ids))
        return self._backend.decode(token_ids, **options)

    def decode_batch(self, sequences: Any, **options: Any) -> Any:
        self._count(sum(map(len, sequences)))
        return self._backend.decode_batch(sequences, **options)

    def id_to_token(self, token_id: int) -> Any:
        self._count(1)
        return self._backend.id_to_token(token_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _count(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if threading.get_ident() == self._thread:
            self.num_here += num_tokens


@asynccontextmanager
async def growth(count: Callable[[], int]) -> AsyncIterator[Callable[[], int]]:
    """Gives what returns by how much `count` has grown at most while another task waited for its turn."""
    most = 0

    async def take_turns() -> None:
        nonlocal most
        while True:
            before = count()
            await asyncio.sleep(0)
            most = max(most, count() - before)

    task = asyncio.create_task(take_turns())
    try:
        yield lambda: most
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _array(*items: object) -> Iterator[object]:
    yield from items


@pytest.mark.parametrize(
    ("lazy", "whole"),
    [
        ({}, {}),
        (_array(), []),
        ({"a": _array()}, {"a": []}),
        (_array({"a": _array(1, 2.5, None)}, {}, []), [{"a": [1, 2.5, None]}, {}, []]),
        ({"é": '"\n', "b": {"c": _array("d"), "e": [1]}}, {"é": '"\n', "b": {"c": ["d"], "e": [1]}}),
    ],
)
def test_pieces_are_the_json_of_the_whole(lazy: object, whole: object) -> None:
    assert json.loads(b"".join(encode_in_pieces(lazy))) == whole


@pytest.mark.parametrize("tokens_per_delta", [1, 16])
async def test_others_get_their_turns_while_a_large_answer_is_made(tokens_per_delta: int) -> None:
    """It held the event loop for seconds, in which healthy workers were lost."""
    tokenizer = CountingTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="</s>")
    )
    generator = ScriptedGenerator(token_ids=encode("hello") * 16, tokens_per_delta=tokens_per_delta)
    async with serve(generator, model_tokenizer=tokenizer) as server, aiohttp.ClientSession() as session:
        async with growth(lambda: tokenizer.num_spelt) as most:
            async with session.post(server.url + COMPLETIONS_PATH, json=LARGE) as response:
                assert response.status == 200
                answer = json.loads(await response.read())
    assert len(answer["choices"]) == 32 * 16
    assert all(len(choice["logprobs"]["tokens"]) == 16 for choice in answer["choices"])
    assert tokenizer.num_spelt >= 32 * 16 * 16 * 22
    assert most() <= MOST_SPELLINGS_IN_A_TURN


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [5] * LONG_CONTEXT}),
        ("/tokenize", {"prompt": "9" * (LONG_CONTEXT - 1), "return_token_strs": True}),
        (COMPLETIONS_PATH, {"prompt": [5] * (LONG_CONTEXT - 1), "echo": True, "max_tokens": 0}),
        (COMPLETIONS_PATH, {"prompt": [[5] * 16] * 2048, "echo": True, "max_tokens": 0}),
    ],
    ids=["detokenize", "names of tokens", "echo", "echo of many"],
)
async def test_others_get_their_turns_while_many_tokens_become_text(path: str, body: dict[str, Any]) -> None:
    """A large model's context held the event loop for a tenth of a second."""
    model_tokenizer = wrap(byte_level_backend())
    backend = model_tokenizer._backend = CountingBackend(model_tokenizer._backend)
    limits = settings(max_sequence_tokens=LONG_CONTEXT)
    async with serve(ScriptedGenerator(), limits, model_tokenizer) as server, aiohttp.ClientSession() as session:
        async with growth(lambda: backend.num_here) as most:
            async with session.post(server.url + path, json=body) as response:
                answer = json.loads(await response.read())
                assert response.status == 200, answer
    assert backend.num_tokens >= LONG_CONTEXT - 1
    assert most() <= MOST_DECODED_IN_A_TURN
    if path == "/tokenize":
        assert answer["token_strs"] == ["<s>"] + ["9"] * (LONG_CONTEXT - 1)
    else:
        texts = [answer["prompt"]] if path == "/detokenize" else [choice["text"] for choice in answer["choices"]]
        (text,) = set(texts)
        assert text == byte_level().decode([5] * (16 if len(texts) > 1 else backend.num_tokens))


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        (COMPLETIONS_PATH, {"prompt": "hello", "n": 4, "max_tokens": 101}, 100),
        (COMPLETIONS_PATH, {"prompt": ["hello"] * 4, "n": 2, "max_tokens": 51}, 50),
        (COMPLETIONS_PATH, {"prompt": "hello", "logprobs": 4, "max_tokens": 4}, 3),
        (CHAT_PATH, CHAT | {"n": 8, "max_tokens": 51}, 50),
        (CHAT_PATH, CHAT | {"n": 8, "max_completion_tokens": 51}, 50),
        (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 4, "max_tokens": 4}, 3),
    ],
)
async def test_an_answer_is_bounded(path: str, body: dict[str, Any], most: int) -> None:
    """Here by 1,600 bytes: 4 for each token, 80 for each log probability."""
    limits = settings(max_answer_bytes=1600)
    param = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    generator = ScriptedGenerator()
    status, answer, _ = await post(path, body, generator, api_settings=limits)
    assert status == 400
    assert_error(answer, param)
    assert str(most) in answer["error"]["message"]
    assert generator.generations == []
    status, _, _ = await post(path, body | {param: most}, generator, api_settings=limits)
    assert status == 200
    del body[param]
    status, _, _ = await post(path, body, generator, api_settings=limits)
    assert status == 200
    assert generator.generations[-1].sampling.max_tokens == min(most, 16 if path == COMPLETIONS_PATH else CONTEXT)


async def test_more_choices_than_one_answer_may_have() -> None:
    body = {"prompt": "hello", "logprobs": 20, "n": 16, "max_tokens": 1}
    status, answer, _ = await post(COMPLETIONS_PATH, body, api_settings=settings(max_answer_bytes=1600))
    assert status == 400
    assert_error(answer, "n")


async def test_echoed_prompts_are_bounded_in_every_choice() -> None:
    limits = settings(max_answer_bytes=1600)
    body = {"prompt": ["hello " * 20] * 2, "echo": True, "max_tokens": 0}
    assert (await post(COMPLETIONS_PATH, body | {"n": 6}, api_settings=limits))[0] == 200
    status, answer, _ = await post(COMPLETIONS_PATH, body | {"n": 7}, api_settings=limits)
    assert status == 400
    assert_error(answer, "echo")


async def test_others_have_turns_between_the_choices_of_an_answer_without_tokens() -> None:
    job: Any = SimpleNamespace(echoes=("",) * 200, generations=(SimpleNamespace(num_choices=16),) * 200)
    job.generates_nothing, job.reports_prompt = True, False
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    nothing: Any = None
    pieces = [piece async for piece in stream_pieces(ScriptedGenerator(), nothing, job)]
    task.cancel()
    assert len(pieces) == 3200
    assert turns >= 40
