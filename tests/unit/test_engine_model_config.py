from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LINEAR_SCALING, LLAMA3_SCALING, YARN_SCALING
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.contract.errors import ModelNotSupportedError, OperatorError
from common.contract.kv_layout import KVLayout
from common.contract.messages.fields import MAX_TOKENS
from common.engine.model_config import MODEL_TYPES, ModelConfig
from common.engine.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling, inverse_frequencies
from common.runtime.checkpoint import context_tokens

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 32}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, config, generation))


def test_llama(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"torch_dtype": "bfloat16"})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (384, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.rms_norm_eps == 1e-5
    assert config.max_sequence_tokens == 256
    assert config.eos_token_ids == {1}
    assert config.dtype == "bfloat16"
    assert config.windows == (None, None)
    assert config.rope == RopeConfig(theta=10000.0)
    options = (config.tie_word_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert options == (False,) * 5
    assert config.layout(16, "float32") == KVLayout(
        num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32"
    )


def test_biases_and_norms_of_the_families(tmp_path: Path) -> None:
    llama = read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.tie_word_embeddings) == (True,) * 4
    qwen2 = read(tmp_path, QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = read(tmp_path, QWEN3)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, True)
    assert qwen3.head_dim == 32
    assert read(tmp_path, QWEN3 | {"attention_bias": True}).output_bias


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (LLAMA | {"sliding_window": 24}, (None, None)),
        (QWEN2 | {"sliding_window": 24, "max_window_layers": 1}, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}, (None, 24, 24, 24)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 9}, (None,) * 4),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 24,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            },
            (24, None, 24, None),
        ),
    ],
)
def test_windows(tmp_path: Path, config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(tmp_path, config).windows == windows


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": LINEAR_SCALING},
        {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_parameters": LLAMA3_SCALING},
        {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3_SCALING.items() if k != "rope_theta"}},
        {"rope_parameters": YARN_SCALING},
        {"rope_parameters": YARN_SCALING | {"truncate": False, "beta_fast": 16, "beta_slow": 2}},
        {"rope_parameters": YARN_SCALING | {"mscale": 1.0, "mscale_all_dim": 0.5}},
        {"rope_parameters": YARN_SCALING | {"attention_factor": 1.25}},
        {"rope_scaling": YARN_SCALING | {"attn_factor": 0.8782488562869419}},
        {"rope_parameters": YARN_SCALING, "original_max_position_embeddings": 96},
        {"rope_parameters": LLAMA3_SCALING, "original_max_position_embeddings": 96},
        {
            "rope_parameters": {k: v for k, v in LLAMA3_SCALING.items() if not k.startswith("original")},
            "original_max_position_embeddings": 96,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotation_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any], head_dim: int) -> None:
    ours = read(tmp_path, LLAMA | {"head_dim": head_dim} | rope).rope
    config = AutoConfig.from_pretrained(tmp_path)
    kind = config.rope_parameters["rope_type"]
    factor = ours.scaling.attention_factor if isinstance(ours.scaling, YarnScaling) else 1.0
    if kind == "default":
        assert ours.scaling is None
        assert ours.theta == rope.get("rope_theta", 10000.0)
        expected = ours.theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        torch.testing.assert_close(inverse_frequencies(ours, head_dim).double(), expected)
    else:
        frequencies, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        torch.testing.assert_close(inverse_frequencies(ours, head_dim), frequencies, rtol=1e-6, atol=0)
        assert factor == pytest.approx(expected_factor)


YARN_KEYS = {"attention_factor": 1.25, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("rope", "kind", "unread"),
    [
        ({}, "", ""),
        ({"rope_scaling": None, "rope_theta": 5e5}, "", ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}}, "", ""),
        ({"rope_parameters": LINEAR_SCALING}, "", ""),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "", ""),
        ({"rope_parameters": LLAMA3_SCALING}, "", ""),
        ({"rope_parameters": YARN_SCALING | YARN_KEYS | {"truncate": False}}, "", ""),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}}, "", ""),
        ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 2.0, "attn_factor": None}}, "", ""),
        ({"rope_scaling": YARN_SCALING | {"attn_factor": 0.8782488562869419}}, "yarn", "attn_factor"),
        ({"rope_scaling": YARN_SCALING | {"original": 1, "attn_factor": 1.0}}, "yarn", "attn_factor, original"),
        ({"rope_parameters": LLAMA3_SCALING | {"beta_fast": 32}}, "llama3", "beta_fast"),
        ({"rope_parameters": LINEAR_SCALING | {"attention_factor": 2.0}}, "linear", "attention_factor"),
        ({"rope_parameters": {"rope_theta": 5e5, "factor": 4.0}}, "default", "factor"),
    ],
    ids=str,
)
def test_rope_keys_that_are_not_read_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rope: dict[str, Any], kind: str, unread: str
) -> None:
    """With them a checkpoint asks for a model that `transformers` does not compute either."""
    config = read(tmp_path, LLAMA | rope)
    named = [record.getMessage() for record in caplog.records if "RoPE" in record.getMessage()]
    text = f"states RoPE keys that are not read for type {kind}, nor by transformers, and change nothing: {unread}"
    assert named == ([f"{tmp_path / 'config.json'} {text}"] if unread else [])
    without = {
        name: {key: each for key, each in value.items() if key not in unread.split(", ")}
        for name, value in rope.items()
        if isinstance(value, dict)
    }
    assert read(tmp_path, LLAMA | rope | without).rope == config.rope


@pytest.mark.parametrize("rope", [{}, LINEAR_SCALING, LLAMA3_SCALING, YARN_SCALING, YARN_SCALING | YARN_KEYS], ids=str)
def test_rope_keys_that_transformers_writes_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rope: dict[str, Any]
) -> None:
    write(tmp_path, LLAMA | {"rope_parameters": rope})
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    ModelConfig.from_folder(tmp_path)
    assert "RoPE" not in caplog.text


WRITTEN: dict[str, dict[str, Any]] = {
    "the shape alone": {},
    "null": {"eos_token_id": None, "rope_scaling": None, "sliding_window": None},
    "own heads": {"num_key_value_heads": 1, "head_dim": 48},
    "ends": {"eos_token_id": [3, 4], "tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a window that is not used": {"sliding_window": 17, "max_window_layers": 3},
    "a window": {"sliding_window": 17, "use_sliding_window": True, "max_window_layers": 3},
    "windows by default": {"use_sliding_window": True},
    "no window": {"sliding_window": None, "use_sliding_window": True},
    "layers by name": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 18},
    "an older file": {"rope_theta": 5e5, "torch_dtype": "float16"},
    "an older file, scaled": {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "both names": {"dtype": "bfloat16", "torch_dtype": "float16"},
    "both ropes": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "no rope": {"rope_parameters": {}, "rope_theta": 3e4},
    "scaled from elsewhere": {
        "original_max_position_embeddings": 96,
        "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "all of it rotates": {"partial_rotary_factor": 1.0},
}
"""What files say beside the shape, which takes 36 layers here: more than any family's `max_window_layers`."""


def test_yarn_stretches_the_context_as_the_gateway_reads_it(tmp_path: Path) -> None:
    for factor, original, context in ((4.0, 256, 1024), (4.0, 64, 256), (1.5, 1000, 1500)):
        rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        assert read(tmp_path, LLAMA | {"rope_scaling": rope}).max_sequence_tokens == context
        assert context_tokens(json.loads((tmp_path / "config.json").read_text()), tmp_path) == context


@pytest.mark.parametrize(
    "stated",
    [
        {"max_position_embeddings": 4 * MAX_TOKENS},
        {
            "max_position_embeddings": 2**17,
            "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2**17},
        },
    ],
    ids=["stated", "stretched"],
)
def test_a_context_ends_with_the_longest_sequence_that_a_message_holds(tmp_path: Path, stated: dict[str, Any]) -> None:
    """No worker would get a longer one that the gateway lets in."""
    assert read(tmp_path, LLAMA | stated).max_sequence_tokens == MAX_TOKENS
    assert context_tokens(LLAMA | stated, tmp_path) == MAX_TOKENS


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_biases_are_those_of_the_models_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Some families do not read the keys."""
    shape = {key: LLAMA[key] for key in ("vocab_size", "intermediate_size", "max_position_embeddings", "hidden_size")}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    named = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    for biases in ({}, {"attention_bias": True}, {"mlp_bias": True}):
        ours = read(tmp_path, shape | named | biases)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        theirs = {name.split(".")[-2] for name in model.state_dict() if name.endswith(".bias")}
        expected = {"q_proj", "k_proj", "v_proj"} if ours.qkv_bias else set()
        expected |= {"o_proj"} if ours.output_bias else set()
        expected |= {"gate_proj", "up_proj", "down_proj"} if ours.mlp_bias else set()
        assert theirs == expected, biases


@pytest.mark.parametrize(
    ("architecture", "written"),
    [each for each in product(MODEL_TYPES, WRITTEN) if each != ("MistralForCausalLM", "layers by name")],
)
def test_a_file_means_what_it_means_to_transformers(tmp_path: Path, architecture: str, written: str) -> None:
    shape = {key: LLAMA[key] for key in ("vocab_size", "intermediate_size", "max_position_embeddings")}
    shape |= {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 1024}
    named = {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    ours = read(tmp_path, shape | named | WRITTEN[written])
    theirs = AutoConfig.from_pretrained(tmp_path)

    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.num_layers, ours.rms_norm_eps) == (theirs.num_hidden_layers, theirs.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    stated = theirs.eos_token_id
    assert ours.eos_token_ids == set(stated if isinstance(stated, list) else [stated] if stated is not None else ())
    assert ours.dtype == (None if theirs.dtype is None else str(theirs.dtype).removeprefix("torch."))
    match theirs.model_type:
        case "llama":
            assert set(ours.windows) == {None}
        case "mistral":
            assert set(ours.windows) == {theirs.sliding_window}
        case _:
            kinds = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
            assert list(ours.windows) == kinds
    theirs.standardize_rope_params()  # as the model does once more, when it has every key of the file
    rope = theirs.rope_parameters
    assert ours.rope.theta == rope["rope_theta"]
    scalings = {"default": type(None), "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
    assert type(ours.rope.scaling) is scalings[rope["rope_type"]]
    assert getattr(ours.rope.scaling, "factor", None) == rope.get("factor")
    original = getattr(ours.rope.scaling, "original_max_position_embeddings", None)
    assert original == rope.get("original_max_position_embeddings")


def test_rope_of_older_files(tmp_path: Path) -> None:
    old = LLAMA | {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read(tmp_path, old).rope == RopeConfig(theta=1000.0, scaling=LinearScaling(factor=4.0))


@pytest.mark.parametrize(
    ("stated", "generation", "expected"),
    [
        (1, None, {1}),
        ([1, 5], None, {1, 5}),
        (1, {"eos_token_id": [7, 8]}, {7, 8}),
        (1, {"eos_token_id": 7}, {7}),
        (1, {"temperature": 0.5}, {1}),
        (None, None, set()),
    ],
)
def test_end_of_sequence_tokens(
    tmp_path: Path, stated: object, generation: dict[str, Any] | None, expected: set[int]
) -> None:
    """With a `generation_config.json` that states none, `generate` would end at none."""
    assert read(tmp_path, LLAMA | {"eos_token_id": stated}, generation).eos_token_ids == expected


@pytest.mark.parametrize("stated", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
@pytest.mark.parametrize(("generation", "expected"), [(None, {1, 9}), ({"eos_token_id": [7, 8]}, {7, 8, 9})])
def test_the_tokenizers_end_of_sequence_token_ends_a_sequence_too(
    tmp_path: Path, stated: object, generation: dict[str, Any] | None, expected: set[int]
) -> None:
    """As of a model for chats that was made from one that ends texts by another token."""
    added = [{"id": 1, "content": "<|endoftext|>"}, {"id": 9, "content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
    assert read(tmp_path, LLAMA, generation).eos_token_ids == expected


@pytest.mark.parametrize("stated", [{}, {"eos_token": None}, {"eos_token": 9}, {"eos_token": "<|im_end|>"}], ids=str)
def test_a_tokenizer_may_name_no_token_that_ends_a_sequence(
    tmp_path: Path, stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Or one that its vocabulary lacks."""
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    assert read(tmp_path, LLAMA).eos_token_ids == {1}
    assert "names no end-of-sequence token" not in caplog.text
    assert read(tmp_path, LLAMA | {"eos_token_id": None}).eos_token_ids == set()
    assert "names no end-of-sequence token" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            "GPT2LMHeadModel is not supported.*Qwen3",
        ),
        (LLAMA | {"model_type": "gemma"}, "model_type 'gemma' is not that of LlamaForCausalLM"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supported"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"torch_dtype": "float64"}, "dtype float64 is not supported"),
        (MISTRAL | {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (QWEN2 | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
        (LLAMA | {"per_layer_config": {"0": {"intermediate_size": 32}}}, "per_layer_config"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupportedError, match=message):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({k: v for k, v in LLAMA.items() if k != "architectures"}, "names no architecture"),
        (LLAMA | {"architectures": []}, "names no architecture"),
        (LLAMA | {"hidden_size": "many"}, "not a valid LlamaForCausalLM config: hidden_size"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "not a valid LlamaForCausalLM config: vocab_size"),
        (LLAMA | {"num_hidden_layers": True}, "not a valid LlamaForCausalLM config: num_hidden_layers"),
        (LLAMA | {"hidden_size": 3}, "must be even"),
        (LLAMA | {"rope_theta": None}, "incomplete RoPE parameters"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "incomplete RoPE parameters"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic"}}, "incomplete RoPE parameters"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "incomplete RoPE parameters"),
        (LLAMA | {"rope_theta": 0.0}, "not a valid LlamaForCausalLM config: rope_theta"),
        (LLAMA | {"rope_theta": math.inf}, "not a valid LlamaForCausalLM config: rope_theta"),
        (LLAMA | {"rms_norm_eps": math.nan}, "not a valid LlamaForCausalLM config: rms_norm_eps"),
        (LLAMA | {"num_hidden_layers": 10**12}, "not a valid LlamaForCausalLM config: num_hidden_layers"),
        (LLAMA | {"max_position_embeddings": 10**30}, "not a valid LlamaForCausalLM config: max_position_embeddings"),
        (LLAMA | {"vocab_size": -5}, "not a valid LlamaForCausalLM config: vocab_size"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": math.inf}},
            "incomplete RoPE parameters",
        ),
        (LLAMA | {"num_key_value_heads": 3}, "KV heads must divide"),
        (LLAMA | {"head_dim": 15}, "must be even|even rotary"),
        (LLAMA | {"eos_token_id": [True]}, "eos_token_id|valid"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "makes no sense"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "makes no sense|not a valid"),
    ],
)
def test_what_is_malformed_is_an_operators_error_of_one_line(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(OperatorError, match=message) as caught:
        read(tmp_path, config)
    assert "\n" not in str(caught.value)


def test_a_missing_or_unreadable_folder(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=re.escape(str(tmp_path / "nowhere" / "config.json"))):
        ModelConfig.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OperatorError, match="cannot be read"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(OperatorError, match="not a JSON object"):
        ModelConfig.from_folder(tmp_path)


def test_what_the_model_cannot_continue(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert config.objection(range(255)) is None
    assert config.objection([383], [383] * 1000) is None
    assert config.objection(range(256)) == "256 tokens leave no room in a context of 256"
    for token_ids, prediction in (([5, 384], ()), ([5], (6, 384))):
        assert config.objection(token_ids, prediction) == "token 384 is beyond the vocabulary of 384"
