"""The shape of the KV cache, and the fingerprint by which two processes decide that they may exchange KV."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from common.contract.errors import FingerprintMismatchError

PROTOCOL_VERSION = 15
"""Version of the wire protocol; two processes of different versions refuse each other.

History: 1, the first. 2, tiers, tenants and salts; prompts computed by decode workers; pulled prefixes.
3, second attempts, migration, drain; heartbeats report received messages and echoes. 4, requests suspected of a crash.
5, logit biases and grammars. 6, heartbeats count tokens; timings of a request's stages.
7, lists of token ids, block ids and names as bytes; suspects are tried in groups; requests that were admitted before
are not refused because of the queue. 8, log probabilities of prompts. 9, KV heads outermost in a block.
10, the tokens of a step as columns. 11, predictions, and counts of drafted tokens.
12, profiles of decode workers, and their time between tokens. 13, caches in parts, one for each rank of a worker.
14, one choice of a request given up. 15, the same files give other hashes, ends and KV than before; unknown fields of
messages of the link are ignored. See docs/protocol.md.
"""

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""KV element types and their sizes in bytes."""

_Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]
_Text = Annotated[str, Field(strict=True, max_length=256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Geometry of a block: `[num_kv_heads, num_layers, 2, block_size, head_dim]` of `dtype`, contiguous.

    Index 0 of the third axis holds keys, index 1 values. Any range of heads of a block is contiguous. A cache is
    `num_blocks` such blocks, one after another.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    num_layers: _Positive
    num_kv_heads: _Positive
    head_dim: _Positive
    block_size: _Positive
    """Token slots in a block."""
    dtype: _Text
    """A key of `DTYPE_BYTES`."""

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block. One block is one descriptor of a transfer."""
        return self.token_bytes * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The properties that must be equal in two workers before one may read KV from the other. Of another protocol
    version only that number need be understood: fields that are not known are ignored."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    protocol_version: Annotated[int, Field(strict=True, ge=0)] = PROTOCOL_VERSION
    config_hash: _Text
    """SHA-256 of the model's configuration and its tokenizer's files. A gateway loads no weights and compares only
    this."""
    weights_hash: _Text
    """SHA-256 of every byte of the weight files."""
    layout: KVLayout

    def require_equal(self, other: Fingerprint, mine: str, theirs: str) -> None:
        """Raise `FingerprintMismatchError`, naming each differing field and both values, unless equal.

        `mine` and `theirs` name the two processes for the message.
        """
        if self == other:
            return
        left, right = _flat(self), _flat(other)
        differences = "; ".join(
            f"{name}: {left[name]} at {mine}, {right[name]} at {theirs}" for name in left if left[name] != right[name]
        )
        raise FingerprintMismatchError(f"fingerprint mismatch: {differences}")


def _flat(fingerprint: Fingerprint) -> dict[str, object]:
    fields = asdict(fingerprint)
    layout = fields.pop("layout")
    return fields | {f"layout.{name}": value for name, value in layout.items()}


def width_objection(width: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Why a model with these numbers of query heads and KV heads cannot be divided among `width` ranks; None if it
    can."""
    if num_heads % width:
        return f"--tensor-parallel {width} does not divide the model's {num_heads} query heads"
    if num_kv_heads % width and width % num_kv_heads:
        return (
            f"--tensor-parallel {width} neither divides the model's {num_kv_heads} KV heads nor is a multiple of them"
        )
    return None
