"""Batches by which a GPU compiles attention of decode tokens, and products of few, before a request waits for them.

How a kernel is cut, and so compiled, may depend on the number of decode tokens and, for attention, on the lengths of
their sequences: the tuning table of a GPU has entries by both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.engine.linear import MANY_ROWS
from common.engine.ragged import RaggedBatch

MOST_ROWS = 512
"""Decode tokens of the largest batch; larger batches have the same tiling."""
_SHORTEST = 16
"""Length of the shortest sequences, in tokens; shorter ones have the same tiling."""
_MOST_RUNS = 2048
"""Most runs of a batch whose contexts are cut at fixed places. A GPU computes fewer at a time, so programs take them in
turn, as they do in larger batches. The partial results of larger ones may take more memory than is left beside the KV
cache."""


def decode_batches(
    num_blocks: int, block_size: int, longest: int, device: torch.device, invariant_run: int | None = None
) -> Iterator[RaggedBatch]:
    """Batches of decode tokens, for numbers and lengths up to what a cache of `num_blocks` can hold, in the steps of
    `_steps_up`. If contexts are cut at the multiples of `invariant_run` keys, none has more than `_MOST_RUNS` runs.

    The lengths are only for the host, which chooses the tiling. On the device each token is the first of its sequence,
    in block 0.
    """
    longest = min(longest, num_blocks * block_size)
    lengths = sorted({size for size in _steps_up(longest) if size >= min(_SHORTEST, longest)})
    tables = torch.zeros(1, -(-longest // block_size), dtype=torch.int64, device=device)
    for num in _steps_up(min(MOST_ROWS, num_blocks)):
        for length in lengths:
            if invariant_run is None or num * -(-length // invariant_run) <= _MOST_RUNS:
                yield _batch(num, length, tables)


def few_rows(device: torch.device) -> Iterator[RaggedBatch]:
    """As many decode tokens as the tuning table has products of few rows for, or a batch-invariant product has tiles
    for: powers of two; tokens as those of `decode_batches`."""
    tables = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for power in range(MANY_ROWS.bit_length()):
        yield _batch(2**power, 1, tables)


def _batch(num: int, length: int, tables: torch.Tensor) -> RaggedBatch:
    """`num` sequences, for the host of `length` tokens."""
    zeros, ones = (torch.full((num,), value, dtype=torch.int64, device=tables.device) for value in (0, 1))
    rows = torch.arange(num + 1, device=tables.device)
    return RaggedBatch(
        token_ids_T=zeros,
        positions_T=zeros,
        slot_blocks_T=zeros,
        slot_offsets_T=zeros,
        begun_blocks=zeros[:0],
        query_start_B1=rows,
        seq_lens_B=ones,
        block_tables_BM=tables.expand(num, -1),
        logit_rows_R=rows[:num],
        query_lens=(1,) * num,
        seq_lens=(length,) * num,
    )


def _steps_up(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 and so on, as far as they are below `most`, and `most`."""
    sizes = {base * 2**power for base in (2, 3) for power in range(most.bit_length())}
    return sorted({1, most} | {size for size in sizes if size < most})
