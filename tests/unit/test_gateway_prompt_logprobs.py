"""Log probabilities of prompts: `echo` with `logprobs`, as the OpenAI API has it, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

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
    byte_level,
    encode,
    openai_client,
    post,
    settings,
    stream_of,
)
from test_openapi import assert_described

from common.contract.errors import Cause
from common.contract.messages.worker import TokenScores
from gateway.serving.generation import GenerationFailed, PromptDelta
from gateway.text.prompt_text import PromptText

TEXT = "the quick brown fox 日本"
TOKENS = encode(TEXT)
ECHO: dict[str, Any] = {"prompt": TOKENS, "echo": True, "logprobs": 2}


def spelt(token_ids: list[int]) -> list[str]:
    """What tokens are called: those within a character by their bytes."""
    names = [byte_level().decode([token_id], skip_special_tokens=False) for token_id in token_ids]
    return ["bytes:" if "\ufffd" in name else name for name in names]


def joined(chunks: list[Any], index: int = 0) -> tuple[str, dict[str, list[Any]]]:
    """The text and the log probabilities of a streamed choice."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
    parts = [choice["logprobs"] for choice in choices]
    report = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    return "".join(choice["text"] for choice in choices), report


async def asked(body: dict[str, Any], generator: ScriptedGenerator, *, stream: bool) -> list[tuple[str, Any]]:
    """Text and log probabilities of each choice."""
    body = COMPLETION | body
    num = body.get("n", 1)
    if stream:
        chunks = await stream_of(generator, COMPLETIONS_PATH, body)
        return [joined(chunks, index) for index in range(num)]
    status, answer, _ = await post(COMPLETIONS_PATH, body, generator)
    assert status == 200, answer
    assert_described(COMPLETIONS_PATH, answer)
    return [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_reports_the_prompt_and_then_what_follows(stream: bool, size: int) -> None:
    generator = ScriptedGenerator(text=" jumps", finish_reason="length", prompt_tokens_per_delta=size)
    ((text, report),) = await asked(ECHO, generator, stream=stream)
    generated = encode(" jumps")
    names = spelt([*TOKENS, *generated])
    num = len(TOKENS)
    assert generator.generations[0].prompt_logprobs == 2
    assert text == TEXT + " jumps"
    assert {name: len(items) for name, items in report.items()} == dict.fromkeys(report, num + len(generated))
    assert all(name.startswith(expected) for name, expected in zip(report["tokens"], names, strict=True))
    assert report["token_logprobs"] == [None, *(-float(p) for p in range(1, num)), *[-0.5] * len(generated)]
    assert report["top_logprobs"][0] is None
    for position in range(1, num):
        top = report["top_logprobs"][position]
        assert top[report["tokens"][position]] == -float(position)
        assert list(top.values())[:2] == [-0.1, -1.1] or len(top) == 2, "the token itself may be among them"
    offsets = report["text_offset"]
    assert offsets[0] == 0
    assert offsets[num] == len(TEXT), "what is generated begins where the prompt ends"
    for name, offset in zip(report["tokens"], offsets, strict=True):
        assert name.startswith("bytes:") or text[offset:].startswith(name)


async def test_a_stream_brings_the_prompt_in_parts_each_with_its_text() -> None:
    generator = ScriptedGenerator(text="x", prompt_tokens_per_delta=2)
    chunks = await stream_of(generator, COMPLETIONS_PATH, COMPLETION | ECHO | {"prompt": encode("the quick brown fox")})
    texts, seen = [], 0
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        assert choice["logprobs"]["text_offset"][0] >= seen
        texts.append(choice["text"])
        seen = len("".join(texts))
    assert len(texts) >= 3
    assert "".join(texts[:-1]).startswith("the quick")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_needs_a_worker_for_its_log_probabilities(stream: bool) -> None:
    """As lm-eval asks for likelihoods: several prompts, nothing to generate."""
    generator = ScriptedGenerator(text="what was sampled counts for nothing", finish_reason="length")
    prompts = [encode("hello world"), encode("the quick brown fox")]
    body = ECHO | {"prompt": prompts, "max_tokens": 0}
    if stream:
        chunks = await stream_of(generator, COMPLETIONS_PATH, COMPLETION | body)
        choices = [joined(chunks, index) for index in range(2)]
    else:
        status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | body, generator)
        assert status == 200
        choices = [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
        assert answer["usage"]["completion_tokens"] == 0
    assert [text for text, _ in choices] == ["hello world", "the quick brown fox"]
    for (_, report), prompt in zip(choices, prompts, strict=True):
        assert report["tokens"] == spelt(prompt)
        assert report["token_logprobs"] == [None, *(-float(p) for p in range(1, len(prompt)))]
    assert [generation.sampling.max_tokens for generation in generator.generations] == [1, 1]


async def test_every_choice_begins_with_the_prompt() -> None:
    first, second = await asked(ECHO | {"n": 2}, ScriptedGenerator(text=" a"), stream=False)
    assert first == second
    assert first[1]["token_logprobs"][: len(TOKENS)].count(None) == 1


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_a_prompt_of_one_token_has_no_log_probability(max_tokens: int) -> None:
    body = ECHO | {"prompt": encode("a")[:1], "max_tokens": max_tokens}
    ((text, report),) = await asked(body, ScriptedGenerator(text="b"), stream=False)
    assert text == "a" + "b" * max_tokens
    assert report["token_logprobs"] == [None, -0.5][: 1 + max_tokens]
    assert report["text_offset"] == [0, 1][: 1 + max_tokens]


async def test_what_the_tokenizer_puts_before_a_text_is_reported_and_has_no_text() -> None:
    ((text, report),) = await asked(ECHO | {"prompt": "hello", "max_tokens": 0}, ScriptedGenerator(), stream=False)
    assert text == "hello"
    assert report["tokens"][0] == spelt([BOS])[0] == "<s>"
    assert report["token_logprobs"][:2] == [None, -1.0]
    assert report["text_offset"][:2] == [0, 0]


async def test_special_tokens_that_a_text_spells_out_have_their_text() -> None:
    prompt = "hello</s>hello world"
    ((text, report),) = await asked(ECHO | {"prompt": prompt, "max_tokens": 2}, ScriptedGenerator(), stream=False)
    assert text.startswith(prompt)
    assert report["tokens"][0] == "<s>"
    assert "</s>" in report["tokens"]
    for token, offset in zip(report["tokens"][1:], report["text_offset"][1:], strict=True):
        assert text[offset:].startswith(token), (token, offset)


@pytest.mark.parametrize("skipped", [True, False])
async def test_special_tokens_of_a_prompt_of_tokens_are_written_as_those_of_the_answer(skipped: bool) -> None:
    body = ECHO | {"prompt": [BOS, *encode("hello")], "max_tokens": 0, "skip_special_tokens": skipped}
    ((text, report),) = await asked(body, ScriptedGenerator(), stream=False)
    assert text == ("hello" if skipped else "<s>hello")
    assert report["text_offset"][:2] == ([0, 0] if skipped else [0, 3])


async def test_the_openai_client_reads_them() -> None:
    async with openai_client(ScriptedGenerator(text=" a")) as client:
        answer = await client.completions.create(model="owner/tiny", prompt=TOKENS, echo=True, logprobs=1, max_tokens=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(TOKENS) + 1
    assert logprobs.token_logprobs[0] is None


def ranked(prompt: list[int], num: int) -> list[Any]:
    """What `ScriptedGenerator` tells, as vLLM writes it."""
    rows: list[Any] = [None]
    for position, token_id in enumerate(prompt[1:], 1):
        told = [(token_id, -float(position), 10 * position), *((10 + i, -0.1 - i, 1 + i) for i in range(num))]
        rows.append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": byte_level().decode([token])}
                for token, logprob, rank in told
            }
        )
    return rows


@pytest.mark.parametrize("num", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_prompt_logprobs_are_written_as_vllm_writes_them(num: int, max_tokens: int) -> None:
    prompt = encode("the quick brown fox")
    body = COMPLETION | {"prompt": prompt, "prompt_logprobs": num, "max_tokens": max_tokens, "n": 2}
    status, answer, _ = await post(COMPLETIONS_PATH, body, ScriptedGenerator(text=" jumps over"))
    assert status == 200
    assert_described(COMPLETIONS_PATH, answer)
    for choice in answer["choices"]:
        assert choice["prompt_logprobs"] == ranked(prompt, num)
        assert choice["logprobs"] is None
        assert not choice["text"].startswith("the")


async def test_a_chats_prompt_logprobs_stand_beside_its_choices() -> None:
    generator = ScriptedGenerator()
    status, answer, _ = await post(CHAT_PATH, CHAT | {"prompt_logprobs": 1, "n": 2}, generator)
    assert status == 200
    assert_described(CHAT_PATH, answer)
    assert answer["prompt_logprobs"] == ranked(list(generator.generations[0].token_ids), 1)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["hello world"] * 2
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])


async def test_each_form_has_as_many_alternatives_as_it_asked_for() -> None:
    generator = ScriptedGenerator(text=" a")
    body = COMPLETION | ECHO | {"prompt_logprobs": 3, "logprobs": 1, "max_tokens": 1}
    _, answer, _ = await post(COMPLETIONS_PATH, body, generator)
    assert generator.generations[0].prompt_logprobs == 3
    assert generator.generations[0].sampling.logprobs == 1
    (choice,) = answer["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(TOKENS)]} <= {1, 2}
    assert [len(row or ()) for row in choice["prompt_logprobs"]] == [len(row or ()) for row in ranked(TOKENS, 3)]


@pytest.mark.parametrize("body", [{}, {"echo": True}, {"logprobs": 2}, {"logprobs": 2, "max_tokens": 0}])
async def test_who_does_not_ask_is_told_nothing_of_the_prompt(body: dict[str, Any]) -> None:
    generator = ScriptedGenerator()
    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | body, generator)
    assert status == 200
    assert all(generation.prompt_logprobs is None for generation in generator.generations)
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)], ids=["completions", "chat"]
)
async def test_a_stream_has_no_prompt_logprobs(path: str, body: dict[str, Any]) -> None:
    status, answer, _ = await post(path, body | {"prompt_logprobs": 1, "stream": True})
    assert status == 400
    assert_error(answer, "prompt_logprobs")


@pytest.mark.parametrize(
    ("body", "param", "num_bytes"),
    [
        (ECHO, "logprobs", 3 * 80),
        (ECHO | {"n": 2}, "logprobs", 2 * 3 * 80),
        (ECHO | {"prompt_logprobs": 0}, "prompt_logprobs", 4 * 80),
        (COMPLETION | {"prompt": TOKENS, "prompt_logprobs": 4}, "prompt_logprobs", 5 * 80),
    ],
)
async def test_what_is_told_of_prompts_counts_for_the_bound_on_answers(
    body: dict[str, Any], param: str, num_bytes: int
) -> None:
    enough = len(TOKENS) * num_bytes
    body = COMPLETION | body | {"max_tokens": 1}
    status, answer, _ = await post(COMPLETIONS_PATH, body, api_settings=settings(max_answer_bytes=enough - 1))
    assert status == 400
    assert_error(answer, param)
    assert f"log probabilities of {len(TOKENS)} tokens of prompt" in answer["error"]["message"]
    assert (await post(COMPLETIONS_PATH, body, api_settings=settings(max_answer_bytes=enough + 600)))[0] == 200


async def test_a_chat_may_be_as_long_as_its_prompts_log_probabilities_leave() -> None:
    generator = ScriptedGenerator()
    await post(CHAT_PATH, CHAT | {"prompt_logprobs": 0}, generator)
    num_bytes = 80 * len(generator.generations[0].token_ids)
    await post(
        CHAT_PATH, CHAT | {"prompt_logprobs": 0}, generator, api_settings=settings(max_answer_bytes=num_bytes + 40)
    )
    assert generator.generations[1].sampling.max_tokens == 10


async def test_a_failure_before_anything_was_told_is_an_answer_of_its_own() -> None:
    class Failing(ScriptedGenerator):
        async def generate(self, generation: Any) -> Any:
            raise GenerationFailed(Cause.INTERNAL, "no")
            yield

    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | ECHO | {"stream": True}, Failing())
    assert status == 500, answer


async def test_a_failure_on_the_way_ends_a_stream_with_an_error() -> None:
    generator = ScriptedGenerator(text=STORY, failure=GenerationFailed(Cause.INTERNAL, "no"))
    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | ECHO, generator)
    assert status == 500, answer


def test_a_large_part_of_a_prompt_goes_out_in_pieces() -> None:
    """Others have their turns between two of them."""
    token_ids = (encode(STORY) * 1000)[:1000]
    text = byte_level().decode(token_ids)
    prompt = PromptText([4, 5], token_ids, _Decoder(), text)
    delta = PromptDelta(scores=TokenScores(logprobs=(-1.0,) * 999, ranks=tuple(range(1, 1000))))
    pieces = [*prompt.pieces(delta), *prompt.pieces(None)]
    assert max(len(piece.prompt_reports) for piece in pieces) == 256
    for choice in (4, 5):
        mine = [piece for piece in pieces if piece.choice == choice]
        assert "".join(piece.text for piece in mine) == text
        reports = [report for piece in mine for report in piece.prompt_reports]
        assert [report.token_id for report in reports] == token_ids
        assert [report.rank for report in reports] == list(range(1000))
        assert not any(piece.plain for piece in mine)


class _Decoder:
    stop_specials = ()

    def decode(self, token_ids: Any) -> str:
        text: str = byte_level().decode(list(token_ids))
        return text

    decode_all = decode

    def has_text(self, token_id: int) -> bool:
        return True
