"""Entries of a tuning table for the products of a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tuning import Kind
from common.engine.linear import Linear
from common.engine.native.packing import Zeros
from common.engine.weights import Weights


def skinny_entries(weights: Weights, itemsize: int, tilings: dict[int, SkinnyTiling]) -> list[dict[str, Any]]:
    """Every product of few rows by the kernel; `tilings` are by the number of rows, a power of two."""
    layer = weights.layers[0]
    products: list[tuple[Kind, Linear]] = [
        ("plain", layer.qkv),
        ("onto", layer.output),
        ("gate", layer.gate_up),
        ("onto", layer.down),
        ("plain", weights.lm_head),
    ]
    entries = []
    for kind, linear in products:
        outputs, inputs = linear.weight.shape
        for rows, tiling in tilings.items():
            shape = {"rows": rows, "outputs": outputs, "inputs": inputs}
            entries.append({"kernel": kind, "itemsize": itemsize, "shape": shape, "tiling": asdict(tiling)})
    return entries


def keep_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights that are loaded from now on stay as they are on a GPU, `[out, in]`, on a CPU as well."""

    def pack(linear: Linear, zeros: Zeros) -> None:
        linear.weight = linear.weight.contiguous()

    monkeypatch.setattr(Linear, "pack", pack)
