"""The operations of a layer on a CPU, computed by the kernels in C."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.backend import Norms, PlainProducts
from common.engine.batch import Samples
from common.engine.draw import column, random_numbers
from common.engine.group import Group
from common.engine.kv_cache import KVCache
from common.engine.linear import Linear
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels
from common.engine.native.group import SharedGroup
from common.engine.native.layers import NativeLayers, computes
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles, Rope
from common.engine.weights import LayerWeights


class NativeBackend(PlainProducts):
    """Everything between the cache and the weights is float32. Wants head dimensions that `native.serves`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.add_norm = kernels.add_norm
        self.silu_mul = kernels.silu_mul
        self.best = kernels.best
        self._layers: list[NativeLayers] = []
        """One for each model that has been computed."""

    def layers(
        self,
        weights: Sequence[LayerWeights],
        config: ModelConfig,
        h_TE: torch.Tensor,
        batch: RaggedBatch,
        cache: KVCache,
        angles: Angles,
        group: Group | None,
    ) -> torch.Tensor | None:
        """See `Backend.layers`. Only if all products are computed in C, and ranks share memory."""
        found = next((each for each in self._layers if each.weights is weights and each.config is config), None)
        if found is None and computes(weights):
            self._layers.append(found := NativeLayers(self._kernels, weights, config))
        if found is None or not isinstance(group, SharedGroup | None):
            return None
        return found.compute(h_TE, batch, cache, angles, group)

    def project_rows(
        self,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        rows_R: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        linear: Linear,
    ) -> torch.Tensor:
        """See `Backend.project_rows`."""
        return linear(self._kernels.norm_some(h_TE, delta_TE, rows_R, norm_E, eps))

    def norm_gate(
        self,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        norm_E: torch.Tensor,
        eps: float,
        linear: Linear,
    ) -> torch.Tensor:
        """See `Backend.norm_gate`."""
        x_TE = self.add_norm(h_TE, delta_TE, norm_E, eps)
        gated_TF = linear.gate(x_TE)
        return self.silu_mul(linear(x_TE)) if gated_TF is None else gated_TF

    def angles(self, rope: Rope, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
        """See `Backend.angles`."""
        return rope.table(dtype), positions_T

    def rotate_and_write(
        self,
        qkv_TF: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: RaggedBatch,
        num_heads: int,
        norms: Norms | None,
        eps: float,
        angles: Angles,
    ) -> torch.Tensor:
        """See `Backend.rotate_and_write`."""
        num_kv_heads = kv_layer.shape[1]
        self._kernels.rotate(qkv_TF, num_heads, num_kv_heads, norms, eps, angles)
        qkv = qkv_TF.view(qkv_TF.shape[0], num_heads + 2 * num_kv_heads, -1)
        k_TKD, v_TKD = qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        self._kernels.write(kv_layer, k_TKD, v_TKD, batch.slot_blocks_T, batch.slot_offsets_T)
        return qkv[:, :num_heads]

    def attend(
        self, q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
    ) -> torch.Tensor:
        """See `Backend.attend`. Adjacent slices of one token share a call."""
        out_THD = torch.empty(q_THD.shape)
        row, token = 0, 0
        while row < len(batch.query_lens):
            last, end = row + 1, token + batch.query_lens[row]
            if batch.query_lens[row] == 1:
                while last < len(batch.query_lens) and batch.query_lens[last] == 1:
                    last, end = last + 1, end + 1
                tables_NM, lens_N = batch.block_tables_BM[row:last], batch.seq_lens_B[row:last]
                self._kernels.attend_decode(
                    q_THD[token:end], kv_layer, tables_NM, lens_N, window, scale, out_THD[token:end]
                )
            else:
                table_M, start = batch.block_tables_BM[row], batch.seq_lens[row] - batch.query_lens[row]
                self._kernels.attend_prefill(
                    q_THD[token:end], kv_layer, table_M, start, window, scale, out_THD[token:end]
                )
            row, token = last, end
        return out_THD

    def draw(self, logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
        """See `Backend.draw`."""
        return self._kernels.draw(
            logits_PV,
            best_P,
            column(samples, "temperature"),
            column(samples, "top_k"),
            column(samples, "top_p"),
            column(samples, "min_p").double().log().float(),  # the same on every CPU
            torch.from_numpy(random_numbers(samples)),
        )
