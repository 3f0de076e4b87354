"""Every refusal and failure has its status, its shape and the field at fault."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import bad_fields
import openai
import pytest
import pytest_asyncio
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    CONTEXT,
    MESSAGES,
    MODEL,
    Refusing,
    ScriptedGenerator,
    assert_error,
    byte_level_backend,
    encode,
    plain_openai,
    post,
    serve,
    serve_refusing,
    settings,
    wrap,
)

from common.contract.errors import Cause
from gateway.serving.generation import GenerationFailed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing() -> AsyncIterator[Refusing]:
    async with serve_refusing() as server:
        yield server


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *[
            (COMPLETIONS_PATH, COMPLETION | change, param)
            for change, param in bad_fields.COMMON + bad_fields.COMPLETION
        ],
        *[(CHAT_PATH, CHAT | change, param) for change, param in bad_fields.COMMON + bad_fields.CHAT],
        (COMPLETIONS_PATH, {"model": MODEL}, "prompt"),
        (CHAT_PATH, {"model": MODEL}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": ""}]}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [2] * (CONTEXT + 1)}, "tokens"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_a_bad_field_is_named(refusing: Refusing, path: str, body: Any, param: str) -> None:
    assert_error(await refusing.refusal(path, body), param)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", bad_fields.NOT_JSON.values(), ids=bad_fields.NOT_JSON)
async def test_what_is_not_a_json_object_is_refused(refusing: Refusing, path: str, body: bytes) -> None:
    assert_error(await refusing.refusal(path, body), None)


async def test_a_wrong_tier_is_told_the_right_ones() -> None:
    _, answer, _ = await post(CHAT_PATH, CHAT | {"service_tier": "gold"})
    for name in ("interactive", "standard", "batch", "auto", "default", "priority", "flex"):
        assert name in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH])
@pytest.mark.parametrize(
    "names", [["x" * 257], ["a\tb"], ["a\u2028b"], [b"\xff"], ["acme", "umbrella"], ["acme", "acme"]], ids=repr
)
async def test_a_tenant_that_is_no_name_is_refused(path: str, names: list[str | bytes]) -> None:
    """Two headers mean that somebody has added to what another wrote: nobody says which of them to believe."""
    generator = ScriptedGenerator()
    body = json.dumps(COMPLETION | CHAT).encode()
    lines = b"".join(b"X-Tenant: %b\r\n" % (n if isinstance(n, bytes) else n.encode()) for n in names)
    async with serve(generator, dataclasses.replace(settings(), tenant_header="x-tenant")) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % path.encode()
        writer.write(head + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head, _, answer = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
        writer.close()
    assert b" 400 " in head.splitlines()[0]
    assert_error(json.loads(answer), None, "invalid_tenant")
    assert "x-tenant" in json.loads(answer)["error"]["message"]
    assert generator.generations == []


async def test_a_number_that_overflows_a_double_is_refused() -> None:
    status, answer, _ = await post(COMPLETIONS_PATH, b'{"prompt": "hello", "temperature": 1e999}')
    assert status == 400
    assert_error(answer, "temperature")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt": [2] * CONTEXT}, "context_length_exceeded"),
        ({"max_tokens": CONTEXT}, "context_length_exceeded"),
        ({"best_of": 2}, "unsupported_parameter"),
        ({"temperature": -1}, "invalid_value"),
    ],
)
async def test_the_code_tells_refusals_apart(change: dict[str, object], code: str) -> None:
    _, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | change)
    assert answer["error"]["code"] == code
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("change", [{"prompt": [2] * CONTEXT}, {"prompt": "9" * CONTEXT}, {"max_tokens": CONTEXT}])
async def test_a_context_that_is_exceeded_is_told_in_the_words_of_openai(change: dict[str, object]) -> None:
    """Clients look for them in the message, not for the code."""
    _, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | change)
    assert answer["error"]["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")


@pytest.mark.parametrize(("cause", "num_requests"), [(Cause.POISON, 1), (Cause.INTERNAL, 2)])
async def test_the_openai_client_sends_what_crashes_workers_only_once(cause: Cause, num_requests: int) -> None:
    """Each repetition would begin without suspicion, and crash as many workers again."""
    generator = ScriptedGenerator(failure=GenerationFailed(cause, "two workers have crashed with this request"))
    async with serve(generator) as server, plain_openai(server.url, max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert refused.value.code == cause
    assert refused.value.response.headers.get("x-should-retry") == ("false" if cause is Cause.POISON else None)
    assert len(generator.generations) == num_requests


@pytest.mark.parametrize("path", [COMPLETIONS_PATH, CHAT_PATH, "/tokenize", "/detokenize"])
async def test_an_unknown_model_is_not_found(path: str) -> None:
    body = COMPLETION | CHAT | {"tokens": [5], "model": "other"}
    if path == "/tokenize":
        del body["messages"]
    status, answer, _ = await post(path, body)
    assert status == 404
    assert_error(answer, "model", "model_not_found")


async def test_only_a_short_conversation_is_rendered_on_the_event_loops_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = wrap(byte_level_backend(), chat_template="{{ messages[0].content }}"), list[int]()
    render = tokenizer.render_chat

    def rendered(*arguments: Any) -> str:
        threads.append(threading.get_ident())
        return render(*arguments)

    monkeypatch.setattr(tokenizer, "render_chat", rendered)
    one = [{"role": "user", "content": "hello"}]
    async with serve(ScriptedGenerator(), model_tokenizer=tokenizer) as server, aiohttp.ClientSession() as session:
        for messages in (one, 9 * one, one):
            async with session.post(server.url + CHAT_PATH, json=CHAT | {"messages": messages}) as response:
                assert response.status == 200
    assert [each == threading.get_ident() for each in threads] == [True, False, True]


async def test_no_chat_template() -> None:
    bare = wrap(byte_level_backend(), chat_template=None)
    status, answer, _ = await post(CHAT_PATH, CHAT, model_tokenizer=bare)
    assert status == 400
    assert_error(answer, "messages")
    assert "chat template" in answer["error"]["message"]


async def test_a_body_over_the_limit() -> None:
    body = json.dumps(COMPLETION | {"user": "x" * 2000}).encode()
    limits = settings(max_body_bytes=1000)
    for data in (body, body * 1000):
        status, answer, _ = await post(COMPLETIONS_PATH, data, api_settings=limits)
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


async def test_a_compressed_body_is_not_taken() -> None:
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    status, answer, _ = await post(COMPLETIONS_PATH, packed, headers={"Content-Encoding": "gzip"})
    assert status == 415
    assert_error(answer, None, "unsupported_encoding")


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


async def test_unknown_fields_are_ignored() -> None:
    generator = ScriptedGenerator()
    forged = {"kv_transfer_params": {"remote_block_ids": [1]}, "request_id": "x", "attempt": 9, "timeout": 1}
    status, _, _ = await post(COMPLETIONS_PATH, COMPLETION | forged, generator)
    assert status == 200
    (generation,) = generator.generations
    assert generation.token_ids == (0, *encode("hello"))
    assert generation.budget_s == 86400.0


async def test_null_and_values_that_ask_for_nothing_count_as_absent() -> None:
    harmless: dict[str, Any] = {
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
        "model": "",
        "thinking_token_budget": -1,
        "watermarking": False,
    }
    status, _, _ = await post(COMPLETIONS_PATH, COMPLETION | harmless)
    assert status == 200
