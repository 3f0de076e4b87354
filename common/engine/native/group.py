"""The group of ranks that are processes on one machine: they share memory. See `group.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from common.engine.batch import Ints
from common.engine.native import Kernels
from common.engine.shard import Shard

MOST_RANKS = 16
_ALIGNMENT = 64


class GroupEndedError(Exception):
    """Nobody is to wait for the other ranks any more: one of them is gone, or the worker ends."""


class _Member(ctypes.Structure):
    """`struct member`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("rank", ctypes.c_long),
        ("width", ctypes.c_long),
        ("numbers", ctypes.c_long),
        ("adding_ns", ctypes.c_long),
    )


class SharedGroup:
    """A `Group` in shared memory. Used by one thread of each rank, but for `end`, which any thread may call."""

    def __init__(self, kernels: Kernels, memory: torch.Tensor, shard: Shard, place_numbers: int, order_numbers: int):
        """`memory` is that of the group, uint8, at first all zeros; see `memory_bytes` for the numbers."""
        assert shard.width <= MOST_RANKS, shard
        assert memory.numel() >= memory_bytes(kernels, shard.width, place_numbers, order_numbers)
        self.shard = shard
        self.ended = False
        """Whether this rank has ended the group."""
        self._kernels = kernels
        self._memory = memory
        self._table = memory.data_ptr()
        self._place_numbers = place_numbers
        self._member = _Member(self._table, shard.rank, shard.width, place_numbers)
        self.address = ctypes.addressof(self._member)
        """Where C finds this rank's place in the group."""
        orders = _places_end(kernels, shard.width, place_numbers)
        self._order: Ints = memory[orders : orders + 8 * order_numbers].numpy().view(np.int64)

    @property
    def adding_s(self) -> float:
        """Seconds that this rank has spent in sums so far."""
        return float(self._member.adding_ns / 1e9)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group.add`. Sums are in float32."""
        summed = x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
        self._require(self._kernels.group_add(self.address, summed.data_ptr(), summed.numel()))
        return summed.to(x.dtype)

    def beside(self, x_RV: torch.Tensor, num_columns: int) -> torch.Tensor:
        """See `Group.beside`."""
        part, num_rows = x_RV.float().contiguous(), x_RV.shape[0]
        assert x_RV.shape[1] == len(self.shard.of(num_columns)) <= self._place_numbers
        out = torch.empty(num_rows if self.shard.rank == 0 else 0, num_columns)
        self._require(self._kernels.group_beside(self.address, part.data_ptr(), num_rows, num_columns, out.data_ptr()))
        return out.to(x_RV.dtype)

    def tell(self, order: Sequence[Ints]) -> None:
        """Rank 0 gives an order, in parts, as soon as all have read the last one. A longer one takes several turns."""
        left, room = sum(part.size for part in order), len(self._order) - 2
        turns: Iterable[Sequence[Ints]] = [order]
        if left > room:
            whole = np.concatenate([part.ravel() for part in order])
            turns = ((whole[begin : begin + room],) for begin in range(0, left, room))
        for turn in turns:
            self._require(self._kernels.group_wait_for_readers(self.address))
            end = 2
            for part in turn:
                begin, end = end, end + part.size
                self._order[begin:end] = part.ravel()
            left -= end - 2
            self._order[:2] = end, left
            self._kernels.group_tell(self.address)

    def hear(self) -> Ints:
        """The next order, its parts one after another; waits for it."""
        turns, left = [], 1
        while left:
            self._require(self._kernels.group_hear(self.address))
            end, left = self._order[:2].tolist()
            turns.append(self._order[2:end].copy())
            self._kernels.group_has_read(self.address)
        return turns[0] if len(turns) == 1 else np.concatenate(turns)

    def end(self) -> None:
        """Let nobody wait any more: from now on whatever would wait raises `GroupEndedError`."""
        self.ended = True
        self._kernels.group_end(self._table)

    @staticmethod
    def _require(ended: int) -> None:
        if ended:
            raise GroupEndedError


def memory_bytes(kernels: Kernels, width: int, place_numbers: int, order_numbers: int) -> int:
    """Bytes that a group shares. `place_numbers` are the numbers that a rank says at once, at least those of a row of
    its logits, and `order_numbers`, more than two, those of an order; what is longer takes several turns."""
    return _places_end(kernels, width, place_numbers) + 8 * order_numbers


def _places_end(kernels: Kernels, width: int, place_numbers: int) -> int:
    end: int = kernels.group_table_bytes + width * 2 * 4 * place_numbers
    return end + -end % _ALIGNMENT
