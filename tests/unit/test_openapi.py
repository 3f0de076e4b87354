"""The document is valid, complete, and says of bodies and answers what the gateway does."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import bad_fields
import httpx
import openai
import pytest
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    CONTEXT,
    MESSAGES,
    MODEL,
    ScriptedGenerator,
    keyring_of,
    post,
    serve,
    settings,
    tokenizer,
)
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel

from common.contract.errors import Cause
from gateway.api import create_app
from gateway.intake.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from gateway.observability.metrics import GatewayMetrics
from gateway.openapi import ROUTES, describe
from gateway.serving.generation import GenerationFailed, Readiness

DOCUMENT = describe()
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SAID_NOWHERE = [
    {"max_tokens": CONTEXT},
    {"min_tokens": 5, "max_tokens": 4},
    {"min_tokens": 1, "max_tokens": 0},
    {"prompt": [2] * CONTEXT},
    {"prompt": [2] * (CONTEXT - 1), "max_tokens": 2},
    {"max_completion_tokens": CONTEXT, "max_tokens": 1},
    {"messages": [{"role": "user", "content": "hello " * CONTEXT}]},
    # The model's: its vocabulary, its template.
    {"stop_token_ids": [10**9]},
    {"prompt": [10**9]},
    {"logit_bias": {"999999999": 1}},
    {"messages": [{"role": "wizard", "content": "hello"}]},
    # Fields that need, or contradict, one another: content may be missing in what an assistant said.
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"stream_options": {"include_usage": True}},
    {"top_logprobs": 3},
    {"prompt_logprobs": 1, "stream": True},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_object", "json_schema": {"schema": {"type": "object"}}}},
    {"response_format": {"type": "text", "json_schema": {"schema": {"type": "object"}}}},
    {"best_of": 2},
    {"n": 2, "best_of": 3},
    {"guided_regex": "a", "guided_choice": ["a"]},
    {"guided_regex": "a", "min_tokens": 2},
    {"guided_regex": "a", "ignore_eos": True},
    # What is wrong in a grammar.
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wizard"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://localhost/s"}}}},
    {"response_format": {"type": "json_object", "schema": {"type": "wizard"}}},
    {"guided_json": "[1]"},
    {"guided_json": "{"},
    {"guided_json": '{"a":' * 13000},
    {"guided_json": '{"type": "object"} }, {"lark_grammar": "start: /x/"'},
    {"guided_regex": "[0-9"},
    {"guided_regex": "(?=a)b"},
    {"guided_grammar": "start: foo"},
    {"guided_json": {"type": "object", "minProperties": 2}},
    {"guided_json": {"type": "integer", "multipleOf": 9_999_991}},
    {"structured_outputs": {"regex": "("}},
    # What JSON Schema takes for the same: 1.0 is an integer there, and half a surrogate pair is text.
    {"seed": 1.0},
    {"stop": "\ud800"},
    {"cache_salt": "\ud800"},
    {"prompt": "\udc00"},
    {"guided_regex": "\ud800"},
    {"guided_json": {"type": "object", "\ud800": 1}},
    {"messages": [{"role": "user", "content": "\ud800"}]},
]
"""Changes of a good body that are refused for what a schema does not say: the context, first of all."""


def validator(schema: Any) -> Draft202012Validator:
    """Of a schema of the document."""
    return Draft202012Validator(schema | {"components": DOCUMENT["components"]})


@functools.cache
def body_validator(path: str) -> Draft202012Validator:
    (content,) = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    return validator(content["schema"])


def closed(schema: Any) -> Any:
    """The schema, but that objects have no fields besides those that it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return made | {"additionalProperties": False} if "properties" in schema else made


def assert_described(path: str, answer: Any, method: str = "post", status: int = 200) -> None:
    """The answer is the document's, and has no field that the document does not name."""
    schema = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    components = {"schemas": closed(SCHEMAS)}
    Draft202012Validator(schema | {"components": components}).validate(answer)


def test_the_document_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()
    assert DOCUMENT["openapi"].startswith("3.1.")
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_it_has_every_route_and_no_other() -> None:
    app = create_app(ScriptedGenerator(), tokenizer(), settings(), GatewayMetrics(MODEL))
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == served
    assert len(ROUTES) == len(served)


def test_every_operation_has_its_own_name_and_says_what_it_does() -> None:
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] and operation["tags"] for operation in operations)
    assert all(answer["description"] for operation in operations for answer in operation["responses"].values())
    assert all(schema["description"] for name, schema in SCHEMAS.items() if name != "JsonValue")


@pytest.mark.parametrize(
    ("schema", "field", "said"),
    [("StreamOptions", "continuous_usage_stats", "report the usage so far"), ("Function", "strict", "Has no effect")],
)
def test_a_fields_docstring_is_its_description(schema: str, field: str, said: str) -> None:
    assert said in SCHEMAS[schema]["properties"][field]["description"]


def _bare(schema: Any, name: str = "") -> Any:
    """Without titles and defaults, which say nothing, and with references as the document has them."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if isinstance(schema, str):
        return schema.replace("#/$defs/", "#/components/schemas/")
    if not isinstance(schema, dict):
        return schema
    dropped = () if name == "properties" else ("title", "default", "$defs")
    return {key: _bare(value, key) for key, value in schema.items() if key not in dropped}


@pytest.mark.parametrize("path", BODIES)
def test_bodies_are_described_by_what_checks_them(path: str) -> None:
    made = BODIES[path].model_json_schema()
    (content,) = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    (name,) = (name for name in SCHEMAS if content["schema"]["$ref"].endswith("/" + name))
    assert _bare(SCHEMAS[name]) == _bare(made)
    for part, schema in made.get("$defs", {}).items():
        assert _bare(SCHEMAS[part]) == _bare(schema)


async def test_it_is_served_to_whoever_has_a_key() -> None:
    keyed = serve(ScriptedGenerator(), keyring=keyring_of("first"))
    async with keyed as server, aiohttp.ClientSession() as session:
        async with session.get(server.url + "/openapi.json") as response:
            assert response.status == 401
            assert_described("/openapi.json", await response.json(), "get", 401)
        async with session.get(server.url + "/openapi.json", headers={"Authorization": "Bearer first"}) as response:
            assert response.status == 200
            assert response.content_type == "application/json"
            assert await response.json() == json.loads(json.dumps(DOCUMENT))
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (path not in ("/health", "/ping", "/ready", "/metrics"))


SENT: list[tuple[str, dict[str, Any]]] = [
    ("chat", {}),
    ("chat", {"temperature": 0, "max_tokens": 5, "seed": 7, "user": "someone"}),
    ("chat", {"max_completion_tokens": 5, "top_p": 0.5, "presence_penalty": -2, "frequency_penalty": 2.0}),
    ("chat", {"logprobs": True, "top_logprobs": 20, "n": 16}),
    ("chat", {"stop": ["a", "b"], "logit_bias": {"5": -100, "17": 2.5}}),
    ("chat", {"stop": None, "stream": True, "stream_options": {"include_usage": True}}),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "Otto"}]}),
    ("chat", {"response_format": {"type": "json_object"}, "service_tier": "flex"}),
    ("chat", {"response_format": {"type": "json_object", "schema": {"type": "object"}}, "service_tier": "fast"}),
    (
        "chat",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}},
            }
        },
    ),
    ("chat", {"extra_body": {"guided_json": {"type": "object"}, "top_k": -1, "min_p": 0.1, "ignore_eos": False}}),
    ("chat", {"tools": [], "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True}),
    ("completions", {}),
    ("completions", {"prompt": [5, 6, 7], "logprobs": 3, "max_tokens": 3}),
    ("completions", {"prompt": ["hello", "there"], "echo": True, "n": 2, "stop": "x"}),
    ("completions", {"prompt": [[5, 6], [7]], "n": 2, "best_of": 2, "suffix": "", "stream": True}),
    ("completions", {"best_of": 1, "extra_body": {"add_special_tokens": False}}),
    ("completions", {"extra_body": {"repetition_penalty": 1.1, "stop_token_ids": [5], "cache_salt": "x"}}),
    ("completions", {"extra_body": {"structured_outputs": {"regex": "[a-z]+"}, "min_tokens": 0}}),
]
"""What the openai client is asked to send, besides model, messages or prompt."""


@asynccontextmanager
async def recording_client() -> AsyncIterator[tuple[openai.AsyncOpenAI, list[httpx.Request]]]:
    """A client of a server, and what it sends."""
    sent: list[httpx.Request] = []

    async def record(request: httpx.Request) -> None:
        sent.append(request)

    async with serve(ScriptedGenerator()) as server:
        http: Any = httpx.AsyncClient(verify=False, event_hooks={"request": [record]})
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            yield client, sent


@pytest.mark.parametrize(("endpoint", "options"), SENT, ids=repr)
async def test_what_the_openai_client_sends_is_described(endpoint: str, options: dict[str, Any]) -> None:
    answer: Any
    async with recording_client() as (client, sent):
        if endpoint == "chat":
            answer = await client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES} | options))
        else:
            answer = await client.completions.create(**({"model": MODEL, "prompt": "hello"} | options))
        if options.get("stream"):
            assert [chunk async for chunk in answer]
    (request,) = sent
    body_validator(request.url.path).validate(json.loads(request.content))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[(COMPLETIONS_PATH, COMPLETION | change) for change, _ in bad_fields.COMMON + bad_fields.COMPLETION],
        *[(CHAT_PATH, CHAT | change) for change, _ in bad_fields.COMMON + bad_fields.CHAT],
    ],
    ids=lambda value: repr(value)[:60],
)
def test_what_is_refused_for_its_form_is_not_described(path: str, body: dict[str, Any]) -> None:
    change = {name: value for name, value in body.items() if (COMPLETION | CHAT).get(name) != value}
    said_nowhere = any(change == each and repr(change) == repr(each) for each in SAID_NOWHERE)
    assert body_validator(path).is_valid(body) == said_nowhere


ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT_PATH, CHAT),
    (CHAT_PATH, CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2, "include_timings": True}),
    (COMPLETIONS_PATH, COMPLETION),
    (COMPLETIONS_PATH, COMPLETION | {"include_timings": True}),
    (COMPLETIONS_PATH, COMPLETION | {"logprobs": 2, "max_tokens": 1}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERED, ids=repr)
async def test_answers_have_the_fields_that_are_described_and_no_others(path: str, body: dict[str, Any]) -> None:
    status, answer, _ = await post(path, body)
    assert status == 200
    assert_described(path, answer)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("option", ["include_usage", "include_timings", "continuous_usage_stats"])
async def test_events_have_the_fields_that_are_described_and_no_others(path: str, failing: bool, option: str) -> None:
    failure = GenerationFailed(Cause.WORKER_LOST, "gone") if failing else None
    body = (
        COMPLETION
        | CHAT
        | {"stream": True, "stream_options": {"include_usage": True, option: True}, "logprobs": path == CHAT_PATH or 1}
    )
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    name = content["$ref"].rpartition("/")[2]
    done, described = (each for each in SCHEMAS[name]["properties"]["data"]["anyOf"])
    assert done["const"] == "[DONE]"
    chunk = Draft202012Validator(described["contentSchema"] | {"components": {"schemas": closed(SCHEMAS)}})
    async with serve(ScriptedGenerator(failure=failure, num_before=1)) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + path, json=body) as response:
            events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    for event in events[:-1]:
        chunk.validate(json.loads(event.removeprefix("data: ")))
    if failing:
        chunk.validate(json.loads(events[-1].removeprefix("data: ")))
    else:
        assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/ready", "/v1/models", "/v1/models/{name}"])
async def test_other_answers_have_the_fields_that_are_described_and_no_others(path: str, ready: bool) -> None:
    readiness = Readiness(ready=ready, reason="as told", details=lambda: {"decode": [1, {"a": 2}]})
    generator = ScriptedGenerator(readiness=readiness)
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        async with session.get(server.url + path.format(name=MODEL)) as response:
            assert_described(path, await response.json(), "get", response.status)


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH])
async def test_every_failure_has_a_status_that_is_described(path: str, cause: Cause) -> None:
    generator = ScriptedGenerator(failure=GenerationFailed(cause, "as told"))
    status, answer, headers = await post(path, COMPLETION | CHAT, generator)
    assert_described(path, answer, status=status)
    described = DOCUMENT["paths"][path]["post"]["responses"][str(status)].get("headers", {})
    assert ("Retry-After" in headers) == ("Retry-After" in described)


@pytest.mark.parametrize("path", BODIES)
async def test_an_encoding_that_is_not_taken_has_a_status_that_is_described(path: str) -> None:
    status, answer, _ = await post(path, COMPLETION | CHAT, headers={"Content-Encoding": "br"})
    assert status == 415
    assert_described(path, answer, status=status)
