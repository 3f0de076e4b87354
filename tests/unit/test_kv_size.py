"""`baton kv-size`: exact sizes, where shapes come from, and one line about whatever is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES
from transformers import AutoConfig

from common.contract.errors import OperatorError
from common.engine.model_config import ModelConfig
from common.runtime.checkpoint import DEMO_FOLDER
from common.runtime.config import DeviceType, PrefillSettings
from common.runtime.config import load as load_role
from common.runtime.kv_size import (
    KNOWN_SHAPES,
    KVShape,
    KVSizeSettings,
    find_shape,
    human,
    read_shape,
    size_of_model,
    table_of_known_models,
)
from common.runtime.options import load_options

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "dtype": "bfloat16",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def load(*arguments: str) -> KVSizeSettings:
    return load_options(KVSizeSettings, "baton kv-size", arguments, (KVSizeSettings,))


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key not in keys}


def cells(line: str) -> list[str]:
    return re.split(" {2,}", line)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`baton kv-size ARGUMENTS`, as a process."""
    command = [sys.executable, "-m", "common.runtime.cli", "kv-size", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | env)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "token", "block", "at_4096"),
    [
        ("llama-2-7b", "512 KiB", "8 MiB", "2 GiB"),
        ("llama-3-8b", "128 KiB", "2 MiB", "512 MiB"),
        ("llama-3-70b", "320 KiB", "5 MiB", "1.25 GiB"),
        ("qwen2.5-0.5b", "12 KiB", "192 KiB", "48 MiB"),
        ("qwen2.5-7b", "56 KiB", "896 KiB", "224 MiB"),
    ],
)
def test_well_known_models(model: str, token: str, block: str, at_4096: str) -> None:
    lines = size_of_model(model, load("--block-size", "16")).splitlines()[1:]
    assert [cells(line)[:2] for line in lines] == [
        ["per token", token],
        ["per block of 16", block],
        ["4096 tokens", at_4096],
    ]
    (row,) = [
        line for line in table_of_known_models(load("--block-size", "16")).splitlines() if line.startswith(f"{model} ")
    ]
    assert cells(row)[-3:] == [token, block, at_4096]


def test_every_figure_of_one_model() -> None:
    options = (
        "--block-size",
        "16",
        "--tokens",
        "16,17",
        "--tokens",
        "100",
        "--dtype",
        "float32",
        "--kv-cache-bytes",
        str(2**28 + 2**20),
    )
    assert size_of_model("llama-2-7b", load(*options)).splitlines() == [
        "llama-2-7b: 32 layers, 32 KV heads of dimension 128, float32",
        "per token              1 MiB    1048576 bytes",
        "per block of 16       16 MiB   16777216 bytes",
        "16 tokens             16 MiB   16777216 bytes",
        "17 tokens             32 MiB   33554432 bytes",
        "100 tokens           112 MiB  117440512 bytes",
        "fit into 257 MiB  256 tokens        16 blocks",
    ]


@pytest.mark.parametrize(
    ("width", "block", "fitting"), [(2, "4 MiB", "4096"), (8, "1 MiB", "4096"), (16, "1 MiB", "2048")]
)
def test_a_rank_holds_its_heads_of_a_block(width: int, block: str, fitting: str) -> None:
    """A copy of a head takes memory, too."""
    told = size_of_model(
        "llama-3-8b", load("--tensor-parallel", str(width), "--block-size", "64", "--kv-cache-bytes", str(2**29))
    )
    assert re.search(rf"per block of 64 +{block} ", told), told
    assert re.search(rf"fit into 512 MiB +{fitting} tokens", told), told


def test_heads_that_cannot_be_divided_are_named() -> None:
    with pytest.raises(OperatorError, match="7 neither divides the model's 4 KV heads nor is a multiple of them"):
        size_of_model("qwen2.5-7b", load("--tensor-parallel", "7"))
    with pytest.raises(OperatorError, match="3 does not divide the model's 32 query heads"):
        size_of_model("llama-3-8b", load("--tensor-parallel", "3"))


def test_models_that_cannot_be_divided_are_named_below_the_others() -> None:
    told = table_of_known_models(load("--tensor-parallel", "4")).splitlines()
    assert told[-1] == "not to be divided among 4 ranks: qwen2.5-0.5b"
    assert len(told) == 2 + len(KNOWN_SHAPES) - 1
    assert table_of_known_models(load("--tensor-parallel", "15")).startswith("not to be divided among 15 ranks: llama")


@pytest.mark.parametrize(
    ("block_size", "kv_cache_bytes", "fitting"),
    [
        (16, 2**31, "4096 tokens"),
        (16, 2**31 - 1, "4080 tokens"),
        (256, 2**31 - 1, "3840 tokens"),
        (1, 2**31 - 1, "4095 tokens"),
        (16, 1, "0 tokens"),
    ],
)
def test_what_fits_is_whole_blocks(block_size: int, kv_cache_bytes: int, fitting: str) -> None:
    settings = load("--block-size", str(block_size), "--kv-cache-bytes", str(kv_cache_bytes))
    assert f" {fitting} " in size_of_model("llama-2-7b", settings).splitlines()[-1]
    assert table_of_known_models(settings).splitlines()[1].endswith(f" {fitting}")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1025, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (2**30, "1 GiB"),
        (2**40, "1024 GiB"),
    ],
)
def test_only_what_is_exact_has_no_fraction(num_bytes: int, text: str) -> None:
    assert human(num_bytes) == text


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONFIG, (3, 2, 16, "bfloat16")),
        (CONFIG | {"head_dim": 128}, (3, 2, 128, "bfloat16")),
        (CONFIG | {"head_dim": None}, (3, 2, 16, "bfloat16")),
        (CONFIG | {"num_key_value_heads": None}, (3, 4, 16, "bfloat16")),
        (without("num_key_value_heads"), (3, 4, 16, "bfloat16")),
        (without("hidden_size") | {"head_dim": 8}, (3, 2, 8, "bfloat16")),
        (without("dtype") | {"torch_dtype": "float16"}, (3, 2, 16, "float16")),
        (without("dtype"), (3, 2, 16, None)),
        (CONFIG | {"dtype": "torch.float16"}, (3, 2, 16, "float16")),
    ],
)
def test_shape_of_a_configuration(
    config: dict[str, Any], shape: tuple[int, int, int, str | None], tmp_path: Path
) -> None:
    num_layers, num_kv_heads, head_dim, dtype = shape
    expected = KVShape(num_layers=num_layers, num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    assert find_shape(str(write(tmp_path, config))) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_does_not_state_is_what_the_engine_takes_for_it(family: str, tmp_path: Path) -> None:
    """Each family has defaults of its own."""
    shape: dict[str, Any] = {
        "hidden_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "intermediate_size": 64,
    }
    shape |= {"vocab_size": 384, "max_position_embeddings": 64, "dtype": "float16"}
    write(tmp_path, shape | {"architectures": [ARCHITECTURES[family]], "model_type": family})
    assert read_shape(tmp_path).layout(16, "auto") == ModelConfig.from_folder(tmp_path).layout(16, "float16")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_would_allocate_the_same(family: str, tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, **fields, architectures=[ARCHITECTURES[family]], dtype="float16")
    config.save_pretrained(tmp_path)
    engine = ModelConfig.from_folder(tmp_path)
    assert read_shape(tmp_path).layout(16, "auto") == engine.layout(16, "float16")


def test_demo() -> None:
    assert find_shape("demo").layout(16, "auto") == ModelConfig.from_folder(DEMO_FOLDER).layout(16, "float32")
    assert "8 MiB" in size_of_model("demo", load())


def test_a_known_name_goes_before_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-3-8b").mkdir()
    write(tmp_path / "llama-3-8b", CONFIG)
    monkeypatch.chdir(tmp_path)
    assert find_shape("llama-3-8b") == KNOWN_SHAPES["llama-3-8b"]
    assert find_shape("./llama-3-8b").num_layers == 3


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.json: num_hidden_layers: Field required; num_attention_heads: Field required"),
        (without("num_hidden_layers"), "num_hidden_layers: Field required"),
        (without("hidden_size"), "neither head_dim nor hidden_size is there"),
        (CONFIG | {"hidden_size": 3}, "a hidden_size of 3 is less than 4 heads"),
        (CONFIG | {"num_attention_heads": 0}, "num_attention_heads: Input should be greater than or equal to 1"),
        (CONFIG | {"num_key_value_heads": 0}, "num_key_value_heads: Input should be greater than or equal to 1"),
        (CONFIG | {"num_hidden_layers": "3"}, "num_hidden_layers: Input should be a valid integer"),
        (CONFIG | {"num_hidden_layers": True}, "num_hidden_layers: Input should be a valid integer"),
        (CONFIG | {"head_dim": -16}, "head_dim: Input should be greater than or equal to 1"),
        ([CONFIG], "is not a JSON object"),
        (without("dtype"), "the model's dtype is none: choose one of float32, float16, bfloat16 by --dtype"),
        (CONFIG | {"dtype": "float8_e4m3fn"}, "the model's dtype is 'float8_e4m3fn': choose one"),
    ],
)
def test_a_wrong_configuration_is_refused(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(OperatorError) as caught:
        size_of_model(str(write(tmp_path, config)), load())
    assert message in str(caught.value)


@pytest.mark.parametrize(("device", "size"), [("cpu", 32), ("cuda", 64)])
def test_blocks_are_as_large_as_those_of_a_worker(device: DeviceType, size: int) -> None:
    assert f"per block of {size} " in size_of_model("llama-3-8b", load("--device", device))
    assert load_role(PrefillSettings, "baton prefill", []).on(device).block_size == size
    assert "per block of 8 " in size_of_model("llama-3-8b", load("--device", device, "--block-size", "8"))


def test_dtype_stands_in_for_what_the_configuration_lacks(tmp_path: Path) -> None:
    text = size_of_model(str(write(tmp_path, without("dtype"))), load("--dtype", "float32"))
    assert "768 bytes" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens: Input should be greater than or equal to 1"),
        (["--tokens", "1,x"], "--tokens: Input should be a valid integer"),
        (["--tokens", ""], "--tokens: Input should be a valid integer"),
        (["--block-size", "257"], "--block-size: Input should be less than or equal to 256"),
        (["--kv-cache-bytes", "0"], "--kv-cache-bytes: Input should be greater"),
        (["--dtype", "int8"], "--dtype: Input should be 'auto'"),
        (["--bogus", "1"], "unrecognized arguments: --bogus"),
    ],
)
def test_a_wrong_option_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(OperatorError, match="baton kv-size") as caught:
        load(*arguments)
    assert message in str(caught.value)


def test_options_are_variables_too_which_roles_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KV_SIZE_TOKENS", "1,2")
    monkeypatch.setenv("BATON_KV_CACHE_BYTES", "4096")
    settings = load("demo")
    assert (settings.model, settings.tokens, settings.kv_cache_bytes) == ("demo", (1, 2), None)
    assert load_role(PrefillSettings, "baton prefill", []).kv_cache_bytes == 4096
    monkeypatch.setenv("BATON_KV_SIZE_TOKNES", "1")
    with pytest.raises(OperatorError, match="unknown environment variable BATON_KV_SIZE_TOKNES"):
        load("demo")


# --- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_command() -> None:
    done = run("qwen2.5-0.5b", BATON_KV_SIZE_TOKENS="32768")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split() == ["32768", "tokens", "384", "MiB", "402653184", "bytes"]
    table = run().stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == list(KNOWN_SHAPES)


@pytest.mark.processes
def test_an_error_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for arguments in (["no-such-model"], [str(tmp_path)], ["demo", "--tokens", "-1"]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.processes
def test_it_answers_without_torch() -> None:
    check = (
        "import sys; from common.runtime import cli; cli.main();"
        "sys.exit(', '.join({'torch', 'transformers', 'zmq'} & sys.modules.keys()) or 0)"
    )
    command = [sys.executable, "-c", check, "kv-size", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo: 2 layers" in done.stdout
