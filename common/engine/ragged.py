"""The tensors of one step: slices of many sequences side by side, without padding.

Shapes: T tokens of all slices, B slices, M blocks of the longest sequence, R rows of logits, N samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from common.engine.batch import Slice
from common.engine.host_copy import to_device

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedBatch:
    """Slice `b` is tokens `[query_start_B1[b], query_start_B1[b + 1])` of the batch. They are the last ones of the
    `seq_lens_B[b]` tokens of its sequence.

    Integers on the device are int64. Numbers that a backend needs to plan its work are on the host too, so that it
    never waits for the device.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_blocks_T: torch.Tensor
    slot_offsets_T: torch.Tensor
    """Block and slot in which each token's KV is stored."""
    begun_blocks: torch.Tensor
    """Blocks whose first slot is written by this batch and whose last slot is not."""
    query_start_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    """Tokens of each sequence up to the end of its slice."""
    block_tables_BM: torch.Tensor
    """Entries beyond a sequence's length are further blocks of its own, or block 0."""
    logit_rows_R: torch.Tensor
    """Tokens whose logits are wanted: the last one of each slice with samples."""
    block_size: int
    num_tokens: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def follow(self, follows: Sequence[int | None], chosen_N: torch.Tensor) -> None:
        """Fill in the tokens of slices that follow a sample of the step before (`Slice.follows`). `chosen_N` are the
        tokens that the samples of that step have chosen."""
        sources = [each for each in follows if each is not None]
        if not sources:
            return
        ends = accumulate(self.query_lens)
        places = [end - 1 for end, each in zip(ends, follows, strict=True) if each is not None]
        device = chosen_N.device
        self.token_ids_T[to_device(places, torch.int64, device)] = chosen_N[to_device(sources, torch.int64, device)]

    def last_tokens(self) -> torch.Tensor:
        """The token before each row of logits, `[R]` int64."""
        return self.token_ids_T[self.logit_rows_R]

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int, device: torch.device) -> RaggedBatch:
        """Lay `slices` (at least one) out as tensors."""
        return Rows.of(slices, block_size).on(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """A `RaggedBatch` that is still on the host: its tensors as int64 arrays, by name."""

    arrays: dict[str, _Ints]
    sample_rows_N: _Ints
    """Row of logits that each sample uses, in the order of the slices."""
    follows: tuple[int | None, ...]
    """See `Slice.follows`."""
    block_size: int
    num_tokens: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int) -> Rows:
        """Lay `slices` (at least one) out."""
        lens = [len(each.token_ids) for each in slices]
        query_lens = np.array(lens)
        starts = np.array([each.start for each in slices])
        seq_lens = starts + query_lens
        num_blocks = -(-seq_lens // block_size)
        query_start = np.zeros(len(slices) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start[1:])
        num_tokens = int(query_start[-1])
        token_ids = np.fromiter(chain.from_iterable(each.token_ids for each in slices), np.int64, num_tokens)
        rows = order = np.arange(len(slices))
        positions = starts
        assert min(lens) >= 1, "a slice without tokens"
        if num_tokens > len(slices):
            rows = np.repeat(order, query_lens)
            positions = np.arange(num_tokens) + (starts - query_start[:-1])[rows]
        tables = _tables(slices, num_blocks)
        slot_offsets = positions % block_size
        slot_blocks = tables[rows, positions // block_size]

        # Block `num_blocks - 1` is the one that a slice ends in. The slice begins that block if it starts at or before
        # the block's slot 0.
        last_starts = (num_blocks - 1) * block_size
        partial = (seq_lens - last_starts < block_size) & (starts <= last_starts)
        begun_blocks = tables[order[partial], num_blocks[partial] - 1]

        num_samples = np.array([len(each.samples) for each in slices])
        sampled = num_samples > 0
        arrays = {
            "token_ids_T": token_ids,
            "positions_T": positions,
            "slot_blocks_T": slot_blocks,
            "slot_offsets_T": slot_offsets,
            "begun_blocks": begun_blocks,
            "query_start_B1": query_start,
            "seq_lens_B": seq_lens,
            "block_tables_BM": tables,
            "logit_rows_R": query_start[1:][sampled] - 1,
        }
        return cls(
            arrays=arrays,
            sample_rows_N=np.repeat(np.arange(int(sampled.sum())), num_samples[sampled]),
            follows=tuple(each.follows for each in slices),
            block_size=block_size,
            num_tokens=num_tokens,
            query_lens=tuple(lens),
            seq_lens=tuple(seq_lens.tolist()),
        )

    def on(self, device: torch.device) -> RaggedBatch:
        """The batch on the device, by one copy."""
        return RaggedBatch(
            **dict(zip(self.arrays, _together(list(self.arrays.values()), device), strict=True)),
            block_size=self.block_size,
            num_tokens=self.num_tokens,
            query_lens=self.query_lens,
            seq_lens=self.seq_lens,
        )


def _tables(slices: Sequence[Slice], num_blocks: _Ints) -> _Ints:
    """The block tables, `[B, M]`, zeros beyond the end of a shorter one. `num_blocks` of each are needed."""
    of_tables = [_block_bytes(each.block_table) for each in slices]  # once, because they may grow
    lens = [len(each) for each in of_tables]
    table_lens = np.array(lens) // 8
    assert (table_lens >= num_blocks).all(), f"{table_lens} blocks for slices that need {num_blocks}"
    longest = max(lens)
    rows = bytearray().join([each.ljust(longest, b"\0") for each in of_tables])
    return np.frombuffer(rows, np.int64).reshape(len(slices), longest // 8)[:, : int(num_blocks.max())]


def _block_bytes(table: Sequence[int]) -> bytes:
    """A block table as bytes of int64. An array is copied as a whole, without a loop over its blocks."""
    return (table if isinstance(table, array) else array("q", table)).tobytes()


def _together(arrays: Sequence[_Ints], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, by one copy. Each begins at a multiple of 16 bytes, which suits the kernels. On a CPU
    the arrays themselves, where they are contiguous."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(each)) for each in arrays]
    sizes = [each.size + each.size % 2 for each in arrays]
    flat = np.empty(sum(sizes), dtype=np.int64)
    begin = 0
    for each, size in zip(arrays, sizes, strict=True):
        flat[begin : begin + each.size] = each.ravel()
        begin += size
    parts = zip(torch.split(to_device(flat, torch.int64, device), sizes), arrays, strict=True)
    trimmed = [(part[:-1] if each.size % 2 else part, each) for part, each in parts]
    return [part if each.ndim == 1 else part.view(each.shape) for part, each in trimmed]
