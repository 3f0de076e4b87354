"""The memory that a transport reads from or into: a KV cache, as addresses."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from common.contract.errors import TransferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A KV cache: `num_blocks` blocks of `block_bytes` bytes, one after another from `address`.

    It owns nothing: whoever allocated the memory keeps it alive until every transport over it is closed.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: Literal["cpu", "cuda"] = "cpu"
    device_id: int = 0
    """Index of the CUDA device; 0 for host memory."""

    def __post_init__(self) -> None:
        assert self.address > 0
        assert self.num_blocks > 0
        assert self.block_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.num_blocks * self.block_bytes

    def require(self, block_ids: Iterable[int]) -> None:
        """Raise `TransferError`, naming the first offender, unless every id is a block of this region."""
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise TransferError(f"block {block_id} of a cache of {self.num_blocks} blocks")

    def view(self, block_id: int) -> memoryview:
        """The bytes of a block, writable and without a copy.

        Raises `TransferError` for an id out of range, and for device memory, which has no view.
        """
        self.require((block_id,))
        if self.device != "cpu":
            raise TransferError(f"a {self.device} region cannot be viewed from the host")
        buffer = (ctypes.c_ubyte * self.block_bytes).from_address(self.address + block_id * self.block_bytes)
        return memoryview(buffer).cast("B")

    def crc32(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """CRC-32 of each block's bytes. Takes about 1 ms per MiB; other threads can run meanwhile.

        Raises `TransferError` as `view` does.
        """
        return tuple(zlib.crc32(self.view(block_id)) for block_id in block_ids)
