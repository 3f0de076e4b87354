"""Random-weight checkpoints of given shapes, for measurements that do not depend on the generated text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from common.runtime.checkpoint import DEMO_FOLDER


def llama_15m(folder: Path) -> Path:
    """Write a Llama of 6 layers, width 288, vocabulary 32,000: 15 million weights; the demo model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    return _save(LlamaForCausalLM(config), folder)


def llama_long(folder: Path) -> Path:
    """Write a Llama of 2 layers, width 128, 2 KV heads and 40,960 positions: cheap enough for very long prompts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    return _save(LlamaForCausalLM(config), folder)


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
    return _save(Qwen2ForCausalLM(config).to(torch.bfloat16), folder)


def model_with_texts(scratch: Path, model: Model) -> Path:
    """Make a folder in `scratch` with this model, and a tokenizer in which every token is a word."""
    folder = scratch / "model"
    folder.mkdir()
    MODELS[model](folder)
    give_every_token_text(folder)
    return folder


def without_last_layers(folder: Path, target: Path, num_layers: int) -> Path:
    """Write the checkpoint at `folder` with its first `num_layers` layers only into `target`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, target / name)
    return target


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return folder


def give_every_token_text(folder: Path) -> None:
    """Replace the tokenizer of a checkpoint by one in which every token of the model is a word.

    Servers then send a chunk for each token; random weights mostly generate tokens that the demo model's tokenizer
    lacks. The special tokens are named, since transformers' tokenizer for Qwen2 would otherwise add one beyond the
    vocabulary.
    """
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(WordLevel({f"w{token} ": token for token in range(vocab_size)}, unk_token="w0 "))
    tokenizer.pre_tokenizer = Split(" ", "merged_with_previous")
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "w0 ")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))


Model = Literal["15m", "0.5b"]
MODELS = {"15m": llama_15m, "0.5b": qwen2_05b}
"""The models that are compared with those of other systems, by name."""
