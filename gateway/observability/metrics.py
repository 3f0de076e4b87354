"""The gateway's own metrics: the `vllm:*` names that dashboards know, and `baton_gateway_*`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from common.contract.errors import Cause
from common.contract.tiers import Tier
from common.runtime.counting import PlainCounter, PlainHistogram
from gateway.observability.finished_metrics import REQUEST_BUCKETS_S, FinishedMetrics
from gateway.observability.recent import Recent
from gateway.text.choice_text import CallTally

_TTFT_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TOKEN_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 20.0,
)  # fmt: skip
_REFUSALS: Final = (
    "crowded_out", "full", "handshake", "large_head", "malformed", "slow_head", "slow_reader", "stalled",
)  # fmt: skip
"""Reasons for which a connection is refused or closed."""


class _KeyCounter(PlainCounter):
    """A counter whose first label is the name of an API key."""

    def keep(self, names: Collection[str]) -> None:
        """Forget the counts of all other keys."""
        self._counts = {labels: count for labels, count in self._counts.items() if labels[0] in names}


class GatewayMetrics:
    """Counts and latencies of one gateway. Other parts register their metrics in `registry` too."""

    def __init__(self, model_name: str) -> None:
        self.registry: Final = CollectorRegistry()
        self.recent: Final = Recent()
        self._always = {"model_name": model_name}
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival of a request to its first token.", _TTFT_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Gap between two arrivals of tokens of one choice.", _TOKEN_BUCKETS_S
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time for each token of a choice after its first.",
            _TOKEN_BUCKETS_S,
        )
        self.request_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival of a request to its last token.", REQUEST_BUCKETS_S
        )
        self.prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that got a first token."
        ).labels()
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.").labels()
        self._success = self._counter("vllm:request_success", "Choices that finished, by reason.", ["finished_reason"])
        for reason in ("stop", "length", "tool_calls"):
            self._success.labels(reason)
        self._tool_calls = PlainCounter(
            "baton_gateway_tool_calls",
            "Calls of functions in answers: complete; cut; or malformed, which are in the text.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("complete", "cut", "malformed"):
            self._tool_calls.labels(outcome)
        self._requests = PlainCounter(
            "baton_gateway_requests", "HTTP requests, by answer.", ["endpoint", "code"], registry=self.registry
        )
        self._failed = PlainCounter(
            "baton_gateway_requests_failed",
            "Requests that did not finish, but for invalid ones; those of the cause capacity were refused.",
            ["cause"],
            registry=self.registry,
        )
        for cause in Cause:  # Prometheus sees no increase in a counter that first appears as 1
            self._failed.labels(cause)
        self._finished = PlainCounter(
            "baton_gateway_requests_finished",
            "Requests that finished, by tier and by whether they met the tier's targets. Those whose clients left are "
            "counted if they had missed one by then.",
            ["tier", "met"],
            registry=self.registry,
        )
        for tier in Tier:
            self._finished.labels(tier, "yes")
            self._finished.labels(tier, "no")
        self.of_finished = FinishedMetrics(self.registry, model_name)
        self.requests_in_flight = Gauge(
            "baton_gateway_requests_in_flight", "POST requests being served.", registry=self.registry
        )
        self._limited = _KeyCounter(
            "baton_gateway_requests_limited",
            "Requests refused by a limit of their API key.",
            ["key", "reason"],
            registry=self.registry,
        )
        self.connections = Gauge("baton_gateway_connections", "Connections of clients.", registry=self.registry)
        self._connections_refused = PlainCounter(
            "baton_gateway_connections_refused",
            "Connections ended because of what the client did, or for want of room.",
            ["reason"],
            registry=self.registry,
        )
        for reason in _REFUSALS:
            self._connections_refused.labels(reason)
        self._files_reloaded = PlainCounter(
            "baton_gateway_files_reloaded",
            "Times that a changed file of keys or certificates was read again.",
            ["file", "outcome"],
            registry=self.registry,
        )
        self._file_refused = Gauge(
            "baton_gateway_file_refused",
            "1 while a file of keys or certificates cannot be used, and what was before is in force.",
            ["file"],
            registry=self.registry,
        )

    def answered(self, endpoint: str, code: int) -> None:
        """Count an HTTP request and its status."""
        self._requests.labels(endpoint, str(code)).inc()

    def failed(self, cause: str) -> None:
        """Count a request that did not finish, and was not known to be invalid."""
        self._failed.labels(cause).inc()

    def limited(self, key: str, reason: str) -> None:
        """Count a request that a limit of an API key refused; `key` is the key's name, which the operator has
        chosen."""
        self._limited.labels(key, reason).inc()

    def keep_keys(self, names: Collection[str]) -> None:
        """Forget the counts of API keys that are not among `names`."""
        self._limited.keep(names)

    def connection_refused(self, reason: str) -> None:
        """Count a connection that was refused or closed, by reason."""
        self._connections_refused.labels(reason).inc()

    def reloaded(self, file: str, good: bool) -> None:
        """Count an attempt to read a changed file again, and record whether its content is now in force (`good`)."""
        self._files_reloaded.labels(file, "ok" if good else "refused").inc()
        self._file_refused.labels(file).set(not good)

    def request_finished(self, tier: Tier, now_s: float, *, met: bool) -> None:
        """Record a request that finished. `met`: within its tier's targets."""
        self._finished.labels(tier, "yes" if met else "no").inc()
        self.recent.finished(now_s, met=met)

    def left_late(self, tier: Tier) -> None:
        """Count a request whose client left after a target was missed."""
        self._finished.labels(tier, "no").inc()

    def finished(self, reason: str) -> None:
        """Count a choice that finished, by reason."""
        self._success.labels(reason).inc()

    def called(self, tally: CallTally) -> None:
        """Count the function calls of a choice."""
        self._tool_calls.labels("complete").inc(tally.complete)
        self._tool_calls.labels("cut").inc(tally.cut)
        self._tool_calls.labels("malformed").inc(tally.malformed)

    def exposition(self) -> bytes:
        """All metrics of `registry` in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> PlainHistogram:
        return PlainHistogram(name, text, buckets, always=self._always, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> PlainCounter:
        return PlainCounter(name, text, labels, always=self._always, registry=self.registry)
