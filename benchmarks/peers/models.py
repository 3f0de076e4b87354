"""Checkpoints for the comparison that `benchmarks.models` does not have."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from common.runtime.checkpoint import DEMO_FOLDER


def qwen2_05b(folder: Path) -> Path:
    """Write a Qwen2 of the 0.5B model's shape with random weights in bf16; the demo model's tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder
