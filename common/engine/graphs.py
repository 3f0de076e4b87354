"""Decode steps as CUDA graphs: a step of hundreds of launches is replayed by one.

A graph is captured for each batch size of a ladder, over buffers that stay where they are; a batch is copied into them,
and filled up to the next size with places that are nobody's: no tokens, and written nowhere.

Shapes: N sequences of a batch, P places of a graph, M blocks of the longest table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.engine.backend import Backend
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.ragged import RaggedBatch

Progress = Callable[[int, int], None]
"""Called with (graphs captured, graphs to capture)."""
NOWHERE = -1
"""The block of a token whose KV is not stored."""


def ladder(most: int) -> list[int]:
    """Batch sizes that have a graph: 1, 2, 4, then multiples of 8, and of a sixteenth of the size from 128 on."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append(sizes[-1] // 8 * 8 + max(8, sizes[-1] // 128 * 8))
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """The graphs of one model, of batches of up to `max_num_seqs` sequences of up to `max_blocks` blocks."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, backend: Backend, *, max_num_seqs: int, max_blocks: int
    ) -> None:
        self._decoder, self._cache, self._backend = decoder, cache, backend
        self._sizes = ladder(max_num_seqs)
        self._max_blocks = max_blocks
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Places → graph."""
        self._logits_PV = torch.empty(0)
        """Where every graph leaves its logits."""

        def places(value: int, *more: int) -> torch.Tensor:
            return torch.full((max_num_seqs, *more), value, dtype=torch.int64, device=cache.device)

        self._token_ids, self._positions, self._seq_lens = places(0), places(0), places(0)
        self._slot_blocks, self._slot_offsets = places(NOWHERE), places(0)
        self._block_tables = places(0, max_blocks)
        self._query_start = torch.arange(max_num_seqs + 1, device=cache.device)

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Capture them all, the largest first: the others share its memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for index, size in enumerate(reversed(self._sizes)):
            batch = self._places(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles kernels, and lets libraries allocate what they need
                logits_PV = self._decoder.forward(batch, self._cache, self._backend)
            torch.cuda.current_stream().wait_stream(stream)
            if index == 0:
                self._logits_PV = torch.empty_like(logits_PV)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self._logits_PV[:size] = self._decoder.forward(batch, self._cache, self._backend)
            self._graphs[size] = graph
            if progress is not None:
                progress(index + 1, len(self._sizes))

    def logits(self, batch: RaggedBatch) -> torch.Tensor | None:
        """Compute a batch and store its KV, as `Decoder.forward` does: the logits `[N, V]`, until the next call.

        None, with nothing done, for a batch that is not of decode tokens alone, each with a sample, or is too large.
        """
        num = len(batch.query_lens)
        fits = num <= self._sizes[-1] and batch.block_tables_BM.shape[1] <= self._max_blocks
        if not fits or batch.num_tokens != num or batch.logit_rows_R.numel() != num:
            return None
        size = next(size for size in self._sizes if size >= num)
        self._cache.clear(batch.begun_blocks)
        self._fill(batch, num, size)
        return self._replay(size)[:num]

    def _replay(self, size: int) -> torch.Tensor:
        self._graphs[size].replay()
        return self._logits_PV

    def _fill(self, batch: RaggedBatch, num: int, size: int) -> None:
        """Copy a batch into the first places, and empty the others of the graph's."""
        self._token_ids[:num] = batch.token_ids_T
        self._positions[:num] = batch.positions_T
        self._seq_lens[:num] = batch.seq_lens_B
        self._slot_blocks[:num] = batch.slot_blocks_T
        self._slot_offsets[:num] = batch.slot_offsets_T
        self._block_tables[:num, : batch.block_tables_BM.shape[1]] = batch.block_tables_BM
        if num < size:
            self._seq_lens[num:size].zero_()
            self._slot_blocks[num:size].fill_(NOWHERE)

    def _places(self, size: int) -> RaggedBatch:
        """The batch that a graph of this size computes. For the host, which decides how the work is cut, every sequence
        is as long as any can be."""
        return RaggedBatch(
            token_ids_T=self._token_ids[:size],
            positions_T=self._positions[:size],
            slot_blocks_T=self._slot_blocks[:size],
            slot_offsets_T=self._slot_offsets[:size],
            begun_blocks=self._token_ids[:0],
            query_start_B1=self._query_start[: size + 1],
            seq_lens_B=self._seq_lens[:size],
            block_tables_BM=self._block_tables[:size],
            logit_rows_R=self._query_start[:size],
            sample_rows_N=self._query_start[:size],
            block_size=self._cache.layout.block_size,
            num_tokens=size,
            query_lens=(1,) * size,
            seq_lens=(self._max_blocks * self._cache.layout.block_size,) * size,
        )
