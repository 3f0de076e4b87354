"""What a device computes for the decoder, and how torch does it; the matrix products are those of the weights, or a
kernel's that does what is beside them, too.

Shapes: T tokens, E hidden size, F outputs of a projection, H query heads, K KV heads, D head dimension, V vocabulary, R
rows of logits, P of them that are sampled at random. `kv_layer` is one layer of the cache,
`[num_blocks, K, 2, block_size, D]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch.nn.functional import embedding, silu
from torch.nn.functional import rms_norm as normalize

from common.engine.batch import Samples
from common.engine.draw import draw
from common.engine.linear import Linear
from common.engine.ragged import RaggedBatch
from common.engine.rope import Angles, Rope, rotate

Norms = tuple[torch.Tensor, torch.Tensor]
"""Normalisation weights of queries and of keys, `[D]` each."""


class Backend(Protocol):
    """The operations of a layer. Used by one thread."""

    def embed(self, token_ids_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
        """Rows of the table, `[T, E]`, in the type of the activations. They are not a view of the table."""

    def add_norm(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add `delta_TE` to `h_TE` in place. Returns the weighted root mean square normalisation of `h_TE`,
        `[T, E]`."""

    def norm_project(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, norm_E: torch.Tensor, eps: float, linear: Linear
    ) -> torch.Tensor:
        """`linear` of what `add_norm` gives, `[T, F]`."""

    def norm_gate(
        self, h_TE: torch.Tensor, delta_TE: torch.Tensor | None, norm_E: torch.Tensor, eps: float, linear: Linear
    ) -> torch.Tensor:
        """`silu_mul` of what `norm_project` gives, `[T, F / 2]`."""

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
    """Products, and what comes before and after them, one by one."""

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


class TorchBackend(PlainProducts, ABC):
    """All of it but attention, in the type of the weights, rounding where transformers does."""

    def embed(self, token_ids_T: torch.Tensor, table_VE: torch.Tensor) -> torch.Tensor:
        """See `Backend.embed`."""
        return embedding(token_ids_T, table_VE)

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

    @abstractmethod
    def write(self, kv_layer: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, batch: RaggedBatch) -> None:
        """Store the keys and values of the batch's tokens in their slots."""

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
