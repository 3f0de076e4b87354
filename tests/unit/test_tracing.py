"""Requests as OpenTelemetry spans: what they say, whose they are, and that they cost no request."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from gateway_fixtures import CHAT, CHAT_PATH, COMPLETION, COMPLETIONS_PATH, MODEL, ScriptedGenerator, serve
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from otlp_collector import Collector, running_collector

from common.contract.errors import Cause, OperatorError
from common.runtime.config import GatewaySettings, load
from gateway.__main__ import open_tracing
from gateway.observability.metrics import GatewayMetrics
from gateway.observability.request_life import RequestLife
from gateway.observability.tracing import Tracing
from gateway.serving.generation import GenerationFailed
from gateway.serving.waterfall import Stage

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "zanzibar"


@asynccontextmanager
async def traced(
    exporter: SpanExporter, generator: ScriptedGenerator | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A server whose requests are traced; every span has been exported afterwards."""
    tracing = Tracing(exporter)
    async with serve(generator or ScriptedGenerator(), traces=tracing) as server, aiohttp.ClientSession() as session:
        yield session, server.url
    await tracing.close()


async def spans_of(
    path: str, body: dict[str, Any], generator: ScriptedGenerator | None = None, **headers: str
) -> tuple[Sequence[ReadableSpan], dict[str, Any]]:
    """The spans of one request, the request's own last, and the answer."""
    exporter = InMemorySpanExporter()
    async with traced(exporter, generator) as (session, url):
        async with session.post(url + path, json=body, headers=headers) as response:
            answer = json.loads(await response.read())
    return exporter.get_finished_spans(), answer


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_is_a_span_with_its_stages_inside() -> None:
    body = CHAT | {"temperature": 0.5, "max_tokens": 7, "n": 2}
    header: dict[str, Any] = {"X-Request-Id": "mine"}
    (*stages, request), answer = await spans_of(CHAT_PATH, body, **header)
    assert (request.name, request.kind, request.parent) == (f"chat {MODEL}", SpanKind.SERVER, None)
    said = attributes(request)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "baton.request_id": "mine",
        "baton.tier": "standard",
    }
    assert said | expected == said
    assert request.status.status_code is StatusCode.UNSET
    assert stages
    at = request.start_time
    for stage in stages:
        assert stage.name in set(Stage)
        assert stage.parent is not None
        assert request.context is not None
        assert (stage.parent.span_id, stage.start_time) == (request.context.span_id, at)
        at = stage.end_time
    assert at == request.end_time
    resource = {str(name): value for name, value in request.resource.attributes.items()}
    assert resource["service.name"] == "baton-gateway"


async def test_the_callers_trace_is_continued() -> None:
    header: dict[str, Any] = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "a=b"}
    spans, _ = await spans_of(COMPLETIONS_PATH, COMPLETION, **header)
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE_ID}
    parent = spans[-1].parent
    assert parent is not None
    assert (f"{parent.span_id:016x}", parent.trace_state.get("a")) == (SPAN_ID, "b")


async def test_what_the_caller_does_not_sample_is_not_traced() -> None:
    spans, _ = await spans_of(COMPLETIONS_PATH, COMPLETION, traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")
    assert spans == ()


@pytest.mark.parametrize("header", ["", "junk", f"00-{'0' * 32}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}", "é" * 50])
async def test_a_trace_that_cannot_be_read_is_a_new_one(header: str) -> None:
    spans, _ = await spans_of(COMPLETIONS_PATH, COMPLETION, traceparent=header)
    assert spans[-1].parent is None
    assert f"{spans[-1].context.trace_id:032x}" != TRACE_ID


async def test_a_failure_is_an_error_with_its_cause() -> None:
    generator = ScriptedGenerator(failure=GenerationFailed(Cause.DEADLINE, "too late"), num_before=1)
    (*_, request), _ = await spans_of(COMPLETIONS_PATH, COMPLETION, generator)
    assert request.status.status_code is StatusCode.ERROR
    assert attributes(request)["error.type"] == "deadline"


async def test_no_text_gets_into_a_trace() -> None:
    body = {"prompt": SECRET, "stop": ["never"], "user": SECRET, "max_tokens": 40}
    spans, answer = await spans_of(COMPLETIONS_PATH, body, ScriptedGenerator(text=f"the answer is {SECRET}"))
    assert SECRET in answer["choices"][0]["text"]
    assert SECRET not in "".join(span.to_json() for span in spans)


class Broken(SpanExporter):
    """It raises, or says that it has failed."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.called = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        if self.error is not None:
            raise self.error
        return SpanExportResult.FAILURE


def counted(tracing: Tracing, name: str, result: str = "") -> float:
    return next(
        sample.value
        for metric in tracing.collect()
        for sample in metric.samples
        if sample.name == f"baton_gateway_{name}_total" and sample.labels.get("result", "") == result
    )


@pytest.mark.parametrize("error", [None, RuntimeError("no collector")])
async def test_an_exporter_that_fails_costs_spans_and_no_request(error: Exception | None) -> None:
    exporter = Broken(error)
    tracing = Tracing(exporter)
    async with serve(ScriptedGenerator(), traces=tracing) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION) as response:
            assert response.status == 200
    await tracing.close()
    assert exporter.called.is_set()
    assert counted(tracing, "spans", "failed") >= 2
    assert counted(tracing, "spans", "sent") == 0


async def test_a_request_that_cannot_be_traced_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracing = Tracing(InMemorySpanExporter())

    def broken(life: RequestLife) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(tracing, "_record", broken)
    async with serve(ScriptedGenerator(), traces=tracing) as server, aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION) as response:
                assert response.status == 200
    await tracing.close()
    assert counted(tracing, "untraced") == 3
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1, "it is logged once"


# --- the gateway -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_nothing_is_imported_where_no_collector_is_named() -> None:
    code = "import sys, gateway.__main__; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_packages_are_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(GatewaySettings, "baton gateway", ["--otlp-endpoint", "http://collector:4318"])
    monkeypatch.setitem(sys.modules, "gateway.observability.tracing", None)
    with pytest.raises(OperatorError, match=r"extra 'otel'"):
        open_tracing(settings, GatewayMetrics(MODEL))


async def test_what_becomes_of_spans_is_among_the_gateways_metrics() -> None:
    metrics = GatewayMetrics(MODEL)
    settings = load(GatewaySettings, "baton gateway", ["--otlp-endpoint", "http://127.0.0.1:9/v1/traces"])
    tracing = open_tracing(settings, metrics)
    assert tracing is not None
    assert b'baton_gateway_spans_total{result="failed"} 0.0' in metrics.exposition()
    await tracing.close()


@pytest.mark.parametrize("url", ["collector:4318", "ftp://x", "http://", "http:// x"])
def test_a_collector_is_a_url(url: str) -> None:
    with pytest.raises(OperatorError, match="otlp"):
        load(GatewaySettings, "baton gateway", ["--otlp-endpoint", url])


# --- a collector -----------------------------------------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as made:
        yield made


@pytest.mark.parametrize(("path", "expected"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/mine", "/mine")])
async def test_spans_reach_a_collector(collector: Collector, path: str, expected: str) -> None:
    tracing = Tracing.to(collector.url + path)
    async with serve(ScriptedGenerator(), traces=tracing) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION) as response:
            await response.read()
    await tracing.close()
    names = [span.name for span in collector.spans]
    assert collector.paths == [expected]
    assert f"text_completion {MODEL}" in names
    assert counted(tracing, "spans", "sent") == len(names)


async def test_leaving_does_not_wait_for_a_collector_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.observability.tracing._CLOSE_TIMEOUT_S", 0.05)
    stuck = threading.Event()

    class Stuck(Broken):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            self.called.set()
            stuck.wait(60)
            return SpanExportResult.SUCCESS

    exporter = Stuck(None)
    tracing = Tracing(exporter)
    async with serve(ScriptedGenerator(), traces=tracing) as server, aiohttp.ClientSession() as session:
        async with session.post(server.url + COMPLETIONS_PATH, json=COMPLETION) as response:
            await response.read()
    try:
        async with asyncio.timeout(30):
            await tracing.close()
        assert exporter.called.is_set()
    finally:
        stuck.set()
