"""LiteLLM, by both of its ways to a server with OpenAI's API: `openai/…`, with its client, and `hosted_vllm/…`."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from questions import ANSWER, CODE_SCHEMA, FREQUENCY_PENALTY, MESSAGES, PROMPT, QUESTION, TOO_LONG, TOOL, TOOL_RESULT

litellm.telemetry = False
litellm.num_retries = 0

PROVIDERS = ("openai", "hosted_vllm")
EFFORT: dict[str, Any] = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
"""LiteLLM passes it on only for models that it knows, unless told so."""
pytestmark = pytest.mark.parametrize("provider", PROVIDERS)


@pytest.fixture
def common(base_url: str, model: str, provider: str) -> dict[str, Any]:
    return {"model": f"{provider}/{model}", "api_base": base_url, "api_key": "any", "temperature": 0.0}


@pytest.fixture
def forced(common: dict[str, Any]) -> dict[str, Any]:
    return common | {"frequency_penalty": FREQUENCY_PENALTY, "max_tokens": 300}


def test_an_answer(common: dict[str, Any]) -> None:
    answer = litellm.completion(**common, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len(ANSWER) + 1


def test_a_stream_with_its_usage(common: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**common, messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].completion_tokens == len(ANSWER) + 1
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert (built.choices[0].message.content, built.choices[0].finish_reason) == (ANSWER, "stop")


async def test_asynchronously(common: dict[str, Any]) -> None:
    answer = await litellm.acompletion(**common, messages=MESSAGES)
    assert answer.choices[0].message.content == ANSWER
    text = ""
    async for chunk in await litellm.acompletion(**common, messages=MESSAGES, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == ANSWER


async def test_a_stream_that_is_left(common: dict[str, Any], in_flight: Any) -> None:
    """`base_url` waits until nothing is left of it."""
    endless = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = await litellm.acompletion(**common, messages=MESSAGES, **endless)
    async for _ in stream:
        assert in_flight() == 1
        break
    await stream.aclose()


def test_a_completion(common: dict[str, Any]) -> None:
    completing = common["model"].replace("openai/", "text-completion-openai/")
    answer = litellm.text_completion(**common | {"model": completing}, prompt=PROMPT, max_tokens=8)
    assert answer.choices[0].text.strip() == ANSWER


def test_a_call_and_its_result(common: dict[str, Any], forced: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(**forced, messages=asked, tools=[TOOL], tool_choice="required")
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["name"] in ("Mira", "Otto")
    result = {"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT}
    second = litellm.completion(**common, messages=[*asked, message.model_dump(), result], tools=[TOOL])
    assert second.choices[0].message.content == ANSWER
    assert not second.choices[0].message.tool_calls


def test_a_streamed_call(forced: dict[str, Any]) -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    stream = litellm.completion(**forced, messages=MESSAGES, tools=[TOOL], tool_choice=named, stream=True)
    built = litellm.stream_chunk_builder(list(stream), messages=MESSAGES)
    (call,) = built.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["name"] in ("Mira", "Otto")
    assert built.choices[0].finish_reason == "tool_calls"


def test_an_answer_in_a_format(forced: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "code", "schema": CODE_SCHEMA, "strict": True}}
    answer = litellm.completion(**forced, messages=MESSAGES, response_format=wanted)
    code = json.loads(answer.choices[0].message.content)["code"]
    assert len(code) == 4
    assert code.isdigit()


def test_fields_of_a_request(common: dict[str, Any]) -> None:
    cut = litellm.completion(**common, messages=MESSAGES, max_tokens=2, **EFFORT)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (ANSWER[:2], "length")
    stopped = litellm.completion(**common, messages=MESSAGES, stop=["1"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (ANSWER[:2], "stop")
    several = litellm.completion(**common, messages=MESSAGES, n=2, seed=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert len(several.choices[0].logprobs.content) == len(ANSWER) + 1


def test_errors_are_its_own(common: dict[str, Any], provider: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**common | {"model": f"{provider}/other"}, messages=MESSAGES)
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**common, messages=MESSAGES, top_p=2)
    with pytest.raises(litellm.ContextWindowExceededError, match="2048"):
        litellm.completion(**common, messages=[{"role": "user", "content": TOO_LONG}])
    with pytest.raises(litellm.ContextWindowExceededError, match="2048"):
        litellm.completion(**common, messages=MESSAGES, max_tokens=5000)
