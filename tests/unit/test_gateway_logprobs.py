"""Log probabilities in both endpoints' formats, one entry for each token of the usage."""

from __future__ import annotations

import pytest
from gateway_fixtures import (
    EOS,
    MESSAGES,
    MODEL,
    STORY,
    ScriptedGenerator,
    byte_level,
    encode,
    openai_client,
    stream_of,
)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(stream: bool) -> None:
    token_ids = [*encode("hello 日"), EOS]
    generator = ScriptedGenerator(token_ids=token_ids)
    async with openai_client(generator) as client:
        if stream:
            entries = [
                entry
                async for chunk in await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
                )
                for entry in chunk.choices[0].logprobs.content or []  # type: ignore[union-attr]
            ]
        else:
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
            assert answer.choices[0].logprobs is not None
            entries = answer.choices[0].logprobs.content or []
    assert len(entries) == len(token_ids)
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == "hello 日</s>".encode()
    assert entries[0].token == byte_level().decode(token_ids[:1])
    assert all(entry.logprob == -0.5 for entry in entries)
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [[-0.5, -1.5]] * len(entries)
    assert generator.generations[0].sampling.logprobs == 2
    partial = [entry.token for entry in entries if entry.token.startswith("bytes:")]
    assert partial, "a token within a character is named by its bytes"


async def test_chat_logprobs_without_alternatives() -> None:
    generator = ScriptedGenerator()
    async with openai_client(generator) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
    assert generator.generations[0].sampling.logprobs == 0
    assert answer.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in answer.choices[0].logprobs.content or [])


@pytest.mark.parametrize("num_logprobs", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(num_logprobs: int, stream: bool) -> None:
    token_ids = encode("hello the end")
    body = {"prompt": "a", "logprobs": num_logprobs}
    if stream:
        chunks = await stream_of(ScriptedGenerator(token_ids=token_ids), "/v1/completions", body)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        report = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        async with openai_client(ScriptedGenerator(token_ids=token_ids)) as client:
            answer = await client.completions.create(model=MODEL, prompt="a", logprobs=num_logprobs)
        assert answer.choices[0].logprobs is not None
        report = answer.choices[0].logprobs.model_dump()
    spelt = [byte_level().decode([token_id]) for token_id in token_ids]
    assert report["tokens"] == spelt
    assert report["token_logprobs"] == [-0.5] * len(token_ids)
    assert report["text_offset"] == [len("".join(spelt[:index])) for index in range(len(spelt))]
    assert [len(top) for top in report["top_logprobs"]] == [max(1, num_logprobs)] * len(token_ids)
    assert all(top[token] == -0.5 for top, token in zip(report["top_logprobs"], spelt, strict=True))


async def test_logprobs_end_with_the_stop_string() -> None:
    generator = ScriptedGenerator(text=STORY)
    async with openai_client(generator) as client:
        answer = await client.completions.create(model=MODEL, prompt="a", stop="brown", logprobs=1, max_tokens=50)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens or []) == answer.usage.completion_tokens
    assert max(choice.logprobs.text_offset or []) <= len(choice.text)
