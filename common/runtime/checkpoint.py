"""Finding a model on disk and knowing it again: name → folder → hashes. Reads files; loads no weights."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from common.contract.errors import OperatorError

DEMO_MODEL = "demo"
"""The name of the bundled model."""
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
WEIGHT_FILES = ["*.safetensors"]

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 64 * 1024
_VOLATILE_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path"})


def resolve_model(name: str, *, weights: bool) -> Path:
    """The folder of a model given as `demo`, a folder, or a hub id (downloaded once, into the hub's own cache).

    `weights` is False for a process that needs the tokenizer and configuration only. Raises `OperatorError`.
    """
    if name == DEMO_MODEL:
        return DEMO_FOLDER
    try:
        folder = Path(name).expanduser()
        found = folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise OperatorError(f"model {name[:100]!r} is no usable path: {error}") from error
    if found:
        if not (folder / "config.json").is_file():
            raise OperatorError(f"model folder {name} has no config.json")
        return folder.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise OperatorError(f"model {name!r} is neither a folder nor a hub id of the form owner/name")
    return _download(name, weights)


def _download(hub_id: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = TOKENIZER_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated types; each means the same to the operator
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OperatorError(
            f"model {hub_id!r} is no local folder and could not be had from the hub: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json`. Raises `OperatorError`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OperatorError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise OperatorError(f"{folder / 'config.json'} does not hold an object")
    return config


def config_hash(folder: Path) -> str:
    """SHA-256 of the canonical configuration, without the keys that change without changing the model."""
    config = {key: value for key, value in read_config(folder).items() if key not in _VOLATILE_CONFIG_KEYS}
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weights_hash(folder: Path) -> str:
    """SHA-256 over each weight file's size, header (names, shapes, offsets) and 64 evenly spread pieces of 64 KiB.

    Files of up to 4 MiB are hashed whole; of a larger one enough is read to tell two revisions apart, in
    milliseconds rather than minutes. Raises `OperatorError` if there are no weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise OperatorError(f"model folder {folder} has no *.safetensors weights")
    digest = hashlib.sha256()
    try:
        for path in files:
            _hash_file(path, digest)
    except OSError as error:
        raise OperatorError(f"cannot read the weights in {folder}: {error}") from error
    return digest.hexdigest()


def _hash_file(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    digest.update(path.name.encode() + struct.pack("<Q", size))
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = min(struct.unpack("<Q", prefix)[0], size) if len(prefix) == 8 else 0
        digest.update(file.read(header_bytes))
        start = 8 + header_bytes
        step = max(_SAMPLE_BYTES, (size - start) // _SAMPLES_PER_FILE)
        for offset in range(start, size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
