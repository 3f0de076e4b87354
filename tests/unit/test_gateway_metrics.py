"""Names that dashboards rely on, and the latencies behind them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from gateway_fixtures import MODEL, READY, ScriptedGenerator, encode, serve, settings, tokenizer
from prometheus_client.parser import text_string_to_metric_families

from common.contract.errors import Cause
from common.contract.sampling import SamplingParams
from common.contract.tiers import Target, Tier
from gateway.answer.responses import CompletionFormat, Heading
from gateway.api_settings import SamplingDefaults
from gateway.intake.request_intake import Intake, Job
from gateway.intake.schemas import CompletionRequest, parse
from gateway.observability.metrics import GatewayMetrics
from gateway.observability.request_life import RequestLife
from gateway.serving.generation import Delta, Generation, GenerationFailed
from gateway.text.answer_parts import AnswerParts, AnswerPlan
from gateway.text.choice_text import ChoiceText, Piece
from gateway.text.stop_strings import StopTables

NAMES = {
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "baton_gateway_requests": "counter",
    "baton_gateway_requests_failed": "counter",
    "baton_gateway_requests_finished": "counter",
    "baton_gateway_requests_in_flight": "gauge",
    "baton_gateway_tool_calls": "counter",
    "baton_gateway_stage_seconds": "histogram",
    "baton_gateway_pull_bytes": "histogram",
    "baton_gateway_hidden_pull_seconds": "histogram",
    "baton_gateway_timings_cut": "counter",
    "baton_gateway_requests_limited": "counter",
    "baton_gateway_connections": "gauge",
    "baton_gateway_connections_refused": "counter",
    "baton_gateway_files_reloaded": "counter",
    "baton_gateway_file_refused": "gauge",
}


def samples(exposition: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (
            sample.name,
            tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def piece(choice: int, num_tokens: int, finish_reason: str | None = None) -> Piece:
    return Piece(choice=choice, text="", num_tokens=num_tokens, reports=(), finish_reason=finish_reason)  # type: ignore[arg-type]


def test_names_and_kinds() -> None:
    families = text_string_to_metric_families(GatewayMetrics("m").exposition().decode())
    assert {family.name: family.type for family in families} == NAMES


def test_causes_are_counted_from_zero() -> None:
    values = samples(GatewayMetrics("m").exposition().decode())
    assert {cause: values["baton_gateway_requests_failed_total", (cause,)] for cause in Cause} == dict.fromkeys(
        Cause, 0
    )


def test_a_file_is_refused_until_it_can_be_used() -> None:
    metrics = GatewayMetrics("m")
    for good, refused in ((True, 0), (False, 1), (False, 1), (True, 0)):
        metrics.reloaded("tls", good)
        assert samples(metrics.exposition().decode())["baton_gateway_file_refused", ("tls",)] == refused


def test_two_gateways_do_not_share_metrics() -> None:
    one, two = GatewayMetrics("m"), GatewayMetrics("m")
    one.finished("stop")
    assert one.exposition() != two.exposition()


def accepted(metrics: GatewayMetrics, tier: Tier = Tier.STANDARD, **options: Any) -> RequestLife:
    """A request with two choices that came at 100.0."""
    generation = Generation(
        token_ids=tuple(range(7)), num_choices=2, sampling=SamplingParams(max_tokens=9), budget_s=9.0, tier=tier
    )
    job = Job(generations=(generation,), stops=(), echoes=("",), stream=False, include_usage=False)
    answer = CompletionFormat(Heading.draw("cmpl", 0, "m"), tokenizer(), False)
    return RequestLife(make_mocked_request("POST", "/"), job, answer, 100.0, 100.25, metrics=metrics, **options)


def test_latencies_are_derived_from_pieces() -> None:
    metrics = GatewayMetrics("m")
    life = accepted(metrics)
    life.observe(piece(0, 1), 100.5)
    life.observe(piece(1, 1), 100.75)
    life.observe(piece(0, 3), 101.5)
    life.observe(piece(0, 0, "stop"), 102.0)
    life.observe(piece(1, 1, "length"), 102.75)
    life.finished(103.0)
    values = samples(metrics.exposition().decode())
    assert life.num_tokens == 6
    assert values["vllm:time_to_first_token_seconds_sum", ()] == 0.5
    assert values["vllm:time_to_first_token_seconds_count", ()] == 1
    assert values["vllm:inter_token_latency_seconds_sum", ()] == 1.0 + 2.0
    assert values["vllm:inter_token_latency_seconds_count", ()] == 2
    assert values["vllm:request_time_per_output_token_seconds_sum", ()] == pytest.approx(1.0 / 3 + 2.0)
    assert values["vllm:e2e_request_latency_seconds_sum", ()] == 3.0
    assert values["vllm:prompt_tokens_total", ()] == 7
    assert values["vllm:generation_tokens_total", ()] == 6
    assert values["vllm:request_success_total", ("stop",)] == 1
    assert values["vllm:request_success_total", ("length",)] == 1


def test_tokens_that_come_together_are_one_gap() -> None:
    """Those of a step, in a delta each; and those of a delta, which is split where calls are looked for."""
    metrics = GatewayMetrics("m")
    life, token_ids = accepted(metrics), tuple(encode("hello world the end of the story"))
    plan = AnswerPlan(
        decoder=tokenizer(),
        calls=None,
        names=frozenset(),
        most_calls=1,
        reasons=False,
        opened=False,
        include_reasoning=False,
    )
    parts = AnswerParts(ChoiceText(0, tokenizer(), StopTables(()), 0), plan)
    for delta, now in (
        (Delta(0, token_ids[:1]), 101.0),
        (Delta(0, token_ids[1:2]), 102.0),
        (Delta(0, token_ids[2:3], joined=True), 102.25),
        (Delta(0, token_ids[3:], finish_reason="length"), 104.25),
    ):
        for each in parts.pieces(delta):
            life.observe(each, now)
    values = samples(metrics.exposition().decode())
    assert life.num_tokens == len(token_ids) > 4
    assert values["vllm:inter_token_latency_seconds_count", ()] == 2
    assert values["vllm:inter_token_latency_seconds_sum", ()] == 1.0 + 2.0
    assert metrics.recent.summary(104.25)["itl_p50_s"] == pytest.approx(1.0, rel=0.2)


def test_requests_are_counted_by_tier_and_by_whether_they_met_its_targets() -> None:
    """From zero on: the first tokens of both come after five seconds."""
    metrics = GatewayMetrics("m")
    for tier, target_s in ((Tier.INTERACTIVE, 0.5), (Tier.BATCH, 60.0)):
        life = accepted(metrics, tier, target=Target(ttft_s=target_s))
        life.observe(piece(0, 1, "stop"), 105.0)
        life.finished(106.0)
    values = samples(metrics.exposition().decode())
    counts = {labels: value for (name, labels), value in values.items() if "requests_finished" in name}
    assert counts == {(met, tier.value): 0 for met in ("yes", "no") for tier in Tier} | {
        ("no", "interactive"): 1,
        ("yes", "batch"): 1,
    }


@pytest.mark.parametrize(
    ("tokens_at", "left_at", "late"),
    [
        ((), 100.4, 0),  # while it waits for its first token
        ((), 101.6, 1),
        ((101.0, 101.01), 101.5, 0),
        ((101.6, 101.61), 101.7, 1),
        ((101.0, 101.5), 101.6, 1),  # the gap
    ],
)
def test_a_client_that_leaves_late_counts_as_a_missed_target(
    tokens_at: tuple[float, ...], left_at: float, late: int
) -> None:
    """As one that waits to the end does: a pool so slow that all leave would look well else."""
    metrics = GatewayMetrics("m")
    life = accepted(metrics, Tier.STANDARD, target=Target(ttft_s=1.5, itl_s=0.1))
    for at in tokens_at:
        life.observe(piece(0, 1, None), at)
    life.failed(Cause.CANCELLED, "left", left_at)
    values = samples(metrics.exposition().decode())
    counts = {labels: value for (name, labels), value in values.items() if "requests_finished" in name}
    assert (counts["no", "standard"], counts["yes", "standard"]) == (late, 0)


async def test_requests_are_counted() -> None:
    generator = ScriptedGenerator()
    body = {"model": MODEL, "prompt": "hello"}
    ticks = iter(range(1000))
    async with serve(generator, clock=lambda: float(next(ticks))) as server, aiohttp.ClientSession() as session:
        for stream in [False, True]:
            async with session.post(server.url + "/v1/completions", json=body | {"stream": stream}) as response:
                await response.read()
        async with session.post(server.url + "/v1/completions", json=body | {"n": 0}) as response:
            assert response.status == 400
        generator.failure = GenerationFailed(Cause.DEADLINE, "too late")
        async with session.post(server.url + "/v1/completions", json=body) as response:
            assert response.status == 504
        async with session.get(server.url + "/nowhere/1") as response:
            assert response.status == 404
        async with session.get(server.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            text = await response.text()
    values = samples(text)
    assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}}' in text
    assert values["baton_gateway_requests_total", ("200", "/v1/completions")] == 2
    assert values["baton_gateway_requests_total", ("400", "/v1/completions")] == 1
    assert values["baton_gateway_requests_total", ("504", "/v1/completions")] == 1
    assert values["baton_gateway_requests_total", ("404", "unknown")] == 1
    assert values["baton_gateway_requests_failed_total", ("deadline",)] == 1
    assert values["baton_gateway_requests_in_flight", ()] == 0
    assert values["vllm:generation_tokens_total", ()] == 2 * len(encode("hello world"))
    assert values["vllm:prompt_tokens_total", ()] == 2 * (1 + len(encode("hello")))
    assert values["vllm:request_success_total", ("length",)] == 2
    assert values["vllm:time_to_first_token_seconds_count", ()] == 2
    assert values["vllm:e2e_request_latency_seconds_count", ()] == 2


async def test_sizes_of_requests_that_finished() -> None:
    generator = ScriptedGenerator(text="hello world")
    length = len(encode("hello world"))
    bodies = [
        {"prompt": [5, 6, 7], "max_tokens": 1},
        {"prompt": [[5], [6, 7]], "n": 2, "max_tokens": 100},
        {"prompt": "hello", "max_tokens": 0},
    ]
    async with serve(generator) as server, aiohttp.ClientSession() as session:
        for body in bodies:
            async with session.post(server.url + "/v1/completions", json=body) as response:
                assert response.status == 200
        generator.failure = GenerationFailed(Cause.DEADLINE, "too late")
        async with session.post(server.url + "/v1/completions", json=bodies[0]) as response:
            assert response.status == 504
        values = samples(server.metrics.exposition().decode())
    for name, expected in {
        "prompt_tokens": [3, 1, 2],
        "generation_tokens": [1, *[length] * 4],
        "max_num_generation_tokens": [1, length, length],
        "params_n": [1, 2, 2],
        "params_max_tokens": [1, 100, 100],
    }.items():
        assert values[f"vllm:request_{name}_count", ()] == len(expected)
        assert values[f"vllm:request_{name}_sum", ()] == sum(expected)
    no_numbers = [name for name, value in values.items() if math.isnan(value)]
    assert no_numbers == [], "a prompt that wants no token has no time between tokens"


async def test_the_models_sampling_defaults_give_way_to_the_request() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.05)
    intake = Intake(tokenizer(), dataclasses.replace(settings(), sampling_defaults=defaults), lambda: READY)
    job = await intake.completion(parse(CompletionRequest, {"prompt": "a", "top_k": 0, "temperature": 0}))
    sampling = job.generations[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0, 0)
    assert (sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.9, 0.1, 1.05)
