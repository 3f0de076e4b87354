"""Answers that follow a schema, an expression, a choice or a grammar, of a model that knows nothing of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from stack import BLOCK_BYTES, MODEL, Process, Workers, generation, prompt

from gateway.dispatch.dispatcher import Dispatcher
from gateway.intake.structured_output import compile_grammar
from gateway.serving.generation import Delta, Generation

Pool = Callable[..., Workers]

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "ok": {"type": "boolean"},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "kinds": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
        },
        "required": ["ok", "count", "kinds"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"k": {"type": ["integer", "null"], "multipleOf": 5, "maximum": 500, "minimum": -500}},
        "patternProperties": {"^[ab]{1,2}$": {"enum": ["x", 'é"\\\n', 1.5]}},
        "additionalProperties": False,
        "maxProperties": 3,
        "minProperties": 1,
        "required": ["k"],
    },
    "choice": {
        "anyOf": [{"const": {"x": None}}, {"$ref": "#/$defs/point"}],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {
                    name: {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 9} for name in "xy"
                },
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{2}$"}, {"type": "string", "maxLength": 8}],
        "items": {"type": "boolean"},
        "minItems": 2,
        "maxItems": 4,
    },
    "tree": {
        "allOf": [{"$ref": "#/$defs/node"}, {"required": ["children"]}],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"enum": ["l", "r"]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
                },
                "required": ["name"],
                "additionalProperties": False,
            },
            "leaf": {"oneOf": [{"type": "null"}, {"type": "integer", "exclusiveMinimum": 3, "maximum": 12}]},
        },
    },
}
QUESTION: Any = [{"role": "user", "content": "tell me " * 40}]
WEIGHTLESS: Any = {"seed": 5, "temperature": 1.0}


async def test_what_stops_follows_the_schema_and_nearly_everything_stops(main_gateway: Process) -> None:
    """With random weights, at temperature 1: nothing but the grammar makes it so."""
    async with openai.AsyncOpenAI(base_url=f"{main_gateway.facts['url']}/v1", api_key="any") as client:

        async def ask(name: str, seed: int) -> tuple[str, Any]:
            form: Any = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMAS[name]}}
            return name, await client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                temperature=1.0,
                seed=seed,
                max_completion_tokens=400,
                response_format=form,
            )

        answers = await asyncio.gather(*(ask(name, seed) for name in SCHEMAS for seed in range(20)))
    for name, schema in SCHEMAS.items():
        choices = [answer.choices[0] for asked, answer in answers if asked == name]
        stopped = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
        assert len(stopped) >= 18, name
        for text in stopped:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        assert len(set(stopped)) > 10, f"{name}: they are drawn"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"guided_choice": ["red", 'gr"een', "blå"]}, r'red|gr"een|blå'),
        ({"guided_regex": "[a-c]{3}-[0-9]+x"}, "[a-c]{3}-[0-9]+x"),
        ({"guided_grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
        ({"guided_json": json.dumps({"enum": ["yes", "no"]})}, r'\s*"(yes|no)"\s*'),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\s*\{.*\}\s*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_each_kind_of_grammar(main_gateway: Process, asked: dict[str, Any], expected: str, stream: bool) -> None:
    """Three choices of a short prompt, which a decode worker computes itself; each ends where its grammar lets it."""
    async with openai.AsyncOpenAI(base_url=f"{main_gateway.facts['url']}/v1", api_key="any") as client:
        texts = ["", "", ""]
        reasons: list[str | None] = [None, None, None]
        many: Any = {"model": MODEL, "prompt": "say it:", "n": 3, "max_tokens": 300}
        if stream:
            async for chunk in await client.completions.create(**many, **WEIGHTLESS, extra_body=asked, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        else:
            answer = await client.completions.create(**many, **WEIGHTLESS, extra_body=asked)
            texts = [choice.text for choice in answer.choices]
            reasons = [choice.finish_reason for choice in answer.choices]
    ended = [text for text, reason in zip(texts, reasons, strict=True) if reason == "stop"]
    assert ended
    for text in ended:
        assert re.fullmatch(expected, text), text


async def test_an_ambiguous_grammar_is_given_up_with_the_bound_that_it_exceeds(main_gateway: Process) -> None:
    ambiguous = "start: e\ne: e e e | e e | /[ -~]/ |"
    many: Any = {"model": MODEL, "prompt": "say it:", "max_tokens": 300, "extra_body": {"guided_grammar": ambiguous}}
    async with openai.AsyncOpenAI(base_url=f"{main_gateway.facts['url']}/v1", api_key="any") as client:
        with pytest.raises(openai.BadRequestError, match="one token takes more than 5000 items"):
            await client.completions.create(**many, **WEIGHTLESS)


async def tokens_of(dispatcher: Dispatcher, work: Generation, after: Callable[[int], None] = lambda num: None) -> Any:
    """The tokens of its choices, and how they ended; `after` hears how many of the first there are."""
    tokens: list[list[int]] = [[] for _ in range(work.num_choices)]
    reasons: list[str | None] = [None] * work.num_choices
    async for delta in dispatcher.generate(work):
        assert isinstance(delta, Delta)
        tokens[delta.choice] += delta.token_ids
        reasons[delta.choice] = delta.finish_reason or reasons[delta.choice]
        after(len(tokens[0]))
    return tokens, reasons


def structured(seed: int, first: int = 3, num_groups: int = 12, **more: Any) -> Generation:
    """About 60 tokens that follow an expression, or five for each group."""
    grammar, error = compile_grammar("regex", f"([a-f]{{4}}-){{{num_groups}}}[0-9]{{9}}")
    assert not error
    max_tokens = 30 + 5 * num_groups
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "grammar": grammar}
    return generation(prompt(first, 100), **sampling, **more)


async def test_a_worker_that_dies_takes_no_grammar_with_it(pool: Pool) -> None:
    """Whoever goes on reads the tokens again: they are those of an undisturbed run."""
    workers = pool("structured", decode=2)
    async with workers.dispatcher(timeout_s=1.5) as dispatcher:
        long = {"num_groups": 60, "n": 2}  # so that it has not ended before it is seen to run
        expected = await tokens_of(dispatcher, structured(11, **long))
        assert expected[1] == ["stop", "stop"]

        def kill_at_20(num: int) -> None:
            if num >= 20 and not any(worker.killed for worker in workers.decode):
                for worker in workers.decode:
                    if worker.get("/ready")["running"]:
                        worker.kill()
                        break

        while not any(worker.killed for worker in workers.decode):  # it may end before it is seen to run
            assert await tokens_of(dispatcher, structured(11, **long), kill_at_20) == expected


async def test_sequences_that_are_preempted_keep_their_grammar(pool: Pool, main_pool: Workers) -> None:
    works = [structured(seed, first=seed) for seed in range(14)]
    async with main_pool.dispatcher() as dispatcher:
        expected = [await tokens_of(dispatcher, work) for work in works]
    little = pool(
        "structured little", decode_options=("--kv-cache-bytes", str(40 * BLOCK_BYTES), "--memory-reserve", "-1")
    )
    async with little.dispatcher() as dispatcher:
        assert await asyncio.gather(*(tokens_of(dispatcher, work) for work in works)) == expected
    assert sum(worker.metric("baton_preemptions_total") for worker in little.decode) > 0
