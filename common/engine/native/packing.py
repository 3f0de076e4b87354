"""The layout of weights for the kernels in C: panels of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from common.engine.host_memory import zeros_in_large_pages

Zeros = Callable[[int], torch.Tensor]
"""Allocates so many bytes, uint8, that are zero."""

PANEL = 16
"""Outputs per panel of packed weights."""
BLOCK = 32
"""Input features of packed pairs are a multiple of this."""


def pack(weight: torch.Tensor, zeros: Zeros = zeros_in_large_pages) -> torch.Tensor:
    """Pack a weight `[out, in]` for the kernels: `[panels, in, 16]`, in its own type, padded with zeros.

    The 16 outputs of a bfloat16 panel are in the order 0, 8, 1, 9, and so on.
    """
    out_features, in_features = weight.shape
    full, rest = divmod(out_features, PANEL)
    shape = (full + bool(rest), in_features, PANEL)
    packed = zeros(math.prod(shape) * weight.itemsize).view(weight.dtype).view(shape)
    last = torch.zeros(PANEL if rest else 0, in_features, dtype=weight.dtype)
    last[:rest] = weight[out_features - rest :]
    for panels, rows in ((packed[:full], weight[: out_features - rest]), (packed[full:], last)):
        if weight.dtype == torch.bfloat16:
            pairs = rows.view(-1, 2, PANEL // 2, in_features).permute(0, 3, 2, 1)
            panels.view(-1, in_features, PANEL // 2, 2).copy_(pairs)
        else:
            panels.copy_(rows.view(-1, PANEL, in_features).transpose(1, 2))
    return packed


def alternating(gate_up: torch.Tensor) -> torch.Tensor:
    """Weights or biases of gates, then as many of ups, padded with zeros to whole panels: panels in turn."""
    gates_and_ups = gate_up.view(2, -1, *gate_up.shape[1:])
    rest = -gates_and_ups.shape[1] % PANEL
    padded = torch.nn.functional.pad(gates_and_ups, (0, 0) * (gate_up.dim() - 1) + (0, rest))
    return padded.view(2, -1, PANEL, *gate_up.shape[1:]).transpose(0, 1).flatten(0, 2)


def blocks_of(in_features: int) -> int:
    """Blocks of packed pairs."""
    return -(-in_features // BLOCK)


def pack_pairs(weight: torch.Tensor, zeros: Zeros = zeros_in_large_pages) -> torch.Tensor:
    """Pack a bfloat16 weight `[out, in]` in pairs of input features: `[panels, blocks * 16, 16, 2]`, padded with
    zeros."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % BLOCK))
    words = pack(padded.view(torch.int32), zeros)
    return words.view(torch.bfloat16).view(*words.shape, 2)
