"""What rank 0 of a group tells the others to do: an array of numbers for each order. Ranks run no scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from itertools import accumulate, pairwise
from queue import SimpleQueue

import numpy as np
import torch

from common.engine.backend import Backend
from common.engine.batch import Ints
from common.engine.executor import Executor, Pairs, StepLogits
from common.engine.group import Group
from common.engine.host_copy import HostCopy
from common.engine.host_swap import HostSwap
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.native.group import SharedGroup
from common.engine.ragged import Rows
from common.engine.weights import Progress


class _Order(IntEnum):
    """The first number of an order: a method of the executor."""

    COMPUTE = 1
    LOGITS = 2
    CLEAR = 3
    COPY = 4
    SWAP_OUT = 5
    SWAP_IN = 6
    JOIN = 7
    GRAPHS = 8
    WARM_UP = 9


_ARRAYS = (
    "token_ids_T",
    "positions_T",
    "slot_blocks_T",
    "slot_offsets_T",
    "begun_blocks",
    "query_start_B1",
    "seq_lens_B",
    "block_tables_BM",
    "logit_rows_R",
)
"""Those of `Rows`."""


class LeadingExecutor(Executor):
    """That of rank 0: the others do what it does."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, swap: HostSwap, backend: Backend, group: Group, orders: SharedGroup
    ) -> None:
        super().__init__(decoder, cache, swap, backend, group)
        self._orders = orders

    def capture_graphs(self, max_num_seqs: int, progress: Progress | None = None) -> None:
        """See `Executor.capture_graphs`."""
        with self._telling(_Order.GRAPHS, max_num_seqs):
            super().capture_graphs(max_num_seqs, progress)

    def warm_up(self) -> None:
        """See `Executor.warm_up`."""
        with self._telling(_Order.WARM_UP):
            super().warm_up()

    def compute(self, rows: Rows, chosen_N: torch.Tensor, *, after_swaps: bool = False) -> StepLogits:
        """See `Executor.compute`."""
        with self._telling(_Order.COMPUTE, *compute_order(rows, len(chosen_N), after_swaps)):
            return super().compute(rows, chosen_N, after_swaps=after_swaps)

    def logits(self, rows_R: Ints) -> torch.Tensor:
        """See `Executor.logits`."""
        with self._telling(_Order.LOGITS, rows_R):
            return super().logits(rows_R)

    def clear(self, blocks: Ints) -> None:
        """See `Executor.clear`."""
        with self._telling(_Order.CLEAR, blocks):
            super().clear(blocks)

    def copy_block(self, src: int, dst: int) -> None:
        """See `Executor.copy_block`."""
        with self._telling(_Order.COPY, src, dst):
            super().copy_block(src, dst)

    def swap_out(self, pairs: Pairs) -> None:
        """See `Executor.swap_out`."""
        with self._telling(_Order.SWAP_OUT, np.array(pairs, np.int64)):
            super().swap_out(pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """See `Executor.swap_in`."""
        with self._telling(_Order.SWAP_IN, np.array(pairs, np.int64)):
            super().swap_in(pairs)

    def join(self) -> None:
        """See `Executor.join`."""
        if self.moved:
            with self._telling(_Order.JOIN):
                super().join()

    @contextmanager
    def _telling(self, *order: int | Ints) -> Iterator[None]:
        """Give an order. After an error the ranks are not at the same place any more, and the group ends."""
        try:
            self._orders.tell([np.asarray(part, np.int64) for part in order])
            yield
        except BaseException:
            self._orders.end()
            raise


def follow(executor: Executor, orders: SharedGroup, marks: SimpleQueue[HostCopy] | None = None) -> None:
    """Do what rank 0 says, for ever. `marks` gets the end of each order's work on the device. Raises `GroupEndedError`
    when the group ends."""
    while True:
        order = orders.hear()
        what, numbers = _Order(order[0]), order[1:]
        match what:
            case _Order.COMPUTE:
                rows, num_chosen, after_swaps = rows_of(numbers)
                chosen_N = torch.zeros(num_chosen, dtype=torch.int64, device=executor.cache.device)
                executor.compute(rows, chosen_N, after_swaps=after_swaps)
            case _Order.LOGITS:
                executor.logits(numbers)
            case _Order.CLEAR:
                executor.clear(numbers)
            case _Order.COPY:
                executor.copy_block(*numbers.tolist())
            case _Order.SWAP_OUT:
                executor.swap_out(_pairs(numbers))
            case _Order.SWAP_IN:
                executor.swap_in(_pairs(numbers))
            case _Order.JOIN:
                executor.join()
            case _Order.GRAPHS:
                executor.capture_graphs(*numbers.tolist())
            case _Order.WARM_UP:
                executor.warm_up()
        if marks is not None:
            marks.put(HostCopy(device=executor.cache.device))


def _pairs(numbers: Ints) -> Pairs:
    return [(first, second) for first, second in numbers.reshape(-1, 2).tolist()]


def compute_order(rows: Rows, num_chosen: int, after_swaps: bool) -> list[Ints]:
    """The numbers of an order to compute `rows`, in parts: see `rows_of`."""
    parts = [*(rows.arrays[name] for name in _ARRAYS), rows.follows_B]
    num_blocks = rows.arrays["block_tables_BM"].shape[1]
    sizes = (part.size for part in parts)
    return [np.array((num_chosen, after_swaps, num_blocks, *sizes)), *parts]


def rows_of(order: Ints) -> tuple[Rows, int, bool]:
    """The rows of an order, without what concerns only samples; the number of tokens that the step before has chosen;
    and whether the rows are to wait for swaps."""
    num_parts = len(_ARRAYS) + 1
    num_chosen, after_swaps, num_blocks, *sizes = order[: 3 + num_parts].tolist()
    ends = accumulate(sizes, initial=3 + num_parts)
    *arrays, follows_B = (order[begin:end] for begin, end in pairwise(ends))
    named = dict(zip(_ARRAYS, arrays, strict=True))
    named["block_tables_BM"] = named["block_tables_BM"].reshape(-1, num_blocks)
    rows = Rows(arrays=named, sample_rows_N=np.empty(0, np.int64), follows_B=follows_B)
    return rows, num_chosen, bool(after_swaps)
