"""Which settings vLLM is measured with, and that it gets them, without vLLM."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import record, result_tables
from benchmarks.peers import vllm
from benchmarks.peers.vllm import Part, Settings
from benchmarks.peers.vllm_plugin import baton_vllm_plugin
from benchmarks.vllm_settings import candidates

SIZE_ALONE = {"max_num_batched_tokens": 2048, "reserved_cores": 0}
BOUND: dict[str, Any] = {"vllm": {"settings": {}}}
"""Settings and peers in records from when all threads were bound."""


def measured(form: str, number: int, tokens: float, ttft_s: float) -> dict[str, Any]:
    settings = asdict(Settings(max_num_batched_tokens=number))
    return {"form": form, "settings": settings, "output_tokens_per_s": tokens, "ttft_p50_s": ttft_s, "itl_p99_s": 0.1}


def test_the_settings_with_most_tokens_are_used_and_of_nearly_equal_ones_those_with_the_earliest_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single = [measured("single", 512, 90.0, 0.1), measured("single", 1024, 98.0, 0.2)]
    single += [measured("single", 2048, 100.0, 0.5), measured("single", 4096, 97.5, 0.3)]
    pair = measured("pair", 4096, 5.0, 0.9)
    figures = {"runs": [*single, pair]}
    monkeypatch.setattr(vllm, "recorded", {"vllm-settings-15m-float32": {"figures": figures}}.get)
    assert vllm.chosen("single", "15m", "float32") == Settings(max_num_batched_tokens=1024)
    assert vllm.chosen("pair", "15m", "float32") == Settings(max_num_batched_tokens=4096)
    assert vllm.chosen("single", "15m", "bfloat16") == Settings(), "nothing is recorded"
    lines = str(result_tables.vllm_settings({"figures": figures})).splitlines()
    used = [line.split("|")[2].strip() for line in lines if line.split("|")[-2].strip() == "yes"]
    assert used == ["1024", "4096"]
    old = result_tables.vllm_settings({"figures": {"runs": [{**pair, "settings": SIZE_ALONE}]}, "peers": BOUND})
    assert "| pair | 2048 | 0 | bound |" in old
    assert "is used since with threads that are not bound" in old


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("avx2", "vllm-settings-15m-bfloat16-avx2"),
        ("avx2 avx512f", "vllm-settings-15m-bfloat16"),
        ("avx2 avx512f amx_bf16", "vllm-settings-15m-bfloat16-amx"),
    ],
)
def test_settings_that_were_measured_on_such_a_cpu_come_first(
    flags: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ("", "-avx2", "-amx")
    figures = {f"vllm-settings-15m-bfloat16{other}": {"runs": [measured("pair", 512, 9.0, 0.1)]} for other in others}
    figures[name] = {"runs": [measured("pair", 2048, 9.0, 0.1)]}
    monkeypatch.setattr(record, "cpuinfo", {"flags": flags}.get)
    monkeypatch.setattr(vllm, "recorded", {each: {"figures": of} for each, of in figures.items()}.get)
    assert vllm.chosen("pair", "15m", "bfloat16") == Settings(max_num_batched_tokens=2048)


@pytest.mark.parametrize("other", ["", "-avx2"])
def test_a_form_that_was_not_measured_on_such_a_cpu_has_the_settings_of_another_one(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {
        "vllm-settings-15m-bfloat16-amx": {"runs": [measured("single", 2048, 9.0, 0.1)]},
        "vllm-settings-15m-bfloat16" + other: {"runs": [measured("pair", 1024, 9.0, 0.1)]},
    }
    monkeypatch.setattr(record, "cpuinfo", {"flags": "avx2 avx512f amx_bf16"}.get)
    monkeypatch.setattr(vllm, "recorded", {each: {"figures": of} for each, of in figures.items()}.get)
    assert vllm.chosen("pair", "15m", "bfloat16") == Settings(max_num_batched_tokens=1024)


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
    bound = vllm.variables(Part(cores=[1], settings=Settings(threads="bound")))
    assert (bound["GOMP_CPU_AFFINITY"], bound["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "1")
    env = vllm.variables(part)
    assert env["OMP_NUM_THREADS"] == "1", "one of two cores is left to its API server"
    assert not [name for name in env if "AFFINITY" in name], "or all threads of all its processes share a core"


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("", ["_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx512_supported"]),
        ("AVX512_CORE_BF16", ["_is_avx512_bf16_supported", "_is_avx512_supported"]),
        ("AVX2", []),
    ],
)
def test_what_limits_onednn_hides_instructions_from_vllm(
    limit: str, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx512_supported")
    for name in names:
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    baton_vllm_plugin.limit_instructions()
    assert [name for name in names if getattr(torch.cpu, name)()] == left


def test_instructions_that_cannot_be_hidden_end_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ignores exceptions of what it calls then."""
    monkeypatch.delattr(torch.cpu, "_is_avx512_supported")
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(SystemExit, match="_is_avx512_supported is gone"):
        baton_vllm_plugin.limit_instructions()


def test_the_best_size_of_a_step_is_tried_with_the_other_settings() -> None:
    def tried(form: str, tokens_per_s: dict[int, float]) -> list[Settings]:
        done, yielded = [measured("other form", 8192, 1000.0, 0.1)], []
        for settings in candidates(form, done):
            tokens = tokens_per_s[settings.max_num_batched_tokens]
            done.append(measured(form, settings.max_num_batched_tokens, tokens, 0.1))
            yielded.append(settings)
        return yielded

    sizes = [Settings(max_num_batched_tokens=number) for number in (512, 1024, 2048, 4096)]
    bound = Settings(max_num_batched_tokens=1024, threads="bound")
    by_size = {512: 50.0, 1024: 90.0, 2048: 80.0, 4096: 70.0}
    assert tried("single", by_size) == [*sizes, bound, Settings(max_num_batched_tokens=1024, reserved_cores=1)]
    assert tried("pair", by_size) == [*sizes, bound]
