"""Host memory for the KV of preempted sequences.

A block is contiguous both in the cache and here, so each is moved by one plain copy. Indexed copies of many blocks at
once were measured to be no quicker for small blocks and seven times slower for large ones: they gather into a buffer
first.

A GPU copies on a stream of its own, in parallel with the step that it computes. A step waits for the copies before it
starts if it writes a block that is being read, or uses a block that is being written; otherwise it waits at its end. So
no swap is under way any more when the outcomes of a step are known.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from common.contract.kv_layout import KVLayout
from common.engine.batch import Slice
from common.engine.kv_cache import TORCH_DTYPES, KVCache

Copy = tuple[torch.Tensor, torch.Tensor]
"""(destination, source)."""


class Lane:
    """How copies are made: in the order of all other work, as a CPU does."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Start these copies, after everything queued on the device before."""
        for to, source in copies:
            to.copy_(source)

    def join(self) -> None:
        """Let everything queued on the device later wait for these copies."""


class SideStream(Lane):
    """Copies on a GPU's stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, copies: Sequence[Copy]) -> None:
        """See `Lane.copy`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)

    def join(self) -> None:
        """See `Lane.join`."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class HostSwap:
    """Host memory `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`, uninitialised, for the KV heads of
    one rank.

    Its block `i` is *host slot* `i`. The caller decides who may use a slot.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, lane: Lane | None = None) -> None:
        """Allocate host slots for a cache on `device`; `layout` is that of the rank's part of a block.

        On a CPU, slots that were never swapped to cost no memory, because they are not touched. For CUDA the memory is
        pinned, hence resident. Copies are made on `lane`; the default is a stream of its own on a GPU, and in order on
        a CPU. Raises `RuntimeError` if there is not enough memory.
        """
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        self._block_size = layout.block_size
        shape = (num_blocks, layout.num_kv_heads, layout.num_layers, 2, layout.block_size, layout.head_dim)
        self._slots = torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype])
        on_gpu = device.type == "cuda"
        if on_gpu and num_blocks:
            pin(self._slots)
        self._lane = lane or (SideStream(device) if on_gpu else Lane())
        self._read: set[int] = set()
        """Blocks that are being copied to the host."""
        self._written: set[int] = set()
        """Blocks that are being copied from the host."""

    def swap_out(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy this rank's part of blocks of `cache` to slots: pairs (block, host slot). Runs after everything queued
        on the device before."""
        self._copy(cache.blocks, self._slots, pairs)
        self._read.update(block for block, _ in pairs)

    def swap_in(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to blocks of `cache`: pairs (host slot, block). Runs after everything queued on the device
        before."""
        self._copy(self._slots, cache.blocks, pairs)
        self._written.update(block for _, block in pairs)

    def _copy(self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        assert len({dst for _, dst in pairs}) == len(pairs), f"two blocks to one place: {pairs}"
        for src, dst in pairs:
            assert 0 <= src < len(source), f"nothing is at {src}, there are {len(source)}"
            assert 0 <= dst < len(destination), f"no room at {dst}, there are {len(destination)}"
        if pairs:
            self._lane.copy([(destination[dst], source[src]) for src, dst in pairs])

    @property
    def busy(self) -> bool:
        """Whether swaps are under way."""
        return bool(self._read or self._written)

    def clashes_with(self, slices: Sequence[Slice]) -> bool:
        """Whether a step of `slices` must not run in parallel with the swaps that are under way."""
        size = self._block_size
        for each in slices:
            end_block = -(-(each.start + len(each.token_ids)) // size)
            if not self._read.isdisjoint(each.block_table[each.start // size : end_block]):
                return True
            if not self._written.isdisjoint(each.block_table[:end_block]):
                return True
        return False

    def join(self) -> None:
        """Let everything queued on the device later wait for the swaps that are under way."""
        if self.busy:
            self._lane.join()
            self._read.clear()
            self._written.clear()


def pin(tensor: torch.Tensor) -> None:
    """Register host memory with CUDA, which then copies it in parallel with its computations, until the tensor is gone.
    Raises `RuntimeError` if CUDA refuses.

    Memory that torch itself pins is not used here, because torch rounds its size up to a power of two.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    storage = tensor.untyped_storage()
    torch.cuda.check_error(cudart.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    weakref.finalize(tensor, _unpin, cudart, storage)


def _unpin(cudart: object, storage: torch.UntypedStorage) -> None:
    """Unregister the memory. As an argument of this call, the storage outlives the tensor until then."""
    cudart.cudaHostUnregister(storage.data_ptr())  # type: ignore[attr-defined]
