"""Which settings vLLM is measured with, and that it gets them, without vLLM."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_settings
from benchmarks.peers import vllm
from benchmarks.peers.vllm import Part, Settings


def test_the_settings_with_most_tokens_are_chosen_for_each_form() -> None:
    given = (("single", 512, 10.0), ("single", 1024, 12.0), ("single", 2048, 11.0), ("pair", 512, 9.0))
    runs = [
        {"form": form, "settings": asdict(Settings(max_num_batched_tokens=number)), "output_tokens_per_s": tokens}
        for form, number, tokens in given
    ]
    chosen = {form: Settings(**settings) for form, settings in vllm_settings.chosen(runs).items()}
    assert chosen == {
        "single": Settings(max_num_batched_tokens=1024),
        "pair": Settings(max_num_batched_tokens=512),
    }


def test_what_is_recorded_is_used_and_else_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    best = Settings(max_num_batched_tokens=512, reserved_cores=1)
    records = {"vllm-settings-15m-float32": {"figures": {"chosen": {"single": asdict(best)}}}}
    monkeypatch.setattr(vllm, "recorded", records.get)
    assert vllm.chosen("single", "15m", "float32") == best
    assert vllm.chosen("pair", "15m", "float32") == Settings(), "it has not been measured"
    assert vllm.chosen("single", "15m", "bfloat16") == Settings()


def test_an_instance_gets_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Part] = []

    @contextmanager
    def instances(model: Path, parts: list[Part], dtype: str, logs: Path) -> Any:
        started.extend(parts)
        yield

    monkeypatch.setattr(vllm, "instances", instances)
    with vllm.single(Path("m"), dtype="float32", settings=Settings(max_num_batched_tokens=768, reserved_cores=1)):
        (part,) = started
    words = vllm.arguments(Path("m"), part, "float32")
    assert words[words.index("--max-num-batched-tokens") + 1] == "768"
    assert vllm.variables(part)["VLLM_CPU_OMP_THREADS_BIND"] == "0", "the last core is its API server's"
