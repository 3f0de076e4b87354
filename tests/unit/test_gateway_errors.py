"""Every refusal and failure has its status, its shape and the field at fault."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import logging
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import (
    CONTEXT,
    MODEL,
    ScriptedGenerator,
    byte_level_backend,
    encode,
    serve,
    settings,
    tokenizer,
    wrap,
)

from common.contract.errors import Cause
from gateway.generation import GenerationFailed

COMPLETION = {"model": MODEL, "prompt": "hello"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"


async def post(
    path: str,
    body: Any,
    generator: ScriptedGenerator | None = None,
    *,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> tuple[int, Any, Any]:
    """Status, decoded body and headers."""
    async with serve(generator or ScriptedGenerator(), **options) as server, aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(server.url + path, data=data, headers=headers) as response:
            return response.status, json.loads(await response.read()), response.headers


def assert_error(answer: Any, param: str | None, code: str | None = None) -> None:
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code


COMMON_CASES = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.0}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": "\ud800"}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"user": 5}, "user"),
    ({"service_tier": 5}, "service_tier"),
    ({"model": 5}, "model"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
]
COMPLETION_CASES = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [10**40]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": "\udc00"}, "prompt"),
    ({"prompt": [2] * CONTEXT}, "prompt"),
    ({"prompt": [2] * (CONTEXT - 1), "max_tokens": 2}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]
CHAT_CASES = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "hello"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "hello " * CONTEXT}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": CONTEXT, "max_tokens": 1}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *[(COMPLETIONS_PATH, COMPLETION | change, param) for change, param in COMMON_CASES + COMPLETION_CASES],
        *[(CHAT_PATH, CHAT | change, param) for change, param in COMMON_CASES + CHAT_CASES],
        (COMPLETIONS_PATH, {"model": MODEL}, "prompt"),
        (CHAT_PATH, {"model": MODEL}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": ""}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [2] * (CONTEXT + 1)}, "tokens"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_a_bad_field_is_named(path: str, body: Any, param: str) -> None:
    generator = ScriptedGenerator()
    status, answer, _ = await post(path, body, generator)
    assert status == 400
    assert_error(answer, param)
    assert not generator.generations


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe\xfd",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
async def test_what_is_not_a_json_object_is_refused(path: str, body: bytes) -> None:
    status, answer, _ = await post(path, body)
    assert status == 400
    assert_error(answer, None)


async def test_a_number_that_overflows_a_double_is_refused() -> None:
    status, answer, _ = await post(COMPLETIONS_PATH, b'{"prompt": "hello", "temperature": 1e999}')
    assert status == 400
    assert_error(answer, "temperature")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt": [2] * CONTEXT}, "context_length_exceeded"),
        ({"max_tokens": CONTEXT}, "context_length_exceeded"),
        ({"echo": True}, "unsupported_parameter"),
        ({"temperature": -1}, "invalid_value"),
    ],
)
async def test_the_code_tells_refusals_apart(change: dict[str, object], code: str) -> None:
    _, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | change)
    assert answer["error"]["code"] == code
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH, "/tokenize", "/detokenize"])
async def test_an_unknown_model_is_not_found(path: str) -> None:
    body = COMPLETION | CHAT | {"tokens": [5], "model": "other"}
    if path == "/tokenize":
        del body["messages"]
    status, answer, _ = await post(path, body)
    assert status == 404
    assert_error(answer, "model", "model_not_found")


async def test_no_chat_template() -> None:
    bare = wrap(byte_level_backend(), chat_template=None)
    status, answer, _ = await post(CHAT_PATH, CHAT, model_tokenizer=bare)
    assert status == 400
    assert_error(answer, "messages")
    assert "chat template" in answer["error"]["message"]


async def test_a_body_over_the_limit() -> None:
    body = json.dumps(COMPLETION | {"user": "x" * 2000}).encode()
    limits = settings(max_body_bytes=1000)
    for data, headers in [
        (body, {}),
        (body * 1000, {}),
        (gzip.compress(body), {"Content-Encoding": "gzip"}),
    ]:
        status, answer, _ = await post(COMPLETIONS_PATH, data, api_settings=limits, headers=headers)
        assert status == 413
        assert_error(answer, None, "body_too_large")


async def test_a_body_over_the_limit_that_does_not_say_its_size() -> None:
    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with serve(ScriptedGenerator(), settings(max_body_bytes=1000)) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + COMPLETIONS_PATH, data=chunks()) as response:
            assert response.status == 413
            assert_error(await response.json(), None, "body_too_large")


async def test_a_body_as_large_as_allowed_is_read() -> None:
    body = json.dumps(COMPLETION | {"user": "x" * 500_000}).encode()
    status, _, _ = await post(COMPLETIONS_PATH, body, api_settings=settings(max_body_bytes=len(body)))
    assert status == 200


async def test_a_broken_encoding() -> None:
    status, answer, _ = await post(COMPLETIONS_PATH, b"not gzip", headers={"Content-Encoding": "gzip"})
    assert status == 400
    assert_error(answer, None, "invalid_body")


async def test_a_body_that_does_not_come() -> None:
    async with serve(ScriptedGenerator(), settings(body_timeout_s=0.1)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completion", "/v2/completions"])
async def test_an_unknown_path(method: str, path: str) -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        async with session.request(method, server.url + path) as response:
            assert response.status == 404
            assert_error(await response.json(), None, "not_found")


async def test_a_wrong_method() -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        async with session.get(server.url + COMPLETIONS_PATH) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert_error(await response.json(), None, "method_not_allowed")
        async with session.post(server.url + "/v1/models") as response:
            assert response.status == 405


async def test_an_api_key_is_asked_for() -> None:
    keyed = dataclasses.replace(settings(), api_keys=("first", "sécond"))
    async with serve(ScriptedGenerator(), keyed) as server, aiohttp.ClientSession() as session:
        for authorization in [None, "", "Bearer", "Bearer wrong", "Basic first", "first", "Bearer first2"]:
            headers = {} if authorization is None else {"Authorization": authorization}
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=headers) as response:
                assert response.status == 401
                assert_error(await response.json(), None, "invalid_api_key")
        for authorization in ["Bearer first", "bearer sécond"]:
            headers = {"Authorization": authorization}
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION, headers=headers) as response:
                assert response.status == 200
        for path in ["/health", "/ready", "/metrics"]:
            async with session.get(server.url + path) as response:
                assert response.status == 200
        async with session.get(server.url + "/v1/models") as response:
            assert response.status == 401


STATUSES = {
    Cause.CANCELLED: 499,
    Cause.CAPACITY: 429,
    Cause.TOO_LARGE: 400,
    Cause.DEADLINE: 504,
    Cause.DRAINING: 503,
    Cause.WORKER_LOST: 503,
    Cause.LEASE_LOST: 503,
    Cause.TRANSFER: 503,
    Cause.FINGERPRINT: 503,
    Cause.SUPERSEDED: 503,
    Cause.INTERNAL: 500,
}


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(cause: Cause, stream: bool) -> None:
    generator = ScriptedGenerator(failure=GenerationFailed(cause, "what happened"))
    status, answer, headers = await post(CHAT_PATH, CHAT | {"stream": stream}, generator)
    assert status == STATUSES[cause]
    assert_error(answer, None, cause.value)
    assert headers["Content-Type"].startswith("application/json")
    assert ("Retry-After" in headers) == (status in (429, 503))
    assert ("what happened" in answer["error"]["message"]) == (cause is not Cause.INTERNAL)


async def test_an_unexpected_exception_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(failure=ZeroDivisionError("secret detail"))
    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION, generator)
    assert status == 500
    assert_error(answer, None)
    assert "secret" not in json.dumps(answer)
    assert "secret detail" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("failure", [GenerationFailed(Cause.WORKER_LOST, "gone"), ZeroDivisionError("secret detail")])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)])
async def test_a_failure_in_mid_stream_is_an_error_event(failure: Exception, path: str, body: dict[str, Any]) -> None:
    generator = ScriptedGenerator(failure=failure, num_before=3, text="hello world the end of the story")
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        request = body | {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
        async with session.post(server.url + path, json=request) as response:
            assert response.status == 200
            text = (await response.read()).decode()
        events = text.strip().split("\n\n")
        assert len(events) == 4
        kind, data = events[-1].split("\n")
        assert kind == "event: error"
        assert_error(json.loads(data.removeprefix("data: ")), None)
        assert "[DONE]" not in text
        assert "secret" not in text
        for event in events[:-1]:
            (choice,) = json.loads(event.removeprefix("data: "))["choices"]
            assert choice["finish_reason"] is None
        exposition = server.metrics.exposition().decode()
    cause = failure.cause.value if isinstance(failure, GenerationFailed) else "internal"
    assert f'baton_gateway_requests_failed_total{{cause="{cause}"}} 1.0' in exposition


async def test_a_generation_that_just_stops_is_a_failure() -> None:
    class Quits(ScriptedGenerator):
        async def generate(self, generation: Any) -> Any:
            async for delta in super().generate(generation):
                yield dataclasses.replace(delta, finish_reason=None)

    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION, Quits())
    assert status == 500
    assert_error(answer, None, "internal")


async def test_too_many_requests_in_flight() -> None:
    generator = ScriptedGenerator(hang=True)
    async with serve(generator, settings(max_in_flight=2, retry_after_s=7)) as server:
        async with aiohttp.ClientSession() as session:
            held = [asyncio.create_task(session.post(server.url + CHAT_PATH, json=CHAT)) for _ in range(2)]
            while len(generator.generations) < 2:
                await asyncio.sleep(0.01)
            async with session.post(server.url + CHAT_PATH, json=CHAT) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "7"
                assert_error(await response.json(), None, "capacity")
            async with session.get(server.url + "/health") as response:
                assert response.status == 200
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            generator.hang = False
            async with asyncio.timeout(5):
                while True:
                    async with session.post(server.url + CHAT_PATH, json=CHAT) as response:
                        if response.status == 200:
                            break
                    await asyncio.sleep(0.01)


async def test_unknown_fields_are_ignored_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gateway.schemas")
    generator = ScriptedGenerator()
    forged = {"kv_transfer_params": {"remote_block_ids": [1]}, "request_id": "x", "attempt": 9, "timeout": 1}
    status, _, _ = await post(COMPLETIONS_PATH, COMPLETION | forged, generator)
    assert status == 200
    (line,) = [record.getMessage() for record in caplog.records if "ignored unknown fields" in record.getMessage()]
    assert all(name in line for name in forged)
    (generation,) = generator.generations
    assert generation.token_ids == (0, *encode("hello"))
    assert generation.budget_s == 600.0


async def test_null_and_values_that_ask_for_nothing_count_as_absent() -> None:
    harmless = {
        "temperature": None,
        "stop": None,
        "n": None,
        "stream": None,
        "stream_options": None,
        "max_tokens": None,
        "best_of": 1,
        "echo": False,
        "suffix": "",
        "logit_bias": {},
        "tools": [],
        "response_format": {"type": "text"},
    }
    status, _, _ = await post(COMPLETIONS_PATH, COMPLETION | harmless)
    assert status == 200


def test_the_vocabulary_is_the_models() -> None:
    assert tokenizer().vocab_size == settings().model_vocab_size
