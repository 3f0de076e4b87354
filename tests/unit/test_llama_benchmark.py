"""The comparison with llama.cpp, as far as it needs no llama.cpp: the file's tensors, the turns and the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import llama, result_tables
from benchmarks.command import UsageError
from benchmarks.engine_turns import _tokens
from benchmarks.peers.gguf_file import name_of, tensors, widened
from benchmarks.turns import TurnProcess
from common.runtime.checkpoint import DEMO_FOLDER


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ("model.layers.23.self_attn.q_proj.bias", "blk.23.attn_q.bias"),
        ("model.layers.7.self_attn.o_proj.weight", "blk.7.attn_output.weight"),
        ("model.layers.7.post_attention_layernorm.weight", "blk.7.ffn_norm.weight"),
        ("model.layers.10.mlp.down_proj.weight", "blk.10.ffn_down.weight"),
    ],
)
def test_tensors_have_llama_cpp_s_names(tensor: str, name: str) -> None:
    assert name_of(tensor) == name


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_a_tensor_that_the_file_would_lack_is_an_error(tensor: str) -> None:
    with pytest.raises(KeyError):
        name_of(tensor)


def test_bfloat16_is_read_without_torch_and_widened_exactly(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    saved = {"a": torch.randn(3, 5).bfloat16(), "b": torch.tensor([-0.0, float("inf"), 1e-30, 65280.0]).bfloat16()}
    save_file(saved, file, {"format": "pt"})
    found = dict(tensors(file))
    assert set(found) == {"a", "b"}
    for name, bits in found.items():
        assert torch.equal(torch.from_numpy(widened(bits)), saved[name].float())


def test_float32_is_not_taken_for_bfloat16(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "file")
    with pytest.raises(AssertionError, match="a is F32"):
        list(tensors(tmp_path / "file"))


def test_keys_and_values_have_the_type_of_the_weights_or_the_default() -> None:
    assert {each["kv"] for each in llama.candidates("float32")} == {"float32"}
    assert {each["kv"] for each in llama.candidates("bfloat16")} == {"bfloat16", "float16"}
    with pytest.raises(UsageError, match="float16"):
        llama.candidates("float16")


def test_other_tokens_or_probabilities_are_other_weights() -> None:
    ours = [(5, -0.5), (6, -1.0), (7, -2.0)]
    near = [(5, -0.5), (6, -1.0005), (7, -2.0)]
    assert llama.agreement(ours, near, "float32") == {
        "same_tokens": 3,
        "of": 3,
        "logprob_difference": pytest.approx(0.0005),
    }
    for other in ([(5, -0.5), (6, -1.1), (7, -2.0)], [(5, -0.5), (6, -1.0), (8, -2.0)]):
        with pytest.raises(SystemExit, match="other weights"):
            llama.agreement(ours, other, "float32")
    rounded = llama.agreement(ours, [(5, -0.5), (6, -1.1), (8, -9.0)], "bfloat16")
    assert (rounded["same_tokens"], rounded["logprob_difference"]) == (2, pytest.approx(0.1))


class Scripted:
    """Answers each case with the next of its times."""

    def __init__(self, name: str, seconds: Sequence[float], asked: list[str]) -> None:
        self._name, self._seconds, self._asked = name, iter(seconds), asked

    def ask(self, case: Sequence[Any]) -> float:
        self._asked.append(self._name)
        return next(self._seconds)


def test_turns_alternate_and_the_first_round_does_not_count() -> None:
    asked: list[str] = []
    ours = Scripted("ours", [90.0] * 3 + [1.0, 9.0, 2.0] + [4.0, 3.0, 5.0], asked)
    theirs = Scripted("theirs", [90.0] * 3 + [6.0, 7.0, 8.0] + [6.0] * 3, asked)
    pair = [(cast(TurnProcess, each), ["steps"]) for each in (ours, theirs)]
    assert llama.in_turns(pair, rounds=2, times=3) == [(2.0, 7.0), (4.0, 6.0)]
    assert asked[::3] == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]


def test_the_fastest_settings_are_those_of_the_least_time() -> None:
    tried = llama.candidates("float32")
    process = cast(TurnProcess, Scripted("theirs", [9.0, 5.0, 5.0, 9.0, 4.0, 8.0], []))
    found = llama.trial(process, "steps", "file", (1, 512), tried)
    assert found == [{**tried[1], "seconds": 4.0}, {**tried[0], "seconds": 5.0}]


def test_the_engine_continues_a_prompt_as_it_does_a_longer_one() -> None:
    prompt = [5, 9, 200, 31, 77]
    models = {"demo": str(DEMO_FOLDER)}
    found = _tokens(models, 16, "demo", "float32", prompt, 4)()
    assert all(logprob < 0 for _, logprob in found)
    later = _tokens(models, 16, "demo", "float32", [*prompt, found[0][0], found[1][0]], 2)()
    assert [token for token, _ in later] == [token for token, _ in found[2:]]
    assert [logprob for _, logprob in later] == pytest.approx([logprob for _, logprob in found[2:]], abs=1e-4)


def test_the_table_names_the_settings_that_were_fastest() -> None:
    seconds = {"ours": 0.1, "theirs": 0.125, "ratio": 0.8, "ratio_min": 0.75, "ratio_max": 0.9}
    plain = {"flash_attention": False, "kv": "float32"}
    flash = {"flash_attention": True, "kv": "float16"}
    cases = [
        {"dtype": "float32", "kind": "prompts", "sizes": [512], "settings": plain, "seconds": seconds},
        {"dtype": "bfloat16", "kind": "steps", "sizes": [8, 512], "settings": flash, "seconds": seconds},
    ]
    agreed = {"float32": {"same_tokens": 16, "of": 16}, "bfloat16": {"same_tokens": 9, "of": 16}}
    lines = result_tables.llama({"figures": {"agreement": agreed, "cases": cases}}).splitlines()
    times = "100.0 / 125.0 | **0.80** (0.75 to 0.90)"
    assert lines[2:] == [
        f"| float32 | a prompt of 512 tokens | {times} | KV in float32, no flash attention |",
        f"| bfloat16 | a decode step of 8 | {times} | KV in float16, flash attention |",
        "",
        "Greedy tokens that are the same in both: 16 of 16 in float32, 9 of 16 in bfloat16.",
    ]
