"""What a device computes for the decoder, and how torch does it; the matrix products are those of the weights, or a
kernel's that does what is beside them, too.

Shapes: T tokens, E hidden size, F outputs of a projection, H query heads, K KV heads, G = H / K, D head dimension, S
slots of a sequence, V vocabulary, R rows of logits, P of them that are sampled at random. `kv_layer` is one layer of
the cache, `[num_blocks, K, 2, block_size, D]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import rms_norm as normalize
from torch.nn.functional import scaled_dot_product_attention, silu

from common.engine.batch import Samples
from common.engine.draw import draw
from common.engine.linear import Linear
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles, Rope, rotate

if TYPE_CHECKING:
    from common.engine.group import Group
    from common.engine.kv_cache import KVCache
    from common.engine.model_config import ModelConfig
    from common.engine.weights import LayerWeights

_MASK_ROWS = 128
"""Most queries of one slice that attend at once: a mask has as many rows, of as many columns as the slice has keys."""

Norms = tuple[torch.Tensor, torch.Tensor]
"""Normalisation weights of queries and of keys, `[D]` each."""


class Backend(Protocol):
    """The operations of a layer. Used by one thread."""

    @property
    def invariant_run(self) -> int | None:
        """Keys at whose multiples the contexts of decode tokens are cut, whatever the batch, on a GPU; None if the
        batch decides."""

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
        """Compute all layers at once: what is still to be added to `h_TE`, which is changed in place. None if the
        backend computes them one by one, by the operations below. `config` is that of this rank's part."""

    def add_norm(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta_TE` to `h_TE` in place. Returns the weighted root mean square normalisation of `h_TE`,
        `[T, E]`."""

    def norm_project(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, norm_E: torch.Tensor, eps: float, linear: Linear
    ) -> torch.Tensor:
        """`linear` of what `add_norm` gives, `[T, F]`."""

    def project_rows(
        self,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        rows_R: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        linear: Linear,
    ) -> torch.Tensor:
        """`norm_project` of some rows, `[R, F]`; `h_TE` stays as it is."""

    def norm_gate(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, norm_E: torch.Tensor, eps: float, linear: Linear
    ) -> torch.Tensor:
        """`silu_mul` of what `norm_project` gives, `[T, F / 2]`, as the next product takes it."""

    def project_onto(self, h_TE: torch.Tensor, x_TF: torch.Tensor, linear: Linear) -> torch.Tensor | None:
        """`linear(x_TF)`, which is to be added to `h_TE`; None if that is done."""

    def angles(self, rope: Rope, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
        """The angles of tokens at these positions, in the form that `rotate_and_write` takes."""

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
        """Rotate queries and keys, and store keys and values in their slots. Returns the queries, `[T, H, D]`.

        With `norms`, queries and keys are normalised first. A row of `qkv_TF` holds H queries, K keys and K values, and
        may be overwritten.
        """

    def attend(
        self, q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
    ) -> torch.Tensor:
        """Causal attention of each token to its sequence in the cache, `[T, H, D]`.

        A token at position p sees positions `(p - window, p]`, or all up to p without a window.
        """

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`, `[T, F / 2]`."""

    def best(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row, float32, NaN if the row has one, and its token. Of equal logits, the first one
        counts."""

    def draw(self, logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
        """Draw a token for each row, whose largest logit is `best_P`; see `common.engine.draw`."""


class PlainProducts:
    """Layers one by one; products, and what comes before and after them, one by one."""

    @property
    def invariant_run(self) -> int | None:
        """See `Backend.invariant_run`."""
        return None

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
        """See `Backend.layers`."""
        return None

    def norm_project(
        self: Backend,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        norm_E: torch.Tensor,
        eps: float,
        linear: Linear,
    ) -> torch.Tensor:
        """See `Backend.norm_project`."""
        return linear(self.add_norm(h_TE, delta_TE, norm_E, eps))

    def project_rows(
        self: Backend,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        rows_R: torch.Tensor,
        norm_E: torch.Tensor,
        eps: float,
        linear: Linear,
    ) -> torch.Tensor:
        """See `Backend.project_rows`."""
        delta_RE = None if delta_TE is None else delta_TE[rows_R]
        return self.norm_project(h_TE[rows_R], delta_RE, norm_E, eps, linear)

    def norm_gate(
        self: Backend,
        h_TE: torch.Tensor,
        delta_TE: torch.Tensor | None,
        norm_E: torch.Tensor,
        eps: float,
        linear: Linear,
    ) -> torch.Tensor:
        """See `Backend.norm_gate`."""
        return self.silu_mul(linear(self.add_norm(h_TE, delta_TE, norm_E, eps)))

    def project_onto(self, h_TE: torch.Tensor, x_TF: torch.Tensor, linear: Linear) -> torch.Tensor | None:
        """See `Backend.project_onto`."""
        return linear(x_TF)


class TorchBackend(PlainProducts):
    """All of it in the type of the weights, rounding where transformers does. It is what a CPU computes without kernels
    in C, and what every kernel is tested against."""

    def add_norm(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Backend.add_norm`."""
        if delta_TE is not None:
            h_TE += delta_TE
        return _rms_norm(h_TE, weight_E, eps)

    def angles(self, rope: Rope, positions_T: torch.Tensor, dtype: torch.dtype) -> Angles:
        """See `Backend.angles`."""
        return rope.angles(positions_T, dtype)

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
        q_THD, k_TKD, v_TKD = self.rotate(qkv_TF, num_heads, kv_layer.shape[1], norms, eps, angles)
        self.write(kv_layer, k_TKD, v_TKD, batch)
        return q_THD

    def write(self, kv_layer: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: RaggedBatch) -> None:
        """Store the keys and values of the batch's tokens in their slots."""
        where = (batch.slot_blocks_T, batch.slot_offsets_T)
        kv_layer[:, :, 0].transpose(1, 2).index_put_(where, k_TKD)
        kv_layer[:, :, 1].transpose(1, 2).index_put_(where, v_TKD)

    def rotate(
        self, qkv_TF: torch.Tensor, num_heads: int, num_kv_heads: int, norms: Norms | None, eps: float, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries `[T, H, D]`, rotated keys `[T, K, D]`, and values `[T, K, D]`. With `norms`, queries and keys
        are normalised first."""
        qkv = qkv_TF.view(qkv_TF.shape[0], num_heads + 2 * num_kv_heads, -1)
        # Queries and keys lie side by side, so one operation rotates both.
        qk = qkv[:, : num_heads + num_kv_heads]
        if norms is not None:
            q_THD = _rms_norm(qk[:, :num_heads], norms[0], eps)
            k_TKD = _rms_norm(qk[:, num_heads:], norms[1], eps)
            qk = torch.cat((q_THD, k_TKD), dim=1)
        rotated = rotate(qk, angles)
        return rotated[:, :num_heads], rotated[:, num_heads:], qkv[:, num_heads + num_kv_heads :]

    def attend(
        self, q_THD: torch.Tensor, kv_layer: torch.Tensor, batch: RaggedBatch, window: int | None, scale: float
    ) -> torch.Tensor:
        """See `Backend.attend`. One slice after another, each over the blocks that some token of it sees."""
        _, num_kv_heads, _, size, head_dim = kv_layer.shape
        q_TKGD = q_THD.reshape(q_THD.shape[0], num_kv_heads, -1, head_dim)
        out_TKGD = torch.empty_like(q_TKGD)
        end = 0
        for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            begin, end = end, end + query_len
            first = 0 if window is None else max(0, seq_len - query_len - window + 1) // size
            table = batch.block_tables_BM[row, first : -(-seq_len // size)]
            k_KSD, v_KSD = kv_layer.permute(2, 1, 0, 3, 4).index_select(2, table).flatten(2, 3)
            keys_S = torch.arange(first * size, first * size + k_KSD.shape[1], device=q_THD.device)
            k_KGSD, v_KGSD = (each[:, None].expand(-1, q_TKGD.shape[2], -1, -1) for each in (k_KSD, v_KSD))
            for start in range(begin, end, _MASK_ROWS):
                tile = slice(start, min(start + _MASK_ROWS, end))
                distance_TS = batch.positions_T[tile, None] - keys_S
                visible_TS = distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)
                if query_len == 1:  # the query heads of a KV head are its queries, so its keys are read once
                    q_1KGD, k_1KSD, v_1KSD = q_TKGD[tile], k_KSD[None], v_KSD[None]
                    out_TKGD[tile] = scaled_dot_product_attention(q_1KGD, k_1KSD, v_1KSD, visible_TS, scale=scale)
                    continue
                q_KGTD = q_TKGD[tile].permute(1, 2, 0, 3)
                out_KGTD = scaled_dot_product_attention(q_KGTD, k_KGSD, v_KGSD, visible_TS, scale=scale)
                out_TKGD[tile] = out_KGTD.permute(2, 0, 1, 3)
        return out_TKGD.flatten(1, 2)

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """See `Backend.silu_mul`."""
        gate, up = gate_up_TF.chunk(2, dim=-1)
        return silu(gate) * up

    def best(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend.best`."""
        values_R, tokens_R = logits_RV.max(dim=-1)
        return values_R, tokens_R

    def draw(self, logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
        """See `Backend.draw`."""
        return draw(logits_PV, best_P, samples)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation in float32, scaled in the type of `x`, as transformers does it."""
    return weight * normalize(x.float(), x.shape[-1:], None, eps).to(x.dtype)
