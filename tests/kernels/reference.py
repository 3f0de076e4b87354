"""What the kernels should compute, in float64, and how far from it they may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of ‖out - reference‖ / ‖reference‖, by the type of the operands."""


def examples(most: int) -> int:
    """How many shapes to draw: fewer on a GPU, for which most of them take seconds to compile."""
    return most // 3 if torch.cuda.is_available() else most


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out - reference‖ / ‖reference‖; infinite if anything of `out` is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return float((out.double() - reference).norm() / reference.norm().clamp_min(1e-30))


def attention(
    q_THD: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of slices side by side, `[T, H, D]`; zeros for a sequence of no tokens."""
    _, num_kv_heads, _, _, head_dim = kv_layer.shape
    group = q_THD.shape[1] // num_kv_heads
    out = torch.zeros(q_THD.shape, dtype=torch.float64, device=q_THD.device)
    end = 0
    for table, query_len, seq_len in zip(block_tables, query_lens, seq_lens, strict=True):
        begin, end = end, end + query_len
        if not seq_len:
            continue
        blocks = kv_layer[list(table)].double()
        keys, values = blocks.permute(2, 1, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :seq_len]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = q_THD[begin:end].double().transpose(0, 1) @ keys.transpose(1, 2) * scale
        at = torch.arange(seq_len - query_len, seq_len, device=q_THD.device)[:, None]
        distance = at - torch.arange(seq_len, device=q_THD.device)
        hidden = (distance < 0) | (distance >= (window or seq_len + 1))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = (weights @ values).transpose(0, 1)
    return out
