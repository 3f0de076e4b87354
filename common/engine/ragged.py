"""The tensors of one step: slices of many sequences side by side, without padding.

Shapes: T tokens of all slices, B slices, M blocks of the longest sequence, R rows of logits, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import torch

from common.engine.batch import Slice
from common.engine.host_copy import to_device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedBatch:
    """Slice `b` is tokens `[query_start_B1[b], query_start_B1[b + 1])`, the last ones of its `seq_lens_B[b]`.

    Integers on the device are int64. What a backend needs in order to shape its work is here on the host too, so
    that it never waits for the device.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_blocks_T: torch.Tensor
    slot_offsets_T: torch.Tensor
    """Where each token's KV goes."""
    begun_blocks: torch.Tensor
    """Blocks whose first slot is written by this batch and whose last slot is not."""
    query_start_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    """Tokens of each sequence up to the end of its slice."""
    block_tables_BM: torch.Tensor
    """Padded with block 0."""
    logit_rows_R: torch.Tensor
    """Tokens whose logits are wanted: the last ones of the slices with samples."""
    sample_rows_N: torch.Tensor
    """The row of logits that each sample is taken from, in the order of the slices."""

    block_size: int
    num_tokens: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def follow(self, slices: Sequence[Slice], chosen_N: torch.Tensor) -> None:
        """Put the tokens that the samples of the step before have chosen in the places of `slices` that follow them."""
        sources = [each.follows for each in slices if each.follows is not None]
        if not sources:
            return
        ends = accumulate(self.query_lens)
        places = [end - 1 for end, each in zip(ends, slices, strict=True) if each.follows is not None]
        device = chosen_N.device
        self.token_ids_T[to_device(places, torch.int64, device)] = chosen_N[to_device(sources, torch.int64, device)]

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int, device: torch.device) -> RaggedBatch:
        """Lay `slices` (at least one) out as tensors."""
        query_lens = np.array([len(each.token_ids) for each in slices])
        starts = np.array([each.start for each in slices])
        seq_lens = starts + query_lens
        num_blocks = -(-seq_lens // block_size)
        for each, needed in zip(slices, num_blocks, strict=True):
            assert len(each.token_ids) >= 1, "a slice without tokens"
            assert len(each.block_table) >= needed, f"{len(each.block_table)} blocks for a slice that needs {needed}"

        query_start = np.zeros(len(slices) + 1, dtype=np.int64)
        np.cumsum(query_lens, out=query_start[1:])
        num_tokens = int(query_start[-1])
        token_ids = np.fromiter(chain.from_iterable(each.token_ids for each in slices), np.int64, num_tokens)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], query_lens)

        tables = np.zeros((len(slices), int(num_blocks.max())), dtype=np.int64)
        blocks = chain.from_iterable(islice(s.block_table, int(n)) for s, n in zip(slices, num_blocks, strict=True))
        tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = np.fromiter(blocks, np.int64, int(num_blocks.sum()))
        rows = np.repeat(np.arange(len(slices)), query_lens)
        slot_blocks, slot_offsets = tables[rows, positions // block_size], positions % block_size

        # [num_blocks - 1] is the block that a slice ends in; the slice begins it if it starts at or before its slot 0.
        partial = (seq_lens % block_size != 0) & (starts <= (num_blocks - 1) * block_size)
        begun_blocks = tables[np.arange(len(slices)), num_blocks - 1][partial]

        num_samples = np.array([len(each.samples) for each in slices])
        sampled = num_samples > 0
        sample_rows = np.repeat(np.arange(sampled.sum()), num_samples[sampled])

        def tensor(array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
            return to_device(array, torch.int64, device)

        return cls(
            token_ids_T=tensor(token_ids),
            positions_T=tensor(positions),
            slot_blocks_T=tensor(slot_blocks),
            slot_offsets_T=tensor(slot_offsets),
            begun_blocks=tensor(begun_blocks),
            query_start_B1=tensor(query_start),
            seq_lens_B=tensor(seq_lens),
            block_tables_BM=tensor(tables),
            logit_rows_R=tensor(query_start[1:][sampled] - 1),
            sample_rows_N=tensor(sample_rows),
            block_size=block_size,
            num_tokens=num_tokens,
            query_lens=tuple(query_lens.tolist()),
            seq_lens=tuple(seq_lens.tolist()),
        )
