"""The paged KV cache: one tensor in which each block is contiguous, with KV heads outermost within a block."""

from __future__ import annotations

import torch

from common.contract.kv_layout import KVLayout
from common.engine.host_memory import zeros_in_large_pages

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Name of an element type in the contract → torch's type."""

_PAGE_BYTES = 4096


class KVCache:
    """`[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`, zeroed, starting on a memory page."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        assert num_blocks >= 1, num_blocks
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        memory = _memory(layout.block_bytes * num_blocks + _PAGE_BYTES, device)
        lead = -memory.data_ptr() % _PAGE_BYTES
        shape = (num_blocks, layout.num_kv_heads, layout.num_layers, 2, layout.block_size, layout.head_dim)
        self._blocks = memory[lead : lead + self.num_bytes].view(TORCH_DTYPES[layout.dtype]).view(shape)
        self._layers = self._blocks.unbind(2)

    @property
    def address(self) -> int:
        """Address of block 0; block `i` starts `i * layout.block_bytes` after it."""
        return self._blocks.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.layout.block_bytes * self.num_blocks

    @property
    def blocks(self) -> torch.Tensor:
        """The whole cache, in the shape that the class states; `blocks[i]` is contiguous."""
        return self._blocks

    def layer(self, index: int) -> torch.Tensor:
        """View `[num_blocks, num_kv_heads, 2, block_size, head_dim]` of one layer."""
        return self._layers[index]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero `blocks`.

        This is done to a block when its first slot is written. So every slot that is not yet written is zero, and
        nothing that an earlier owner left there, NaN in particular, can reach a sequence through a masked slot.
        """
        self._blocks.index_fill_(0, blocks, 0)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy all layers of block `src` to block `dst`."""
        self._blocks[dst].copy_(self._blocks[src])

    def synchronize(self) -> None:
        """Wait until the device has done everything queued on it. Transports access the cache by address, in no such
        order."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed memory; on a host in large pages, since blocks lie apart.

    Raises `RuntimeError` if there is not enough memory.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return zeros_in_large_pages(num_bytes)
