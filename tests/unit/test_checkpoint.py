"""Finding a model, and knowing it again by its hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gateway_fixtures import byte_level_backend
from model_hub import HUB_ID, ModelHub, model_hub
from safetensors.numpy import save_file
from waiting import eventually

from common.contract.errors import OperatorError
from common.runtime.checkpoint import (
    DEMO_FOLDER,
    config_hash,
    has_chat_template,
    is_hub_id,
    read_config,
    resolve_model,
    unchanged,
    weights_hash,
)
from gateway.text.tokenizer import ModelTokenizer

CONFIG = {"model_type": "llama", "vocab_size": 7, "rope_scaling": {"factor": 2.0}}
_PIECE_BYTES = 4 * 2**20
Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder, CONFIG)
    return folder


def write_config(folder: Path, config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def write_weights(path: Path, *, elements: int = 1000) -> Path:
    ramp = np.arange(elements, dtype=np.float32)
    save_file({"first": ramp, "middle": ramp * 2, "zlast": ramp * 3}, path)
    return path


def write_index(folder: Path, *shards: str) -> None:
    """An index that places a tensor in each of the shards."""
    weight_map = {f"w{number}": shard for number, shard in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def data_start(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# --- resolving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [True, False])
def test_demo_is_the_bundled_model(weights: bool) -> None:
    assert resolve_model("demo", weights=weights) == DEMO_FOLDER
    assert read_config(DEMO_FOLDER)["vocab_size"] > 0


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    ],
)
def test_pipes_are_no_files(folder: Path, name: str, weights: bool) -> None:
    """Whoever opens one that nobody writes to waits for ever."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(OperatorError, match=f"{name} is no regular file"):
        resolve_model(str(folder), weights=weights)
    path.unlink()
    (folder / "elsewhere").write_text("{}")
    path.symlink_to(folder / "elsewhere")
    assert resolve_model(str(folder), weights=weights) == folder


def test_a_config_that_is_nested_too_deeply(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(OperatorError, match="cannot be read"):
        read_config(folder)


def test_a_folder_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder), weights=True) == folder
    assert resolve_model(f"{folder}/", weights=True) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model", weights=True) == folder
    assert resolve_model("./model", weights=True) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/model", weights=True) == folder


def test_a_folder_goes_before_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    name = f"{folder.parent.name}/{folder.name}"
    assert resolve_model(name, weights=True) == folder


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"config\.json"):
        resolve_model(str(tmp_path), weights=True)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OperatorError, match=r"config\.json"):
        resolve_model(str(tmp_path), weights=True)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "no-such-model",
        "/no/such/folder",
        "./nothing",
        "../nothing",
        "~/nothing-here",
        "~nobody-here/model",
        "a/b/c",
        "a\0b",
        "x" * 300,
    ],
    ids=lambda name: repr(name[:20]),
)
def test_what_can_be_neither_folder_nor_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError):
        resolve_model(name, weights=True)


@pytest.mark.parametrize(
    "name", ["owner/name", "owner/", "own er/name", "owner/na--me", "owner/name.git", "öwner/name"]
)
def test_a_hub_id_that_cannot_be_had_is_one_line_that_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError) as refusal:
        resolve_model(name, weights=False)
    assert repr(name) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_revision_of_a_hub_id_is_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    (tmp_path / "commit").mkdir()
    write_config(tmp_path / "commit", CONFIG)
    asked: list[tuple[str, str | None]] = []

    def download(hub_id: str, *, revision: str | None, **_: list[str]) -> str:
        asked.append((hub_id, revision))
        return str(tmp_path / "commit")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for revision in (None, "v1.0", "refs/pr/1"):
        assert resolve_model("owner/name", revision, weights=True) == tmp_path / "commit"
    assert list(dict.fromkeys(asked)) == [("owner/name", None), ("owner/name", "v1.0"), ("owner/name", "refs/pr/1")]
    assert is_hub_id("owner/name")


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_id_without_a_configuration_is_refused(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has only GGUF files, or an adapter."""
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(OperatorError, match=r"owner/name has no config\.json.*GGUF"):
        resolve_model("owner/name", weights=weights)


def resolving(hub: ModelHub, cache: Path, *, weights: bool, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """A process that has looked for the hub's model, and downloads into `cache`."""
    program = f"""
from common.runtime.checkpoint import resolve_model
print(resolve_model({HUB_ID!r}, weights={weights}))
"""
    variables = os.environ | hub.variables(cache) | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.processes
def test_a_model_that_the_hub_refuses_is_told_of_with_the_reason(tmp_path: Path, folder: Path) -> None:
    """The client puts the reason behind an empty line."""
    with model_hub({"1" * 40: folder}, "1" * 40) as hub:
        hub.refusal = {"X-Error-Code": "GatedRepo", "X-Request-Id": "Root=1-2-3"}
        done = resolving(hub, tmp_path / "cache", weights=False)
    said = done.stderr.rstrip().splitlines()[-1]
    assert "OperatorError" in said
    assert HUB_ID in said
    assert "gated" in said


def resolve_elsewhere(hub: ModelHub, cache: Path, *, weights: bool, offline: bool = False) -> Path:
    """The folder of the hub's model in a process that downloads into `cache`."""
    done = resolving(hub, cache, weights=weights, offline=offline)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def repository(folder: Path) -> Path:
    """A sharded model as a hub may have it, the files `UNREAD` included."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in (*shards, "consolidated.safetensors", "checkpoint-500/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_weights(folder / name)
    write_index(folder, *shards)
    (folder / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (folder / name).write_text("{}")
    for name in ("checkpoint-500/trainer_state.json", "original/tokenizer.model"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


UNREAD = {
    "consolidated.safetensors",
    "checkpoint-500/model.safetensors",
    "checkpoint-500/trainer_state.json",
    "original/tokenizer.model",
}


@pytest.mark.processes
def test_only_what_is_read_is_downloaded(repository: Path, tmp_path: Path) -> None:
    """A repository may have all weights twice, and those of checkpoints during training."""
    commit = "a" * 40
    read = names_in(repository) - UNREAD
    with model_hub({commit: repository}, commit) as hub:
        without = resolve_elsewhere(hub, tmp_path / "gateway", weights=False)
        assert names_in(without) == {name for name in read if not name.endswith(".safetensors")}
        snapshot = resolve_elsewhere(hub, tmp_path / "worker", weights=True)
        assert names_in(snapshot) == read
    assert resolve_elsewhere(hub, tmp_path / "worker", weights=True, offline=True) == snapshot
    known = weights_hash(snapshot)
    (snapshot / "consolidated.safetensors").write_bytes((repository / "consolidated.safetensors").read_bytes())
    assert resolve_elsewhere(hub, tmp_path / "worker", weights=True, offline=True) == snapshot, "as downloaded before"
    assert weights_hash(snapshot) == known


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ({"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}, "model_type 'gemma3_text' is not"),
        (CONFIG | {"quantization_config": {"quant_method": "awq"}}, "quantised checkpoints"),
    ],
    ids=["another family", "quantised"],
)
def test_the_weights_of_a_model_that_cannot_be_loaded_are_not_downloaded(
    repository: Path, tmp_path: Path, stated: dict[str, object], reason: str
) -> None:
    write_config(repository, stated)
    commit = "a" * 40
    with model_hub({commit: repository}, commit) as hub:
        done = resolving(hub, tmp_path / "worker", weights=True)
    assert done.returncode == 1
    assert f"ModelNotSupportedError: model {HUB_ID}: {reason}" in done.stderr
    assert not [each for each in hub.asked if each.endswith(".safetensors")]


def test_a_local_model_has_no_revisions(folder: Path) -> None:
    """It would be served as if it were the one that was asked for."""
    for name in ("demo", str(folder)):
        assert not is_hub_id(name)
        with pytest.raises(OperatorError, match="only a hub id has revisions"):
            resolve_model(name, "v1.0", weights=True)


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"{'a': 1}"], ids=repr)
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    for read in (read_config, config_hash):
        with pytest.raises(OperatorError, match=r"config\.json"):
            read(folder)


def test_a_missing_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"config\.json"):
        config_hash(tmp_path)


def test_the_hash_ignores_what_changes_without_changing_the_model(folder: Path) -> None:
    before = config_hash(folder)
    write_config(folder, {"transformers_version": "9.9", "_name_or_path": "/elsewhere", **CONFIG})
    assert config_hash(folder) == before
    write_config(folder, dict(reversed(CONFIG.items())))
    assert config_hash(folder) == before, "the order of keys"
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=4) + "\n")
    assert config_hash(folder) == before, "spaces"


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 8},
        {"vocab_size": "7"},
        {"added": None},
        {"rope_scaling": {"factor": 2.5}},
        {"rope_scaling": None},
    ],
    ids=str,
)
def test_the_hash_sees_what_changes_the_model(folder: Path, change: dict[str, object]) -> None:
    before = config_hash(folder)
    write_config(folder, CONFIG | change)
    assert config_hash(folder) != before
    assert len(config_hash(folder)) == 64


def test_the_hash_sees_another_tokenizer(folder: Path) -> None:
    hashes = {config_hash(folder)}
    for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "tekken.json"):
        (folder / name).write_text("{}")
        hashes.add(config_hash(folder))
        (folder / name).write_text("{ }")
        hashes.add(config_hash(folder))
    for config in ("{", "[]", '{"add_bos_token": true}', '{"add_bos_token": false}'):
        (folder / "tokenizer_config.json").write_text(config)
        hashes.add(config_hash(folder))
    assert len(hashes) == 15


def test_the_hash_sees_other_ends_of_sequences(folder: Path) -> None:
    """Workers take them from there: with others, a stream would go on elsewhere after its end."""
    hashes = {config_hash(folder)}
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert hashes == {config_hash(folder)}, "it names none"
    for ends in (1, [1, 2]):
        for version in ("5.1", "5.2"):
            stated = {"eos_token_id": ends, "temperature": 0.6, "transformers_version": version}
            (folder / "generation_config.json").write_text(json.dumps(stated))
            hashes.add(config_hash(folder))
    assert len(hashes) == 3


def test_the_hash_ignores_the_chat_template(folder: Path) -> None:
    hashes = set()
    for config in ({"a": 1}, {"a": 1, "chat_template": "x"}, {"chat_template": "y", "a": 1, "name_or_path": "z"}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        hashes.add(config_hash(folder))
    (folder / "chat_template.jinja").write_text("x")
    assert hashes == {config_hash(folder)}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_git_lfs_has_not_pulled_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 11422654\n")
    for read in (config_hash, lambda folder: read_config(folder, name)):
        with pytest.raises(OperatorError, match=f"{name} is a pointer of Git LFS: run `git lfs pull`"):
            read(folder)


@pytest.mark.parametrize(
    ("stated", "file", "has"),
    [
        ({}, None, False),
        ({"chat_template": None}, None, False),
        ({"chat_template": "x"}, None, True),
        ({"chat_template": [{"name": each, "template": each} for each in ("default", "tool_use")]}, None, True),
        ({}, "x", True),
    ],
    ids=["none", "null", "one", "several", "a file"],
)
def test_whether_there_is_a_chat_template_is_what_the_gateway_finds(
    tmp_path: Path, stated: dict[str, object], file: str | None, has: bool
) -> None:
    assert not has_chat_template(tmp_path)
    write_config(tmp_path, {"model_type": "llama"})
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **stated}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert has_chat_template(tmp_path) is has
    assert (ModelTokenizer.load(tmp_path).chat_template(False) != "") is has


# --- the weights -----------------------------------------------------------------------------------------------------


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(OperatorError, match=r"model\.safetensors.*other weights are not loaded \(\*\.bin"):
        weights_hash(folder)


def test_weights_that_are_read_in_part_have_no_hash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's file system may return less than was asked for, of a file that does not change."""
    write_weights(folder / "model.safetensors")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *asked: pread(*asked)[:-1])
    with pytest.raises(OperatorError, match="in part only"):
        weights_hash(folder)


def test_the_same_weights_elsewhere_have_the_same_hash(folder: Path, tmp_path: Path) -> None:
    write_weights(folder / "model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    write_weights(other / "model.safetensors")
    assert weights_hash(folder) == weights_hash(other)


@pytest.mark.parametrize("elements", [1, 1000, 100_000, 1_200_000], ids=lambda n: f"{n} elements")
def test_a_changed_byte_anywhere_shows(folder: Path, elements: int) -> None:
    path = write_weights(folder / "model.safetensors", elements=elements)
    start, size = data_start(path), path.stat().st_size
    before = weights_hash(folder)
    seams = [at for piece in range(_PIECE_BYTES, size, _PIECE_BYTES) for at in (piece - 1, piece)]
    for offset in {9, start - 1, start, start + 1, start + (size - start) // 2, size - 1, *seams}:
        flip(path, offset)
        assert weights_hash(folder) != before, f"byte {offset} of {size}"
        flip(path, offset)
    assert weights_hash(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: t * 1.5 if "norm" in name else t for name, t in tensors.items()},
        lambda tensors: tensors | {"layers.7.norm": tensors["layers.7.norm"] * 1.01},
        lambda tensors: (
            tensors | {"layers.3.mlp": np.concatenate([np.zeros((30, 1024), "f4"), tensors["layers.3.mlp"][30:]])}
        ),
    ],
    ids=["every norm scaled", "one norm scaled", "30 rows zeroed"],
)
def test_a_revision_that_changes_little_of_a_large_file_shows(folder: Path, change: Change) -> None:
    ramp = np.arange(1, 2 * 2**20 + 1, dtype=np.float32).reshape(2048, 1024)
    tensors: dict[str, np.ndarray] = {f"layers.{layer}.mlp": ramp + layer for layer in range(8)}
    tensors |= {f"layers.{layer}.norm": np.ones(1024, dtype=np.float32) for layer in range(8)}
    save_file(tensors, folder / "model.safetensors")
    before = weights_hash(folder)
    save_file(change(tensors), folder / "model.safetensors")
    assert weights_hash(folder) != before


def test_the_hash_does_not_depend_on_the_number_of_threads(folder: Path) -> None:
    write_weights(folder / "model.safetensors", elements=5_000_000)
    assert len({weights_hash(folder, num_threads) for num_threads in (1, 2, 5)}) == 1


@pytest.mark.processes
def test_a_process_that_ends_early_does_not_wait_for_the_hash(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2**38)  # minutes of hashing
    program = """
import sys, time
from pathlib import Path
from common.runtime import checkpoint
from common.runtime.daemon_threads import DaemonThreads
pieces, digest = [], checkpoint.hashlib.sha256
checkpoint.hashlib.sha256 = lambda *content: (pieces.append(0), digest(*content))[1]
DaemonThreads(1, "hash-weights").submit(lambda: checkpoint.weights_hash(Path(sys.argv[1]), 2))
while len(pieces) < 200:  # and most others are queued
    time.sleep(0.01)
sys.exit(2)
"""
    done = subprocess.run([sys.executable, "-c", program, str(folder)], timeout=60, check=False)
    assert done.returncode == 2


async def test_the_threads_of_the_hash_end_with_it(folder: Path) -> None:
    write_weights(folder / "model.safetensors")
    weights_hash(folder, 2)
    await eventually(lambda: not any(each.name.startswith("hash-") for each in threading.enumerate()))


def test_what_names_the_files_of_the_tensors_counts(folder: Path) -> None:
    write_weights(folder / "model-1.safetensors")
    write_weights(folder / "model-2.safetensors")
    hashes = set()
    for files in (("model-1.safetensors", "model-2.safetensors"), ("model-2.safetensors", "model-1.safetensors")):
        write_index(folder, *files)
        hashes.add(weights_hash(folder))
    assert len(hashes) == 2


def test_weights_that_are_not_loaded_do_not_count(repository: Path) -> None:
    """A folder that was fetched without them has the same model."""
    before = weights_hash(repository)
    (repository / "consolidated.safetensors").unlink()
    assert weights_hash(repository) == before
    (repository / "consolidated.safetensors.index.json").write_text("{}")
    write_weights(repository / "adapter_model.safetensors")
    assert weights_hash(repository) == before
    for shard in sorted(repository.glob("model-*")):
        flip(shard, -1)
        assert weights_hash(repository) != before
        flip(shard, -1)
    write_weights(repository / "model.safetensors")
    alone = weights_hash(repository)
    assert alone != before
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (repository / name).unlink()
        assert weights_hash(repository) == alone, "a single file comes before an index"


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": ["a.safetensors"]}',
        '{"weight_map": {"w": 1}}',
        '{"weight_map": {"w": "../a.safetensors"}}',
        '{"weight_map": {"w": "a.bin"}}',
        '{"weight_map": {"w": "absent.safetensors"}}',
        '{"weight_map":' * 100_000,
    ],
    ids=lambda index: index[:50],
)
def test_an_index_that_names_no_weights_of_the_folder_is_the_operators_to_mend(folder: Path, index: str) -> None:
    write_weights(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(OperatorError, match="model"):
        weights_hash(folder)
    with unchanged(folder):  # whoever loads them reports it
        pass


def test_a_file_that_is_replaced_while_it_is_hashed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_weights(folder / "model.safetensors")
    write_weights(folder / "model.safetensors")
    pread = os.pread

    def replace_it(file: int, length: int, offset: int) -> bytes:
        os.utime(path, ns=(0, 0))
        return pread(file, length, offset)

    monkeypatch.setattr(os, "pread", replace_it)
    with pytest.raises(OperatorError, match="has changed"), unchanged(folder):
        weights_hash(folder)


def test_another_size_or_shape_shows(folder: Path) -> None:
    hashes = set()
    for elements in (1000, 1001):
        write_weights(folder / "model.safetensors", elements=elements)
        hashes.add(weights_hash(folder))
    ramp = np.arange(3000, dtype=np.float32)
    for tensors in ({"w": ramp}, {"w": ramp.reshape(30, 100)}, {"v": ramp}):
        save_file(tensors, folder / "model.safetensors")
        hashes.add(weights_hash(folder))
    assert len(hashes) == 5


def test_the_names_of_files_and_their_number_show(folder: Path) -> None:
    path = write_weights(folder / "model.safetensors")
    hashes = {weights_hash(folder)}
    path = path.rename(folder / "renamed.safetensors")
    write_index(folder, "renamed.safetensors")
    hashes.add(weights_hash(folder))
    write_weights(folder / "second.safetensors")
    write_index(folder, "renamed.safetensors", "second.safetensors")
    hashes.add(weights_hash(folder))
    path.write_bytes(path.read_bytes() + b"\0")
    hashes.add(weights_hash(folder))
    assert len(hashes) == 4


def test_shards_that_swap_their_contents_show(folder: Path) -> None:
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    save_file({"w": np.zeros(8, dtype=np.float32)}, a)
    save_file({"w": np.ones(8, dtype=np.float32)}, b)
    write_index(folder, a.name, b.name)
    before = weights_hash(folder)
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    assert weights_hash(folder) != before


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, b"\xff" * 100], ids=len)
def test_a_broken_file_has_a_hash_of_its_own(folder: Path, content: bytes) -> None:
    path = write_weights(folder / "model.safetensors")
    whole = weights_hash(folder)
    path.write_bytes(content)
    assert weights_hash(folder) != whole


def test_a_link_to_weights_that_are_gone_is_the_operators_to_mend(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to(folder / "blobs" / "gone")
    with pytest.raises(OperatorError, match="model"):
        weights_hash(folder)


# --- between loading and hashing -------------------------------------------------------------------------------------


def replace(path: Path) -> None:
    """With a file of the same size and time."""
    known = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(known.st_mtime_ns, known.st_mtime_ns))
    other.replace(path)


def write_to(path: Path) -> None:
    """Same file, same size, a later time."""
    known = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(known.st_mtime_ns + 1, known.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [replace, write_to, Path.unlink], ids=["replaced", "written to", "removed"])
@pytest.mark.parametrize(
    "name",
    [
        "a.safetensors",
        "b.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tekken.json",
        "vocab.json",
    ],
)
def test_a_change_while_the_model_is_loaded_is_refused(folder: Path, name: str, change: Callable[[Path], None]) -> None:
    for each in ("a.safetensors", "b.safetensors"):
        write_weights(folder / each)
    write_index(folder, "a.safetensors", "b.safetensors")
    for each in ("tokenizer.json", "tokenizer_config.json", "tekken.json", "vocab.json"):
        (folder / each).write_text("{}")
    with unchanged(folder):
        pass
    with pytest.raises(OperatorError, match=f"{name} has changed while the model was loaded"), unchanged(folder):
        change(folder / name)


@pytest.mark.parametrize("name", ["b.safetensors", "model.safetensors", "tokenizer.json"])
def test_a_file_that_is_added_while_the_model_is_loaded_is_refused(folder: Path, name: str) -> None:
    """A shard that was missing, a file that comes before the index, and one beside the weights."""
    write_weights(folder / "a.safetensors")
    write_index(folder, "a.safetensors", "b.safetensors")
    with pytest.raises(OperatorError, match=rf"{name} has changed"), unchanged(folder):
        write_weights(folder / name)


def test_a_link_that_is_turned_to_another_revision_is_refused(folder: Path) -> None:
    """As in the hub's cache."""
    for blob in ("first", "second"):
        write_weights(folder / blob)
        os.utime(folder / blob, ns=(0, 0))
    link = folder / "model.safetensors"
    link.symlink_to(folder / "first")
    turned = folder / "turned"
    turned.symlink_to(folder / "second")
    with pytest.raises(OperatorError, match="has changed"), unchanged(folder):
        turned.replace(link)


def test_the_error_of_a_load_that_fails_meanwhile_is_kept(folder: Path) -> None:
    path = write_weights(folder / "a.safetensors")

    def fail() -> None:
        path.unlink()
        raise OperatorError("a tensor is missing")

    with pytest.raises(OperatorError, match="a tensor is missing"), unchanged(folder):
        fail()


def test_a_file_that_is_not_hashed_may_change(folder: Path) -> None:
    write_weights(folder / "model.safetensors")
    with unchanged(folder):
        (folder / "README.md").write_text("x")
        write_weights(folder / "consolidated.safetensors")
