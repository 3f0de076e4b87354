"""The hashes in a fingerprint are fixed: two releases of one protocol version take each other's workers by them."""

from __future__ import annotations

import json
from pathlib import Path

from common.runtime.checkpoint import DEMO_FOLDER, config_hash, weights_hash

FILES = {
    "added_tokens.json": "{}",
    "merges.txt": "a b",
    "special_tokens_map.json": "{}",
    "tekken.json": "{}",
    "tokenizer.json": "{}",
    "tokenizer.model": "model",
    "tokenizer_config.json": '{"chat_template": "ignored", "name_or_path": "ignored", "unk_token": "<unk>"}',
    "vocab.json": "{}",
    "vocab.txt": "a",
}
"""Every file of a tokenizer that counts."""


def test_the_hashes_of_the_demo_model_are_what_they_were() -> None:
    """One that changes while the files do not needs another `PROTOCOL_VERSION`, and another value here."""
    assert config_hash(DEMO_FOLDER) == "fde4eee565351963b03b6bb7f4552071d2c77eb62a920440d3c8f9e147333bbf"
    assert weights_hash(DEMO_FOLDER) == "6cd61e5cf39b8a7392ca8713e760cbd6463b8926ebfd5c9f1841cba982d87ba3"


def test_the_hashes_of_a_folder_with_every_part_are_what_they_were(tmp_path: Path) -> None:
    """As above."""
    config = {"vocab_size": 7, "model_type": "llama", "_name_or_path": "ignored", "transformers_version": "ignored"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5}')
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for number, name in enumerate([*shards.values(), "consolidated.safetensors"]):
        (tmp_path / name).write_bytes(bytes([number]) * 1000)
    assert config_hash(tmp_path) == "ddd39cf511c985539c55795e0994506686949ed8f5779c2087b182c8c28ffe51"
    assert weights_hash(tmp_path) == "a2f178bc765c977c6a32f24a136b04b090f0697732ca58d97d0ae2e53a5c6b8f"
