"""A checkpoint as a file for llama.cpp. Runs in the environment of `install_llama_cpp`, which has no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Tensor = tuple[str, np.ndarray]

_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(tensor: str) -> str:
    """The name in GGUF of a tensor of a Qwen2 with tied embeddings. Raises `KeyError` for any other tensor."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", tensor)
    if found is None:
        return _WHOLE[tensor]
    layer, module, kind = found.groups()
    return f"blk.{layer}.{_OF_LAYER[module]}.{kind}"


def tensors(file: Path) -> Iterator[Tensor]:
    """The tensors of a safetensors file in bfloat16, as their bits."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    bits = np.memmap(file, np.uint16, "r", 8 + size) if not size % 2 else None
    assert bits is not None, "safetensors pads its header"
    for name, of in header.items():
        assert of["dtype"] == "BF16", f"{name} is {of['dtype']}"
        begin, end = of["data_offsets"]
        yield name, bits[begin // 2 : end // 2].reshape(of["shape"])


def widened(bits: np.ndarray) -> np.ndarray:
    """The float32 of bfloat16's bits, which is exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write(folder: Path, dtype: str, file: Path) -> None:
    """Write a Qwen2 whose checkpoint is in bfloat16: matrices in `dtype`, float32 or bfloat16, and vectors in float32.

    There is no vocabulary, so tokens are their ids.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("qwen2", True)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, bits in tensors(folder / "model.safetensors"):
        if dtype == "bfloat16" and bits.ndim > 1:
            kept = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name_of(name), np.asarray(bits).view(np.uint8), raw_dtype=kept)
        else:
            writer.add_tensor(name_of(name), widened(bits))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
