"""Attention over the paged KV cache: the reference that every backend is tested against.

Shapes: T tokens, H query heads, K KV heads, G = H / K, D head dimension, S tokens of a sequence. `kv_layer` is one
layer of the cache, `[num_blocks, K, 2, block_size, D]`.
"""

from __future__ import annotations

import torch

from common.engine.backend import TorchBackend
from common.engine.ragged import RaggedBatch


class ReferenceAttention(TorchBackend):
    """The reference in plain torch: computes one sequence after another, in float32."""

    def write(self, kv_layer: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: RaggedBatch) -> None:
        """See `TorchBackend.write`."""
        slots = zip(batch.slot_blocks_T.tolist(), batch.slot_offsets_T.tolist(), strict=True)
        for token, (block, offset) in enumerate(slots):
            kv_layer[block, :, 0, offset] = k_TKD[token]
            kv_layer[block, :, 1, offset] = v_TKD[token]

    def attend(
        self, q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
    ) -> torch.Tensor:
        """See `Backend.attend`."""
        group = q_THD.shape[1] // kv_layer.shape[1]
        out_THD = torch.empty_like(q_THD)
        end = 0
        for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            begin, end = end, end + query_len
            num_blocks = -(-seq_len // batch.block_size)
            blocks = kv_layer[batch.block_tables_BM[row, :num_blocks]].float()
            k_KSD, v_KSD = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
            k_HSD, v_HSD = k_KSD.repeat_interleave(group, dim=0), v_KSD.repeat_interleave(group, dim=0)
            visible = visible_mask(batch.positions_T[begin:end], torch.arange(seq_len, device=q_THD.device), window)
            scores = q_THD[begin:end].float().transpose(0, 1) @ k_HSD.transpose(1, 2) * scale
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            out_THD[begin:end] = (weights @ v_HSD).transpose(0, 1).to(out_THD.dtype)
        return out_THD


def visible_mask(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Whether each query position sees each key position, `[len(queries), len(keys)]` bool. A query sees its own and
    earlier positions; with a window, only the last `window` of these."""
    distance = queries[:, None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
