"""What the operator and the client are told of a request's life: lines of the log, ids, and where the time has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from dispatcher_bench import Bench, failure, settle
from gateway_fixtures import (
    CHAT,
    CHAT_PATH,
    COMPLETION,
    COMPLETIONS_PATH,
    MODEL,
    ScriptedGenerator,
    post,
    serve,
    settings,
    stream_of,
)

from common.contract.errors import Cause
from gateway.serving.generation import GenerationFailed
from gateway.web.request_ids import HEADER, MAX_CHARS

SECRET = "zanzibar"


def events(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines about events, in order."""
    return [record.baton_fields for record in caplog.records if hasattr(record, "baton_fields")]


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


# --- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS_PATH, COMPLETION), (CHAT_PATH, CHAT)])
async def test_a_whole_answer_tells_where_its_time_has_gone(path: str, body: dict[str, Any]) -> None:
    _, answer, _ = await post(path, body | {"include_timings": True})
    timings = answer["usage"]["timings"]
    assert sum(timings["stages_ms"].values()) == pytest.approx(timings["e2e_ms"], abs=0.01)
    assert 0 < timings["ttft_ms"] <= timings["e2e_ms"]
    _, answer, _ = await post(path, body)
    assert "timings" not in answer["usage"]


@pytest.mark.parametrize(
    "options", [{"include_timings": True}, {"stream_options": {"include_timings": True}}], ids=["field", "option"]
)
async def test_a_stream_ends_with_where_its_time_has_gone(options: dict[str, Any]) -> None:
    *chunks, last = await stream_of(ScriptedGenerator(), COMPLETIONS_PATH, COMPLETION | options)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["timings"]["e2e_ms"] > 0
    assert last["usage"]["completion_tokens"] > 0


async def test_a_stream_with_usage_alone_has_no_timings() -> None:
    options = {"stream_options": {"include_usage": True}}
    *_, last = await stream_of(ScriptedGenerator(), COMPLETIONS_PATH, COMPLETION | options)
    assert "timings" not in last["usage"]


async def test_whether_to_tell_is_a_boolean() -> None:
    status, answer, _ = await post(COMPLETIONS_PATH, COMPLETION | {"include_timings": 1})
    assert (status, answer["error"]["param"]) == (400, "include_timings")


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_name_for_a_request_is_said_again(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        body, headers = COMPLETION | {"stream": stream}, {HEADER: "abc-123"}
        async with session.post(server.url + COMPLETIONS_PATH, json=body, headers=headers) as response:
            text = await response.text()
            assert response.headers.getall(HEADER) == ["abc-123"]
    told = [line for line in events(caplog) if "x_request_id" in line]
    assert {line["x_request_id"] for line in told} == {"abc-123"}
    (answer_id,) = {line["id"] for line in told}
    assert answer_id.startswith("cmpl-")
    assert f'"{answer_id}"' in text
    assert [line for line in caplog.messages if "abc-123" in line and answer_id in line], "none in the text format"


async def test_the_answers_id_and_the_workers_are_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """In the text format: of each attempt, and of the failure."""
    bench = Bench()
    key, task = await bench.request()
    [flow] = bench.dispatcher.open_flows()
    flow.generation.waterfall.arrived("cmpl-7", bench.clock())
    for cause in (Cause.INTERNAL, Cause.INVALID):
        newest, work = bench.newest(key)
        bench.fail([*work][-1], newest, cause)
        await settle()
    assert await failure(task) is Cause.INVALID
    assert f"request {key.request} of cmpl-7: attempt 2" in caplog.text
    assert f"request {key.request} of cmpl-7 failed: " in caplog.text
    assert {"event": "story", "id": "cmpl-7", "request": key.request} in events(caplog)
    await bench.close()


@pytest.mark.parametrize("name", ["", "x" * (MAX_CHARS + 1), "caf\u00e9", "a\tb"], ids=["empty", "long", "é", "tab"])
async def test_another_name_is_drawn_for_an_unusable_one(name: str) -> None:
    _, _, headers = await post(COMPLETIONS_PATH, COMPLETION, headers={HEADER: name})
    assert len(headers[HEADER]) == 32
    assert headers[HEADER].isalnum()


async def test_every_answer_has_a_name() -> None:
    async with serve(ScriptedGenerator()) as server, aiohttp.ClientSession() as session:
        names = set()
        for path in ("/health", "/ready", "/metrics", "/nowhere", "/v1/models"):
            async with session.get(server.url + path) as response:
                names.add(response.headers[HEADER])
        assert len(names) == 5
        async with session.get(server.url + "/health", headers=[(HEADER, "a"), (HEADER, "b")]) as response:
            assert response.headers[HEADER] not in ("a", "b")


# --- the log ---------------------------------------------------------------------------------------------------------


async def test_one_line_for_each_event(caplog: pytest.LogCaptureFixture) -> None:
    body = {"model": MODEL, "prompt": ["hello", "hello world"], "n": 2, "service_tier": "batch", "max_tokens": 5}
    await post(COMPLETIONS_PATH, body, headers={HEADER: "mine"})
    accepted, first, finished = events(caplog)
    assert accepted | {"id": "", "prompt_tokens": 0} == {
        "event": "accepted",
        "id": "",
        "x_request_id": "mine",
        "operation": "text_completion",
        "prompt_tokens": 0,
        "prompts": 2,
        "n": 2,
        "max_tokens": 5,
        "tier": "batch",
        "tenant": "",
        "stream": False,
    }
    assert (first["event"], finished["event"]) == ("first_token", "finished")
    assert finished["finish_reasons"] == ["length"] * 4
    assert finished["completion_tokens"] > 0
    assert sum(finished["stages_ms"].values()) == pytest.approx(finished["e2e_ms"], abs=0.01)


async def test_a_failure_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(failure=GenerationFailed(Cause.DEADLINE, "too late"), num_before=1)
    await post(COMPLETIONS_PATH, COMPLETION, generator)
    ends = [line for line in events(caplog) if line["event"] in ("failed", "finished", "cancelled", "refused")]
    assert [(line["event"], line["cause"], line["why"]) for line in ends] == [("failed", "deadline", "too late")]
    assert ends[0]["completion_tokens"] == 1
    assert ends[0]["e2e_ms"] >= sum(ends[0]["stages_ms"].values()) - 0.01


async def test_a_client_that_leaves_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    generator = ScriptedGenerator(hang=True, num_before=1)
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(server.url + COMPLETIONS_PATH, json=COMPLETION | {"stream": True}))
        async with asyncio.timeout(10):
            await generator.hanging.wait()
            (await asking).close()
            await generator.closed_early.wait()
    assert [line["event"] for line in events(caplog)] == ["accepted", "first_token", "cancelled"]


async def test_what_is_refused_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    await post(COMPLETIONS_PATH, COMPLETION | {"n": 0}, headers={HEADER: "mine"})
    assert events(caplog) == [
        {
            "event": "refused",
            "x_request_id": "mine",
            "path": COMPLETIONS_PATH,
            "status": 400,
            "code": "invalid_value",
            "param": "n",
        },
    ]


async def test_a_refusal_says_whose_request_it_was_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """In the line of the text format, too."""
    named = replace(settings(max_in_flight=0), tenant_header="X-Tenant")
    await post(COMPLETIONS_PATH, COMPLETION, headers={HEADER: "mine", "X-Tenant": "acme"}, api_settings=named)
    why = "0 requests are in flight, as many as may"
    [line] = events(caplog)
    assert (line["status"], line["code"], line["tenant"], line["why"]) == (429, "capacity", "acme", why)
    assert f"request mine refused with 429, code capacity, tenant acme, why {why}" in caplog.messages


async def test_a_refusal_says_nothing_that_the_client_wrote(caplog: pytest.LogCaptureFixture) -> None:
    for change in (
        {"logit_bias": {SECRET: 1}},
        {"model": SECRET},
        {"stop": [SECRET, 1]},
        {"structured_outputs": {SECRET: 1}},
    ):
        await post(COMPLETIONS_PATH, COMPLETION | change)
    assert [line["param"] for line in events(caplog)] == ["logit_bias", "model", "stop", "structured_outputs"]
    assert SECRET not in json.dumps([caplog.messages, events(caplog)])


async def test_no_text_gets_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for path, body in (
        (COMPLETIONS_PATH, COMPLETION | {"prompt": SECRET}),
        (CHAT_PATH, CHAT | {"messages": [{"role": "user", "content": SECRET}]}),
        (CHAT_PATH, CHAT | {"messages": [{"role": "user", "content": SECRET}], "n": 0}),
    ):
        await post(path, body, ScriptedGenerator(text=f"the answer is {SECRET}"))
    lines = [json.dumps([record.getMessage(), getattr(record, "baton_fields", {})]) for record in caplog.records]
    assert len(lines) > 6
    assert not [line for line in lines if SECRET in line]
