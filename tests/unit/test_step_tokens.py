"""The histogram of the tokens of engine steps, as dashboards for vLLM ask for it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from common.runtime.counting import step_tokens


def test_step_tokens_have_the_name_and_the_buckets_of_vllm() -> None:
    metric = step_tokens("owner/tiny")
    for num_tokens in (1, 8, 9, 512, 20_000):
        metric.observe(num_tokens)
    registry = CollectorRegistry()
    registry.register(metric)
    lines = generate_latest(registry).decode().splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    name, label = "vllm:iteration_tokens_total", 'model_name="owner/tiny"'
    bounds = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    counts = [told.pop(f'{name}_bucket{{le="{bound:.1f}",{label}}}') for bound in bounds]
    assert counts == ["1.0", "2.0", *["3.0"] * 5, *["4.0"] * 6]
    assert told == {
        f'{name}_bucket{{le="+Inf",{label}}}': "5.0",
        f"{name}_count{{{label}}}": "5.0",
        f"{name}_sum{{{label}}}": str(float(1 + 8 + 9 + 512 + 20_000)),
    }
