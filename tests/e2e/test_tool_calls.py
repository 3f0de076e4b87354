"""Functions are called by models that know nothing of them, through real processes and the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from stack import Process, Workers
from tool_models import TOOLS, WEATHER, follows_weather, make_tool_checkpoint
from transformers import PreTrainedTokenizerFast

MODEL = "tiny"
FAMILIES = {"hermes reasoning": "qwen3", "llama3": "llama", "mistral": "mistral"}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather like in Oslo?"}]
TAGS = {"think": "<think>", "answer": "</think>", "call": "[TOOL_CALLS]"}
HOT = 6.0
"""Random weights have strong opinions; at this temperature their answers differ."""
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}

Serving = Callable[[str], tuple[Workers, Process]]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Workers and a gateway for a model with this chat template, started at first use."""
    started: dict[str, tuple[Workers, Any, Process]] = {}

    def get(template: str) -> tuple[Workers, Process]:
        if template not in started:
            folder = make_tool_checkpoint(FAMILIES[template], template, tmp_path_factory.mktemp("tools"))
            workers = Workers.start(folder, options=("--checksums",))
            gateway = workers.gateway("--served-model-name", MODEL)
            started[template] = workers, gateway, gateway.__enter__()
        workers, _, process = started[template]
        return workers, process

    yield get
    for workers, gateway, _ in started.values():
        workers.wait_for_baseline()
        gateway.__exit__(None, None, None)
        workers.signal()
    for workers, *_ in started.values():
        workers.wait()


@asynccontextmanager
async def client_of(process: Process) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{process.facts['url']}/v1", api_key="any", max_retries=0) as client:
        yield client


def asked(seed: int, **more: Any) -> Any:
    common = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_completion_tokens": 300}
    return common | {"temperature": HOT, "seed": seed} | more


def biased(workers: Workers, **biases: float) -> dict[str, float]:
    """`logit_bias` for tags, which chance alone would seldom hit on."""
    vocabulary = PreTrainedTokenizerFast.from_pretrained(workers.folder)
    return {str(vocabulary.convert_tokens_to_ids(TAGS[name])): bias for name, bias in biases.items()}


def message_of(choice: Any) -> tuple[str, list[tuple[str, str]], str]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, body: Any) -> tuple[str, list[tuple[str, str]], str]:
    """The same of a stream."""
    text, finish_reason = "", ""
    calls: list[tuple[str, str]] = []
    async for chunk in await client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append((call.function.name, ""))
            else:
                calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.function.arguments)
        finish_reason = choice.finish_reason or finish_reason
    return text, calls, finish_reason


def check(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        parsed = json.loads(arguments)
        assert follows_weather(parsed) if name == "get_weather" else (name, parsed) == ("is-noon", {})


@pytest.mark.parametrize("template", FAMILIES)
async def test_a_required_call_is_valid_whatever_the_weights(serving: Serving, template: str) -> None:
    """Streamed or not, the same seed gives the same calls."""
    _, process = serving(template)
    async with client_of(process) as client:
        bodies = [asked(seed, tool_choice="required") for seed in range(16)]
        answers = await asyncio.gather(*(client.chat.completions.create(**body) for body in bodies))
        streams = await asyncio.gather(*(streamed(client, body) for body in bodies))
    found = [message_of(answer.choices[0]) for answer in answers]
    assert found == streams
    called = [(text, calls) for text, calls, finish_reason in found if finish_reason == "tool_calls"]
    assert len(called) >= 8
    for text, calls in called:
        assert text == ""
        check(calls)
    assert len({json.dumps(calls) for _, calls in called}) > 4, "they are drawn"


@pytest.mark.parametrize("template", FAMILIES)
async def test_a_named_function_is_called_once(serving: Serving, template: str) -> None:
    _, process = serving(template)
    async with client_of(process) as client:
        bodies = [asked(seed, tool_choice=NAMED, n=2) for seed in range(4)]
        answers = await asyncio.gather(*(client.chat.completions.create(**body) for body in bodies))
    found = [message_of(choice) for answer in answers for choice in answer.choices]
    assert sum(finish_reason == "tool_calls" for *_, finish_reason in found) >= 4
    for text, calls, finish_reason in found:
        if finish_reason == "tool_calls":
            assert (text, len(calls), calls[0][0]) == ("", 1, "get_weather")
            check(calls)


@pytest.mark.parametrize("template", ["hermes reasoning", "mistral"])
async def test_a_round_trip(serving: Serving, template: str) -> None:
    """The call goes back as it came, with its result; the model goes on in text, or calls again."""
    _, process = serving(template)
    async with client_of(process) as client:
        for seed in range(20):
            first = await client.chat.completions.create(**asked(seed, tool_choice=NAMED))
            if first.choices[0].finish_reason == "tool_calls":
                break
        message = first.choices[0].message
        (call,) = message.tool_calls
        messages = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        second = await client.chat.completions.create(**asked(1, messages=messages, max_completion_tokens=20))
        assert second.usage.prompt_tokens > first.usage.prompt_tokens + 5
        assert second.choices[0].message.content
        again = await client.chat.completions.create(**asked(2, messages=messages, tool_choice=NAMED))
        if again.choices[0].finish_reason == "tool_calls":
            check(message_of(again.choices[0])[1])


async def test_an_answer_in_a_format_or_a_call(serving: Serving) -> None:
    """The model is free to call: what it does not call with follows its format."""
    workers, process = serving("mistral")
    either = {"extra_body": {"guided_regex": "[0-9]{3}"}, "logit_bias": biased(workers, call=15)}
    async with client_of(process) as client:
        bodies = [asked(seed, **either) for seed in range(24)]
        answers = await asyncio.gather(*(client.chat.completions.create(**body) for body in bodies))
        free = asked(5, max_completion_tokens=40, logprobs=True)
        whole = await client.chat.completions.create(**free)
        assert message_of(whole.choices[0])[:2] == (await streamed(client, free))[:2]
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    kinds = set()
    for text, calls, finish_reason in (message_of(answer.choices[0]) for answer in answers):
        if finish_reason == "tool_calls":
            check(calls)
        elif finish_reason == "stop":
            assert len(text) == 3
            assert text.isdigit()
        kinds.add(finish_reason)
    assert {"stop", "tool_calls"} <= kinds


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_before_a_call(serving: Serving, stream: bool) -> None:
    """The tags are made likely: the model opens its reasoning, closes it some time, and must call then."""
    workers, process = serving("hermes reasoning")
    tags = biased(workers, think=100, answer=20)
    async with client_of(process) as client:
        bodies = [asked(seed, tools=[WEATHER], tool_choice="required", logit_bias=tags) for seed in range(8)]
        if stream:
            found = await asyncio.gather(*(streamed(client, body) for body in bodies))
        else:
            answers = await asyncio.gather(*(client.chat.completions.create(**body) for body in bodies))
            assert all(answer.choices[0].message.reasoning_content for answer in answers)
            found = [message_of(answer.choices[0]) for answer in answers]
    called = [(text, calls) for text, calls, finish_reason in found if finish_reason == "tool_calls"]
    assert len(called) >= 2
    for text, calls in called:
        assert text == ""
        check(calls)


async def test_bad_functions_are_the_clients_to_mend(serving: Serving) -> None:
    _, process = serving("llama3")
    bad_name = {"type": "function", "function": {"name": "a b"}}
    unknown = {"type": "function", "function": {"name": "get_time"}}
    async with client_of(process) as client:
        changes: list[tuple[dict[str, Any], str]] = [
            ({"tools": [bad_name]}, "tools[0].function.name"),
            ({"tool_choice": unknown}, "tool_choice"),
            ({"tools": [], "tool_choice": "required"}, "tool_choice"),
            ({"functions": [{"name": "f"}]}, "functions"),
        ]
        for change, param in changes:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**asked(1, **change))
            assert caught.value.param == param
    assert process.metric("baton_gateway_tool_calls_total", outcome="complete") > 0
    assert any("tool calls: llama3; reasoning: none" in line for line in process.log)
