"""The tensors of one step: slices of many sequences side by side, without padding. But for `RaggedBatch.follow`, nobody
changes these objects once they are made.

Shapes: T tokens of all slices, B slices, M blocks of the longest sequence, R rows of logits, N samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from common.engine.batch import NO_SAMPLE, Decodes, Ints, Slice
from common.engine.host_copy import to_device


@dataclass(slots=True, kw_only=True, eq=False)
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
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def follow(self, follows_B: Ints, chosen_N: torch.Tensor) -> None:
        """Fill in the tokens of slices that follow a sample of the step before (`Rows.follows_B`). `chosen_N` are the
        tokens that the samples of that step have chosen."""
        rows = np.flatnonzero(follows_B != NO_SAMPLE)
        if not rows.size:
            return
        places = np.cumsum(self.query_lens)[rows] - 1
        sources, device = follows_B[rows], chosen_N.device
        self.token_ids_T[to_device(places, torch.int64, device)] = chosen_N[to_device(sources, torch.int64, device)]

    def last_tokens(self) -> torch.Tensor:
        """The token before each row of logits, `[R]` int64."""
        return self.token_ids_T[self.logit_rows_R]


@dataclass(slots=True, kw_only=True, eq=False)
class Rows:
    """A `RaggedBatch` that is still on the host: its tensors as int64 arrays, by name."""

    arrays: dict[str, Ints]
    sample_rows_N: Ints
    """Row of logits that each sample uses, in the order of the slices."""
    follows_B: Ints
    """See `Decodes.follows_D`."""

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int, decodes: Decodes | None = None) -> Rows:
        """Lay `decodes`, then `slices`, out; at least one of both."""
        columns = _columns(slices) if slices else None
        if decodes is not None:
            columns = _decode_columns(decodes) if columns is None else _decode_columns(decodes).followed_by(columns)
        assert columns is not None, "nothing to compute"
        starts, query_lens = columns.starts_B, columns.query_lens_B
        num = len(starts)
        seq_lens = starts + query_lens
        num_blocks = -(-seq_lens // block_size)
        assert (columns.table_lens_B >= num_blocks).all(), (
            f"{columns.table_lens_B} blocks for slices that need {num_blocks}"
        )
        tables = columns.tables_BM[:, : int(num_blocks.max())]
        num_tokens = len(columns.token_ids_T)
        rows = order = np.arange(num)
        positions = starts
        query_start = np.arange(num + 1)
        if num_tokens > num:
            np.cumsum(query_lens, out=query_start[1:])
            rows = np.repeat(order, query_lens)
            positions = np.arange(num_tokens) + (starts - query_start[:-1])[rows]
        slot_offsets = positions % block_size
        slot_blocks = tables[rows, positions // block_size]

        # Block `num_blocks - 1` is the one that a slice ends in. The slice begins that block if it starts at or before
        # the block's slot 0.
        last_starts = (num_blocks - 1) * block_size
        partial = (seq_lens - last_starts < block_size) & (starts <= last_starts)
        begun_blocks = tables[order[partial], num_blocks[partial] - 1]

        logit_rows, sample_rows = order, order
        if not (num_tokens == num and columns.one_sample_each):
            sampled = columns.num_samples_B > 0
            logit_rows = query_start[1:][sampled] - 1
            sample_rows = np.repeat(np.arange(len(logit_rows)), columns.num_samples_B[sampled])
        arrays = {
            "token_ids_T": columns.token_ids_T,
            "positions_T": positions,
            "slot_blocks_T": slot_blocks,
            "slot_offsets_T": slot_offsets,
            "begun_blocks": begun_blocks,
            "query_start_B1": query_start,
            "seq_lens_B": seq_lens,
            "block_tables_BM": tables,
            "logit_rows_R": logit_rows,
        }
        return cls(arrays=arrays, sample_rows_N=sample_rows, follows_B=columns.follows_B)

    def on(self, device: torch.device) -> RaggedBatch:
        """The batch on the device, by one copy."""
        return RaggedBatch(
            **dict(zip(self.arrays, _together(list(self.arrays.values()), device), strict=True)),
            query_lens=tuple(np.diff(self.arrays["query_start_B1"]).tolist()),
            seq_lens=tuple(self.arrays["seq_lens_B"].tolist()),
        )


@dataclass(slots=True, eq=False)
class _Columns:
    """What `Rows.of` has to know of each of B slices."""

    token_ids_T: Ints
    starts_B: Ints
    query_lens_B: Ints
    num_samples_B: Ints
    follows_B: Ints
    table_lens_B: Ints
    """Blocks of each table."""
    tables_BM: Ints
    """The block tables, with zeros beyond the end of a shorter one."""
    one_sample_each: bool

    def followed_by(self, others: _Columns) -> _Columns:
        """These, then `others`."""
        num, longest = len(self.starts_B), max(self.tables_BM.shape[1], others.tables_BM.shape[1])
        tables_BM = np.zeros((num + len(others.starts_B), longest), np.int64)
        tables_BM[:num, : self.tables_BM.shape[1]] = self.tables_BM
        tables_BM[num:, : others.tables_BM.shape[1]] = others.tables_BM
        return _Columns(
            np.concatenate((self.token_ids_T, others.token_ids_T)),
            np.concatenate((self.starts_B, others.starts_B)),
            np.concatenate((self.query_lens_B, others.query_lens_B)),
            np.concatenate((self.num_samples_B, others.num_samples_B)),
            np.concatenate((self.follows_B, others.follows_B)),
            np.concatenate((self.table_lens_B, others.table_lens_B)),
            tables_BM,
            self.one_sample_each and others.one_sample_each,
        )


def _decode_columns(decodes: Decodes) -> _Columns:
    ones = np.ones(len(decodes), np.int64)
    return _Columns(
        decodes.token_ids_D,
        decodes.positions_D,
        ones,
        ones,
        decodes.follows_D,
        decodes.num_blocks_D,
        decodes.tables_DM,
        True,
    )


def _columns(slices: Sequence[Slice]) -> _Columns:
    lens = [len(each.token_ids) for each in slices]
    assert min(lens) >= 1, "a slice without tokens"
    num_samples = [len(each.samples) for each in slices]
    of_tables = [_block_bytes(each.block_table) for each in slices]  # once, because they may grow
    table_bytes = [len(each) for each in of_tables]
    longest = max(table_bytes)
    tables = bytearray().join([each.ljust(longest, b"\0") for each in of_tables])
    return _Columns(
        np.fromiter(chain.from_iterable(each.token_ids for each in slices), np.int64, sum(lens)),
        np.array([each.start for each in slices], np.int64),
        np.array(lens, np.int64),
        np.array(num_samples, np.int64),
        np.array([NO_SAMPLE if each.follows is None else each.follows for each in slices], np.int64),
        np.array(table_bytes, np.int64) // 8,
        np.frombuffer(tables, np.int64).reshape(len(slices), longest // 8),
        num_samples.count(1) == len(slices),
    )


def _block_bytes(table: Sequence[int]) -> bytes:
    """A block table as bytes of int64. An array is copied as a whole, without a loop over its blocks."""
    return (table if isinstance(table, array) else array("q", table)).tobytes()


def _together(arrays: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, by one copy. Each begins at a multiple of 16 bytes, which suits the kernels. On a CPU
    the arrays themselves."""
    if device.type == "cpu":
        return list(map(torch.from_numpy, arrays))
    sizes = [each.size + each.size % 2 for each in arrays]
    flat = np.empty(sum(sizes), dtype=np.int64)
    begin = 0
    for each, size in zip(arrays, sizes, strict=True):
        flat[begin : begin + each.size] = each.ravel()
        begin += size
    parts = zip(torch.split(to_device(flat, torch.int64, device), sizes), arrays, strict=True)
    trimmed = [(part[:-1] if each.size % 2 else part, each) for part, each in parts]
    return [part if each.ndim == 1 else part.view(each.shape) for part, each in trimmed]
