"""Attention on a CPU without the kernels in C: decode tokens in a few batched calls, prompt chunks in tiles of queries.

The gather makes it fast. The slots of one KV head in one block are contiguous, so the cache can be viewed as rows of
`block_size * D` elements. One `index_select` copies the rows of a sequence into a reused buffer as `[2, K, S, D]`, the
layout that scaled dot product attention needs. Nothing is copied twice, and nothing is allocated.

Shapes: as in `attention`; N sequences, U blocks of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from common.engine.attention import visible_mask
from common.engine.backend import TorchBackend
from common.engine.ragged import RaggedBatch

GATHER_BYTES = 4 * 2**20
"""Most bytes of KV gathered for one call. This much fits into a core's share of the last cache, so it is still there
when it is used."""
_MAX_PADDING = 1.5
"""Greatest ratio of a sequence's padded length to its own length. Padding lets it share a call with longer ones."""
_QUERY_TILE = 128
"""Queries of a prompt chunk per call. A tile bounds the size of the mask, and lets early queries skip later keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    """Memory layout of one layer of the cache, in rows of `block_size * D` elements."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    num_rows: int
    rows_per_block: int
    """Rows from a block to the next one."""
    rows_per_head: int
    """Rows from a KV head to the next one, over all layers."""

    @classmethod
    def of(cls, kv_layer: torch.Tensor) -> _Geometry:
        num_blocks, num_kv_heads, _, block_size, head_dim = kv_layer.shape
        rows_per_block, rows_per_head = (kv_layer.stride(axis) // (block_size * head_dim) for axis in (0, 1))
        return cls(
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            num_rows=(num_blocks - 1) * rows_per_block + (num_kv_heads - 1) * rows_per_head + 2,
            rows_per_block=rows_per_block,
            rows_per_head=rows_per_head,
        )

    @property
    def block_elements(self) -> int:
        """Elements of one layer's keys and values in one block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim

    def row_index(self, tables_NU: torch.Tensor) -> torch.Tensor:
        """Row numbers of the blocks in `tables_NU`, flat, in the order `[2, N, K, U]`."""
        heads_K1 = torch.arange(self.num_kv_heads)[:, None] * self.rows_per_head
        kinds = torch.arange(2).view(2, 1, 1, 1)  # keys, values
        return (tables_NU[:, None] * self.rows_per_block + heads_K1 + kinds).flatten()


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Sequences of similar length that decode one token each, padded to the longest."""

    tokens_N: torch.Tensor | None
    """Rows of the tokens in the batch; None if the group is the whole batch, in order."""
    row_index: torch.Tensor
    visible_N11S: torch.Tensor
    """Which of the gathered slots each token sees, bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Tokens `[begin, end)` of the batch, at positions `[start, start + end - begin)` of one sequence."""

    begin: int
    end: int
    start: int
    first_key: int
    """Position of the first gathered slot. Blocks before the first token's window are left out."""
    row_index: torch.Tensor


class CpuAttention(TorchBackend):
    """Attention over the paged cache in host memory. Not thread-safe: it reuses a buffer."""

    def __init__(self, gather_bytes: int = GATHER_BYTES) -> None:
        """Decode tokens share a call while their keys and values take at most `gather_bytes`. A single sequence may
        exceed that."""
        self._gather_bytes = gather_bytes
        self._buffer = torch.empty(0)
        self._batch: RaggedBatch | None = None
        self._plans: dict[int | None, tuple[list[_DecodeGroup], list[_Chunk]]] = {}
        """Window → plan of `_batch` for the layers with this window."""

    def write(self, kv_layer: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: RaggedBatch) -> None:
        """See `TorchBackend.write`."""
        where = (batch.slot_blocks_T, batch.slot_offsets_T)
        kv_layer[:, :, 0].transpose(1, 2).index_put_(where, k_TKD)
        kv_layer[:, :, 1].transpose(1, 2).index_put_(where, v_TKD)

    def attend(
        self, q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
    ) -> torch.Tensor:
        """See `Backend.attend`."""
        geometry = _Geometry.of(kv_layer)
        if batch is not self._batch:
            self._batch, self._plans = batch, {}
        if window not in self._plans:
            most = self._gather_bytes // (geometry.block_elements * kv_layer.element_size())
            self._plans[window] = _decode_groups(batch, geometry, window, most), _chunks(batch, geometry, window)
        groups, chunks = self._plans[window]
        q_TKGD = q_THD.reshape(q_THD.shape[0], geometry.num_kv_heads, -1, geometry.head_dim)
        out_TKGD = torch.empty_like(q_TKGD)
        for group in groups:
            self._decode(q_TKGD, kv_layer, geometry, group, scale, out_TKGD)
        for chunk in chunks:
            self._prefill(q_TKGD, kv_layer, geometry, chunk, window, scale, out_TKGD)
        return out_TKGD.flatten(1, 2)

    def _decode(
        self,
        q_TKGD: torch.Tensor,
        kv_layer: torch.Tensor,
        geometry: _Geometry,
        group: _DecodeGroup,
        scale: float,
        out_TKGD: torch.Tensor,
    ) -> None:
        """Compute all tokens of a group in one call. The G query heads of a KV head are its queries."""
        q_NKGD = q_TKGD if group.tokens_N is None else q_TKGD[group.tokens_N]
        k_NKSD, v_NKSD = self._gather(kv_layer, geometry, group.row_index, q_NKGD.shape[0])
        out_NKGD = scaled_dot_product_attention(q_NKGD, k_NKSD, v_NKSD, attn_mask=group.visible_N11S, scale=scale)
        if group.tokens_N is None:
            out_TKGD.copy_(out_NKGD)
        else:
            out_TKGD[group.tokens_N] = out_NKGD

    def _prefill(
        self,
        q_TKGD: torch.Tensor,
        kv_layer: torch.Tensor,
        geometry: _Geometry,
        chunk: _Chunk,
        window: int | None,
        scale: float,
        out_TKGD: torch.Tensor,
    ) -> None:
        """Compute each tile of a chunk's queries in one call, over the keys that some query of the tile sees."""
        k_1KSD, v_1KSD = self._gather(kv_layer, geometry, chunk.row_index, 1)
        for begin in range(chunk.begin, chunk.end, _QUERY_TILE):
            end = min(begin + _QUERY_TILE, chunk.end)
            first, last = chunk.start + begin - chunk.begin, chunk.start + end - chunk.begin - 1
            low = _first_visible(first, window)
            visible = visible_mask(torch.arange(first, last + 1), torch.arange(low, last + 1), window)
            keys = slice(low - chunk.first_key, last + 1 - chunk.first_key)
            q_KGQD = q_TKGD[begin:end].permute(1, 2, 0, 3)
            group = q_KGQD.shape[1]
            out_KGQD = scaled_dot_product_attention(
                q_KGQD,
                k_1KSD[0, :, None, keys].expand(-1, group, -1, -1),
                v_1KSD[0, :, None, keys].expand(-1, group, -1, -1),
                attn_mask=visible,
                scale=scale,
            )
            out_TKGD[begin:end] = out_KGQD.permute(2, 0, 1, 3)

    def _gather(
        self, kv_layer: torch.Tensor, geometry: _Geometry, row_index: torch.Tensor, num_sequences: int
    ) -> torch.Tensor:
        """Gather the rows into the buffer. Returns keys and values `[2, N, K, S, D]`, a view of the buffer."""
        row_size = geometry.block_size * geometry.head_dim
        size = row_index.numel() * row_size
        if self._buffer.numel() < size or self._buffer.dtype != kv_layer.dtype:
            self._buffer = torch.empty(size + size // 4, dtype=kv_layer.dtype)
        gathered = self._buffer[:size]
        rows = kv_layer.as_strided((geometry.num_rows, row_size), (row_size, 1))
        torch.index_select(rows, 0, row_index, out=gathered.view(-1, row_size))
        return gathered.view(2, num_sequences, geometry.num_kv_heads, -1, geometry.head_dim)


def _decode_groups(batch: RaggedBatch, geometry: _Geometry, window: int | None, max_blocks: int) -> list[_DecodeGroup]:
    """Group single-token slices by length. A group has at most `max_blocks` blocks including padding, or is a single
    slice."""
    block_size = batch.block_size
    spans = []  # (blocks to gather, first of them, slice), shortest first
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if query_len == 1:
            first = _first_visible(seq_len - 1, window) // block_size
            spans.append((-(-seq_len // block_size) - first, first, row))
    spans.sort()
    groups: list[list[tuple[int, int, int]]] = []
    for span in spans:
        longest = span[0]
        if groups and longest <= _MAX_PADDING * groups[-1][0][0] and longest * (len(groups[-1]) + 1) <= max_blocks:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [_decode_group(batch, geometry, window, group) for group in groups]


def _decode_group(
    batch: RaggedBatch, geometry: _Geometry, window: int | None, spans: list[tuple[int, int, int]]
) -> _DecodeGroup:
    num_blocks = spans[-1][0]
    spans = sorted(spans, key=lambda span: span[2])
    rows = torch.tensor([row for _, _, row in spans])
    first_N1 = torch.tensor([[first] for _, first, _ in spans])
    last_N1 = torch.tensor([[first + count - 1] for count, first, _ in spans])
    # Padding repeats the sequence's own last block. A masked value is still multiplied, and NaN times 0 is NaN, so a
    # NaN in another sequence's block would spread.
    columns_NU = torch.minimum(first_N1 + torch.arange(num_blocks), last_N1)
    tables_NU = batch.block_tables_BM[rows[:, None], columns_NU]
    keys_NS = first_N1 * batch.block_size + torch.arange(num_blocks * batch.block_size)
    queries_N1 = batch.seq_lens_B[rows, None] - 1
    visible_NS = keys_NS <= queries_N1
    if window is not None:
        visible_NS &= keys_NS > queries_N1 - window
    return _DecodeGroup(
        tokens_N=None if len(spans) == batch.num_tokens else batch.query_start_B1[rows],
        row_index=geometry.row_index(tables_NU),
        visible_N11S=visible_NS[:, None, None],
    )


def _chunks(batch: RaggedBatch, geometry: _Geometry, window: int | None) -> list[_Chunk]:
    """The slices with several tokens, as chunks."""
    chunks, end = [], 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        begin, end = end, end + query_len
        if query_len > 1:
            start = seq_len - query_len
            first_block = _first_visible(start, window) // batch.block_size
            tables_1U = batch.block_tables_BM[row : row + 1, first_block : -(-seq_len // batch.block_size)]
            chunks.append(
                _Chunk(
                    begin=begin,
                    end=end,
                    start=start,
                    first_key=first_block * batch.block_size,
                    row_index=geometry.row_index(tables_1U),
                )
            )
    return chunks


def _first_visible(position: int, window: int | None) -> int:
    """The first position that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)
