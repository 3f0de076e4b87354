"""`baton bench` against a real gateway and real workers: everything succeeds, and every token is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stack import Process, Workers, run_forked

COMMON = ("--requests", "12", "--warmup", "2", "--output-tokens", "7", "--ttft-target-s", "60", "--timeline")


def bench(gateway: Process, path: Path, *options: str) -> dict[str, Any]:
    """Run it and read its results, which a report must confirm."""
    arguments: Sequence[str] = ("--url", gateway.facts["url"], *COMMON, *options, "--output", str(path))
    for each in (arguments, ("report", str(path))):
        done = run_forked("benchmarks.load", each)
        assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("pattern", [("--rate", "20"), ("--concurrency", "4"), ("--arrivals", "gamma", "--rate", "30")])
def test_completions(main_gateway: Process, tmp_path: Path, pattern: tuple[str, ...]) -> None:
    body = bench(main_gateway, tmp_path / "run.json", "--input-tokens", "90", *pattern)
    summary = body["run"]["summary"]
    assert summary["outcomes"] == {"ok": 12}
    assert (summary["tokens"]["prompt"], summary["tokens"]["output"]) == (12 * 90, 12 * 7)
    assert summary["tokens"]["counted_by_usage"] == 12
    assert (summary["tokens"]["prompt_not_as_asked"], summary["tokens"]["output_not_as_asked"]) == (0, 0)
    assert summary["goodput"]["attainment"] == 1.0
    assert body["endpoint"]["server"].startswith("Python")


def test_conversations(main_gateway: Process, tmp_path: Path) -> None:
    options = ("--api", "chat", "--turns", "3", "--input-tokens", "8", "--requests", "3", "--warmup", "0")
    body = bench(main_gateway, tmp_path / "run.json", *options)
    summary = body["run"]["summary"]
    assert summary["outcomes"] == {"ok": 9}
    assert summary["tokens"]["output"] == 9 * 7
    prompts = [record["prompt_tokens"] for record in body["run"]["timeline"]["records"]]
    assert all(prompts[3 * i] < prompts[3 * i + 1] < prompts[3 * i + 2] for i in range(3)), prompts


def test_prompts_of_a_trace_share_their_prefixes(main_pool: Workers, main_gateway: Process, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 600 + 10 * index, "output_length": 5, "hash_ids": [0, 1 + index]}
        for index in range(4)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = main_pool.metric("vllm:prefix_cache_hits_total")
    options = ("--arrivals", "trace", "--workload", "trace", "--trace", str(trace), "--requests", "4", "--warmup", "0")
    body = bench(main_gateway, tmp_path / "run.json", *options, "--rate", "2", "--concurrency", "1")
    assert body["run"]["summary"]["outcomes"] == {"ok": 4}
    assert body["run"]["summary"]["tokens"]["output"] == 20
    assert main_pool.metric("vllm:prefix_cache_hits_total") - before >= 3 * 496
