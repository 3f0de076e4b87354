"""What the engine needs to know about a checkpoint, read from its `config.json` as `transformers` reads it.

`transformers` itself takes three seconds to import in addition to torch, more than the rest of a worker's start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.contract.errors import ModelNotSupportedError, OperatorError
from common.contract.kv_layout import DTYPE_BYTES, KVLayout
from common.engine.rope import LinearScaling, Llama3Scaling, RopeConfig, Scaling, YarnScaling, yarn_attention_factor
from common.runtime.checkpoint import UNSTATED, context_tokens, read_config, vocabulary

_log = logging.getLogger(__name__)

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures and the `model_type` that each must have."""

_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "dynamic": {"factor"},
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    },
}
"""Supported types of RoPE → the keys that are read for each, as `transformers` does."""
_ROPE_KEYS_OF_ALL = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
"""Keys that any type may have. `finetuned` only tells how the model was trained."""

_Positive = Annotated[int, Field(ge=1, lt=2**31)]
_Layers = Annotated[int, Field(ge=1, le=2**16)]
_Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Stated(BaseModel):
    """The keys of `config.json` that matter to the engine. Defaults are those of `transformers`, but for those of a
    family (`UNSTATED`). Keys of the model's shape have no default, because every file states them."""

    model_config = ConfigDict(strict=True, frozen=True)

    vocab_size: _Positive
    hidden_size: _Positive
    intermediate_size: _Positive
    num_hidden_layers: _Layers
    num_attention_heads: _Positive
    max_position_embeddings: _Positive
    num_key_value_heads: _Positive | None = None
    head_dim: _Positive | None = None
    hidden_act: str = "silu"
    rms_norm_eps: _Finite = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: _Positive | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: _Finite | None = 10000.0
    original_max_position_embeddings: _Positive | None = None
    partial_rotary_factor: float | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    per_layer_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape: RMSNorm, rotary attention with grouped heads, gated SiLU."""

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
    """For each layer, to how many tokens (itself included) a token attends; None means all."""
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
        raw = read_config(folder)
        architecture = _architecture(raw, folder)
        if raw.get("quantization_config") is not None:
            raise ModelNotSupportedError(f"{folder}: quantised checkpoints (quantization_config) are not supported")
        family = MODEL_TYPES[architecture]
        if raw.get("model_type") != family:
            raise ModelNotSupportedError(
                f"{folder}: model_type {raw.get('model_type')!r} is not that of {architecture}"
            )
        stated = _stated(UNSTATED[family] | raw, architecture, folder)
        if stated.hidden_act != "silu":
            raise ModelNotSupportedError(f"{folder}: hidden_act {stated.hidden_act!r} is not supported, only 'silu'")
        if stated.per_layer_config is not None:
            raise ModelNotSupportedError(f"{folder}: layers that differ (per_layer_config) are not supported")
        num_kv_heads, head_dim = _heads(stated, folder)
        biased = stated.attention_bias and family in ("llama", "qwen3")  # the other families do not read the key
        return cls(
            vocab_size=stated.vocab_size,
            hidden_size=stated.hidden_size,
            intermediate_size=stated.intermediate_size,
            num_layers=stated.num_hidden_layers,
            num_heads=stated.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=stated.rms_norm_eps,
            tie_word_embeddings=stated.tie_word_embeddings,
            qkv_bias=biased or family == "qwen2",
            output_bias=biased,
            mlp_bias=stated.mlp_bias and family == "llama",
            qk_norm=family == "qwen3",
            windows=_windows(stated, family, folder),
            rope=_rope(stated, folder),
            max_sequence_tokens=context_tokens(raw, folder),
            eos_token_ids=_eos_token_ids(stated, folder),
            dtype=_dtype(stated, folder),
        )

    def objection(self, token_ids: Sequence[int], prediction: Sequence[int] = ()) -> str | None:
        """Why the model cannot continue `token_ids`, or verify `prediction` after them; None if it can."""
        highest = max(max(token_ids), max(prediction, default=0))
        if highest >= self.vocab_size:
            return f"token {highest} is beyond the vocabulary of {self.vocab_size}"
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


def _stated(raw: dict[str, Any], architecture: str, folder: Path) -> _Stated:
    try:
        return _Stated.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(f"{each['loc'][0]}: {each['msg']}" for each in error.errors())
        raise OperatorError(f"{folder / 'config.json'} is not a valid {architecture} config: {problems}") from error


def _heads(stated: _Stated, folder: Path) -> tuple[int, int]:
    """Number of KV heads, and the dimension of every head."""
    num_heads, num_kv_heads = stated.num_attention_heads, stated.num_key_value_heads or stated.num_attention_heads
    head_dim = stated.head_dim or stated.hidden_size // num_heads
    if num_heads % num_kv_heads or head_dim % 2 or head_dim == 0:
        raise OperatorError(
            f"{folder}: {num_heads} query heads, {num_kv_heads} KV heads of dimension {head_dim}: KV heads must divide "
            "query heads, and the dimension must be even"
        )
    return num_kv_heads, head_dim


def _windows(stated: _Stated, family: str, folder: Path) -> tuple[int | None, ...]:
    """The attention window of each layer. Mistral has one in every layer, and Llama in none. The Qwen families have one
    if `use_sliding_window` is set: in the layers that `layer_types` names or, without it, from layer
    `max_window_layers` on."""
    num_layers = stated.num_hidden_layers
    if family == "llama":
        return (None,) * num_layers
    if family == "mistral":
        if stated.layer_types is not None:
            raise ModelNotSupportedError(f"{folder}: a Mistral model with layer_types is not supported")
        return (stated.sliding_window,) * num_layers
    window = stated.sliding_window if stated.use_sliding_window else None
    layer_types = stated.layer_types
    if layer_types is None:
        return tuple(window if layer >= stated.max_window_layers else None for layer in range(num_layers))
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers or ("sliding_attention" in layer_types and window is None):
        raise OperatorError(f"{folder}: layer_types {layer_types} with sliding_window {window} makes no sense")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(stated: _Stated, folder: Path) -> RopeConfig:
    """RoPE parameters, from `rope_parameters` or, in older files, from `rope_theta` and `rope_scaling`. Logs a warning
    that names the keys that are not read, if there are any."""
    in_file = stated.rope_scaling or stated.rope_parameters or {}
    parameters = dict(in_file)
    parameters.setdefault("rope_theta", stated.rope_theta)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("original_max_position_embeddings", stated.max_position_embeddings)
    if stated.original_max_position_embeddings is not None:  # beside the parameters, it comes before theirs
        parameters["original_max_position_embeddings"] = stated.original_max_position_embeddings
    if parameters.get("partial_rotary_factor", stated.partial_rotary_factor) not in (None, 1.0):
        raise ModelNotSupportedError(f"{folder}: a partial_rotary_factor is not supported")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelNotSupportedError(f"{folder}: RoPE parameters that differ between layers are not supported")
    try:
        config = RopeConfig(theta=float(parameters["rope_theta"]), scaling=_scaling(parameters, folder))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise OperatorError(f"{folder}: incomplete RoPE parameters {parameters}: {error!r}") from error
    kind = parameters["rope_type"]
    unread = {key for key, value in in_file.items() if value is not None} - _ROPE_KEYS[kind] - _ROPE_KEYS_OF_ALL
    if unread:
        names = ", ".join(sorted(unread))
        _log.warning(
            "%s states RoPE keys that are not read for type %s, nor by transformers, and change nothing: %s",
            folder / "config.json",
            kind,
            names,
        )
    return config


def _scaling(parameters: dict[str, Any], folder: Path) -> Scaling | None:
    match parameters["rope_type"]:
        case "default":
            return None
        case "dynamic":  # changes nothing within `max_position_embeddings`, which no sequence exceeds
            float(parameters["factor"])
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
                f"{folder}: rope_type {other!r} is not supported; supported are {', '.join(_ROPE_KEYS)}"
            )


def _eos_token_ids(config: _Stated, folder: Path) -> frozenset[int]:
    """End-of-sequence tokens: the tokenizer's, and those of `generation_config.json` or, if that states none, those of
    `config.json`.

    A model that was fine-tuned for chats often ends its turns with the tokenizer's, while the two other files still
    state those of the model that it was made from. `generate` of transformers does not read the tokenizer's, nor those
    of `config.json` if there is a `generation_config.json` that states none.
    """
    name = "generation_config.json"
    stated = read_config(folder, name).get("eos_token_id") if (folder / name).exists() else None
    match config.eos_token_id if stated is None else stated:
        case None:
            token_ids: list[int] = []
        case int() as token_id if type(token_id) is int:
            token_ids = [token_id]
        case list() as token_ids if all(type(each) is int for each in token_ids):
            pass
        case _:
            raise OperatorError(f"{folder}: eos_token_id is neither a token id nor a list of them")
    ends = frozenset(token_ids) | _tokenizers_end(folder)
    if not ends:
        _log.warning("%s names no end-of-sequence token: only max_tokens and stop tokens end a sequence", folder)
    return ends


def _tokenizers_end(folder: Path) -> frozenset[int]:
    """The end-of-sequence token of `tokenizer_config.json`, if it states one that the vocabulary has."""
    name = "tokenizer_config.json"
    stated = read_config(folder, name).get("eos_token") if (folder / name).exists() else None
    text = stated.get("content") if isinstance(stated, dict) else stated
    token_id = vocabulary(folder).get(text) if isinstance(text, str) else None
    return frozenset((token_id,)) if type(token_id) is int else frozenset()


def _dtype(stated: _Stated, folder: Path) -> str | None:
    """The element type that the file states, if any. Older files call it `torch_dtype`."""
    stated_name = stated.torch_dtype if stated.dtype is None else stated.dtype
    if stated_name is None:
        return None
    name = stated_name.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelNotSupportedError(f"{folder}: dtype {name} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name
