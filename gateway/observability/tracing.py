"""Requests as OpenTelemetry spans, in the semantic conventions for generative AI; without prompts or answers.

Imported only if a collector is configured, because the packages come with the extra `otel`. A request becomes a span
when it ends, with a child span for each stage of its waterfall. A slow or failing collector costs spans, never
requests: a thread of the SDK sends the spans from a bounded queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.runtime.probes import counter
from gateway.observability.request_life import RequestLife

_SEND_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_QUEUED = 16_384
"""Most spans waiting to be sent, enough for more than a thousand requests; further spans are dropped."""

_LOG = logging.getLogger(__name__)


class Tracing(Collector):
    """Sends requests to a collector (`gateway.observability.request_life.Traces`), and counts sent and failed spans."""

    def __init__(self, exporter: SpanExporter) -> None:
        """`OTEL_TRACES_SAMPLER` decides whether a request is traced; by default as the caller's `traceparent` says, and
        without it every one."""
        self._exporter = _Counting(exporter)
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "baton-gateway"}
        self._provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=_MAX_QUEUED))
        self._tracer = self._provider.get_tracer("baton.gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._num_broken = 0
        self._num_made = 0

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """A `Tracing` that sends OTLP over HTTP to `endpoint`; `/v1/traces` is added if that has no path."""
        url = endpoint if urlsplit(endpoint).path not in ("", "/") else endpoint.rstrip("/") + "/v1/traces"
        return cls(OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT_S))

    def record(self, life: RequestLife) -> None:
        """Record an ended request as spans."""
        try:
            self._record(life)
        except Exception:  # noqa: BLE001 (a tracing error must not fail a request)
            self._num_broken += 1
            if self._num_broken == 1:
                _LOG.exception("a request could not be traced; the next ones will be counted only")

    def collect(self) -> Iterable[Metric]:
        """Current values of the Prometheus metrics."""
        spans = {"sent": self._exporter.num_sent, "failed": self._exporter.num_failed}
        yield counter("baton_gateway_spans", "Spans by what became of them.", spans, "result")
        text = "Spans made; what is neither sent nor failed waits, or was dropped."
        yield counter("baton_gateway_spans_made", text, self._num_made)
        yield counter("baton_gateway_untraced", "Requests that could not be traced.", self._num_broken)

    async def close(self) -> None:
        """Send the remaining spans, for at most `_CLOSE_TIMEOUT_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_TIMEOUT_S)

    def _record(self, life: RequestLife) -> None:
        began_ns = life.arrived_unix_ns
        model = life.heading.model
        span = self._tracer.start_span(
            f"{life.operation} {model}",
            context=self._propagator.extract(life.trace_headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(life),
            start_time=began_ns,
        )
        if not span.is_recording():
            return
        if life.cause is not None:
            span.set_attribute("error.type", life.cause.value)
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for segment in life.waterfall.segments:
            stage = self._tracer.start_span(
                segment.stage.value,
                context=inside,
                attributes={"baton.attempt": segment.attempt},
                start_time=began_ns + segment.start_ns,
            )
            stage.end(began_ns + segment.end_ns)
        self._num_made += len(life.waterfall.segments) + 1
        span.end(began_ns + life.waterfall.e2e_ns)


class _Counting(SpanExporter):
    """An exporter that counts sent and failed spans; the SDK logs the failures."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_sent = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans; called on the SDK's thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_sent += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut the exporter down."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send buffered spans."""
        return self._exporter.force_flush(timeout_millis)


def _attributes(life: RequestLife) -> Mapping[str, str | int | float | bool | Sequence[str]]:
    job, heading = life.job, life.heading
    first = job.generations[0]
    sampling = first.sampling
    attributes: dict[str, str | int | float | bool | Sequence[str]] = {
        "gen_ai.operation.name": life.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": heading.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stream": job.stream,
        "gen_ai.response.id": heading.id,
        "gen_ai.response.model": heading.model,
        "gen_ai.response.finish_reasons": tuple(life.finish_reasons),
        "gen_ai.usage.input_tokens": job.num_prompt_tokens,
        "gen_ai.usage.output_tokens": life.num_tokens,
        "baton.request_id": life.request_id,
        "baton.tier": first.tier.value,
        "baton.attempts": len(life.waterfall.legs),
    }
    if first.num_choices != 1:
        attributes["gen_ai.request.choice.count"] = first.num_choices
    if life.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = life.ttft_s
    if life.waterfall.legs:
        last = life.waterfall.legs[-1]
        attributes["baton.decode_worker"] = last.decode_address
        if last.prefill_address is not None:
            attributes["baton.prefill_worker"] = last.prefill_address
    return attributes
