"""Schemathesis sends what `/openapi.json` allows, and what it does not, and holds each answer against it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import CHAT_PATH, COMPLETIONS_PATH, EOS, MODEL, ScriptedGenerator, Server, serve
from tool_models import NOON, TOOLS, WEATHER, tokens_of, tool_settings, tool_tokenizer

pytestmark = pytest.mark.processes

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "30"))
"""For each operation."""
SEED = int(os.environ.get("SCHEMATHESIS_SEED", "1"))
UNDECIDED = "positive_data_acceptance"
"""What a schema cannot say may be refused all the same: a token of another vocabulary, two grammars, a role that the
template does not know."""
GENERATING = ("--include-path-regex", "completions$")
HANG_S = 60
"""No test of speed: a machine that is busy with something else stays far below it."""


async def run(server: Server, location: str, folder: Path, *options: str) -> None:
    """A 5xx, a request that hangs, anything accepted that the document forbids, or an answer that is not in it, fails
    the test."""
    command = (
        *(sys.executable, "-m", "schemathesis.cli", "run", location, "--url", server.url, "--checks", "all"),
        *("--exclude-checks", UNDECIDED, "--warnings", "off", "--no-color"),
        *("--request-timeout", str(HANG_S), "--max-response-time", str(HANG_S)),
        *("--max-examples", str(EXAMPLES), "--seed", str(SEED), "--generation-database", "none", *options),
    )
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = output.decode()
    print(f"SCHEMATHESIS_SEED={SEED} SCHEMATHESIS_EXAMPLES={EXAMPLES}\n{report}")
    assert process.returncode == 0, report


async def num_served(server: Server) -> dict[str, int]:
    """How many requests each path has answered with 200."""
    async with aiohttp.ClientSession() as session, session.get(server.url + "/metrics") as response:
        counts = re.findall(r'requests_total\{code="200",endpoint="(.*?)"\} (\S+)', await response.text())
    return {path: int(float(count)) for path, count in counts}


@pytest.mark.timeout(900)
async def test_what_the_document_allows_and_what_it_does_not(tmp_path: Path) -> None:
    async with serve(ScriptedGenerator()) as server:
        await run(server, server.url + "/openapi.json", tmp_path, "--phases", "examples,coverage,fuzzing")
        served = await num_served(server)
    assert served[COMPLETIONS_PATH] > EXAMPLES


KEPT = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "n", "stop", "ignore_eos", "logprobs", "top_logprobs", "service_tier", "cache_salt", "messages"),
)
"""Fields that say the same for any model, and contradict none of the others."""
TEMPLATE = "hermes reasoning"
SAID = '<think>\nhm\n</think>\n\nWell.\n<tool_call>\n{"name": "is-noon", "arguments": {}}\n</tool_call>'
"""What the model says to everything."""
SCHEMA = {"type": "json_schema", "json_schema": {"schema": WEATHER["function"]["parameters"]}}
FREE: dict[str, Any] = {"response_format": {"enum": [{"type": "text"}]}}
BOUND: dict[str, Any] = {"min_tokens": {"enum": [0, None]}, "ignore_eos": {"enum": [False, None]}}
"""A grammar says where an answer may end."""
CALLING: dict[str, Any] = BOUND | {
    "tools": {"enum": [TOOLS, [NOON]]},
    "parallel_tool_calls": {"enum": [False, True, None]},
    "include_reasoning": {"enum": [False, True, None]},
    "chat_template_kwargs": {"enum": [{"enable_thinking": False}, {}, None]},
}
CHAT_KINDS: list[dict[str, Any]] = [
    FREE,
    CALLING
    | {"tool_choice": {"enum": ["none", "auto"]}, "response_format": {"enum": [{"type": "json_object"}, SCHEMA, None]}},
    CALLING | {"tool_choice": {"enum": ["required", NOON]}},
]
COMPLETION_KINDS: list[dict[str, Any]] = [
    FREE,
    BOUND | {"guided_choice": {"enum": [["yes", "no"], ["日本"]]}},
    BOUND | {"guided_regex": {"enum": ["[a-z]{1,9}"]}},
]
"""Fields that go together."""


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what only this server knows, so that most of what is sent gets as far as being generated."""
    schemas = document["components"]["schemas"]
    token = {"type": "integer", "minimum": 0, "maximum": tool_tokenizer(TEMPLATE).vocab_size - 1}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": 50}
    prompt = {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 50}, tokens]}
    prompts = {"anyOf": [prompt, {"type": "array", "items": prompt, "minItems": 1, "maxItems": 4}]}
    for name, own in (
        ("ChatRequest", {"logprobs": {"const": True}, "max_completion_tokens": {"enum": [7, None]}}),
        ("CompletionRequest", {"prompt": prompts}),
    ):
        kept = {field: schema for field, schema in schemas[name]["properties"].items() if field in KEPT}
        schemas[name]["properties"] = {
            **kept,
            "model": {"enum": [MODEL, None]},
            "stream": {"type": "boolean"},
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": 100},
            "min_tokens": {"enum": [0, 1, None]},
            "stop_token_ids": tokens,
            **own,
        }
        schemas[name]["required"] = [*schemas[name]["required"], "stream"]
    schemas["ChatRequest"]["required"].append("logprobs")
    for name, kinds in [("ChatRequest", CHAT_KINDS), ("CompletionRequest", COMPLETION_KINDS)]:
        schemas[name] = {"anyOf": [with_fields(schemas[name], own) for own in kinds]}
    content = [kind for kind in schemas["ChatMessage"]["properties"]["content"]["anyOf"] if kind != {"type": "null"}]
    spoken = {"role": {"enum": ["system", "user", "assistant"]}, "content": {"anyOf": content}}
    schemas["ChatMessage"] |= {"properties": spoken, "required": list(spoken)}
    return document


def with_fields(schema: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body that has these fields as well."""
    return schema | {"properties": schema["properties"] | own, "required": [*schema["required"], *own]}


@pytest.mark.timeout(900)
async def test_what_is_generated(tmp_path: Path) -> None:
    generator = ScriptedGenerator(token_ids=[*tokens_of(SAID), EOS], finish_reason="stop", tokens_per_delta=4)
    async with serve(generator, tool_settings(), tool_tokenizer(TEMPLATE)) as server:
        async with aiohttp.ClientSession() as session, session.get(server.url + "/openapi.json") as response:
            document = narrowed(await response.json())
        path = tmp_path / "narrowed.json"
        path.write_text(json.dumps(document))
        await run(server, str(path), tmp_path, "--phases", "fuzzing", "--mode", "positive", *GENERATING)
        served = await num_served(server)
        calls = server.metrics.registry.get_sample_value("baton_gateway_tool_calls_total", {"outcome": "complete"})
    assert served[CHAT_PATH] > EXAMPLES / 2
    assert served[COMPLETIONS_PATH] > EXAMPLES / 2
    assert sum(generation.sampling.grammar is not None for generation in generator.generations) > EXAMPLES / 4
    assert calls
