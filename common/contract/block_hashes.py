"""The names of KV blocks: the name of a full block is a hash of its tokens and of every token before it.

The name of block `i` is SHA-256 over (name of block `i - 1`, the block's token ids, 8 bytes each, little-endian); the
parent of the first block is derived from block size and salt. Equal names mean equal tokens in equal positions under
an equal salt, on every worker with the same fingerprint, so a chain of names says which prefix a cache holds. Requests
with different salts share no block, so a tenant cannot find out by timing what another tenant has asked.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NewType

HASH_BYTES = 32
SHORT_NAME_BYTES = 8
"""Leading bytes of a name that are sent where the name is only a hint."""
_TOKEN_BYTES = 8
BlockHash = NewType("BlockHash", bytes)
"""The name of a full block, `HASH_BYTES` long."""


@lru_cache(maxsize=1024)
def _root(block_size: int, salt: str) -> BlockHash:
    """The parent of the first block of every chain with this salt."""
    return BlockHash(hashlib.sha256(f"baton block {block_size} {salt}".encode()).digest())


def _packed(token_ids: Sequence[int]) -> bytes:
    numbers = array("Q", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class BlockChain:
    """The names of the leading full blocks of one sequence, computed once each, as the sequence grows."""

    __slots__ = ("_block_size", "_root", "hashes")

    def __init__(self, block_size: int, salt: str = "") -> None:
        assert block_size >= 1, block_size
        self._block_size = block_size
        self._root = _root(block_size, salt)
        self.hashes: list[BlockHash] = []
        """Names of blocks `[0, len(hashes))`."""

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Name every full block within `token_ids[:num_tokens]`. The tokens of the blocks named so far must lead it."""
        assert num_tokens <= len(token_ids), f"{num_tokens} of {len(token_ids)} tokens"
        size, sha256, hashes = self._block_size, hashlib.sha256, self.hashes
        new = token_ids[len(hashes) * size : num_tokens - num_tokens % size]
        packed = _packed(new)
        parent = hashes[-1] if hashes else self._root
        for start in range(0, len(packed), size * _TOKEN_BYTES):
            parent = BlockHash(sha256(parent + packed[start : start + size * _TOKEN_BYTES]).digest())
            hashes.append(parent)

    def fork(self) -> BlockChain:
        """Return a copy of this chain; the two are extended independently."""
        other = BlockChain.__new__(BlockChain)
        other._block_size, other._root = self._block_size, self._root
        other.hashes = list(self.hashes)
        return other


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[BlockHash]:
    """The names of every full block of `token_ids`."""
    chain = BlockChain(block_size, salt)
    chain.extend(token_ids, len(token_ids))
    return chain.hashes
