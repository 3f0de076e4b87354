"""Matrix products with weights, in the representation that the device multiplies fastest.

| device | type | representation |
|---|---|---|
| CUDA | any | `[out, in]`, as in the checkpoint |
| CPU | float32 | `[in, out]`: up to three times the speed of `[out, in]` for one token |
| CPU with instructions for the type | bfloat16, float16 | packed for oneDNN, once rather than in every call |
| CPU without | bfloat16, float16 | float32: ten times the speed of emulated products, for twice the memory |

In the last case a product of low-precision inputs is summed in float32 and rounded once, as hardware would do it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has instructions for matrix products of `dtype`."""
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is not None and bool(supported())


class Linear:
    """`x @ weight.T + bias`. Fill `weight` and `bias`, which start uninitialised, then call `pack` once."""

    def __init__(
        self, out_features: int, in_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        on_cpu = device.type == "cpu"
        stored = torch.float32 if on_cpu and not multiplies_natively(dtype) else dtype
        if on_cpu and stored == torch.float32:
            self.weight = torch.empty(in_features, out_features, dtype=stored, device=device).T
        else:
            self.weight = torch.empty(out_features, in_features, dtype=stored, device=device)
        self.bias = torch.empty(out_features, dtype=stored, device=device) if bias else None
        self._dtype = dtype
        self._stored = stored
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Bring the loaded weight into its final representation."""
        if self.weight.device.type == "cpu" and self._stored != torch.float32:
            self.pack_for_onednn()

    def pack_for_onednn(self) -> None:
        """Let oneDNN choose the layout of the weight, which cannot be read any more."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        del self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`; at least one row."""
        if self._packed is not None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return y
        return linear(x.to(self._stored), self.weight, self.bias).to(self._dtype)
