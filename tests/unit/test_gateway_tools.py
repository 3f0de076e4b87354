"""Functions and reasoning in chats, as clients see them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import pytest_asyncio
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    CHAT_TEMPLATE,
    COMPLETION,
    COMPLETIONS_PATH,
    EOS,
    MESSAGES,
    MODEL,
    Refusing,
    ScriptedGenerator,
    assert_error,
    byte_level_backend,
    plain_openai,
    post,
    serve,
    serve_refusing,
    tokenizer,
    wrap,
)
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families
from tool_models import NOON, TEMPLATES, TOOLS, WEATHER, backend, tokens_of, tool_settings, tool_tokenizer

from common.runtime.grammar_limits import grammar_limits

ARGUMENTS = '{"city": "Oslo", "days": 3}'
TWO_CALLS = (
    f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "is-noon", "arguments": {}}\n</tool_call>'
)
ONE_CALL = TWO_CALLS[len("Let me see.\n") :].split("\n<tool_call>\n{" + '"name": "is')[0]


def scripted(text: str, **how: Any) -> ScriptedGenerator:
    """A model that says this, and ends."""
    return ScriptedGenerator(token_ids=[*tokens_of(text), EOS], finish_reason="stop", **how)


@asynccontextmanager
async def client_of(
    generator: ScriptedGenerator, template: str = "hermes", **changes: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serve(generator, tool_settings(**changes), tool_tokenizer(template)) as server:
        async with plain_openai(server.url, max_retries=0) as client:
            yield client


async def ask(generator: ScriptedGenerator, template: str = "hermes", **body: Any) -> Any:
    """The answer of the official client."""
    async with client_of(generator, template) as client:
        return await client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | body))


async def chunks_of(generator: ScriptedGenerator, template: str = "hermes", **body: Any) -> list[ChatCompletionChunk]:
    async with client_of(generator, template) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True} | body
        return [chunk async for chunk in await client.chat.completions.create(**asked)]


async def refused(body: dict[str, Any], template: str = "hermes", **changes: Any) -> Any:
    """The error of a request that generates nothing."""
    generator = ScriptedGenerator()
    status, answer, _ = await post(
        CHAT_PATH,
        CHAT | body,
        generator,
        api_settings=tool_settings(**changes),
        model_tokenizer=tool_tokenizer(template),
    )
    assert status == 400, answer
    assert not generator.generations
    return answer


def prompt_of(generator: ScriptedGenerator) -> str:
    text: str = backend().decode(generator.generations[0].token_ids, skip_special_tokens=False)
    return text


# Whole answers.


async def test_calls_in_a_whole_answer() -> None:
    generator = scripted(TWO_CALLS)
    answer = await ask(generator, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("is-noon", "{}")
    assert len({first.id, second.id}) == 2
    assert answer.usage.completion_tokens == len(tokens_of(TWO_CALLS)) + 1
    assert generator.generations[0].sampling.grammar is None
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt_of(generator)
    assert json.dumps(NOON) in prompt_of(generator)


async def test_content_is_null_where_there_are_only_calls() -> None:
    answer = await ask(scripted(ONE_CALL), tools=TOOLS)
    assert answer.choices[0].message.content is None
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_text_is_text_whether_functions_are_offered_or_not() -> None:
    bodies: list[dict[str, Any]] = [{"tools": TOOLS}, {}, {"tools": []}]
    without: list[dict[str, Any]] = [{}, {"tools": []}]
    bodies += [{"tool_choice": choice} | tools for choice in ("none", "auto") for tools in without]
    for body in bodies:
        answer = await ask(scripted("hello < there"), **body)
        assert answer.choices[0].message.content == "hello < there"
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"


async def test_what_looks_like_a_call_is_text_where_no_function_is_offered() -> None:
    bodies: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}]
    for body in bodies:
        generator = scripted(TWO_CALLS)
        answer = await ask(generator, **body)
        assert answer.choices[0].message.content == TWO_CALLS
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert "get_weather" not in prompt_of(generator)


async def test_a_malformed_call_is_text() -> None:
    text = '<tool_call>\n{"name": "get_wether", "arguments": {}}\n</tool_call>'
    answer = await ask(scripted(text), tools=TOOLS)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


async def test_a_call_that_is_cut_does_not_end_the_answer_as_one() -> None:
    for generator, expected in [
        (ScriptedGenerator(token_ids=tokens_of(TWO_CALLS[:-30])), "length"),
        (ScriptedGenerator(token_ids=tokens_of(TWO_CALLS)), "length"),
        (scripted(TWO_CALLS.replace("{}}", '{"a": x}}')), "stop"),
        (scripted(TWO_CALLS.replace("{}}", "{}]")), "tool_calls"),
    ]:
        answer = await ask(generator, tools=TOOLS)
        assert answer.choices[0].finish_reason == expected
        assert answer.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_ends_the_answer_where_there_may_be_no_more(stream: bool) -> None:
    generator = scripted(TWO_CALLS, tokens_per_delta=3)
    body: Any = {"tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        chunks = await chunks_of(generator, **body)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        names = [call.function.name for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]  # type: ignore[union-attr]
        assert [name for name in names if name] == ["get_weather"]
    else:
        answer = await ask(generator, **body)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.arguments == ARGUMENTS
        assert answer.choices[0].stop_reason is None
        assert answer.usage.completion_tokens < len(tokens_of(TWO_CALLS))
    assert generator.closed_early.is_set()


async def test_no_token_behind_the_only_call_counts_however_many_come_at_once() -> None:
    told = []
    for number in (1, 3, 1000):
        body: Any = {"tools": TOOLS, "parallel_tool_calls": False, "logprobs": True}
        answer = await ask(scripted(TWO_CALLS, tokens_per_delta=number), **body)
        assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
        told.append([entry.token for entry in answer.choices[0].logprobs.content])
    assert told[0] == told[1] == told[2]
    assert len(told[0]) < len(tokens_of(TWO_CALLS))


async def test_a_stop_string_ends_an_answer_within_a_call() -> None:
    answer = await ask(scripted(TWO_CALLS), tools=TOOLS, stop='lo", ')
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Os']
    assert choice.stop_reason == 'lo", '
    answer = await ask(scripted(TWO_CALLS), tools=TOOLS, stop="\n</tool")
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("tool_calls", "\n</tool")
    *others, last = await chunks_of(scripted(TWO_CALLS), tools=TOOLS, stop="\n</tool")
    assert last.choices[0].model_dump()["stop_reason"] == "\n</tool"
    assert {chunk.choices[0].model_dump()["stop_reason"] for chunk in others} == {None}


@pytest.mark.parametrize("tokens_per_delta", [1, 100])
async def test_a_special_token_ends_an_answer_of_which_parts_are_told(tokens_per_delta: int) -> None:
    generator = scripted("<think>\nhm\n</think>\n\nyes[TOOL_CALLS]no", tokens_per_delta=tokens_per_delta)
    (choice,) = (await ask(generator, "hermes reasoning", stop="[TOOL_CALLS]")).choices
    assert (choice.message.reasoning, choice.message.content) == ("hm", "yes")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "[TOOL_CALLS]")
    chunks = await chunks_of(generator, "hermes reasoning", stop="[TOOL_CALLS]")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "yes"
    assert chunks[-1].choices[0].model_dump()["stop_reason"] == "[TOOL_CALLS]"


async def test_a_marker_that_is_a_stop_string_is_still_one_before_it_may_end_the_answer() -> None:
    text = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    answer = await ask(scripted(text), "mistral", tools=TOOLS, stop="[TOOL_CALLS]", extra_body={"min_tokens": 1})
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == ARGUMENTS
    answer = await ask(scripted(text), "mistral", tools=TOOLS, stop="[TOOL_CALLS]")
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", "[TOOL_CALLS]")


async def test_log_probabilities_of_all_tokens() -> None:
    whole = await ask(scripted(TWO_CALLS), tools=TOOLS, logprobs=True)
    assert len(whole.choices[0].logprobs.content) == len(tokens_of(TWO_CALLS)) + 1
    chunks = await chunks_of(scripted(TWO_CALLS), tools=TOOLS, logprobs=True)
    entries = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content or []]  # type: ignore[union-attr]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("llama3", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        ("llama3", f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
        ("mistral named", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}"),
    ],
)
async def test_the_chat_template_tells_the_format(template: str, text: str) -> None:
    """The markers are special tokens here, which no other request's text shows."""
    answer = await ask(scripted(text), template, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert answer.choices[0].message.content is None
    assert len(call.id) == 9 or not template.startswith("mistral")
    plain = await ask(scripted(text), template)
    for marker in ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"):
        text = text.replace(marker, "")
    assert plain.choices[0].message.content == text


# Streams.


@pytest.mark.parametrize("tokens_per_delta", [1, 4, 1000])
async def test_calls_in_a_stream(tokens_per_delta: int) -> None:
    chunks = await chunks_of(scripted(TWO_CALLS, tokens_per_delta=tokens_per_delta), tools=TOOLS)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see.\n"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert all(len(delta.tool_calls or []) <= 1 for delta in deltas)
    arguments = {0: "", 1: ""}
    for number, name in enumerate(["get_weather", "is-noon"]):
        first, *more = [call for call in calls if call.index == number]
        assert first.id is not None
        assert (first.type, first.function.name, first.function.arguments) == ("function", name, "")  # type: ignore[union-attr]
        assert more
        for call in more:
            assert (call.id, call.type, call.function.name) == (None, None, None)  # type: ignore[union-attr]
            arguments[number] += call.function.arguments or ""  # type: ignore[union-attr]
    assert arguments == {0: ARGUMENTS, 1: "{}"}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "tool_calls"]
    if tokens_per_delta == 1:
        assert len(calls) > 6, "arguments come as they are generated"


async def test_the_bytes_of_a_stream() -> None:
    """Nothing but what OpenAI sends: no `id`, `type` or `name` in later deltas, `content: null` beside a first call."""
    generator = scripted(ONE_CALL, tokens_per_delta=1000)
    async with client_of(generator) as client:
        raw = client.chat.completions.with_streaming_response
        async with raw.create(model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True) as response:
            lines = [line.removeprefix("data: ") async for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    first, second = [json.loads(line)["choices"][0] for line in lines[:-1]]
    call_id = first["delta"]["tool_calls"][0]["id"]
    assert first["delta"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"index": 0, "id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
        ],
    }
    assert second["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS}}]}
    assert (first["finish_reason"], second["finish_reason"]) == (None, "tool_calls")


async def test_the_clients_own_accumulation_of_a_stream() -> None:
    async with client_of(scripted(TWO_CALLS)) as client:
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
    assert message.content == "Let me see.\n"
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
        ("get_weather", ARGUMENTS),
        ("is-noon", "{}"),
    ]


async def test_several_choices_and_the_usage_of_a_stream() -> None:
    chunks = await chunks_of(scripted(TWO_CALLS), tools=TOOLS, n=3, stream_options={"include_usage": True})
    usage = chunks.pop().usage
    assert usage is not None
    assert usage.completion_tokens == 3 * (len(tokens_of(TWO_CALLS)) + 1)
    for index in range(3):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        assert "".join(call.function.arguments or "" for call in calls) == ARGUMENTS + "{}"  # type: ignore[union-attr]
        assert choices[-1].finish_reason == "tool_calls"
    ids = [call.id for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [] if call.id]
    assert len(set(ids)) == 6


async def test_a_failure_in_a_stream_of_calls_is_an_error_event() -> None:
    generator = scripted(TWO_CALLS, failure=RuntimeError("boom"), num_before=40)
    with pytest.raises(openai.APIError, match="internal error"):
        await chunks_of(generator, tools=TOOLS)


# Conversations.


async def test_a_conversation_with_calls_and_their_results() -> None:
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
        {"id": "call_2", "type": "function", "function": {"name": "is-noon", "arguments": ""}},
        {"id": "call_3", "type": "function", "function": {"name": "is-noon", "arguments": "[no object"}},
        {"id": "call_4", "type": "function", "function": {"name": "is-noon", "arguments": '{"a": "\\ud83d"}'}},
        {"id": "call_5", "type": "function", "function": {"name": "is-noon", "arguments": '{"a": "\\ud83d\\ude00"}'}},
    ]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "no"}]},
    ]
    generator = scripted("It is sunny.")
    answer = await ask(generator, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It is sunny."
    prompt = prompt_of(generator)
    assert f'"name": "get_weather", "arguments": {ARGUMENTS}' in prompt
    assert '"name": "is-noon", "arguments": {}' in prompt
    assert '"name": "is-noon", "arguments": "[no object"' in prompt
    assert '{"a": "' + "\N{GRINNING FACE}" in prompt, "half of one is no text, so it stays as the model has written it"
    assert "<tool_response>sunny</tool_response>" in prompt
    assert "<tool_response>no</tool_response>" in prompt
    assert "None" not in prompt


_NAMING = """
{%- for message in messages %}{% if message.role == "tool" %}{% if message.name is not defined %}
{{- raise_exception("Tool response dicts require a 'name' key") }}{% endif %}{{ message.name }}: {% endif %}
{{- message.content }}
{% endfor %}{# tools #}assistant:"""


async def test_a_result_has_the_name_of_its_function() -> None:
    """Templates of Hermes 2 Pro require it, and clients of OpenAI's API do not send it."""
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("get_weather", "is-noon")
    ]
    messages: list[dict[str, Any]] = [*MESSAGES, {"role": "assistant", "tool_calls": calls}]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "call_is-noon", "content": "yes"},
        {"role": "tool", "tool_call_id": "call_get_weather", "content": "sunny", "name": "weather"},
    ]
    again = [  # the client numbers the calls of each turn anew
        {"role": "assistant", "tool_calls": [calls[0] | {"id": "call_is-noon"}]},
        {"role": "tool", "tool_call_id": "call_is-noon", "content": "rain"},
    ]
    model: dict[str, Any] = {"api_settings": tool_settings(), "model_tokenizer": wrap(backend(), _NAMING)}
    generator = scripted("Well.")
    status, _, _ = await post(CHAT_PATH, CHAT | {"messages": messages + results + again}, generator, **model)
    assert status == 200
    unknown = results[0] | {"tool_call_id": "another"}
    status, answer, _ = await post(CHAT_PATH, CHAT | {"messages": [*messages, unknown]}, **model)
    assert status == 400
    assert "require a 'name' key" in answer["error"]["message"]
    prompt = prompt_of(generator)
    assert "is-noon: yes" in prompt
    assert "weather: sunny" in prompt
    assert "get_weather: sunny" not in prompt, "the client has said otherwise"
    assert "get_weather: rain" in prompt


_PARTS = """
{%- for m in messages %}{{ m.role }}: {% if '</think>' in m.content %}X{% endif %}{{ m['content'] | trim }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}
{% endfor %}{# tools #}assistant:"""


@pytest.mark.parametrize("template", ["hermes", "llama3", "mistral", "mistral named", _PARTS])
@pytest.mark.parametrize("given", [{"content": None}, {}, {"content": ""}], ids=repr)
async def test_content_of_an_assistant_may_be_null(template: str, given: dict[str, Any]) -> None:
    """Templates get an empty text, beside calls and without, as they look for it in ways of their own; none of them
    writes a word of Python's."""
    call = {"id": "a2b4c6d8e", "type": "function", "function": {"name": "is-noon", "arguments": "{}"}}
    models = tool_tokenizer(template) if template in TEMPLATES else wrap(backend(), template)
    fields: list[dict[str, Any]] = [{"tool_calls": [call]}, {"tool_calls": []}, {"tool_calls": None}, {}]
    for calls in fields:
        message = {"role": "assistant"} | given | calls
        generator = scripted("hello")
        body = CHAT | {"messages": [*MESSAGES, message, *MESSAGES]}
        status, answer, _ = await post(CHAT_PATH, body, generator, api_settings=tool_settings(), model_tokenizer=models)
        assert status == 200, answer
        prompt = prompt_of(generator)
        assert ("is-noon" in prompt) == bool(calls.get("tool_calls"))
        assert "None" not in prompt
        assert "Undefined" not in prompt
        status, same, _ = await post("/tokenize", body, api_settings=tool_settings(), model_tokenizer=models)
        assert tuple(same["tokens"]) == generator.generations[0].token_ids


@pytest.mark.parametrize("given", [{"content": None}, {}], ids=repr)
async def test_the_empty_result_of_a_function_may_be_left_out(given: dict[str, Any]) -> None:
    """Clients in Go send no field for an empty text."""
    prompts = []
    for content in ({"content": ""}, given):
        generator = scripted("Done.")
        messages = [*MESSAGES, ASSISTANT | {"tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": "a"} | content]
        body = CHAT | {"messages": messages, "tools": TOOLS}
        models = tool_tokenizer("hermes")
        status, answer, _ = await post(CHAT_PATH, body, generator, api_settings=tool_settings(), model_tokenizer=models)
        assert status == 200, answer
        prompts.append(prompt_of(generator))
    assert "<tool_response></tool_response>" in prompts[0]
    assert prompts[1] == prompts[0]


async def test_an_answer_may_be_sent_back_as_it_came() -> None:
    first = (await ask(scripted(TWO_CALLS), tools=TOOLS)).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "yes"} for call in first.tool_calls]
    for message in (first, first.model_dump(), first.model_dump(exclude_none=True)):
        generator = scripted("Done.")
        await ask(generator, messages=[*MESSAGES, message, *results], tools=TOOLS)
        assert TWO_CALLS.removeprefix("Let me see.\n") in prompt_of(generator)


async def test_an_answer_of_a_model_of_one_call_may_be_sent_back_too() -> None:
    """Its template takes no more of one message, so an answer ends with its first call."""
    call = '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}'
    generator = scripted(call + '; {"name": "is-noon", "parameters": {}}')
    (choice,) = (await ask(generator, "llama3", tools=TOOLS)).choices
    assert choice.finish_reason == "tool_calls"
    (first,) = choice.message.tool_calls
    results = [{"role": "tool", "tool_call_id": first.id, "content": "rain"}]
    generator = scripted("Done.")
    await ask(generator, "llama3", messages=[*MESSAGES, choice.message, *results], tools=TOOLS)
    assert call in prompt_of(generator)


_LIKE_QWEN = """
{%- if messages[0].role == "system" %}<s>{{ messages[0].content }}{% else %}<s>You are helpful.{% endif %}
{%- for m in messages %}{% if m.role == "user" or m.role == "assistant" %}{{ m.role }}: {{ m.content }}
{% elif m.role == "tool" or m.role == "ipython" %}tool: {{ m.content }}
{% endif %}{% endfor %}assistant:"""


@pytest.mark.parametrize("path", [CHAT_PATH, "/tokenize"])
@pytest.mark.parametrize(
    ("messages", "at_fault"),
    [
        ([*MESSAGES, {"role": "function", "name": "f", "content": "42"}], 1),
        ([{"role": "System", "content": "be brief"}, *MESSAGES], 0),
        ([*MESSAGES * 9, {"role": "human", "content": "hello"}], 9),
        ([{"role": "ipython", "content": "42"}, *MESSAGES], None),
        ([{"role": "system", "content": "be brief"}, *MESSAGES], None),
    ],
)
async def test_a_message_that_the_template_leaves_out_is_refused(
    path: str, messages: list[dict[str, str]], at_fault: int | None
) -> None:
    """Else the answer would be to another conversation, without a word."""
    models = wrap(backend(), _LIKE_QWEN)
    status, answer, _ = await post(path, {"messages": messages}, scripted("x"), model_tokenizer=models)
    if at_fault is None:
        assert status == 200, answer
    else:
        assert status == 400
        assert_error(answer, f"messages[{at_fault}].role", "invalid_value")


async def test_any_role_is_taken_by_a_template_that_writes_them_all() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    others = [{"role": f"role-{number}", "content": "a"} for number in range(9)]
    for num_roles, expected in ((8, 200), (9, 400)):
        body = {"messages": [*MESSAGES, *others[:num_roles], *others[:num_roles]]}
        status, answer, _ = await post("/tokenize", body, model_tokenizer=wrap(backend(), template))
        assert status == expected, answer


_LIKE_TINY_LLAMA = """
{%- for m in messages %}{% if m.role == "system" %}<|system|>{{ m.content }}
{% elif m.role == "user" or m.role == "assistant" %}<|{{ m.role }}|>{{ m.content }}
{% endif %}{% endfor %}<|assistant|>"""


@pytest.mark.parametrize(
    ("template", "expected"), [(_LIKE_TINY_LLAMA, 400), (_LIKE_QWEN, 200)], ids=["leaves them out", "writes them"]
)
async def test_results_of_functions_are_not_left_out_either(template: str, expected: int) -> None:
    body = {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "a", "content": "42"}]}
    status, answer, _ = await post("/tokenize", body, model_tokenizer=wrap(backend(), template))
    assert status == expected, answer
    if expected == 400:
        assert_error(answer, "messages[1].role", "invalid_value")


@pytest.mark.parametrize(("tools", "expected"), [([], 400), (TOOLS, 200)], ids=["without functions", "with functions"])
async def test_results_of_functions_are_not_left_out_by_the_template_for_conversations_without_functions(
    tools: list[dict[str, Any]], expected: int
) -> None:
    templates: Any = {"default": _LIKE_TINY_LLAMA, "tool_use": TEMPLATES["hermes"]}
    body = {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "a", "content": "42"}], "tools": tools}
    models = wrap(backend(), templates)
    status, answer, _ = await post("/tokenize", body, api_settings=tool_settings(), model_tokenizer=models)
    assert status == expected, answer
    if expected == 400:
        assert_error(answer, "messages[1].role", "invalid_value")


async def test_tokens_of_a_conversation_with_functions() -> None:
    generator = scripted("x")
    await ask(
        generator, "hermes reasoning", tools=TOOLS, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    status, answer, _ = await post(
        "/tokenize",
        {"messages": MESSAGES, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
        api_settings=tool_settings(),
        model_tokenizer=tool_tokenizer("hermes reasoning"),
    )
    assert status == 200
    assert tuple(answer["tokens"]) == generator.generations[0].token_ids


# Reasoning.

NAMES_OF_REASONING = ("reasoning_content", "reasoning")
THOUGHT = "<think>\nIt is <b>late</b>.\n</think>\n\nGood night. </think>"


@pytest.mark.parametrize("template", ["hermes reasoning", "hermes thinking"])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart(template: str, stream: bool) -> None:
    """Where the prompt has opened the reasoning, the model only closes it."""
    text = THOUGHT.removeprefix("<think>") if template == "hermes thinking" else THOUGHT
    if stream:
        deltas = [chunk.choices[0].delta for chunk in await chunks_of(scripted(text), template)]
        for name in NAMES_OF_REASONING:
            assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "It is <b>late</b>."
        assert "".join(delta.content or "" for delta in deltas) == "Good night. </think>"
        assert deltas[0].role == "assistant"
    else:
        answer = await ask(scripted(text), template)
        message = answer.choices[0].message
        assert [getattr(message, name) for name in NAMES_OF_REASONING] == ["It is <b>late</b>."] * 2
        assert message.content == "Good night. </think>"
        assert answer.choices[0].finish_reason == "stop"


async def test_reasoning_that_the_template_only_removes_is_told_apart() -> None:
    """As in DeepSeek-R1-0528-Qwen3-8B: the model itself opens its reasoning."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }} {% endfor %}assistant:"
    models = wrap(backend(), template)
    status, answer, _ = await post(
        CHAT_PATH, CHAT, scripted(THOUGHT), api_settings=tool_settings(), model_tokenizer=models
    )
    assert status == 200
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == ("It is <b>late</b>.", "Good night. </think>")


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_may_be_left_out(stream: bool) -> None:
    body: Any = {"extra_body": {"include_reasoning": False}}
    if stream:
        chunks = await chunks_of(scripted(THOUGHT), "hermes reasoning", **body, stream_options={"include_usage": True})
        assert chunks.pop().usage.completion_tokens == len(tokens_of(THOUGHT)) + 1  # type: ignore[union-attr]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert not any(hasattr(delta, name) for delta in deltas for name in NAMES_OF_REASONING)
        assert "".join(delta.content or "" for delta in deltas) == "Good night. </think>"
    else:
        message = (await ask(scripted(THOUGHT), "hermes reasoning", **body)).choices[0].message
        assert not any(hasattr(message, name) for name in NAMES_OF_REASONING)
        assert message.content == "Good night. </think>"


@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
@pytest.mark.parametrize("tokens_per_delta", [1, 1000])
async def test_an_answer_in_a_format_keeps_its_white_space_after_reasoning(gap: str, tokens_per_delta: int) -> None:
    body: Any = {"extra_body": {"guided_choice": [" yes", " no"]}}
    for asked, content in ((body, " yes"), ({}, "yes")):
        generator = scripted(f"<think>\nhm\n</think>{gap} yes", tokens_per_delta=tokens_per_delta)
        message = (await ask(generator, "hermes reasoning", **asked)).choices[0].message
        assert (message.reasoning, message.content) == ("hm", content)


async def test_an_answer_that_never_closes_its_reasoning() -> None:
    answer = await ask(ScriptedGenerator(token_ids=tokens_of("well, hm")), "hermes thinking")
    message = answer.choices[0].message
    assert (message.content, message.reasoning) == ("", "well, hm")
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("tokens_per_delta", [1, 2, 7, 1000])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "num_reasoning_chars"),
    [
        pytest.param(THOUGHT, THOUGHT.index("\n\nGood"), id="up to the end of the closing tag"),
        pytest.param("Good night. </think>", 0, id="none"),
        pytest.param("<thin", 0, id="half of an opening"),
        pytest.param(" <think>well", None, id="never closed, so all of it, with the token that ends it"),
    ],
)
async def test_tokens_of_the_reasoning_are_counted(
    text: str, num_reasoning_chars: int | None, stream: bool, tokens_per_delta: int
) -> None:
    """However many come at once, and whatever a stop string holds back."""
    generator = scripted(text, tokens_per_delta=tokens_per_delta)
    expected = len(tokens_of(text)) + 1 if num_reasoning_chars is None else len(tokens_of(text[:num_reasoning_chars]))
    body: dict[str, Any] = {"n": 2, "stop": ["</think>\n\nNever", "hm"]}
    if stream:
        chunks = await chunks_of(generator, "hermes reasoning", **body, stream_options={"include_usage": True})
        usage = chunks[-1].usage
    else:
        usage = (await ask(generator, "hermes reasoning", **body)).usage
    assert usage is not None
    assert usage.completion_tokens == 2 * (len(tokens_of(text)) + 1)
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2 * expected


async def test_a_model_that_does_not_reason_has_no_count_of_it() -> None:
    assert (await ask(scripted(THOUGHT))).usage.completion_tokens_details is None


async def test_calls_after_reasoning_and_none_within() -> None:
    text = f"<think>I could {ONE_CALL}</think>\n\n{ONE_CALL}"
    answer = await ask(scripted(text), "hermes reasoning", tools=TOOLS)
    message = answer.choices[0].message
    assert message.reasoning == f"I could {ONE_CALL}"
    assert message.content is None
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS]
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_model_without_the_tags_does_not_reason() -> None:
    answer = await ask(scripted(THOUGHT))
    assert answer.choices[0].message.content == THOUGHT
    assert not hasattr(answer.choices[0].message, "reasoning")


async def test_the_operator_has_the_last_word() -> None:
    async with client_of(scripted(THOUGHT), "hermes reasoning", reasoning_parser="none") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == THOUGHT
    async with client_of(scripted(THOUGHT), reasoning_parser="think") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Good night. </think>"
    call = f"[TOOL_CALLS]get_weather{ARGUMENTS}"
    async with client_of(scripted(call), tool_parser="mistral") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("name", NAMES_OF_REASONING)
async def test_earlier_reasoning_is_given_to_the_template(name: str) -> None:
    template = "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}){{ m.content }} {% endfor %}"
    generator = ScriptedGenerator()
    messages = [*MESSAGES, {"role": "assistant", "content": "b", name: "why"}, {"role": "user", "content": "c"}]
    model_tokenizer = wrap(byte_level_backend(), template)
    status, _, _ = await post(CHAT_PATH, CHAT | {"messages": messages}, generator, model_tokenizer=model_tokenizer)
    assert status == 200
    assert tokenizer().decode(generator.generations[0].token_ids) == "user()hello assistant(why)b user()c "


async def test_switches_of_the_chat_template() -> None:
    for value, ending in [(False, "assistant:<think>\n\n</think>\n\n"), (True, "assistant:")]:
        generator = scripted("hello")
        extra = {"chat_template_kwargs": {"enable_thinking": value, "unheard_of": [1]}}
        answer = await ask(generator, "hermes reasoning", extra_body=extra)
        assert prompt_of(generator).endswith(ending)
        assert answer.choices[0].message.content == "hello"


async def test_effort_and_verbosity_are_for_templates_that_read_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gateway.intake.ignored_fields")
    template = "{{ reasoning_effort | default('medium') }} {{ verbosity }} {{ messages[-1].content }}"
    models = wrap(backend(), template)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "medium  hello"),
        ({"reasoning_effort": "high"}, "high  hello"),
        ({"reasoning_effort": "low", "verbosity": "high</s>"}, "low high</s> hello"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, "x  hello"),
    ]
    for given, expected in cases:
        generator = scripted("hello")
        status, _, _ = await post(
            CHAT_PATH, CHAT | given, generator, api_settings=tool_settings(), model_tokenizer=models
        )
        assert status == 200
        assert prompt_of(generator) == expected
        assert EOS not in generator.generations[0].token_ids, "what a client writes is text"
    assert not caplog.records
    generator = scripted("hello")
    async with client_of(generator) as client:
        for _ in range(2):
            await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, reasoning_effort="low", verbosity="low"
            )
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len({generation.token_ids for generation in generator.generations}) == 1
    assert [record.getMessage() for record in caplog.records] == ["ignored fields: ['reasoning_effort', 'verbosity']"]


async def test_no_effort_is_no_thinking() -> None:
    for body, ending in [
        ({"reasoning_effort": "none"}, "assistant:<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "assistant:"),
        ({"reasoning_effort": "high"}, "assistant:"),
    ]:
        generator = scripted("hello")
        await ask(generator, "hermes reasoning", extra_body=body)
        assert prompt_of(generator).endswith(ending)


@pytest.mark.parametrize("text", ["The weather is", "a</s>b", "say "])
async def test_an_answer_goes_on_with_the_last_message(text: str) -> None:
    generator = scripted(" fine.")
    models = wrap(backend(), CHAT_TEMPLATE.removeprefix("<s>"))
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": text}]
    for extra, expected in [
        ({"continue_final_message": True}, f"user: hello\nassistant: {text}"),
        ({"continue_final_message": True, "add_generation_prompt": False}, f"user: hello\nassistant: {text}"),
        ({"add_generation_prompt": False}, f"user: hello\nassistant: {text}\n"),
        (
            {"add_generation_prompt": True, "continue_final_message": False},
            f"user: hello\nassistant: {text}\nassistant:",
        ),
    ]:
        body = CHAT | {"messages": messages} | extra
        status, answer, _ = await post(CHAT_PATH, body, generator, api_settings=tool_settings(), model_tokenizer=models)
        assert status == 200, answer
        assert backend().decode(generator.generations[-1].token_ids, skip_special_tokens=False) == expected
        assert EOS not in generator.generations[-1].token_ids
        assert answer["choices"][0]["message"]["content"] == " fine."


@pytest.mark.parametrize(
    ("before", "said", "reasoning", "content"),
    [
        ("<think>\nOkay, let me", "so</think>\n\nhi", "so", "hi"),
        ("<think>\nOkay, let me", " see.\n</think>\n\nhi", " see.", "hi"),
        ("<think>\n", "so</think>\n\nhi", "so", "hi"),
        ("<think>\nwell\n</think>\n\nOh", " hi. </think>", None, " hi. </think>"),
        ("The tag <think> means", " this. </think>", None, " this. </think>"),
    ],
)
async def test_an_answer_goes_on_within_the_reasoning_of_the_last_message(
    before: str, said: str, reasoning: str | None, content: str
) -> None:
    """With the space that the model writes there; what is over in the last message is not opened again."""
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": before}]
    body: dict[str, Any] = {"messages": messages, "extra_body": {"continue_final_message": True}}
    message = (await ask(scripted(said), "hermes reasoning", **body)).choices[0].message
    assert (getattr(message, "reasoning", None), message.content) == (reasoning, content)
    deltas = [chunk.choices[0].delta for chunk in await chunks_of(scripted(said), "hermes reasoning", **body)]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == (reasoning or "")
    assert "".join(delta.content or "" for delta in deltas) == content


async def test_an_answer_in_a_format_goes_on_within_the_reasoning_of_the_last_message() -> None:
    """The grammar has the model close it."""
    generator = scripted(' see.\n</think>\n\n{"a": 1}')
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": "<think>\nOkay, let me"}]
    body: dict[str, Any] = {"messages": messages, "response_format": {"type": "json_object"}}
    answer = await ask(generator, "hermes reasoning", **body, extra_body={"continue_final_message": True})
    assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == (" see.", '{"a": 1}')
    grammar = generator.generations[0].sampling.grammar
    assert grammar is not None
    library = LLTokenizer(backend().to_str(), n_vocab=backend().get_vocab_size(), eos_token=[EOS])
    for text, complete in ((' see.\n</think>\n\n{"a": 1}', True), ('{"a": 1}', False)):
        matcher = LLMatcher(library, grammar, log_level=0, limits=grammar_limits())
        assert matcher.consume_tokens(tokens_of(text)), matcher.get_error()
        assert matcher.is_accepting() == complete


async def test_what_cannot_be_gone_on_with() -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert_error(await refused(both), "add_generation_prompt")
    called = {"role": "assistant", "tool_calls": [CALLED]}
    assert_error(
        await refused({"messages": [*MESSAGES, called], "continue_final_message": True}), "continue_final_message"
    )


# Refusals.


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": None}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[Refusing]:
    async with serve_refusing(api_settings=tool_settings(), model_tokenizer=tool_tokenizer("hermes")) as server:
        yield server


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "get_weather"}, "tools"),
        ({"tools": [tool()] * 2}, "tools"),
        ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(name=f"f{i}", description="x" * 3000) for i in range(100)]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, tool(name="")]}, "tools[1].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="a\n")]}, "tools[0].function.name"),
        ({"tools": [tool(name="é")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(name=5)]}, "tools[0].function.name"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [tool(description="\ud800")]}, "tools"),
        ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"title": "x" * 65536})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"title": "\ud800"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "all", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": allowed("required", "get_weather")}, "tool_choice"),
        ({"tool_choice": allowed("required", "f"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": allowed("required"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": allowed("none", "get_weather"), "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": 5, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [NOON]}, "tool_choice"),
        ({"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls"),
        ({"tool_choice": "required", "tools": [tool(parameters={"properties": {"a": {"type": "wizard"}}})]}, "tools"),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS, "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS, "min_tokens": 2}, "min_tokens"),
        ({"tool_choice": "required", "tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALLED]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": None}]}, "messages[0].tool_call_id"),
        ({"messages": [ASSISTANT | {"tool_calls": [CALLED] * 129}]}, "messages[0].tool_calls"),
        ({"messages": [ASSISTANT | {"tool_calls": [CALLED | {"id": ""}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [ASSISTANT | {"tool_calls": [CALLED | {"id": "é"}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [ASSISTANT | {"tool_calls": [CALLED | {"type": "custom"}]}]}, "messages[0].tool_calls[0].type"),
        (
            {"messages": [ASSISTANT | {"tool_calls": [CALLED | {"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [ASSISTANT | {"tool_calls": [CALLED | {"function": {"name": "f", "arguments": '"\ud800'}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [ASSISTANT | {"tool_calls": [CALLED | {"function": {"name": " ", "arguments": ""}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"messages": [{"role": "user", "content": "a", "reasoning": 5}]}, "messages[0].reasoning"),
        ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 2**14}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "\ud800"}}, "chat_template_kwargs"),
        *(
            ({"chat_template_kwargs": {name: False}}, "chat_template_kwargs")
            for name in (
                *("messages", "conversation", "tools", "documents", "add_generation_prompt", "chat_template"),
                *("continue_final_message", "tokenize", "return_dict", "tokenizer_kwargs", "kwargs"),
                *("bos_token", "pad_token", "raise_exception", "strftime_now", "namespace", "self", "_x", "a b", ""),
            )
        ),
        ({"include_reasoning": "no"}, "include_reasoning"),
    ],
    ids=lambda value: repr(value)[:70],
)
async def test_a_bad_field_is_named(refusing: Refusing, body: dict[str, Any], param: str) -> None:
    assert_error(await refusing.refusal(CHAT_PATH, CHAT | body), param)


async def test_what_is_nested_deeply_is_served_or_refused() -> None:
    """Whoever writes it again, the chat template above all, must not be brought down by it."""
    for depth, served in [(200, True), (900, False)]:
        deep = '{"a":' * depth + "{}" + "}" * depth
        called = CALLED | {"function": {"name": "f", "arguments": deep}}
        for field in (
            f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]',
            f'"chat_template_kwargs": {{"x": {deep}}}',
            f'"messages": [{json.dumps(ASSISTANT | {"tool_calls": [called]})}]',
        ):
            status, _, _ = await post(
                CHAT_PATH,
                f"{json.dumps(CHAT)[:-1]}, {field}}}".encode(),
                api_settings=tool_settings(),
                model_tokenizer=tool_tokenizer("hermes"),
            )
            assert status == (200 if served else 400)


async def test_models_that_know_nothing_of_functions() -> None:
    status, answer, _ = await post(CHAT_PATH, CHAT | {"tools": TOOLS})
    assert status == 400
    assert_error(answer, "tools")
    assert "chat template" in answer["error"]["message"]
    status, _, _ = await post(CHAT_PATH, CHAT | {"tools": TOOLS, "tool_choice": "none"})
    assert status == 200, "nothing is asked for"


async def test_calls_that_are_not_recognised_are_text() -> None:
    """The model is told of the functions, and the client reads what it says; that it calls cannot be enforced."""
    generator = scripted(TWO_CALLS)
    async with client_of(generator, tool_parser="none") as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS)
        formatted: Any = {"type": "json_object"}
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, response_format=formatted)
    assert answer.choices[0].message.content == TWO_CALLS
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert "get_weather" in prompt_of(generator)
    assert [generation.sampling.grammar is None for generation in generator.generations] == [True, False]
    for choice in ("required", NAMED, allowed("required", "get_weather")):
        answer = await refused({"tools": TOOLS, "tool_choice": choice}, tool_parser="none")
        assert_error(answer, "tool_choice")
        assert "--tool-parser" in answer["error"]["message"]


async def test_any_call_is_a_required_one() -> None:
    generator = scripted(ONE_CALL)
    for choice in ("any", "required"):
        await ask(generator, tools=TOOLS, extra_body={"tool_choice": choice})
    first, second = [generation.sampling.grammar for generation in generator.generations]
    assert first is not None
    assert first == second


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_functions_that_are_allowed_are_as_if_there_were_no_others(mode: str) -> None:
    generator = scripted(TWO_CALLS)
    choice: Any = allowed(mode, "get_weather")
    answer = await ask(generator, tools=TOOLS, tool_choice=choice)
    await ask(generator, tools=[WEATHER], tool_choice="auto" if mode == "auto" else "required")
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]
    first, second = generator.generations
    assert first.token_ids == second.token_ids
    assert first.sampling.grammar == second.sampling.grammar
    assert (first.sampling.grammar is None) == (mode == "auto")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "web.search-1_a", "arguments": {}}\n</tool_call>'),
        ("llama3", '{"name": "web.search-1_a", "parameters": {}}'),
        ("mistral named", "[TOOL_CALLS]web.search-1_a[ARGS]{}"),
    ],
)
async def test_names_may_have_dots(template: str, text: str) -> None:
    dotted: Any = {"type": "function", "function": {"name": "web.search-1_a"}}
    for choice in ("auto", "required"):
        answer = await ask(scripted(text), template, tools=[dotted], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("web.search-1_a", "{}")


async def test_what_the_template_does_not_take() -> None:
    calls = [CALLED, CALLED | {"id": "b"}]
    answer = await refused({"messages": [*MESSAGES, ASSISTANT | {"tool_calls": calls}]}, "llama3")
    assert_error(answer, "messages")
    assert "single tool-calls" in answer["error"]["message"]


async def test_completions_have_no_functions() -> None:
    for name, value in [("tools", TOOLS), ("tool_choice", "required"), ("chat_template_kwargs", {"a": 1})]:
        status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | {name: value})
        assert status == 400
        assert_error(answer, name, "unsupported_parameter")


async def test_the_clients_error_classes() -> None:
    for body in ({"tools": [tool(name="a b")]}, {"tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "all"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(ScriptedGenerator(), **body)
        assert caught.value.status_code == 400
        assert (caught.value.param or "").startswith(("tools", "tool_choice"))
        assert caught.value.code == "invalid_value"


# Metrics.


async def test_calls_are_counted() -> None:
    async with serve(scripted(TWO_CALLS + "<tool_call>{}"), tool_settings(), tool_tokenizer("hermes")) as server:
        async with plain_openai(server.url) as client:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, n=2)
        families = text_string_to_metric_families(server.metrics.exposition().decode())
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value for family in families for sample in family.samples
    }
    assert samples["baton_gateway_tool_calls_total", "complete"] == 4
    assert samples["baton_gateway_tool_calls_total", "malformed"] == 2
    assert samples["baton_gateway_tool_calls_total", "cut"] == 0
    assert samples["vllm:request_success_total", MODEL, "tool_calls"] == 2
