"""The decoder: Llama, Mistral, Qwen2 and Qwen3 are one architecture with options.

Shapes: T tokens, E hidden size, H query heads, K KV heads, D head dimension, F inputs or outputs of a projection,
R rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch

from common.engine.backend import Backend
from common.engine.group import Group
from common.engine.kv_cache import KVCache
from common.engine.linear import Linear, Products
from common.engine.model_config import ModelConfig
from common.engine.ragged import RaggedBatch
from common.engine.rope import Rope
from common.engine.weights import Weights

Hidden = tuple[torch.Tensor, torch.Tensor | None]
"""What the layers make of the tokens, `[T, E]`, and what is still to be added to it."""


class Decoder:
    """A model, ready to compute. Holds no state of any sequence."""

    def __init__(
        self, config: ModelConfig, weights: Weights, group: Group | None = None, num_positions: int | None = None
    ) -> None:
        """With a `group`, `weights` are this rank's part of them, and `config` is still that of the whole model. There
        are `num_positions` at most, if the model's context is longer."""
        self.config = config
        self.own_config = config if group is None else group.shard.config(config)
        """The model as this rank computes it; see `Shard.config`."""
        self.leads = group is None or group.shard.rank == 0
        """Whether this rank gets the logits."""
        self._group = group
        self._weights = weights
        num_positions = min(config.max_sequence_tokens, num_positions or config.max_sequence_tokens)
        self._rope = Rope(config.rope, config.head_dim, num_positions, weights.final_norm.device)

    @property
    def cpu_products(self) -> Products | None:
        """How products with the weights are computed on a CPU; None on a GPU."""
        return self._weights.lm_head.products

    def forward(self, batch: RaggedBatch, cache: KVCache, backend: Backend) -> torch.Tensor:
        """Compute the batch's tokens, store their KV, and return `logits` of `batch.logit_rows_R`."""
        return self.logits(self.hidden(batch, cache, backend), batch.logit_rows_R, backend)

    def hidden(self, batch: RaggedBatch, cache: KVCache, backend: Backend) -> Hidden:
        """Compute the batch's tokens, and store their KV. Returns the hidden states before the final norm."""
        config, eps = self.own_config, self.config.rms_norm_eps
        if batch.begun_blocks.shape[0]:
            cache.begin(batch.begun_blocks)
        h_TE = self._embed(batch.token_ids_T)
        angles = backend.angles(self._rope, batch.positions_T, h_TE.dtype)
        delta_TE = backend.layers(self._weights.layers, config, h_TE, batch, cache, angles, self._group)
        if delta_TE is not None:
            return h_TE, delta_TE
        for index, layer in enumerate(self._weights.layers):
            qkv_TF = backend.norm_project(h_TE, delta_TE, layer.input_norm, eps, layer.qkv)
            kv_layer = cache.layer(index)
            q_THD = backend.rotate_and_write(qkv_TF, kv_layer, batch, config.num_heads, layer.qk_norms, eps, angles)
            attended_THD = backend.attend(q_THD, kv_layer, batch, config.windows[index], config.head_dim**-0.5)
            delta_TE = self._project_onto(h_TE, attended_THD.flatten(1), layer.output, backend)
            gated_TF = backend.norm_gate(h_TE, delta_TE, layer.mlp_norm, eps, layer.gate_up)
            delta_TE = self._project_onto(h_TE, gated_TF, layer.down, backend)
        return h_TE, delta_TE

    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        group = self._group
        if group is None:
            return self._weights.embed(token_ids_T)
        words = group.shard.of(self.config.vocab_size)
        here_T = (token_ids_T >= words.start) & (token_ids_T < words.stop)
        h_TE = self._weights.embed(torch.where(here_T, token_ids_T - words.start, 0))
        return group.add(h_TE.masked_fill_(~here_T[:, None], 0))

    def _project_onto(
        self, h_TE: torch.Tensor, x_TF: torch.Tensor, linear: Linear, backend: Backend
    ) -> torch.Tensor | None:
        """See `Backend.project_onto`."""
        if self._group is None:
            return backend.project_onto(h_TE, x_TF, linear)
        return self._group.add(linear(x_TF))

    def logits(self, hidden: Hidden, rows_R: torch.Tensor, backend: Backend) -> torch.Tensor:
        """The logits `[R, V]` of the batch's tokens `rows_R`; `[0, V]` at a rank that gets none."""
        h_TE, delta_TE = hidden
        if rows_R.numel() == 0:
            return h_TE.new_empty(0, self.config.vocab_size)
        weights, eps = self._weights, self.config.rms_norm_eps
        logits_RV = backend.project_rows(h_TE, delta_TE, rows_R, weights.final_norm, eps, weights.lm_head)
        return logits_RV if self._group is None else self._group.beside(logits_RV, self.config.vocab_size)
