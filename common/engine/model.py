"""The decoder: Llama, Mistral, Qwen2 and Qwen3 are one architecture with options.

Shapes: T tokens, E hidden size, H query heads, K KV heads, D head dimension, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, silu
from torch.nn.functional import rms_norm as normalize

from common.engine.attention import AttentionBackend
from common.engine.kv_cache import KVCache
from common.engine.model_config import ModelConfig
from common.engine.ragged import RaggedBatch
from common.engine.rope import Rope, rotate
from common.engine.weights import LayerWeights, Weights


class Decoder:
    """A model, ready to compute. Holds no state of any sequence."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._rope = Rope(config.rope, config.head_dim, weights.embedding.device)

    def forward(self, batch: RaggedBatch, cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Compute the batch's tokens, store their KV, and return the logits `[R, V]` of `batch.logit_rows_R`."""
        cache.clear(batch.begun_blocks)
        h_TE = embedding(batch.token_ids_T, self._weights.embedding)
        angles = self._rope.angles(batch.positions_T, h_TE.dtype)
        for index, layer in enumerate(self._weights.layers):
            x_TE = rms_norm(h_TE, layer.input_norm, self.config.rms_norm_eps)
            q_THD, k_TKD, v_TKD = self._qkv(x_TE, layer, angles)
            kv_layer = cache.layer(index)
            attention.write(kv_layer, k_TKD, v_TKD, batch)
            window, scale = self.config.windows[index], self.config.head_dim**-0.5
            attended_THD = attention.attend(q_THD, kv_layer, batch, window, scale)
            h_TE = h_TE + layer.output(attended_THD.flatten(1))
            x_TE = rms_norm(h_TE, layer.mlp_norm, self.config.rms_norm_eps)
            h_TE = h_TE + _mlp(x_TE, layer)
        if batch.logit_rows_R.numel() == 0:
            return h_TE.new_empty(0, self.config.vocab_size)
        h_RE = rms_norm(h_TE[batch.logit_rows_R], self._weights.final_norm, self.config.rms_norm_eps)
        return self._weights.lm_head(h_RE)

    def _qkv(
        self, x_TE: torch.Tensor, layer: LayerWeights, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values."""
        config = self.config
        qkv = layer.qkv(x_TE).view(x_TE.shape[0], -1, config.head_dim)
        v_TKD = qkv[:, config.num_heads + config.num_kv_heads :]
        # Queries and keys are rotated in one go: they lie side by side.
        qk = qkv[:, : config.num_heads + config.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_THD = rms_norm(qk[:, : config.num_heads], layer.q_norm, config.rms_norm_eps)
            k_TKD = rms_norm(qk[:, config.num_heads :], layer.k_norm, config.rms_norm_eps)
            qk = torch.cat((q_THD, k_TKD), dim=1)
        rotated = rotate(qk, *angles)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], v_TKD


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation in float32, scaled in the type of `x`, as transformers does it."""
    return weight * normalize(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def _mlp(x_TE: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    gate, up = layer.gate_up(x_TE).chunk(2, dim=-1)
    return layer.down(silu(gate) * up)
