from __future__ import annotations

import json
import shutil
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.contract.errors import OperatorError
from common.engine import linear, native
from common.engine import weights as weights_module
from common.engine.kv_cache import TORCH_DTYPES
from common.engine.model_config import ModelConfig
from common.engine.native.packing import Zeros
from common.engine.weights import Weights, load_weights, resolve_dtype

CPU = torch.device("cpu")


def load(folder: Path, dtype: str = "float32") -> Weights:
    return load_weights(ModelConfig.from_folder(folder), folder, dtype, CPU)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "llama")


def test_projections_are_fused_in_order(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path / "qwen2")
    tensors = load_file(folder / "model.safetensors")
    layer, attention, mlp = load(folder).layers[1], "model.layers.1.self_attn", "model.layers.1.mlp"
    assert torch.equal(layer.qkv.weight, torch.cat([tensors[f"{attention}.{x}_proj.weight"] for x in "qkv"]))
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat([tensors[f"{attention}.{x}_proj.bias"] for x in "qkv"]))
    gate_up = torch.cat([tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]])
    assert torch.equal(layer.gate_up.weight, gate_up)
    assert layer.output.bias is None


def test_shards_are_the_same_checkpoint(tmp_path: Path) -> None:
    whole = make_checkpoint("llama", tmp_path / "whole", seed=5)
    sharded = make_checkpoint("llama", tmp_path / "sharded", seed=5, sharded=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    seen: list[tuple[int, int]] = []
    config = ModelConfig.from_folder(sharded)
    ours = load_weights(config, sharded, "float32", CPU, lambda done, total: seen.append((done, total)))
    theirs = load(whole)
    assert ours.embedding is not None
    assert theirs.embedding is not None
    assert torch.equal(ours.embedding, theirs.embedding)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    for left, right in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(left.qkv.weight, right.qkv.weight)
        assert torch.equal(left.down.weight, right.down.weight)
    assert seen == [(done, 21) for done in range(1, 22)]


@pytest.mark.parametrize("shards_stay", [True, False])
def test_a_single_file_comes_before_an_index_as_it_does_for_transformers(tmp_path: Path, shards_stay: bool) -> None:
    """`save_pretrained` of one file leaves the index of earlier shards, and people leave the shards."""
    folder = make_checkpoint("llama", tmp_path / "model", seed=1, sharded=True)
    shards = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    make_checkpoint("llama", folder, seed=2)
    assert (folder / "model.safetensors.index.json").exists()
    if shards_stay:
        for name, content in shards.items():
            (folder / name).write_bytes(content)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(load(folder).lm_head.weight, theirs.lm_head.weight)


def test_a_tied_head_may_be_present_absent_or_the_only_copy(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load(folder).lm_head.weight, embedding)
    rewrite(folder, {"lm_head.weight": embedding})
    assert torch.equal(load(folder).lm_head.weight, embedding)
    rewrite(folder, {"model.embed_tokens.weight": None})
    assert torch.equal(load(folder).embed(torch.arange(len(embedding))), embedding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tied_table_is_held_once_and_read_from_the_packed_head(tmp_path: Path, dtype: str) -> None:
    kernels = native.kernels()
    assert kernels is not None
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(TORCH_DTYPES[dtype])
    weights = load_weights(ModelConfig.from_folder(folder), folder, dtype, CPU, None, kernels, batch_invariant=True)
    assert weights.embedding is None
    tokens_T = torch.randperm(len(embedding))
    assert torch.equal(weights.embed(tokens_T), embedding[tokens_T].float())


@pytest.mark.parametrize("files", ["one file", "two files"])
def test_a_tied_table_that_is_stored_twice_is_held_once(tmp_path: Path, files: str) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(folder, {"lm_head.weight": embedding})
    if files == "two files":
        rewrite(folder, {"lm_head.weight": None})
        save_file({"lm_head.weight": embedding}, folder / "head.safetensors", metadata={"format": "pt"})
        body = (folder / "model.safetensors").rename(folder / "body.safetensors")
        of_name = {**dict.fromkeys(load_file(body), body.name), "lm_head.weight": "head.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_name}))
    seen: list[tuple[int, int]] = []
    config, kernels = ModelConfig.from_folder(folder), native.kernels()
    weights = load_weights(config, folder, "float32", CPU, lambda done, total: seen.append((done, total)), kernels)
    assert weights.embedding is None
    tokens_T = torch.arange(len(embedding))
    assert torch.equal(weights.embed(tokens_T), embedding)
    assert torch.equal(weights.lm_head.rows(tokens_T), embedding)
    assert seen == [(done, 20) for done in range(1, 21)]


@pytest.mark.parametrize("other", ["number", "type"])
def test_a_tied_pair_that_differs_stays_apart_as_it_does_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(weights_module, "_ROWS_COMPARED", 100)  # the last piece has fewer
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.bfloat16() if other == "type" else embedding.clone()
    head[-1, -1] += 1
    rewrite(folder, {"lm_head.weight": head})
    weights = load_weights(ModelConfig.from_folder(folder), folder, "float32", CPU, None, native.kernels())
    tokens_T = torch.arange(len(embedding))
    assert weights.embedding is not None
    assert torch.equal(weights.embed(tokens_T), embedding)
    assert torch.equal(weights.lm_head.rows(tokens_T), head.float())
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(theirs.model.embed_tokens.weight, theirs.lm_head.weight)


def test_a_tied_pair_of_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    short = torch.ones(383, 64)
    rewrite(folder, {"model.embed_tokens.weight": short, "lm_head.weight": short.clone()})
    with pytest.raises(OperatorError, match=r"has shape \[383, 64\], config\.json asks for \[384, 64\]"):
        load(folder)


def test_a_tied_table_is_held_twice_if_onednn_packs_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "multiplies_natively", lambda _dtype: True)
    monkeypatch.setattr(linear.Linear, "pack_for_onednn", lambda _linear: None)  # not every CPU has it
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    weights = load(folder, "bfloat16")
    assert weights.embedding is not None
    assert torch.equal(weights.embed(torch.arange(len(embedding))), embedding)


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_s_memory_is_free_once_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    pack = linear.Linear.pack
    freed: list[bool] = []

    def watched(one: linear.Linear, zeros: Zeros) -> None:
        storage = one.weight.untyped_storage()._weak_ref()
        pack(one, zeros)
        freed.append(bool(torch.UntypedStorage._expired(storage)))

    monkeypatch.setattr(linear.Linear, "pack", watched)
    folder = make_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    load_weights(ModelConfig.from_folder(folder), folder, "float32", CPU, None, native.kernels())
    assert freed == [True] * 9  # four for each layer, and the head


def test_packed_weights_lie_side_by_side_in_large_pages(tmp_path: Path) -> None:
    """One of less than a page's size would be in small ones if it were alone."""
    folder = make_checkpoint("llama", tmp_path)
    weights = load_weights(ModelConfig.from_folder(folder), folder, "float32", CPU, None, native.kernels())
    of = attrgetter("qkv", "output", "gate_up", "down")
    linears = [weights.lm_head, *(each for layer in weights.layers for each in of(layer))]
    panels = sorted((each.panels for each in linears if each.panels is not None), key=torch.Tensor.data_ptr)
    assert len(panels) == 9
    assert panels[0].data_ptr() % (2 * 2**20) == 0
    ends = [each.data_ptr() + each.nbytes for each in panels]
    assert all(0 <= after.data_ptr() - end < 64 for end, after in zip(ends, panels[1:], strict=False))


def test_memory_is_given_back_once_a_model_is_loaded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(weights_module, "give_memory_back", lambda: given.append(True))
    load(llama)
    assert given == [True]


def test_rotary_buffers_of_old_checkpoints_are_ignored(llama: Path) -> None:
    rewrite(llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(llama)


def test_missing_tensors_are_named(llama: Path) -> None:
    rewrite(llama, {"model.norm.weight": None, "model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(
        OperatorError, match=r"lacks tensors: model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"
    ):
        load(llama)


def test_unexpected_tensors_are_named_up_to_a_bound(llama: Path) -> None:
    rewrite(llama, {f"extra.{index}": torch.ones(1) for index in range(7)})
    with pytest.raises(OperatorError, match=r"has unexpected tensors: extra\.0, .*extra\.4 and 2 more"):
        load(llama)


def test_a_bias_that_the_configuration_does_not_have_is_unexpected(llama: Path) -> None:
    rewrite(llama, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(OperatorError, match=r"has unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(llama)


def test_a_wrong_shape_is_named(llama: Path) -> None:
    rewrite(llama, {"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 64)})
    with pytest.raises(OperatorError, match=r"k_proj\.weight has shape \[16, 64\], config\.json asks for \[32, 64\]"):
        load(llama)


def test_no_safetensors(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(OperatorError, match=r"neither model\.safetensors nor"):
        load(llama)


def test_a_damaged_file(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(OperatorError, match="not a readable safetensors file"):
        load(llama)


def test_what_git_lfs_has_not_pulled(llama: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 988097824\n"
    (llama / "model.safetensors").write_text(pointer)
    with pytest.raises(OperatorError, match=r"model\.safetensors is a pointer of Git LFS: run `git lfs pull`"):
        load(llama)


def test_damaged_shards(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, sharded=True)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, second = sorted(set(content["weight_map"].values()))[:2]
    weight_map = {name: second if file == first else file for name, file in content["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(OperatorError, match=f"{second} lacks tensor .*, which the index places there"):
        load(folder)
    (folder / second).unlink()
    with pytest.raises(OperatorError, match=f"lacks the files {second} that its index names"):
        load(folder)
    index.write_text("[]")
    with pytest.raises(OperatorError, match="not an index of safetensors files"):
        load(folder)


def test_the_element_type_is_the_checkpoints_unless_named(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype="bfloat16")
    config = ModelConfig.from_folder(folder)
    assert resolve_dtype(config, folder, "auto") == "bfloat16"
    assert resolve_dtype(config, folder, "float16") == "float16"
    with pytest.raises(OperatorError, match="'int8' is none of auto, float32, float16, bfloat16"):
        resolve_dtype(config, folder, "int8")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in ("dtype", "torch_dtype")}))
    config = ModelConfig.from_folder(folder)
    assert config.dtype is None
    assert resolve_dtype(config, folder, "auto") == "bfloat16"
    assert load(folder, "float32").final_norm.dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["{}/outside.safetensors", "sub/part.safetensors", "../outside.safetensors", "part.bin"]
)
def test_weights_that_no_fingerprint_covers_are_refused(tmp_path: Path, name: str) -> None:
    """An index may name any file, and a worker's fingerprint is of the folder's `*.safetensors`."""
    folder = make_checkpoint("llama", tmp_path / "model", sharded=True)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    tensor, part = next(iter(content["weight_map"].items()))
    elsewhere = folder / name.format(tmp_path)
    elsewhere.parent.mkdir(exist_ok=True)
    shutil.copy(folder / part, elsewhere)
    content["weight_map"][tensor] = name.format(tmp_path)
    index.write_text(json.dumps(content))
    with pytest.raises(OperatorError, match=r"weights are \*\.safetensors files of the folder itself"):
        load(folder)
