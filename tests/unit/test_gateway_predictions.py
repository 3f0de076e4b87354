"""What clients expect the answer to be: `prediction`, and what the usage tells of drafted tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    CONTEXT,
    MODEL,
    STORY,
    ScriptedGenerator,
    assert_error,
    encode,
    openai_client,
    post,
    stream_of,
)

from common.contract.ids import RequestId, RequestKey
from common.contract.messages.session import Role
from common.contract.messages.worker import DecodeTimes, Timings
from gateway.serving.generation import Delta, Generation, PromptDelta

BOTH = [(CHAT_PATH, CHAT), (COMPLETIONS_PATH, COMPLETION)]
NO_TIMES: dict[str, Any] = dict.fromkeys(
    [f"{stage}_s" for stage in ("wait", "reserve", "pull", "settle", "queue", "decode", "preempted", "read")]
    + ["hidden_read_s"],
    0.0,
)


def predicted(content: object) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@dataclass
class DraftingGenerator(ScriptedGenerator):
    """Its worker tells with the last tokens of each choice that it has drafted ten tokens, of which `num_accepted` were
    right."""

    num_accepted: int = 0

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        key = RequestKey(RequestId(str(len(self.generations))), 1)
        waterfall = generation.waterfall
        waterfall.began(key, range(generation.num_choices), 0.0, decode="d:1")
        async with aclosing(super().generate(generation)) as deltas:
            async for delta in deltas:
                assert isinstance(delta, Delta)
                if delta.finish_reason is not None:
                    told = DecodeTimes(**NO_TIMES, pull_bytes=0, num_drafted=10, num_accepted=self.num_accepted)
                    timings = Timings(request=key.request, attempt=1, choice=delta.choice, prompt=None, decode=told)
                    waterfall.measured(key, timings)
                waterfall.tokens(key, delta.choice, Role.DECODE, 0.0)
                yield delta


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_a_prediction_goes_to_the_workers_as_tokens(path: str, fields: dict[str, Any]) -> None:
    for body, expected in (
        (predicted(STORY), STORY),
        (predicted([{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]), "hello\nworld"),
        (predicted(""), ""),
        ({"prediction": None}, ""),
        ({}, ""),
    ):
        generator = ScriptedGenerator()
        status, answer, _ = await post(path, fields | body, generator)
        assert status == 200, answer
        [asked] = generator.generations
        assert asked.prediction == tuple(encode(expected)), "and no special token"
        plain = ScriptedGenerator()
        await post(path, fields, plain)
        assert asked.token_ids == plain.generations[0].token_ids


async def test_all_prompts_of_a_completion_share_it() -> None:
    generator = ScriptedGenerator()
    await post(COMPLETIONS_PATH, COMPLETION | predicted("a b") | {"prompt": ["hello", "world"], "n": 2}, generator)
    assert [each.prediction for each in generator.generations] == [tuple(encode("a b"))] * 2


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        ["text"],
        {},
        {"type": "content"},
        {"content": "text"},
        {"type": "other", "content": "text"},
        {"type": "content", "content": None},
        {"type": "content", "content": 5},
        {"type": "content", "content": [5]},
        {"type": "content", "content": [{"type": "image_url", "text": "x"}]},
        {"type": "content", "content": "\ud800"},
    ],
)
@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_what_is_no_prediction_is_refused(path: str, fields: dict[str, Any], prediction: object) -> None:
    status, answer, _ = await post(path, fields | {"prediction": prediction})
    assert status == 400
    assert answer["error"]["param"].startswith("prediction")


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_a_prediction_longer_than_the_context_is_refused(path: str, fields: dict[str, Any]) -> None:
    fits = "a " * (CONTEXT - 1)
    assert len(encode(fits)) == CONTEXT
    status, answer, _ = await post(path, fields | predicted(fits))
    assert status == 200, answer
    for text in (fits + "a ", fits * 20, "x" * 1_000_000):
        status, answer, _ = await post(path, fields | predicted(text))
        assert status == 400
        assert_error(answer, "prediction")
        assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("path", "fields"), BOTH)
@pytest.mark.parametrize("body", [predicted("hello"), predicted(""), {"include_timings": True}])
async def test_the_usage_tells_what_was_drafted(path: str, fields: dict[str, Any], body: dict[str, Any]) -> None:
    """Of all choices, and only if asked."""
    details = {"accepted_prediction_tokens": 21, "rejected_prediction_tokens": 9}
    status, answer, _ = await post(path, fields | body | {"n": 3}, DraftingGenerator(num_accepted=7))
    assert status == 200, answer
    assert answer["usage"]["completion_tokens_details"] == details
    stream = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 3}
    *chunks, last = await stream_of(DraftingGenerator(num_accepted=7), path, fields | body | stream)
    assert last["usage"]["completion_tokens_details"] == details
    assert all("completion_tokens_details" not in chunk["usage"] for chunk in chunks)
    status, answer, _ = await post(path, fields, DraftingGenerator(num_accepted=7))
    assert "completion_tokens_details" not in answer["usage"]


async def test_where_nothing_is_drafted_nothing_was_right_or_wrong() -> None:
    status, answer, _ = await post(CHAT_PATH, CHAT | predicted("hello"))
    assert status == 200
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == details


async def test_several_prompts_are_counted_together() -> None:
    body = COMPLETION | predicted("hello") | {"prompt": ["hello", "world"]}
    _, answer, _ = await post(COMPLETIONS_PATH, body, DraftingGenerator(num_accepted=10))
    details = {"accepted_prediction_tokens": 20, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == details


async def test_the_openai_client_sends_and_reads_it() -> None:
    async with openai_client(DraftingGenerator(num_accepted=4)) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], prediction={"type": "content", "content": "a"}
        )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 6)
    assert details.reasoning_tokens is None
