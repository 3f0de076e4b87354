"""Sizes of finished requests, under the `vllm:*` names that dashboards know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from common.runtime.counting import PlainHistogram
from gateway.intake.request_intake import Job

_TOKEN_BUCKETS: Final = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)
_CHOICE_BUCKETS: Final = (1, 2, 5, 10, 20)


class SizeMetrics:
    """Size histograms of one gateway. Each prompt of a request counts as one request."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def histogram(name: str, text: str, buckets: tuple[int, ...] = _TOKEN_BUCKETS) -> PlainHistogram:
            always = {"model_name": model_name}
            return PlainHistogram(f"vllm:request_{name}", text, buckets, always=always, registry=registry)

        self._prompt = histogram("prompt_tokens", "Tokens of a prompt.")
        self._generated = histogram("generation_tokens", "Tokens generated for a choice.")
        self._most_generated = histogram("max_num_generation_tokens", "Tokens of a prompt's longest choice.")
        self._n = histogram("params_n", "Choices asked for.", _CHOICE_BUCKETS)
        self._max_tokens = histogram("params_max_tokens", "Most tokens that each choice may have.")

    def observe(self, job: Job, num_tokens: Mapping[int, int]) -> None:
        """Record a finished request. `num_tokens` maps each choice to its number of generated tokens."""
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
