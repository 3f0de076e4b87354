"""Histograms of where the time of finished requests went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from common.runtime.counting import PlainHistogram
from gateway.serving.waterfall import Stage, Waterfall

_STAGE_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
)  # fmt: skip
REQUEST_BUCKETS_S: Final = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_BYTES_BUCKETS: Final = tuple(float(4**exponent) for exponent in range(6, 18))
"""4 KiB to 16 GiB."""


class StageMetrics:
    """Stage histograms. Each request is observed once, with the stages of the choice that ended last."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def phase(name: str, text: str) -> PlainHistogram:
            always = {"model_name": model_name}
            full_name = f"vllm:request_{name}_time_seconds"
            return PlainHistogram(full_name, text, REQUEST_BUCKETS_S, always=always, registry=registry)

        self._queue = phase("queue", "Waiting of the prompt at the worker that computes it.")
        self._prefill = phase("prefill", "Computing the prompt.")
        self._decode = phase("decode", "First token to last token.")
        self._inference = phase("inference", "Prefill and decode.")
        stages = PlainHistogram(
            "baton_gateway_stage_seconds",
            "Time of requests by what it was spent on; the stages of a request add up to its latency.",
            _STAGE_BUCKETS_S,
            ["stage"],
            registry=registry,
        )
        self._stages = {stage: stages.labels(stage.value) for stage in Stage}
        self._pull_bytes = PlainHistogram(
            "baton_gateway_pull_bytes", "KV bytes pulled for a request.", _BYTES_BUCKETS, registry=registry
        )
        self._hidden_pull = PlainHistogram(
            "baton_gateway_hidden_pull_seconds",
            "Time in which blocks were read while the prompt was still computed, or a moving sequence still decoded.",
            _STAGE_BUCKETS_S,
            registry=registry,
        )
        self._excesses = Counter(
            "baton_gateway_timings_cut", "Requests whose workers claimed more time than there was.", registry=registry
        )

    def observe(self, waterfall: Waterfall, spent: Mapping[Stage, int]) -> None:
        """Record a finished request's account of time; `spent` are the nanoseconds of each of its stages."""
        for stage, duration in spent.items():
            self._stages[stage].observe(duration / 1e9)
        if waterfall.first_token_at is not None:  # a request may want no token
            decode_s = waterfall.last_token_at - waterfall.first_token_at
            prefill_s = spent.get(Stage.PREFILL, 0) / 1e9
            self._queue.observe(spent.get(Stage.QUEUE, 0) / 1e9)
            self._prefill.observe(prefill_s)
            self._decode.observe(decode_s)
            self._inference.observe(prefill_s + decode_s)
        if pulls := waterfall.pulls:
            self._pull_bytes.observe(sum(each.pull_bytes for each in pulls))
            self._hidden_pull.observe(sum(each.hidden_read_s for each in pulls))
        if waterfall.excess_ns:
            self._excesses.inc()
