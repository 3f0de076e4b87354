"""Finds a model on disk and identifies it: name → folder → hashes. Reads files; loads no weights."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from common.contract.errors import ModelNotSupportedError, OperatorError
from common.runtime.daemon_threads import DaemonThreads

log = logging.getLogger(__name__)

DEMO_MODEL = "demo"
"""The name of the bundled model."""
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"

UNSTATED: dict[str, dict[str, Any]] = {
    "llama": {"eos_token_id": 2},
    "mistral": {"eos_token_id": 2, "num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""`model_type` of each supported family → values of keys that its `config.json` does not state, where those of this
family are its own."""

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHT_FILES = ["*.safetensors"]
WEIGHTS = "model.safetensors"
"""The file of a checkpoint that is not sharded. It comes before an index, as it does for `transformers`, which leaves
the index of earlier files behind."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""Names the shard of each tensor."""
_UNREAD_FILES = ["consolidated*.safetensors", "*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model"]
"""Files of a hub id that nothing reads: the weights once more in Mistral's own format, and what is in folders, for
example a training run's checkpoints. (`*` also stands for `/`; templates may be in a folder.)"""
_TEMPLATE_FILES = ["additional_chat_templates/*.jinja"]
"""Chat templates besides the tokenizer's own, in a folder that a checkpoint may have."""

_POINTER = b"version https://git-lfs."
"""Beginning of what Git LFS leaves in place of a large file."""
_PIECE_BYTES = 4 * 1024 * 1024
_REASON_CHARACTERS = 1000
"""Most of what the hub's client says of a failure, which has several lines."""
_MAX_SIZE = 2**31
"""Exclusive bound on sizes in a model's configuration; real vocabularies and contexts are far below it."""
_VOLATILE_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path"})
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_PARTS = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    _TOKENIZER_CONFIG,
    "vocab.json",
    "vocab.txt",
)
"""The files that determine which tokens a text becomes."""
_VOLATILE_TOKENIZER_KEYS = frozenset({"chat_template", "name_or_path", "transformers_version"})


def resolve_model(name: str, revision: str | None = None, *, weights: bool) -> Path:
    """The folder of a model. `name` is `demo`, a folder, or a hub id (downloaded once, into the hub's own cache).

    `revision` is a commit, a tag or a branch of a hub id; None: what its branch `main` is now. The folder has the name
    of the commit. `weights` is False for a process that needs only the tokenizer and the configuration. Raises
    `OperatorError`.
    """
    folder = _local_folder(name)
    if folder is None:
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise OperatorError(f"model {name!r} is neither a folder nor a hub id of the form owner/name")
        folder = _download(name, revision, weights)
        _require_config(folder, name)
        return folder
    if revision is not None:
        raise OperatorError(f"--revision {revision}: only a hub id has revisions, and {name} is a local model")
    _require_config(folder, f"folder {name}")
    _require_regular_files(folder)
    return folder.resolve()


def is_hub_id(name: str) -> bool:
    """Whether the hub is asked for the model of this name. Raises `OperatorError` if it can be no name of a model."""
    return _local_folder(name) is None


def _local_folder(name: str) -> Path | None:
    """The folder that a model is in without the hub; None if there is none. Raises `OperatorError`."""
    if name == DEMO_MODEL:
        return DEMO_FOLDER
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError) as error:
        raise OperatorError(f"model {name[:100]!r} is no usable path: {error}") from error


def _require_config(folder: Path, name: str) -> None:
    """Raise `OperatorError` if a model has no configuration."""
    if not (folder / "config.json").is_file():
        raise OperatorError(
            f"model {name} has no config.json, so it is no checkpoint in Hugging Face's format (GGUF files and "
            "adapters are not loaded)"
        )


def _require_regular_files(folder: Path) -> None:
    """Raise `OperatorError` if a file is, for example, a pipe: opening a pipe without a writer would block for ever."""
    for pattern in (*TOKENIZER_FILES, *WEIGHT_FILES, *_TEMPLATE_FILES):
        for path in folder.glob(pattern):
            if not path.is_file() and not path.is_dir():
                raise OperatorError(f"{path} is no regular file")


def _download(hub_id: str, revision: str | None, weights: bool) -> Path:
    if weights:  # gigabytes, so it is asked first whether the engine can load them
        folder = _fetch(hub_id, revision, ["config.json"])
        _require_config(folder, hub_id)
        _require_supported(folder, hub_id)
    folder = _fetch(hub_id, revision, TOKENIZER_FILES + (WEIGHT_FILES if weights else []))
    # The revision is logged for people only; workers compare hashes of the files.
    log.info("%s at revision %s", hub_id, folder.name)
    return folder


def _fetch(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=_UNREAD_FILES)
        )
    except Exception as error:  # the hub client raises a dozen unrelated types; each means the same to the operator
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS] or type(error).__name__
        wanted = repr(hub_id) if revision is None else f"{hub_id!r} at revision {revision}"
        raise OperatorError(f"model {wanted} is no local folder and could not be had from the hub: {reason}") from error


def _require_supported(folder: Path, name: str) -> None:
    """Raise `ModelNotSupportedError` for what most models that the engine cannot load state. It refuses the others when
    it loads them."""
    config = read_config(folder)
    family = str(config.get("model_type"))
    if family not in UNSTATED:
        raise ModelNotSupportedError(
            f"model {name}: model_type {family!r} is not supported; supported are {', '.join(UNSTATED)}"
        )
    if config.get("quantization_config") is not None:
        raise ModelNotSupportedError(f"model {name}: quantised checkpoints (quantization_config) are not supported")


def refuse_pointer(path: Path, content: bytes) -> None:
    """Raise `OperatorError` if the content of a file, or its beginning, is what Git LFS leaves in its place."""
    if content.startswith(_POINTER):
        raise OperatorError(f"{path} is a pointer of Git LFS: run `git lfs pull` in its folder")


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The object in a JSON file of a model's folder. Raises `OperatorError`."""
    try:
        content = (folder / name).read_bytes()
        refuse_pointer(folder / name, content)
        config = json.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise OperatorError(f"{folder / name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise OperatorError(f"{folder / name} is not a JSON object")
    return config


def has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer in `folder` has a template for conversations. Raises `OperatorError`."""
    if (folder / "chat_template.jinja").exists():
        return True
    return (folder / _TOKENIZER_CONFIG).exists() and bool(read_config(folder, _TOKENIZER_CONFIG).get("chat_template"))


def size_in(config: Mapping[str, Any], name: str, folder: Path) -> int:
    """A positive integer of the configuration of the model in `folder`. Raises `OperatorError`."""
    value = config.get(name)
    if type(value) is not int or not 0 < value < _MAX_SIZE:
        said = repr(value)[:40]
        raise OperatorError(f"{folder / 'config.json'}: {name} must be a number from 1 to {_MAX_SIZE - 1}, not {said}")
    return value


def context_tokens(config: Mapping[str, Any], folder: Path) -> int:
    """Tokens of the longest sequence by the configuration of the model in `folder`: `max_position_embeddings`, or what
    YaRN stretches the original context to, if that is more. (Checkpoints that are published without YaRN, for example
    Qwen's, state the original context also when YaRN is added to their file.) At most `MAX_TOKENS`, since no message
    has more. Raises `OperatorError`.
    """
    from common.contract.messages.fields import MAX_TOKENS  # a worker imports this module, and pydantic only later

    stated = size_in(config, "max_position_embeddings", folder)
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return min(stated, MAX_TOKENS)
    name = "original_max_position_embeddings"
    original = config.get(name) or rope.get(name) or stated
    try:
        return min(max(stated, int(original * float(rope["factor"]))), MAX_TOKENS)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise OperatorError(f"{folder / 'config.json'}: incomplete RoPE parameters {rope}: {error!r}") from error


def config_hash(folder: Path) -> str:
    """SHA-256 of the files that a gateway reads: the canonical configuration, the tokens that end a sequence by
    `generation_config.json`, and the tokenizer's files.

    Leaves out keys that can change without changing the model, and the chat template, whose result reaches workers as
    tokens. Raises `OperatorError`.
    """
    config = {key: value for key, value in read_config(folder).items() if key not in _VOLATILE_CONFIG_KEYS}
    digest = hashlib.sha256(_canonical(config))
    ends = (
        read_config(folder, _GENERATION_CONFIG).get("eos_token_id") if (folder / _GENERATION_CONFIG).exists() else None
    )
    if ends is not None:
        digest.update(_canonical({"eos_token_id": ends}))
    for name in _TOKENIZER_PARTS:
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OperatorError(f"cannot read {folder / name}: {error}") from error
        refuse_pointer(folder / name, content)
        if name == _TOKENIZER_CONFIG:
            content = _without_template(content)
        digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _without_template(content: bytes) -> bytes:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return content  # loading the tokenizer reports what is wrong with the file
    if not isinstance(config, dict):
        return content
    return _canonical({key: value for key, value in config.items() if key not in _VOLATILE_TOKENIZER_KEYS})


def _canonical(config: dict[str, Any]) -> bytes:
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def vocabulary(folder: Path) -> dict[str, int]:
    """The ids of all tokens by their text, added ones included; empty if the folder has no `tokenizer.json` that says.

    Raises `OperatorError`.
    """
    if not (folder / "tokenizer.json").exists():
        return {}
    content = read_config(folder, "tokenizer.json")
    model, added = content.get("model"), content.get("added_tokens")
    ids = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(ids, list):  # of a unigram model: pairs of text and score
        ids = {str(pair[0]): index for index, pair in enumerate(ids) if isinstance(pair, list) and pair}
    known = {str(each.get("content")): each.get("id") for each in added or () if isinstance(each, dict)}
    return (ids if isinstance(ids, dict) else {}) | known


def shards_by_tensor(folder: Path) -> dict[str, Path]:
    """Tensor name → its file by the index of the checkpoint in `folder`, ordered by file. A file may be absent.

    Raises `OperatorError` if the index is missing or wrong, or names anything but *.safetensors files of the folder.
    """
    index = folder / WEIGHTS_INDEX
    if not index.exists():
        raise OperatorError(
            f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}, and other weights are not loaded (*.bin, *.gguf)"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in sorted(weight_map.items(), key=lambda item: item[1])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OperatorError(f"{index} is not an index of safetensors files: {error!r}") from error
    elsewhere = sorted({file for file in weight_map.values() if not _is_weight_file(file)})
    if elsewhere:
        raise OperatorError(
            f"{index} names {elsewhere[0][:100]!r}: weights are *.safetensors files of the folder itself"
        )
    return files


def _is_weight_file(name: str) -> bool:
    return Path(name).name == name and any(fnmatchcase(name, pattern) for pattern in WEIGHT_FILES)


def weights_hash(folder: Path, num_threads: int = 1) -> str:
    """SHA-256 of every byte of the files that weights are loaded from, and of the index that names them, if there is
    one: over each file's name, its size and the digests of its 4 MiB pieces.

    `num_threads` threads read and hash the pieces. Raises `OperatorError` if there are no weights; `unchanged` notices
    a file that changes meanwhile.
    """
    digest = hashlib.sha256()
    try:
        # A process that exits early, for example since the model is not supported, does not wait for them.
        with closing(DaemonThreads(num_threads, "hash")) as threads:
            for path in _weight_files(folder):
                _hash_file(path, digest, threads)
    except OSError as error:
        raise OperatorError(f"cannot read the weights in {folder}: {error}") from error
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """What weights are loaded from, and then what names it. Raises `OperatorError`."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    return [*dict.fromkeys(shards_by_tensor(folder).values()), folder / WEIGHTS_INDEX]


def _hash_file(path: Path, digest: hashlib._Hash, threads: DaemonThreads) -> None:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(path.name.encode() + struct.pack("<Q", size))

        def piece(offset: int) -> bytes:
            content = os.pread(file.fileno(), _PIECE_BYTES, offset)
            if len(content) != min(_PIECE_BYTES, size - offset):
                raise OSError(f"{path.name} was read in part only")
            return hashlib.sha256(content).digest()

        pieces = [threads.submit(partial(piece, offset)) for offset in range(0, size, _PIECE_BYTES)]
        try:
            for each in pieces:
                digest.update(each.result())
        finally:
            for each in pieces:
                each.cancel()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """A context in which to load and hash the model in `folder`; it proves that both saw the same files.

    Raises `OperatorError` at the end if a hashed file was replaced, written to, added or removed meanwhile.
    """
    files = [folder / name for name in ("config.json", _GENERATION_CONFIG, *_TOKENIZER_PARTS, WEIGHTS, WEIGHTS_INDEX)]
    before = _identities(files)
    with suppress(OperatorError):  # the code that loads the weights reports it
        files += _weight_files(folder)
    before = _identities(files) | before  # the index as it was before it was read
    yield
    after = _identities(files)
    changed = [path for path in files if before.get(path) != after.get(path)]
    if changed:
        raise OperatorError(f"{changed[0]} has changed while the model was loaded")


def _identities(files: Iterable[Path]) -> dict[Path, tuple[int, int, int, int]]:
    """Device, inode, size and modification time (ns) of each file that exists."""
    found = {}
    for path in files:
        try:
            stat = path.stat()
        except OSError:
            continue  # the code that needs the file reports its absence
        found[path] = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found
