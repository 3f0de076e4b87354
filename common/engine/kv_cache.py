"""The paged KV cache: one tensor in which each block is contiguous, with KV heads outermost within a block. A worker of
several ranks has one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.contract.kv_layout import KVLayout
from common.engine.host_memory import zeros_in_large_pages
from common.engine.shard import WHOLE, Shard

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Name of an element type in the contract → torch's type."""

_PAGE_BYTES = 4096


class KVCache:
    """Blocks of KV, zeroed: for each rank of a worker `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`
    with the rank's KV heads, starting on a memory page. A worker of one rank has one such part."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        shard: Shard = WHOLE,
        memory: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """`layout` is that of a whole block. `memory` is that of each rank's part, uint8, of all ranks or of the
        shard's own rank only; without it, the part of the only rank is allocated."""
        assert num_blocks >= 1, num_blocks
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        if memory is None:
            assert shard.width == 1, shard
            memory = (_memory(part_bytes(layout, num_blocks, shard), device),)
        shards = [shard] if len(memory) == 1 else [Shard(rank, shard.width) for rank in range(shard.width)]
        self.parts = tuple(CachePart(layout, num_blocks, *each) for each in zip(shards, memory, strict=True))
        """One for each rank whose memory this process sees."""
        self._own = self.parts[shards.index(shard)]
        self._layers = self._own.blocks.unbind(2)

    @property
    def num_slots(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.layout.block_size

    @property
    def blocks(self) -> torch.Tensor:
        """This rank's part, in the shape that the class states; `blocks[i]` is contiguous."""
        return self._own.blocks

    def layer(self, index: int) -> torch.Tensor:
        """View `[num_blocks, num_kv_heads, 2, block_size, head_dim]` of one layer of this rank's part."""
        return self._layers[index]

    def begin(self, blocks: torch.Tensor) -> None:
        """Zero this rank's part of `blocks`.

        This is done to a block when its first slot is written. So every slot that is not yet written is zero, and
        nothing that an earlier owner left there, NaN in particular, can reach a sequence through a masked slot.
        """
        self.blocks.index_fill_(0, blocks, 0)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy this rank's part of block `src` to block `dst`."""
        self.blocks[dst].copy_(self.blocks[src])

    def synchronize(self) -> None:
        """Wait until the devices of all parts have done everything that this process has queued on them. Transports
        access the cache by address, in no such order."""
        if self.device.type == "cuda":
            for device in {part.blocks.device for part in self.parts}:
                torch.cuda.synchronize(device)


class CachePart:
    """A rank's part of every block."""

    def __init__(self, layout: KVLayout, num_blocks: int, shard: Shard, memory: torch.Tensor) -> None:
        self.heads = shard.kv_heads(layout.num_kv_heads)
        """The KV heads that it holds."""
        own = shard.layout(layout)
        lead = -memory.data_ptr() % _PAGE_BYTES
        shape = (num_blocks, own.num_kv_heads, own.num_layers, 2, own.block_size, own.head_dim)
        used = memory[lead : lead + own.block_bytes * num_blocks]
        self.blocks = used.view(TORCH_DTYPES[own.dtype]).view(shape)

    @property
    def address(self) -> int:
        """Address of block 0; the others follow it, without gaps."""
        return self.blocks.data_ptr()


def part_bytes(layout: KVLayout, num_blocks: int, shard: Shard) -> int:
    """Bytes of memory for a rank's part: it may have to start within the first page."""
    return shard.layout(layout).block_bytes * num_blocks + _PAGE_BYTES


def _memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed memory; on a host in large pages, since blocks lie apart.

    Raises `RuntimeError` if there is not enough memory.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return zeros_in_large_pages(num_bytes)
