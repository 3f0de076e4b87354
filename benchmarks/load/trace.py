"""Reads traces in Mooncake's format: one JSON object on each line, prompts as hashes of blocks of 512 tokens."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from common.contract.errors import OperatorError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """One request of a trace."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """A hash for each 512 tokens of the prompt; prompts that begin with the same hashes begin with the same tokens."""


def read_trace(path: Path, most: int) -> list[TraceLine]:
    """The first `most` requests. Raises `OperatorError` that names the line at fault."""
    lines: list[TraceLine] = []
    try:
        with path.open() as file:
            for number, text in enumerate(file, 1):
                if len(lines) == most:
                    break
                if text.strip():
                    lines.append(_line(text, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"cannot read the trace: {error}") from error
    if not lines:
        raise OperatorError(f"{path} holds no request")
    if any(later.time_s < earlier.time_s for earlier, later in itertools.pairwise(lines)):
        raise OperatorError(f"{path}: timestamps go backwards")
    return lines


def _line(text: str, where: str) -> TraceLine:
    try:
        fields = json.loads(text)
        line = TraceLine(
            time_s=float(fields["timestamp"]) / 1000,
            input_tokens=int(fields["input_length"]),
            output_tokens=int(fields["output_length"]),
            blocks=tuple(int(each) for each in fields["hash_ids"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise OperatorError(f"{where} is not timestamp, input_length, output_length, hash_ids: {error!r}") from error
    if line.input_tokens < 1 or line.output_tokens < 1 or line.time_s < 0:
        raise OperatorError(f"{where}: lengths are at least 1, times at least 0")
    if len(line.blocks) != -(-line.input_tokens // BLOCK_TOKENS):
        raise OperatorError(f"{where}: {line.input_tokens} tokens are not {len(line.blocks)} blocks of {BLOCK_TOKENS}")
    return line
