"""Decode steps as CUDA graphs: one replay replaces hundreds of launches.

A graph is captured for each batch size of a ladder, over buffers that stay where they are. A batch is copied into them,
all but its block tables at once, and filled up to the next size with places that are nobody's: no tokens, and written
nowhere. A token that the step before has chosen is looked up inside the graph, which ends with logits in float32 and
the most likely token of each place: the sampler has nothing to launch for a batch that is greedy.

Shapes: N sequences of a batch, P places of a graph, M blocks of the longest table, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.engine.backend import Backend
from common.engine.batch import NO_SAMPLE
from common.engine.host_copy import to_device
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.ragged import RaggedBatch, Rows
from common.engine.sampler import Likeliest
from common.engine.weights import Progress

NOWHERE = -1
"""Block number of a token whose KV is not stored."""
_NOBODY = NO_SAMPLE
_INPUTS = ("token_ids_T", "positions_T", "slot_blocks_T", "slot_offsets_T", "seq_lens_B", "sources", "begun_blocks")
"""Inputs that are copied for each place. They are arrays of `Rows`, and `sources`: the sample of the step before that
chose the place's token, or `_NOBODY`. A step of decode tokens begins no more blocks than it has sequences."""
_SOURCES, _BEGUN = _INPUTS.index("sources"), _INPUTS.index("begun_blocks")
_OF_NOBODY = np.array([0, 0, NOWHERE, 0, 0, _NOBODY, 0])


@dataclass(frozen=True, slots=True)
class Computed:
    """What a graph leaves behind, of its places or of the batch in the first of them; until the next replay, or until
    the sampler changes the logits."""

    logits_NV: torch.Tensor
    """float32."""
    likeliest: Likeliest

    def first(self, num: int) -> Computed:
        """The results of the first `num` places."""
        return Computed(self.logits_NV[:num], self.likeliest.first(num))


def ladder(most: int) -> list[int]:
    """Batch sizes that have a graph: 1, 2, 4, then multiples of 8, whose steps are a sixteenth of the size from 128 on.
    The last size is `most`."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append(sizes[-1] // 8 * 8 + max(8, sizes[-1] // 128 * 8))
    return [size for size in sizes if size < most] + [most]


def _nobodys(num: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Inputs of `num` empty places: no token is written, or attends to anything."""
    return np.repeat(_OF_NOBODY[:, None], num, axis=1)


class DecodeGraphs:
    """The graphs of one model, for batches of up to `max_num_seqs` sequences of up to `max_blocks` blocks each."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, backend: Backend, *, max_num_seqs: int, max_blocks: int
    ) -> None:
        self._decoder, self._cache, self._backend = decoder, cache, backend
        self._sizes = ladder(max_num_seqs)
        self._max_blocks = max_blocks
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Places → graph."""
        self._computed = self._room(0)
        """Where every graph leaves what it computes; there is room once the first is captured."""
        self._inputs = torch.empty(len(_INPUTS), max_num_seqs, dtype=torch.int64, device=cache.device)
        """One row for each of `_INPUTS`, in their order."""
        self._inputs.copy_(to_device(_nobodys(max_num_seqs), torch.int64, cache.device))
        self._block_tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int64, device=cache.device)
        self._chosen = torch.zeros(max_num_seqs, dtype=torch.int64, device=cache.device)
        """The first of the tokens that the step before has chosen."""
        self._num_rows = 0
        """Sequences of the last batch."""
        self._query_start = torch.arange(max_num_seqs + 1, device=cache.device)

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Capture every graph, the largest first: the others share its memory."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for index, size in enumerate(reversed(self._sizes)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # compiles kernels, and lets libraries allocate what they need
                if index == 0:
                    self._computed = self._room(size)
                self._forward(self._computed.first(size))
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # What other threads do meanwhile, those of NCCL and UCX, is not captured, and does not fail.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._forward(self._computed.first(size))
            self._graphs[size] = graph
            if progress is not None:
                progress(index + 1, len(self._sizes))

    def compute(self, rows: Rows, chosen_N: torch.Tensor) -> Computed | None:
        """Compute a batch and store its KV, as `Decoder.forward` does; the results stay until the next call. At a
        rank that gets no logits they are arbitrary.

        `chosen_N` are the tokens that the step before has chosen. Returns None, and does nothing, if the batch is too
        large, or if one of its slices is not a single token with a sample.
        """
        num = len(rows.follows_B)
        fits = num <= self._sizes[-1] and rows.arrays["block_tables_BM"].shape[1] <= self._max_blocks
        known = rows.follows_B.max() < len(self._chosen)
        if not (fits and known) or rows.arrays["token_ids_T"].size != num or rows.arrays["logit_rows_R"].size != num:
            return None
        size = next(size for size in self._sizes if size >= num)
        self._num_rows = num
        self._fill(rows, chosen_N)
        return self._replay(size).first(num)

    def last_tokens(self) -> torch.Tensor:
        """The token before each row of logits of the last batch, `[N]`."""
        return self._token_ids(self._num_rows)

    def _token_ids(self, size: int) -> torch.Tensor:
        """Tokens of the first `size` places. Tokens that the step before has chosen are looked up in `_chosen`."""
        sources = self._inputs[_SOURCES, :size]
        token_ids = self._inputs[_INPUTS.index("token_ids_T"), :size]
        return torch.where(sources == _NOBODY, token_ids, self._chosen[sources.clamp_min(0)])

    def _replay(self, size: int) -> Computed:
        self._graphs[size].replay()
        return self._computed

    def _fill(self, rows: Rows, chosen_N: torch.Tensor) -> None:
        """Copy a batch into the first places, empty the others, and zero the blocks that the batch begins."""
        inputs = _nobodys(self._inputs.shape[1])
        for values, name in zip(inputs, _INPUTS, strict=True):
            if name in rows.arrays:
                values[: rows.arrays[name].size] = rows.arrays[name]
        inputs[_SOURCES, : len(rows.follows_B)] = rows.follows_B
        device = self._inputs.device
        on_host = torch.from_numpy(inputs)
        if device.type == "cuda":
            on_host = on_host.pin_memory()  # torch keeps this memory until the copy has ended
        self._inputs.copy_(on_host, non_blocking=True)
        tables_NM = rows.arrays["block_tables_BM"]
        self._block_tables[: tables_NM.shape[0], : tables_NM.shape[1]] = to_device(tables_NM, torch.int64, device)
        if (rows.follows_B != _NOBODY).any():
            num = min(len(chosen_N), len(self._chosen))
            self._chosen[:num] = chosen_N[:num]
        if num_begun := rows.arrays["begun_blocks"].size:
            self._cache.begin(self._inputs[_BEGUN, :num_begun])

    def _room(self, size: int) -> Computed:
        """For what a graph of this size computes."""
        device = self._cache.device
        logits_PV = torch.empty(size, self._decoder.config.vocab_size, dtype=torch.float32, device=device)
        return Computed(logits_PV, Likeliest.empty(size, device))

    def _forward(self, into: Computed) -> None:
        """What a graph does: compute as many places as `into` has."""
        places = self._places(len(into.logits_NV))
        logits_PV = self._decoder.forward(places, self._cache, self._backend)
        if self._decoder.leads:
            into.logits_NV.copy_(logits_PV)
            into.likeliest.fill(into.logits_NV, self._backend)

    def _places(self, size: int) -> RaggedBatch:
        """The batch of all places of a graph. The host plans the work by sequence lengths, so there every sequence has
        the greatest possible length."""
        _, positions, slot_blocks, slot_offsets, seq_lens, _, _ = self._inputs[:, :size]
        token_ids = self._token_ids(size)
        return RaggedBatch(
            token_ids_T=token_ids,
            positions_T=positions,
            slot_blocks_T=slot_blocks,
            slot_offsets_T=slot_offsets,
            begun_blocks=token_ids[:0],
            query_start_B1=self._query_start[: size + 1],
            seq_lens_B=seq_lens,
            block_tables_BM=self._block_tables[:size],
            logit_rows_R=self._query_start[:size],
            query_lens=(1,) * size,
            seq_lens=(self._max_blocks * self._cache.layout.block_size,) * size,
        )
