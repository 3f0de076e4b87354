"""Host memory for the KV of preempted sequences.

A block is contiguous in the cache and here, so each is moved by one plain copy, straight from one to the other. Indexed
copies of many blocks at once were measured to be no quicker for small blocks and seven times slower for large ones:
they gather into a buffer first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.contract.kv_layout import KVLayout
from common.engine.kv_cache import TORCH_DTYPES, KVCache


class HostSwap:
    """`[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]` on the host, uninitialised.

    Block `i` of it is *host slot* `i`. Who may use a slot is decided by the caller.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """Allocate for a cache on `device`.

        On a CPU, memory that no sequence was ever swapped to costs nothing: it is not touched. For CUDA it is pinned,
        hence resident.
        """
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_kv_heads, layout.num_layers, 2, layout.block_size, layout.head_dim)
        self._slots = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype], pin_memory=device.type == "cuda")

    def swap_out(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of `cache` to slots: pairs (block, host slot), before whatever the device is asked next."""
        _copy(cache.blocks, self._slots, pairs)

    def swap_in(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to blocks of `cache`: pairs (host slot, block), before whatever the device is asked next."""
        _copy(self._slots, cache.blocks, pairs)


def _copy(source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    assert len({dst for _, dst in pairs}) == len(pairs), f"two blocks to one place: {pairs}"
    for src, dst in pairs:
        assert 0 <= src < len(source), f"nothing is at {src}, there are {len(source)}"
        assert 0 <= dst < len(destination), f"no room at {dst}, there are {len(destination)}"
        destination[dst].copy_(source[src], non_blocking=True)
