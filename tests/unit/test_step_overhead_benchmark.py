"""What the measurement of a step outside the model makes of its counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record
from benchmarks.figures import spread
from benchmarks.results_page import part
from benchmarks.step_overhead import READ_EVERY, Counts, SamplerTimes, TimedBackend, per_step
from common.contract.sampling import SamplingParams
from common.engine.backend import TorchBackend
from common.engine.batch import Sample, Samples


def counts(at_s: float, steps: int, best_s: float, draw_s: float, num_reads: int) -> Counts:
    """A worker's counts. Each plain read takes a quarter of a second, and `best` after it an eighth."""
    seconds = {"best": best_s, "again": num_reads / 8, "draw": draw_s, "read": num_reads / 4}
    calls = {"best": steps + 7 - num_reads, "again": num_reads, "draw": 0, "read": num_reads}
    return Counts(at_s, at_s / 2, steps, seconds, calls)


def test_a_step_is_split_into_its_parts() -> None:
    before, after = counts(10.0, 100, 1.0, 5.0, 3), counts(22.0, 120, 7.0, 5.5, 11)
    assert per_step(before, after) == {
        "wall_us": 5e5,  # 12 s without 2 s of reads, over 20 steps
        "cpu_us": 2e5,  # 6 s without the same
        "best_us": 35e4,  # 6 s in the 12 steps without a read, and 1 s in the others
        "draw_us": 25e3,
        "outside_us": 125e3,
        "read_us": 25e4,  # a read, not a step
        "best_over_read": 2.0,  # of the 12 steps without a read
    }


def test_the_operations_of_a_backend_are_timed_and_not_changed() -> None:
    backend, times = TorchBackend(), SamplerTimes()
    timed = TimedBackend(backend, times)
    logits_NV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.0, max_tokens=1, seed=3)
    samples = Samples.of([Sample(params=params, choice=0, position=5, token_ids=(), prompt_len=5)] * 3)
    for num_calls in range(1, READ_EVERY + 2):
        best_N, tokens_N = timed.best(logits_NV)
        assert torch.equal(best_N, logits_NV.max(dim=-1).values)
        assert torch.equal(tokens_N, logits_NV.argmax(dim=-1))
        reads = 1 if num_calls <= READ_EVERY else 2
        assert times.calls == {"best": num_calls - reads, "again": reads, "draw": 0, "read": reads}
    assert times.seconds["draw"] == 0.0
    assert torch.equal(timed.draw(logits_NV, best_N, samples), backend.draw(logits_NV, best_N, samples))
    assert times.calls["draw"] == 1
    assert min(times.seconds.values()) > 0.0


def table_of(figures: dict[str, Any], workload: dict[str, Any], folder: Path) -> list[str]:
    run = {"command": "c", "commit": "c", "product": "p", "machine": {"cpu": "Abacus", "cores": 2}}
    (folder / "step-overhead.json").write_text(json.dumps(run | {"workload": workload, "figures": figures}))
    return [line for line in part("step-overhead").splitlines() if line.startswith("|")]


def test_the_record_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    rounds = [per_step(counts(0.0, 0, 0.0, 0.0, 0), counts(at_s, 10_000, 1.5, 0.5, 8)) for at_s in (12.0, 14.0, 19.0)]
    kinds = {"greedy": {name: spread([each[name] for each in rounds]) for name in rounds[0]}}
    head, _, *rows = table_of({"32": kinds, "256": kinds}, {"streams": [32, 256]}, tmp_path)
    assert head.count("|") == rows[0].count("|") == 11
    cells = "greedy | 1200 | 1000 | 500 | 250 | 50 | 900 | 700 | 0.00 |"
    assert rows == [f"| 32 | {cells}", f"| 256 | {cells}"]
