"""What a step or a prompt must at least read and compute, counted by hand, and what is made of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from benchmarks import floors, result_tables
from benchmarks.floors import CONTEXT, Needs, figures_of, needs
from benchmarks.record import by_cpu
from common.engine.model_config import ModelConfig
from common.engine.weights import load_weights


def test_a_step_reads_the_weights_and_the_keys_and_values_of_its_sequences(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=False)
    config = ModelConfig.from_folder(folder)
    weights = load_weights(config, folder, "float32", torch.device("cpu"))
    of_layers = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in weights.layers]
    matrices = [weights.lm_head, *(each for layer in of_layers for each in layer)]
    numbers = sum(each.out_features * each.in_features for each in matrices)
    layout = config.layout(16, "bfloat16")
    step = needs(config, "bfloat16", "steps", 3)
    assert step.num_bytes == 2 * numbers + 3 * CONTEXT * layout.block_bytes // 16
    width = config.num_heads * config.head_dim
    assert step.num_flops == 3 * (2 * numbers + config.num_layers * 4 * width * CONTEXT)


def test_a_prompt_computes_one_row_of_logits_and_attends_to_what_came_before(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_checkpoint("llama", tmp_path, tie_word_embeddings=False))
    one, three = (needs(config, "float32", "prompts", size).num_flops for size in (1, 3))
    step = needs(config, "float32", "steps", 1).num_flops
    width = config.num_layers * config.num_heads * config.head_dim
    assert one == step - 4 * width * (CONTEXT - 1)
    head = 2 * config.vocab_size * config.hidden_size
    assert three == head + 3 * (one - head - 4 * width) + 4 * width * (1 + 2 + 3)


def test_the_larger_of_the_two_times_counts_in_each_round() -> None:
    found = figures_of(Needs(100, 1000), [(4.0, 50.0, 1000.0), (6.0, 100.0, 500.0), (9.0, 100.0, 1000.0)])
    assert (found["seconds"], found["read_s"], found["compute_s"]) == (6.0, 1.0, 1.0)
    assert (found["ratio"], found["ratio_min"], found["ratio_max"]) == (3.0, 2.0, 9.0)


def test_a_small_model_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "MODELS", {"15m": lambda folder: make_checkpoint("llama", folder)})
    monkeypatch.setattr(floors, "LOOP_BYTES", 2**20)
    made = floors.measure(tmp_path, model="15m", rounds=1, batches=(1, 2), prompts=(40,))
    assert made.name == by_cpu("floors-15m-float32-1")
    assert [(each["kind"], each["size"]) for each in made.figures["cases"]] == [
        ("steps", 1),
        ("steps", 2),
        ("prompts", 40),
    ]
    assert all(each["ratio"] > 0 for each in made.figures["cases"])
    lines = result_tables.floors({"figures": made.figures}).split("\n")
    assert lines[2].startswith("| a decode step of 1 |")
    assert lines[4].startswith("| a prompt of 40 tokens |")
    assert lines[4].split("|")[3].strip() == "-"
    assert sys.float_info.min / 2 > 0, "the loop has changed the processor's state: small numbers are zeros"
