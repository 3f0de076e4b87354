"""What the engine needs to know of a checkpoint, read from its `config.json` with `transformers`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from common.contract.errors import ModelNotSupportedError, OperatorError
from common.contract.kv_layout import DTYPE_BYTES, KVLayout
from common.engine.rope import LinearScaling, Llama3Scaling, RopeConfig, Scaling, YarnScaling, yarn_attention_factor

_log = logging.getLogger(__name__)

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures and the `model_type` that each must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape: RMSNorm, rotary attention with grouped heads, gated SiLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head of queries and keys, before the rotation."""
    windows: tuple[int | None, ...]
    """For each layer, how many tokens (itself included) a token attends to; None is all."""
    rope: RopeConfig
    max_sequence_tokens: int
    eos_token_ids: frozenset[int]
    dtype: str | None
    """Element type that the configuration states, a key of `DTYPE_BYTES`."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read a checkpoint folder; nothing is downloaded.

        Raises `ModelNotSupportedError` for an architecture or a feature that the engine does not implement, and
        `OperatorError` for a folder that is missing or malformed.
        """
        raw = _read_json(folder / "config.json")
        architecture = _architecture(raw, folder)
        if raw.get("quantization_config") is not None:
            raise ModelNotSupportedError(f"{folder}: quantised checkpoints (quantization_config) are not supported")
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise OperatorError(f"{folder / 'config.json'} is not a valid {architecture} config: {reason}") from error
        if config.model_type != MODEL_TYPES[architecture]:
            raise ModelNotSupportedError(f"{folder}: model_type {config.model_type!r} is not that of {architecture}")
        if config.hidden_act != "silu":
            raise ModelNotSupportedError(f"{folder}: hidden_act {config.hidden_act!r} is not supported, only 'silu'")
        family = config.model_type
        attention_bias = bool(getattr(config, "attention_bias", False))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if config.num_attention_heads % config.num_key_value_heads or head_dim % 2:
            raise OperatorError(
                f"{folder}: {config.num_attention_heads} query heads, {config.num_key_value_heads} KV heads of "
                f"dimension {head_dim}: KV heads must divide query heads, and the dimension must be even"
            )
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
            windows=_windows(config, folder),
            rope=_rope(config, folder),
            max_sequence_tokens=config.max_position_embeddings,
            eos_token_ids=_eos_token_ids(config, folder),
            dtype=_dtype(config, folder),
        )

    def objection(self, token_ids: Sequence[int]) -> str | None:
        """Why the model cannot go on from `token_ids`; None if it can."""
        if max(token_ids) >= self.vocab_size:
            return f"token {max(token_ids)} is beyond the vocabulary of {self.vocab_size}"
        if len(token_ids) >= self.max_sequence_tokens:
            return f"{len(token_ids)} tokens leave no room in a context of {self.max_sequence_tokens}"
        return None

    def layout(self, block_size: int, dtype: str) -> KVLayout:
        """Geometry of the KV blocks of this model."""
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise OperatorError(f"{path} is not a JSON object")
    return content


def _architecture(raw: dict[str, Any], folder: Path) -> str:
    match raw.get("architectures"):
        case [str() as architecture, *_]:
            pass
        case _:
            raise OperatorError(f"{folder / 'config.json'} names no architecture")
    if architecture not in MODEL_TYPES:
        raise ModelNotSupportedError(
            f"{folder}: architecture {architecture} is not supported; supported are {', '.join(MODEL_TYPES)}"
        )
    return architecture


def _windows(config: Any, folder: Path) -> tuple[int | None, ...]:
    """Mistral slides in every layer; the Qwen families in those that `layer_types` names (as transformers derives it
    from `use_sliding_window` and `max_window_layers`); Llama in none."""
    num_layers: int = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * num_layers
    window: int | None = config.sliding_window
    if config.model_type == "mistral":
        return (window,) * num_layers
    layer_types: list[str] = config.layer_types
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers or ("sliding_attention" in layer_types and not window):
        raise OperatorError(f"{folder}: layer_types {layer_types} with sliding_window {window} makes no sense")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(config: Any, folder: Path) -> RopeConfig:
    """From `rope_parameters`, into which transformers also brings `rope_theta` and `rope_scaling` of older files."""
    parameters: dict[str, Any] = config.rope_parameters
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelNotSupportedError(f"{folder}: a partial_rotary_factor is not supported")
    try:
        return RopeConfig(theta=float(parameters["rope_theta"]), scaling=_scaling(parameters, folder))
    except (KeyError, TypeError) as error:
        raise OperatorError(f"{folder}: incomplete RoPE parameters {parameters}: {error!r}") from error


def _scaling(parameters: dict[str, Any], folder: Path) -> Scaling | None:
    match parameters["rope_type"]:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=float(parameters["factor"]))
        case "llama3":
            return Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
            )
        case "yarn":
            factor = float(parameters["factor"])
            attention_factor = parameters.get("attention_factor")
            if attention_factor is None:
                attention_factor = yarn_attention_factor(
                    factor, parameters.get("mscale"), parameters.get("mscale_all_dim")
                )
            return YarnScaling(
                factor=factor,
                original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
                attention_factor=float(attention_factor),
                beta_fast=float(parameters.get("beta_fast") or 32),
                beta_slow=float(parameters.get("beta_slow") or 1),
                truncate=bool(parameters.get("truncate", True)),
            )
        case other:
            raise ModelNotSupportedError(
                f"{folder}: rope_type {other!r} is not supported; supported are default, linear, llama3, yarn"
            )


def _eos_token_ids(config: Any, folder: Path) -> frozenset[int]:
    """As `generate` does: those of `generation_config.json` if it states any, otherwise those of `config.json`."""
    path = folder / "generation_config.json"
    stated = _read_json(path).get("eos_token_id") if path.exists() else None
    match config.eos_token_id if stated is None else stated:
        case None:
            _log.warning("%s names no end-of-sequence token: only max_tokens and stop tokens end a sequence", folder)
            return frozenset()
        case bool():
            pass
        case int() as token_id:
            return frozenset((token_id,))
        case list() as token_ids if all(type(each) is int for each in token_ids):
            return frozenset(token_ids)
    raise OperatorError(f"{folder}: eos_token_id is neither a token id nor a list of them")


def _dtype(config: Any, folder: Path) -> str | None:
    if config.dtype is None:
        return None
    name = str(config.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelNotSupportedError(f"{folder}: dtype {name} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name
