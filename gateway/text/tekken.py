"""Mistral's tokenizer of more than 100,000 tokens, tekken: which of a checkpoint's files says how it splits a text.

Versions of `transformers` before 5 made of `tekken.json` a `tokenizer.json` that may split texts into words by another
pattern than the model was trained with. Later versions suspect every tekken vocabulary of that age, whatever its
pattern is, and tell whoever loads it to set `fix_mistral_regex`.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from common.contract.errors import OperatorError
from common.runtime.checkpoint import read_config

log = logging.getLogger(__name__)

_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of all tekken vocabularies so far."""
_MOST_TOKENS_OF_OTHERS = 100_000
"""A larger vocabulary of Mistral's is tekken's."""
_OLD_VERSION = re.compile(r"[0-4]\.|$")
"""Start of a version of `transformers` below 5, or nothing."""


def load_options(folder: Path) -> dict[str, Any]:
    """Options with which `transformers` loads the `tokenizer.json` of `folder` as it is, unless its
    `tokenizer_config.json` asks for another pattern. Raises `OperatorError`.

    Without the first option it would load `tekken.json` where `mistral_common` is installed, into a tokenizer without
    a Rust backend. Without the second one it would warn of every suspect.
    """
    fix = _read(folder, "tokenizer_config.json").get("fix_mistral_regex", False)
    return {"mistral_format": False, "fix_mistral_regex": fix}


def mend_split(backend: Any, folder: Path) -> None:
    """Let the Rust tokenizer of the checkpoint in `folder` split texts by the pattern in its `tekken.json`, if it is
    one that `transformers` suspects.

    Without a `tekken.json` nobody can tell which pattern the model was trained with, so that tokens stay as they are,
    with a warning if the pattern is not tekken's. Raises `OperatorError`.
    """
    pattern = _pattern_of(backend) if _is_suspect(backend, folder) else None
    if pattern is None:
        return
    path = folder / "tekken.json"
    match _read(folder, path.name).get("config"):
        case {"pattern": str() as right}:
            if pattern != right:
                backend.pre_tokenizer[0] = _split(right, path)
                log.info("%s splits texts by a wrong pattern; that of %s is used", folder / "tokenizer.json", path.name)
        case _ if pattern != _PATTERN:
            log.warning(
                "%s splits texts by another pattern than other Mistral models of its kind. If the model was not trained"
                " with it, answers get worse: put the tekken.json of the model into its folder, for every process, and"
                " its pattern is used",
                folder / "tokenizer.json",
            )


def _is_suspect(backend: Any, folder: Path) -> bool:
    config = _read(folder, "config.json")
    is_old = _OLD_VERSION.match(str(config.get("transformers_version") or "")) is not None
    return config.get("model_type") == "mistral" and is_old and backend.get_vocab_size() > _MOST_TOKENS_OF_OTHERS


def _pattern_of(backend: Any) -> str | None:
    """The pattern by which `backend` splits a text before anything else; None if it does otherwise, as tokenizers made
    from SentencePiece do."""
    if backend.pre_tokenizer is None:
        return None
    match json.loads(backend.pre_tokenizer.__getstate__()):
        case {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": str() as pattern}}, *_]}:
            return pattern
    return None


def _split(pattern: str, path: Path) -> Split:
    try:
        return Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises nothing more specific
        raise OperatorError(f"{path} has a pattern that is no regular expression: {error}") from error


def _read(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    return read_config(folder, name) if (folder / name).exists() else {}
