"""Ids of tokens in answers, and what was cached of their prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from gateway_fixtures import (
    BOS,
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    STORY,
    ScriptedGenerator,
    assert_error,
    encode,
    post,
    settings,
    stream_of,
)

from common.contract.ids import RequestId, RequestKey
from common.contract.messages.session import Role
from common.contract.messages.worker import PromptTimes, Timings
from gateway.answer.chunk_encoder import encode_in_pieces
from gateway.serving.generation import Delta, Generation, PromptDelta

IDS = {"return_token_ids": True}
PROMPT = [BOS, *encode("hello")]
SAID = encode(STORY)


async def answer_to(path: str, body: dict[str, Any], generator: ScriptedGenerator | None = None) -> Any:
    status, answer, _ = await post(path, body, generator or ScriptedGenerator(text=STORY))
    assert status == 200, answer
    return answer


# --- return_token_ids ------------------------------------------------------------------------------------------------


async def test_ids_of_a_completion() -> None:
    body = COMPLETION | IDS | {"prompt": ["hello", [5, 6, 7]], "n": 2, "max_tokens": 100}
    answer = await answer_to(COMPLETIONS_PATH, body)
    assert [choice["token_ids"] for choice in answer["choices"]] == [SAID] * 4
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [PROMPT, PROMPT, [5, 6, 7], [5, 6, 7]]


async def test_ids_of_a_chat() -> None:
    answer = await answer_to(CHAT_PATH, CHAT | IDS | {"n": 2})
    assert [choice["token_ids"] for choice in answer["choices"]] == [SAID] * 2
    assert answer["prompt_token_ids"] == [BOS, *encode("user: hello\nassistant:")]


@pytest.mark.parametrize("body", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
async def test_nobody_gets_ids_unasked(body: dict[str, Any]) -> None:
    for path, fields in ((COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)):
        answer = await answer_to(path, fields | body)
        chunk = (await stream_of(ScriptedGenerator(), path, fields | body))[0]
        for each in (answer, chunk):
            assert not {"token_ids", "prompt_token_ids"} & (each.keys() | each["choices"][0].keys())


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH])
async def test_ids_in_a_stream(path: str, tokens_per_delta: int) -> None:
    fields = COMPLETION if path == COMPLETIONS_PATH else CHAT
    generator = ScriptedGenerator(text=STORY, tokens_per_delta=tokens_per_delta)
    chunks = await stream_of(generator, path, fields | IDS | {"n": 2, "max_tokens": 100})
    told: dict[int, list[int]] = defaultdict(list)
    prompts: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        told[choice["index"]] += choice["token_ids"]
        prompts[choice["index"]].append((choice | chunk).get("prompt_token_ids"))
    assert told == {0: SAID, 1: SAID}
    for said in prompts.values():
        assert said[0] == list(generator.generations[0].token_ids)
        assert not any(said[1:]), "once"


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_end_with_the_token_that_completes_a_stop_string(stream: bool) -> None:
    """As the usage does; the text ends before it, and chunks come for ids whose text is held back, or cut off."""
    fields = COMPLETION | IDS | {"max_tokens": 100, "stop": "lazy", "stream_options": {"include_usage": True}}
    generator = ScriptedGenerator(text=STORY, tokens_per_delta=2)
    if stream:
        *chunks, last = await stream_of(generator, COMPLETIONS_PATH, fields)
        said = [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]
        usage = last["usage"]
    else:
        del fields["stream_options"]
        answer = await answer_to(COMPLETIONS_PATH, fields, generator)
        said, usage = answer["choices"][0]["token_ids"], answer["usage"]
    assert len(said) == usage["completion_tokens"] < len(SAID)
    assert said == SAID[: len(said)]


async def test_what_generates_nothing_has_the_ids_of_its_prompt() -> None:
    (choice,) = (await answer_to(COMPLETIONS_PATH, COMPLETION | IDS | {"max_tokens": 0}))["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], PROMPT)


async def test_ids_count_towards_the_bound_on_an_answer() -> None:
    for limit, body, param in (
        (400, {"max_tokens": 50}, "max_tokens"),  # 12 bytes for each token, not 4
        (400, {"max_tokens": 1, "n": 2, "prompt": [[5] * 26]}, "return_token_ids"),
    ):
        fields, limits = COMPLETION | body, settings(max_answer_bytes=limit)
        status, answer, _ = await post(COMPLETIONS_PATH, fields, api_settings=limits)
        assert status == 200, answer
        status, answer, _ = await post(COMPLETIONS_PATH, fields | IDS, api_settings=limits)
        assert status == 400
        assert_error(answer, param)


def test_long_lists_are_encoded_in_parts() -> None:
    numbers = list(range(10_000))
    for whole, items in (
        (numbers, map(str, numbers)),
        (tuple(numbers), map(str, numbers)),
        (["\u2028"] * 10_000, [r'"\u2028"'] * 10_000),
    ):
        pieces = list(encode_in_pieces({"ids": whole}))
        assert b"".join(pieces).decode() == '{"ids":[' + ",".join(items) + "]}"
        assert max(map(len, pieces)) < 40_000


# --- cached_tokens ---------------------------------------------------------------------------------------------------


@dataclass
class CachingGenerator(ScriptedGenerator):
    """Its workers tell how much of each prompt was cached."""

    num_cached: list[int] = field(default_factory=list)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta | PromptDelta, None]:
        key = RequestKey(RequestId(str(len(self.generations))), 1)
        told = PromptTimes(queue_s=0.0, prefix_pull_s=0.0, prefill_s=0.0, num_cached=self.num_cached.pop(0))
        waterfall = generation.waterfall
        waterfall.began(key, range(generation.num_choices), 0.0, decode="d:1")
        waterfall.measured(key, Timings(request=key.request, attempt=1, choice=None, prompt=told, decode=None))
        async with aclosing(super().generate(generation)) as deltas:
            async for delta in deltas:
                assert isinstance(delta, Delta)
                waterfall.tokens(key, delta.choice, Role.DECODE, 0.0)
                yield delta


async def test_cached_tokens_are_those_of_all_prompts_and_none_counts_for_each_choice() -> None:
    generator = CachingGenerator(num_cached=[2, 0, 1])
    answer = await answer_to(COMPLETIONS_PATH, COMPLETION | {"prompt": ["hello"] * 3, "n": 2}, generator)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_tokens_that_the_client_had_before_a_failover_are_no_prompt() -> None:
    answer = await answer_to(COMPLETIONS_PATH, COMPLETION, CachingGenerator(num_cached=[1000]))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT)}


async def test_a_stream_tells_of_cached_tokens_at_its_end() -> None:
    body = CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = await stream_of(CachingGenerator(num_cached=[4]), CHAT_PATH, body)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert all("prompt_tokens_details" not in chunk["usage"] for chunk in chunks)


async def test_without_a_prefix_cache_nothing_is_cached() -> None:
    usage = (await answer_to(CHAT_PATH, CHAT))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "completion_tokens_details" not in usage
