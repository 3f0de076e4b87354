"""Histograms of finished requests: where their time went, and how large they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from common.runtime.counting import PlainCounter, PlainHistogram
from gateway.intake.request_intake import Job
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
_TOKEN_BUCKETS: Final = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
_CHOICE_BUCKETS: Final = (1, 2, 5, 10, 20)


class FinishedMetrics:
    """Histograms of one gateway's finished requests. The time of a request is observed once, with the stages of the
    choice that ended last; the sizes are observed for each of its prompts."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def named(name: str, text: str, buckets: tuple[float, ...]) -> PlainHistogram:
            always = {"model_name": model_name}
            return PlainHistogram(f"vllm:request_{name}", text, buckets, always=always, registry=registry)

        waiting = "Waiting of the prompt at the worker that computes it."
        self._queue = named("queue_time_seconds", waiting, REQUEST_BUCKETS_S)
        self._prefill = named("prefill_time_seconds", "Computing the prompt.", REQUEST_BUCKETS_S)
        self._decode = named("decode_time_seconds", "First token to last token.", REQUEST_BUCKETS_S)
        self._inference = named("inference_time_seconds", "Prefill and decode.", REQUEST_BUCKETS_S)
        self._prompt = named("prompt_tokens", "Tokens of a prompt.", _TOKEN_BUCKETS)
        self._generated = named("generation_tokens", "Tokens generated for a choice.", _TOKEN_BUCKETS)
        longest = "Tokens of a prompt's longest choice."
        self._most_generated = named("max_num_generation_tokens", longest, _TOKEN_BUCKETS)
        self._n = named("params_n", "Choices asked for.", _CHOICE_BUCKETS)
        self._max_tokens = named("params_max_tokens", "Most tokens that each choice may have.", _TOKEN_BUCKETS)
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
        self._excesses = PlainCounter(
            "baton_gateway_timings_cut", "Requests whose workers claimed more time than there was.", registry=registry
        ).labels()

    def times(self, waterfall: Waterfall, spent: Mapping[Stage, int]) -> None:
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

    def sizes(self, job: Job, num_tokens: Mapping[int, int]) -> None:
        """Record a finished request's sizes. `num_tokens` maps each choice to its number of generated tokens."""
        if job.generates_nothing:
            return
        first = 0
        for generation in job.generations:
            lengths = [num_tokens.get(first + choice, 0) for choice in range(generation.num_choices)]
            first += generation.num_choices
            self._prompt.observe(len(generation.token_ids))
            self._most_generated.observe(max(lengths))
            self._n.observe(generation.num_choices)
            self._max_tokens.observe(generation.sampling.max_tokens)
            for length in lengths:
                self._generated.observe(length)
