"""The API as clients see it: the `openai` package against a real server, and the bytes of a stream."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from gateway_fixtures import (
    BOS,
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    CONTEXT,
    EOS,
    MESSAGES,
    MODEL,
    STORY,
    ScriptedGenerator,
    byte_fallback_backend,
    byte_level,
    encode,
    openai_client,
    post,
    serve,
    settings,
    stream_of,
    tokenizer,
    wrap,
)

from common.contract.errors import Cause
from common.contract.messages.fields import FinishReason
from common.contract.sampling import MAX_SEED
from common.contract.tiers import Tier
from gateway.intake.request_intake import Intake, Job
from gateway.intake.schemas import ChatRequest, parse
from gateway.serving.generation import Delta, Generation, GenerationFailed, PromptDelta, Readiness


async def test_completion() -> None:
    generator = ScriptedGenerator(text=STORY)
    async with openai_client(generator) as client:
        answer = await client.completions.create(model=MODEL, prompt="hello", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, STORY, "length", None)
    assert answer.usage is not None
    num_generated = len(encode(STORY))
    num_prompt = 1 + len(encode("hello"))
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert generator.generations[0].token_ids == (BOS, *encode("hello"))


async def test_the_answer_in_the_readme_has_the_fields_of_an_answer() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = readme.partition("<!-- example output -->")[2].partition("<!-- /example output -->")[0]
    shown = json.loads(example[example.index('{"id"') : example.rindex("}") + 1])
    status, answer, _ = await post(CHAT_PATH, CHAT)
    assert status == 200
    assert fields(answer) == fields(shown)


def fields(value: Any) -> Any:
    """The names of the members of a JSON value, at every depth."""
    if isinstance(value, dict):
        return {name: fields(each) for name, each in value.items()}
    return [fields(each) for each in value] if isinstance(value, list) else None


async def test_chat() -> None:
    generator = ScriptedGenerator(token_ids=[*encode(STORY), EOS], finish_reason="stop")
    async with openai_client(generator) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", STORY, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(encode(STORY)) + 1
    expected = (BOS, *encode("user: hello\nassistant:"))
    assert generator.generations[0].token_ids == expected, "one beginning-of-text token, the template's"


async def test_an_integer_may_have_a_point() -> None:
    generator = ScriptedGenerator(text=STORY)
    body = {"model": MODEL, "prompt": [7.0, 8], "n": 2.0, "max_tokens": 1e1, "seed": -0.0, "temperature": 0.5}
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + COMPLETIONS_PATH, data=json.dumps(body)) as response:
            assert response.status == 200, await response.text()
    (generation,) = generator.generations
    assert generation.token_ids[-2:] == (7, 8)
    assert all(type(token) is int for token in generation.token_ids)
    assert generation.sampling.max_tokens == 10


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_streams_carry_the_same_text(tokens_per_delta: int) -> None:
    generator = ScriptedGenerator(text=STORY, tokens_per_delta=tokens_per_delta)
    async with openai_client(generator) as client:
        completion = await client.completions.create(model=MODEL, prompt="hello", max_tokens=100, stream=True)
        chunks = [chunk async for chunk in completion]
        assert "".join(chunk.choices[0].text for chunk in chunks) == STORY
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} <= {None}
        assert len({chunk.id for chunk in chunks}) == 1

        chat = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chat_chunks = [chunk async for chunk in chat]
    *content, last = chat_chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == STORY
    assert [chunk.choices[0].delta.role for chunk in content] == ["assistant"] + [None] * (len(content) - 1)
    assert content[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in content)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(encode(STORY))


async def test_the_openai_client_raises_its_own_errors() -> None:
    generator = ScriptedGenerator()
    async with openai_client(generator) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert (not_found.value.param, not_found.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=MODEL, prompt="hello", temperature=-1)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        generator.failure = GenerationFailed(Cause.CAPACITY, "all workers are busy")
        with pytest.raises(openai.RateLimitError, match="all workers are busy") as busy:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert busy.value.response.headers["Retry-After"] == "1"
        generator.failure, generator.num_before = GenerationFailed(Cause.WORKER_LOST, "worker gone"), 1
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="worker gone") as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "worker_lost"


async def test_several_choices() -> None:
    generator = ScriptedGenerator(text="hello there")
    async with openai_client(generator) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, stream=True)
        texts = dict.fromkeys(range(3), "")
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"hello there"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len(encode("hello there"))
    assert texts == dict.fromkeys(range(3), "hello there")
    assert [generation.num_choices for generation in generator.generations] == [3, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(stream: bool) -> None:
    generator = ScriptedGenerator(text=STORY)
    prompts = ["hello", "hello again", "the end"]
    async with openai_client(generator) as client:
        if stream:
            texts, usage = dict.fromkeys(range(6), ""), None
            async for chunk in await client.completions.create(
                model=MODEL, prompt=prompts, n=2, max_tokens=50, stream=True, stream_options={"include_usage": True}
            ):
                usage = chunk.usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == dict.fromkeys(range(6), STORY)
        else:
            answer = await client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=50)
            assert [(choice.index, choice.text) for choice in answer.choices] == [(i, STORY) for i in range(6)]
            usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == sum(1 + len(encode(prompt)) for prompt in prompts)
    assert usage.completion_tokens == 6 * len(encode(STORY))
    assert sorted(g.token_ids for g in generator.generations) == sorted((BOS, *encode(p)) for p in prompts)
    assert len({generation.sampling.seed for generation in generator.generations}) == 3


async def test_one_prompt_of_several_fails() -> None:
    class SecondFails(ScriptedGenerator):
        async def generate(self, generation: Any) -> Any:
            number = len(self.generations)
            async for delta in super().generate(generation):
                if number == 1:
                    raise GenerationFailed(Cause.TRANSFER, "not moved")
                yield delta

    generator = SecondFails(text=STORY, hang=True, num_before=1)
    async with openai_client(generator) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            await client.completions.create(model=MODEL, prompt=["a", "b", "c"], max_tokens=50)
        assert failed.value.status_code == 503
        assert generator.num_open == 0, "the other generations are closed"


async def test_token_prompts() -> None:
    generator = ScriptedGenerator()
    async with openai_client(generator) as client:
        await client.completions.create(model=MODEL, prompt=[5, 6, 7])
        await client.completions.create(model=MODEL, prompt=[[5, 6], [7]])
        await client.completions.create(model=MODEL, prompt=["hello"])
    prompts = [generation.token_ids for generation in generator.generations]
    assert prompts[0] == (5, 6, 7)
    assert sorted(prompts[1:3]) == [(5, 6), (7,)]
    assert prompts[3] == (BOS, *encode("hello"))


async def test_content_parts() -> None:
    generator = ScriptedGenerator()
    parts: Any = [{"type": "text", "text": "hello"}, {"type": "text", "text": "again"}]
    async with openai_client(generator) as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert generator.generations[0].token_ids == (BOS, *encode("user: hello\nagain\nassistant:"))


async def test_sampling_reaches_the_generation() -> None:
    generator = ScriptedGenerator()
    async with openai_client(generator) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            logit_bias={"5": -100, "17": 2.5},  # type: ignore[dict-item]  # says the client: whole numbers
            max_completion_tokens=33,
            extra_body={
                "top_k": -1,
                "min_p": 0.05,
                "repetition_penalty": 1.2,
                "min_tokens": 3,
                "ignore_eos": True,
                "stop_token_ids": [5, 6],
            },
        )
        await client.completions.create(model=MODEL, prompt="hello")
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9)
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    given, completion, short, chat = [generation.sampling for generation in generator.generations]
    assert (given.temperature, given.top_p, given.top_k, given.min_p, given.seed) == (0.5, 0.9, 0, 0.05, 7)
    assert (given.presence_penalty, given.frequency_penalty, given.repetition_penalty) == (0.1, -0.2, 1.2)
    assert (given.max_tokens, given.min_tokens, given.ignore_eos, given.stop_token_ids) == (33, 3, True, (5, 6))
    assert given.logit_bias == ((5, -100.0), (17, 2.5))
    assert completion.logit_bias == ()
    assert given.logprobs is None
    assert (completion.temperature, completion.top_p, completion.top_k, completion.max_tokens) == (1.0, 1.0, 0, 16)
    assert 0 <= completion.seed <= MAX_SEED
    assert completion.seed != chat.seed
    assert short.max_tokens == 9
    assert chat.max_tokens == CONTEXT - len(generator.generations[-1].token_ids), "all that the context leaves"


async def test_a_chat_of_no_given_length_is_as_long_as_most_workers_take() -> None:
    """And one with a length, or with a prompt that leaves there less than half of what the largest leaves, as long as
    the largest takes."""
    ready = Readiness(ready=True, reason="ok", max_sequence_tokens=200, usual_sequence_tokens=180)
    intake = Intake(tokenizer(), settings(), lambda: ready)

    async def generation(**fields: object) -> Generation:
        (made,) = (await intake.chat(parse(ChatRequest, {**CHAT, **fields}))).generations
        return made

    plain = await generation()
    left = 200 - len(plain.token_ids)
    assert plain.most_tokens == 180
    assert (await generation(max_tokens=left)).most_tokens == 200
    assert (await generation(min_tokens=left)).most_tokens == 200
    text = ""
    while len(plain.token_ids) < 180:
        text += " fox"
        plain = await generation(messages=[{"role": "user", "content": text}])
        assert plain.most_tokens == (180 if len(plain.token_ids) <= 160 else 200)


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        (None, Tier.STANDARD),
        ("interactive", Tier.INTERACTIVE),
        ("standard", Tier.STANDARD),
        ("batch", Tier.BATCH),
        ("auto", Tier.STANDARD),
        ("default", Tier.STANDARD),
        ("priority", Tier.INTERACTIVE),
        ("fast", Tier.INTERACTIVE),
        ("scale", Tier.STANDARD),
        ("flex", Tier.BATCH),
    ],
)
async def test_tiers_by_our_names_and_by_those_of_openai(name: str | None, tier: Tier) -> None:
    generator = ScriptedGenerator()
    for path, body in ((COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)):
        for change in [{"service_tier": name}, {}] if name is None else [{"service_tier": name}]:
            assert (await post(path, body | change, generator))[0] == 200
    assert {generation.tier for generation in generator.generations} == {tier}


async def salts(*requests: tuple[str | None, str | None], header: str | None = "X-Tenant") -> list[tuple[str, str]]:
    """(tenant, salt on the wire) of requests with a tenant's header and a `cache_salt` of their own."""
    generator = ScriptedGenerator()
    api_settings = dataclasses.replace(settings(), tenant_header=header)
    for index, (tenant, salt) in enumerate(requests):
        path, body = ((COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT))[index % 2]
        body = body if salt is None else body | {"cache_salt": salt}
        headers = None if tenant is None else {"x-tenant": tenant}
        assert (await post(path, body, generator, headers=headers, api_settings=api_settings))[0] == 200
    return [(generation.tenant, generation.cache_salt) for generation in generator.generations]


async def test_a_tenant_is_named_by_the_operators_header_alone() -> None:
    assert await salts(("acme", None), header=None) == [("", "")]
    assert await salts(("acme", None), header="X-Other") == [("", "")]
    named = await salts(("acme", None), (None, None), ("", None), ("Müller & Söhne " * 17, None))
    assert [tenant for tenant, _ in named] == ["acme", "", "", ("Müller & Söhne " * 17).strip()]


async def test_prefix_caches_are_separated_by_tenant_and_by_salt() -> None:
    tenants, own = (None, "acme", "acm", "acme e"), (None, "e", "\n", "acme", "x" * 128)
    given = list(itertools.product(tenants, own))
    found = [salt for _, salt in await salts(*given)]
    assert found == [salt for _, salt in await salts(*given)], "every gateway comes to the same"
    assert len(set(found)) == len(given)
    assert found[0] == ""
    assert max(len(salt) for salt in found) <= 256


async def test_a_seed_of_minus_one_is_drawn_and_a_top_p_of_nothing_is_greedy() -> None:
    generator = ScriptedGenerator()
    for path, body in ((COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)):
        for change in ({"seed": -1}, {"seed": -1}, {"top_p": 0, "temperature": 0.7}):
            assert (await post(path, body | change, generator))[0] == 200
    first, second, greedy = [generation.sampling for generation in generator.generations[:3]]
    assert first.seed != second.seed
    assert all(generation.sampling.greedy for generation in generator.generations[2::3])
    assert greedy.top_p == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_a_completion_continues_its_prompt(stream: bool, echo: bool) -> None:
    """With tokens that begin with a space, which the decoder drops before the first word of a text."""
    backend = byte_fallback_backend()
    token_ids = backend.encode(" to the world", add_special_tokens=False).ids
    body = COMPLETION | {"prompt": "hello", "echo": echo}
    generator, models = ScriptedGenerator(token_ids=token_ids), wrap(backend)
    if stream:
        chunks = await stream_of(generator, COMPLETIONS_PATH, body, model_tokenizer=models)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        status, answer, _ = await post(COMPLETIONS_PATH, body, generator, model_tokenizer=models)
        assert status == 200
        text = answer["choices"][0]["text"]
    assert text == ("hello" if echo else "") + " to the world"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("formatted", [False, True])
async def test_an_answer_in_a_format_keeps_the_space_that_it_begins_with(stream: bool, formatted: bool) -> None:
    """Which the decoder drops before the first word of a text. The log probabilities name it in any case."""
    backend = byte_fallback_backend()
    token_ids = backend.encode(" to the world", add_special_tokens=False).ids
    body = CHAT | {"logprobs": True} | ({"guided_choice": [" to the world", " to her"]} if formatted else {})
    generator, models = ScriptedGenerator(token_ids=token_ids), wrap(backend)
    if stream:
        chunks = [each["choices"][0] for each in await stream_of(generator, CHAT_PATH, body, model_tokenizer=models)]
        text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
        reports = [report for chunk in chunks for report in (chunk["logprobs"] or {"content": []})["content"]]
    else:
        status, answer, _ = await post(CHAT_PATH, body, generator, model_tokenizer=models)
        assert status == 200, answer
        (choice,) = answer["choices"]
        text, reports = choice["message"]["content"], choice["logprobs"]["content"]
    assert text == (" to the world" if formatted else "to the world")
    assert "".join(report["token"] for report in reports) == " to the world"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_nothing_is_generated_where_nothing_is_asked_for(stream: bool, echo: bool) -> None:
    generator = ScriptedGenerator(readiness=Readiness(ready=False, reason="no worker"))
    body = COMPLETION | {"prompt": ["hello", "there"], "max_tokens": 0, "n": 2, "echo": echo}
    expected = ["hello", "hello", "there", "there"] if echo else [""] * 4
    if stream:
        chunks = [chunk["choices"][0] for chunk in await stream_of(generator, COMPLETIONS_PATH, body)]
        assert [(each["text"], each["finish_reason"]) for each in chunks] == [(text, "length") for text in expected]
    else:
        status, answer, _ = await post(COMPLETIONS_PATH, body, generator)
        assert status == 200
        assert [each["text"] for each in answer["choices"]] == expected
        assert {each["finish_reason"] for each in answer["choices"]} == {"length"}
        num_prompt = 2 + len(encode("hello")) + len(encode("there"))
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (num_prompt, 0)
    assert generator.generations == []


async def test_many_prompts_are_generated_some_at_a_time() -> None:
    most = 0

    class Watched(ScriptedGenerator):
        async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
            nonlocal most
            async with aclosing(super().generate(generation)) as deltas:
                async for delta in deltas:
                    most = max(most, self.num_open)
                    yield delta

    generator = Watched(text="hello there, the end")
    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | {"prompt": [[5], [6, 7]] * 150}, generator)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["hello there, the end"] * 300
    assert most == 32


async def test_a_default_length_is_cut_to_the_context() -> None:
    generator = ScriptedGenerator()
    async with openai_client(generator) as client:
        await client.completions.create(model=MODEL, prompt=[5] * (CONTEXT - 3))
    assert generator.generations[0].sampling.max_tokens == 3


@pytest.mark.parametrize("stop", ["fox", ["dog", "own fo"], ["ox", "fox"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(stop: str | list[str], stream: bool) -> None:
    generator = ScriptedGenerator(text=STORY, finish_reason="length", tokens_per_delta=1)
    path = "/v1/completions"
    body = {"prompt": "hello", "stop": stop, "max_tokens": 100}
    expected = STORY[: min(STORY.index(string) for string in ([stop] if isinstance(stop, str) else stop))]
    if stream:
        *chunks, last = await stream_of(generator, path, body | {"stream_options": {"include_usage": True}})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        async with serve(generator) as server, aiohttp.ClientSession() as session:
            async with session.post(server.url + path, json=body) as response:
                answer = await response.json()
        (choice,) = answer["choices"]
        text, reason, usage = choice["text"], choice["finish_reason"], answer["usage"]
    assert text == expected
    assert reason == "stop"
    assert usage["completion_tokens"] < len(encode(STORY))
    before = byte_level().decode(encode(STORY)[: usage["completion_tokens"] - 1])
    assert not any(string in before for string in ([stop] if isinstance(stop, str) else stop))
    assert usage["completion_tokens"] == generator.num_deltas, "nothing is generated past the stop string"
    assert generator.closed_early.is_set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_delta", [1, 3])
@pytest.mark.parametrize(
    ("said", "stop", "min_tokens", "expected", "num_tokens"),
    [
        ("abcd", "ab", 1, "", 2),
        ("abcd", "ab", 2, "abcd", 4),
        ("abab", "ab", 2, "ab", 4),
        ("aaab", "aa", 2, "a", 3),
        ("xabc", ["abc", "b"], 3, "x", 4),
        ("abc", "abd", 1, "abc", 3),
    ],
)
async def test_a_stop_string_may_begin_before_min_tokens_and_end_after(
    said: str,
    stop: str | list[str],
    min_tokens: int,
    expected: str,
    num_tokens: int,
    tokens_per_delta: int,
    stream: bool,
) -> None:
    token_ids = [token_id for char in said for token_id in encode(char)]
    assert len(token_ids) == len(said)
    generator = ScriptedGenerator(token_ids=token_ids, finish_reason="length", tokens_per_delta=tokens_per_delta)
    body = COMPLETION | {"stop": stop, "min_tokens": min_tokens, "max_tokens": 9, "logprobs": 0}
    if stream:
        choices = [chunk["choices"][0] for chunk in await stream_of(generator, COMPLETIONS_PATH, body)]
    else:
        status, answer, _ = await post(COMPLETIONS_PATH, body, generator)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == num_tokens
        choices = answer["choices"]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == ("length" if expected == said else "stop")
    assert [name for choice in choices for name in choice["logprobs"]["tokens"]] == list(said[:num_tokens])


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
async def test_the_usage_so_far_in_each_chunk(path: str) -> None:
    """Over all choices, as in the last chunk."""
    generator = ScriptedGenerator(text=STORY)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = COMPLETION | CHAT | {"n": 2, "max_tokens": 100}
    chunks = await stream_of(generator, path, body | {"stream_options": options})
    usages = [chunk["usage"] for chunk in chunks]
    total = 2 * len(encode(STORY))
    assert [usage["completion_tokens"] for usage in usages] == [*range(1, total + 1), total]
    assert {usage["prompt_tokens"] for usage in usages} == {len(generator.generations[0].token_ids)}
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    del options["include_usage"]
    assert not any("usage" in chunk for chunk in await stream_of(generator, path, body | {"stream_options": options}))


async def test_prompts_are_counted_once_for_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of them."""
    counted = 0
    count = Job.num_prompt_tokens.fget  # type: ignore[attr-defined]

    def counting(job: Job) -> int:
        nonlocal counted
        counted += 1
        return int(count(job))

    monkeypatch.setattr(Job, "num_prompt_tokens", property(counting))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = COMPLETION | {"prompt": ["hello", "there"], "max_tokens": 100, "stream_options": options}
    chunks = await stream_of(ScriptedGenerator(text=5 * STORY), COMPLETIONS_PATH, body)
    assert len(chunks) > 80 > 8 * counted


@pytest.mark.parametrize("prompt", ["hello fox", encode("hello fox")], ids=["text", "tokens"])
async def test_an_echo_begins_with_the_prompt_and_stops_nothing(prompt: str | list[int]) -> None:
    """Of each choice, once, streamed or not; it is no part of what was generated."""
    generator = ScriptedGenerator(text=STORY, tokens_per_delta=1)
    body = {"prompt": prompt, "echo": True, "stop": "own fo", "n": 2, "max_tokens": 100}
    expected = "hello fox" + STORY[: STORY.index("own fo")]
    chunks = await stream_of(generator, COMPLETIONS_PATH, body)
    for index in range(2):
        texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(texts) == expected
        assert texts[0].startswith("hello fox"), "at once"
    status, answer, _ = await post(COMPLETIONS_PATH, body, generator)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == [expected] * 2


async def test_a_choice_that_has_stopped_ignores_what_follows() -> None:
    class Uneven(ScriptedGenerator):
        """The first choice runs into the stop string, the second does not."""

        def _rounds(self, generation: Any) -> Any:
            self.text = "hello fox again and again and again"
            first = super()._rounds(generation)
            self.text = "the end of the story, hello there"
            second = super()._rounds(generation)
            return [[*one[:1], *two[1:]] for one, two in zip(first, second, strict=False)]

    generator = Uneven()
    async with openai_client(generator) as client:
        answer = await client.completions.create(model=MODEL, prompt="a", n=2, stop="fox", max_tokens=9)
    assert answer.choices[0].text == "hello "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[1].text.startswith("the end")
    assert generator.given_up == [0], "nobody needs more of it"
    assert not generator.closed_early.is_set() or answer.choices[1].finish_reason is not None


async def test_special_tokens_are_no_text_and_count() -> None:
    generator = ScriptedGenerator(token_ids=[*encode("hello"), EOS], finish_reason="stop")
    async with openai_client(generator) as client:
        answer = await client.completions.create(model=MODEL, prompt="a")
    assert answer.choices[0].text == "hello"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(encode("hello")) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_delta", [1, 100])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("reason", "expected"), [("stop", "hello "), ("length", "hello f")])
async def test_a_stop_token_is_no_text_and_counts(
    stream: bool, tokens_per_delta: int, named: bool, reason: FinishReason, expected: str
) -> None:
    """As a stop string is not; if the answer goes on after it, or has its length with it, it is text. The model's own
    may be tokens that the tokenizer does not call special."""
    (stop_token,) = encode("f")
    token_ids = [*encode("hello "), stop_token]
    generator = ScriptedGenerator(token_ids=token_ids, finish_reason=reason, tokens_per_delta=tokens_per_delta)
    body = COMPLETION | {"max_tokens": 50} | ({"stop_token_ids": [stop_token]} if named else {})
    if stream:
        chunks = await stream_of(generator, COMPLETIONS_PATH, body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    else:
        status, answer, _ = await post(COMPLETIONS_PATH, body, generator)
        assert status == 200
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["completion_tokens"] == len(token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_delta", [1, 100])
@pytest.mark.parametrize(
    ("reason", "body", "expected"),
    [
        ("stop", {}, "hello"),
        ("stop", {"skip_special_tokens": True}, "hello"),
        ("stop", {"skip_special_tokens": False}, "<s>hel</s>lo"),
        ("length", {"skip_special_tokens": False}, "<s>hel</s>lo</s>"),
        ("stop", {"skip_special_tokens": False, "stop": "</s>"}, "<s>hel"),
    ],
)
async def test_special_tokens_are_spelt_out_where_that_is_asked_for(
    stream: bool, tokens_per_delta: int, reason: FinishReason, body: dict[str, Any], expected: str
) -> None:
    """But for the one that ends the answer."""
    token_ids = [BOS, *encode("hel"), EOS, *encode("lo"), EOS]
    generator = ScriptedGenerator(token_ids=token_ids, finish_reason=reason, tokens_per_delta=tokens_per_delta)
    body = COMPLETION | {"max_tokens": 50} | body
    if stream:
        chunks = await stream_of(generator, COMPLETIONS_PATH, body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    else:
        status, answer, _ = await post(COMPLETIONS_PATH, body, generator)
        assert status == 200
        assert answer["choices"][0]["text"] == expected
        if "stop" not in body:
            assert answer["usage"]["completion_tokens"] == len(token_ids)


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH])
@pytest.mark.parametrize("tokens_per_delta", [1, 100])
@pytest.mark.parametrize(
    ("stop", "goes_on", "reason", "expected"),
    [
        ("</s>", False, "stop", ("hel", "</s>")),
        (["lazy", "<s>"], False, "stop", ("", "<s>")),
        ("</s>", True, "stop", ("hello", None)),
        ("</s>", True, "length", ("hello", "</s>")),
    ],
)
async def test_a_stop_string_may_be_a_special_token(
    path: str,
    tokens_per_delta: int,
    stop: str | list[str],
    goes_on: bool,
    reason: FinishReason,
    expected: tuple[str, str | None],
) -> None:
    """It is no text, not even where the answer goes on after it because of `min_tokens`."""
    token_ids = [BOS, *encode("hel"), EOS, *encode("lo"), EOS]
    generator = ScriptedGenerator(token_ids=token_ids, finish_reason=reason, tokens_per_delta=tokens_per_delta)
    body = COMPLETION | CHAT | {"max_tokens": 50, "stop": stop}
    if goes_on:
        body["min_tokens"] = token_ids.index(EOS) + 1
    status, answer, _ = await post(path, body, generator)
    assert status == 200, answer
    (choice,) = answer["choices"]
    choices = [chunk["choices"][0] for chunk in await stream_of(generator, path, body)]
    if path == CHAT_PATH:
        whole = choice["message"]["content"] or ""
        streamed = "".join(each["delta"].get("content") or "" for each in choices)
    else:
        whole, streamed = choice["text"], "".join(each["text"] for each in choices)
    assert (whole, choice["stop_reason"]) == (streamed, choices[-1]["stop_reason"]) == expected
    assert choice["finish_reason"] == choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH])
@pytest.mark.parametrize("tokens_per_delta", [1, 100])
@pytest.mark.parametrize(
    ("last", "by_worker", "body", "expected"),
    [
        (EOS, "stop", {}, ("stop", None)),
        (EOS, "stop", {"stop_token_ids": [5, EOS]}, ("stop", None)),
        (EOS, "stop", {"stop_token_ids": [5, EOS], "ignore_eos": True}, ("stop", EOS)),
        (6, "stop", {"stop_token_ids": [5, 6]}, ("stop", 6)),
        (6, "stop", {}, ("stop", 6)),
        (6, "length", {"stop": "cat"}, ("length", None)),
        (EOS, "stop", {"stop": ["lazy", "jumps"]}, ("stop", "jumps")),
        (6, "stop", {"stop": ["ox", "fox", "own fox"]}, ("stop", "own fox")),
        (6, "length", {"stop": ["dog", "dogs"]}, ("stop", "dog")),
    ],
)
async def test_an_answer_tells_what_stopped_it(
    path: str,
    tokens_per_delta: int,
    last: int,
    by_worker: FinishReason,
    body: dict[str, Any],
    expected: tuple[str, int | str | None],
) -> None:
    """As vLLM does: nothing of the tokenizer's end of sequence, but the model may have others."""
    generator = ScriptedGenerator(
        token_ids=[*encode(STORY), last], finish_reason=by_worker, tokens_per_delta=tokens_per_delta
    )
    body = COMPLETION | CHAT | {"max_tokens": 100} | body
    status, answer, _ = await post(path, body, generator)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == expected
    *others, end = [chunk["choices"][0] for chunk in await stream_of(generator, path, body)]
    assert (end["finish_reason"], end["stop_reason"]) == expected
    assert {each["stop_reason"] for each in others} <= {None}


async def test_models() -> None:
    async with openai_client(ScriptedGenerator()) as client:
        (model,) = [model async for model in client.models.list()]
        assert model.id == MODEL
        assert model.model_dump()["max_model_len"] == CONTEXT
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_a_model_of_several_names() -> None:
    named = dataclasses.replace(settings(), other_names=("gpt-4o", "tiny"), system_fingerprint="fp_1")
    async with serve(ScriptedGenerator(), named) as server, aiohttp.ClientSession() as session:
        async with session.get(server.url + "/v1/models") as response:
            told = [(model["id"], model["root"]) for model in (await response.json())["data"]]
            assert told == [(MODEL, MODEL), ("gpt-4o", MODEL), ("tiny", MODEL)]
        async with session.get(server.url + "/v1/models/tiny") as response:
            assert (await response.json())["id"] == "tiny"
        for path, body in ((COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)):
            for name, status in ((MODEL, 200), ("gpt-4o", 200), ("tiny", 200), ("gpt", 404)):
                async with session.post(server.url + path, json=body | {"model": name}) as response:
                    assert response.status == status
                    answer = await response.json()
                    if status == 200:
                        assert (answer["model"], answer["system_fingerprint"]) == (MODEL, "fp_1")


async def test_the_load_is_what_is_in_flight() -> None:
    generator = ScriptedGenerator(hang=True)

    async def load() -> Any:
        async with session.get(server.url + "/load") as response:
            return await response.json()

    async with serve(generator) as server, aiohttp.ClientSession() as session:
        assert await load() == {"server_load": 0}
        asking = asyncio.create_task(session.post(server.url + CHAT_PATH, json=CHAT))
        await generator.hanging.wait()
        assert await load() == {"server_load": 1}
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_tokenize_and_back() -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:

        async def post(path: str, body: Any) -> Any:
            async with session.post(server.url + path, json=body) as response:
                assert response.status == 200
                return await response.json()

        answer = await post("/tokenize", {"model": MODEL, "prompt": "hello 日本"})
        assert answer == {
            "tokens": [BOS, *encode("hello 日本")],
            "count": 1 + len(encode("hello 日本")),
            "max_model_len": CONTEXT,
        }
        spelt = await post("/tokenize", {"prompt": "hello 日本", "return_token_strs": True})
        assert spelt == answer | {"token_strs": byte_level().encode("hello 日本").tokens}
        assert await post("/tokenize", {"prompt": "hello 日本", "return_token_strs": False}) == answer
        assert await post("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": "<s>hello 日本"}
        assert await post("/detokenize", {"tokens": []}) == {"prompt": ""}
        chat = await post("/tokenize", {"messages": MESSAGES})
        assert chat["tokens"] == [BOS, *encode("user: hello\nassistant:")]


@pytest.mark.parametrize(("add", "num_added"), [(None, 1), (True, 1), (False, 0)])
async def test_a_prompt_may_bring_its_own_special_tokens(add: bool | None, num_added: int) -> None:
    generator = ScriptedGenerator()
    body = {"prompt": "<s>hello", "add_special_tokens": add}
    expected = [*[BOS] * num_added, BOS, *encode("hello")]
    assert (await post(COMPLETIONS_PATH, body, generator))[0] == 200
    assert generator.generations[0].token_ids == tuple(expected)
    assert (await post("/tokenize", body))[1]["tokens"] == expected


async def test_tokens_of_a_conversation_have_the_special_ones_of_its_template() -> None:
    for add in (None, False):
        _, answer, _ = await post("/tokenize", {"messages": MESSAGES, "add_special_tokens": add})
        assert answer["tokens"] == [BOS, *encode("user: hello\nassistant:")]
    status, answer, _ = await post("/tokenize", {"messages": MESSAGES, "add_special_tokens": True})
    assert (status, answer["error"]["param"]) == (400, "add_special_tokens")


async def test_probes() -> None:
    generator = ScriptedGenerator()
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        async with session.get(server.url + "/health") as response:
            assert response.status == 200
        async with session.get(server.url + "/ready") as response:
            assert response.status == 200
            assert await response.json() == {"ready": True, "reason": "ok", "details": {"prefill": 1, "decode": 1}}
        generator.readiness = Readiness(ready=False, reason="no decode worker", details=lambda: {"decode": 0})
        async with session.get(server.url + "/ready") as response:
            assert response.status == 503
            assert (await response.json())["reason"] == "no decode worker"
        async with session.get(server.url + "/health") as response:
            assert response.status == 200


class Routed(ScriptedGenerator):
    """Its requests were sent somewhere."""

    def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        generation.waterfall.route = lambda: {"route": "handoff", "prefill": "p:1"}
        return super().generate(generation)


@pytest.mark.parametrize("explain", [False, True])
async def test_where_a_request_went_is_told_where_the_operator_says_so(explain: bool) -> None:
    api_settings = dataclasses.replace(settings(), explain_routing=explain)
    async with serve(Routed(), api_settings) as server, aiohttp.ClientSession() as session:
        for stream in (False, True):
            body = COMPLETION | {"stream": stream}
            async with session.post(server.url + COMPLETIONS_PATH, json=body) as response:
                assert response.status == 200
                told = {name: value for name, value in response.headers.items() if name.startswith("x-baton-")}
            assert told == ({"x-baton-route": "handoff", "x-baton-prefill": "p:1"} if explain else {})
        async with session.post(server.url + COMPLETIONS_PATH, json={}) as response:
            assert response.status == 400
            assert not any(name.startswith("x-baton-") for name in response.headers)
