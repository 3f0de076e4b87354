"""Matrix products with weights, in the representation that the device multiplies fastest.

| device | type | representation |
|---|---|---|
| CUDA | any | `[out, in]`, as in the checkpoint; few rows may have a kernel: `common.engine.kernels.skinny` |
| CUDA, `batch_invariant` | any | the same; all products are those of `common.engine.kernels.matmul` |
| CPU with kernels in C, and instructions for bfloat16 | bfloat16 | panels of pairs: `common.engine.native` |
| CPU with instructions for the type | float16, bfloat16 without kernels in C | packed for oneDNN, once |
| CPU otherwise, with kernels in C | any | panels of 16 outputs, in the type |
| CPU without either | float32, or widened to it | `[in, out]`: three times the speed of `[out, in]` for one token |

The kernels in C take and return float32, and round nothing but the inputs that are multiplied with pairs; gates round
these as soon as they are computed. A row's product does not depend on the rows beside it, as one of oneDNN's may: so
oneDNN has none in bfloat16 where there are kernels, although its instructions would do (AVX-512 without bf16), and with
`batch_invariant` none at all. In the last row, a product of low-precision inputs is summed in float32
and rounded once, as hardware would do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, linear

from common.engine.host_memory import zeros_in_large_pages
from common.engine.native import Kernels
from common.engine.native.packing import Zeros, alternating, pack, pack_pairs

FEW_ROWS = 16
"""Most rows of a product for which a GPU may have a kernel of its own."""
MANY_ROWS = 128
"""Rows from which on a batch-invariant product on a GPU is cut in one way."""


def sum_in_float32() -> None:
    """Let GPUs sum the products of every type in float32, however the rows of a product are cut into parts, and
    multiply float32 as such, whatever PyTorch's defaults and the environment say."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU has instructions for matrix products of `dtype`."""
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    supported = getattr(torch.ops.mkldnn, name, None)
    return supported is not None and bool(supported())


class Products(NamedTuple):
    """How a CPU multiplies with the weights."""

    by: str
    """Instructions of the kernels in C, as `Kernels` names them; "onednn" for products in the weights' own type; or
    "torch"."""
    widened: bool
    """Whether weights of bfloat16 or float16 are multiplied as float32."""


class Linear:
    """`x @ weight.T + bias`. Fill `weight` and `bias`, which start uninitialised, then call `pack` once.

    The outputs of a `gated` one are gates, then as many ups. With kernels in C it is not called, but `gate`.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
        batch_invariant: bool = False,
        gated: bool = False,
    ) -> None:
        """`batch_invariant`: a row's outputs do not depend on the rows beside it. `kernels` compute them, although
        oneDNN could be faster; without `kernels` one in Triton does, also where its interpreter stands in for a
        GPU."""
        self._multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = linear
        in_triton = batch_invariant and kernels is None
        if in_triton:
            from common.engine.kernels.matmul import matmul  # here, so that only a GPU needs triton

            self._multiply = matmul
        on_cpu = self._on_cpu = device.type == "cpu" and not in_triton
        native = multiplies_natively(dtype) and not batch_invariant
        self._in_pairs = kernels is not None and dtype == torch.bfloat16 and kernels.multiplies_pairs
        in_c = dtype != torch.float16 or not native
        self._kernels = kernels if on_cpu and in_c else None
        stored = torch.float32 if on_cpu and not native and self._kernels is None else dtype
        if on_cpu and stored == torch.float32 and self._kernels is None:
            self.weight = torch.empty(in_features, out_features, dtype=stored, device=device).T
        else:
            self.weight = torch.empty(out_features, in_features, dtype=stored, device=device)
        self.bias = torch.empty(out_features, dtype=stored, device=device) if bias else None
        self.out_features, self.in_features = out_features, in_features
        self._type, self._stored, self._gated = dtype, stored, gated
        self._packed: torch.Tensor | None = None

    @property
    def products(self) -> Products | None:
        """How they are computed on a CPU; None elsewhere."""
        if not self._on_cpu:
            return None
        by = "onednn" if self.for_onednn else "torch"
        if self._kernels is not None:
            by = self._kernels.instructions[self._in_pairs]
        return Products(by, self._type != torch.float32 and not (self._in_pairs or self.for_onednn))

    @property
    def for_onednn(self) -> bool:
        """Whether `pack` lets oneDNN choose a layout, whose rows cannot be read."""
        return self._kernels is None and self._on_cpu and self._stored != torch.float32

    @property
    def panels(self) -> torch.Tensor | None:
        """The packed weight if products are computed by kernels in C; see `packing.pack` and `pack_pairs`."""
        return None if self._kernels is None else self._packed

    def pack(self, zeros: Zeros = zeros_in_large_pages) -> None:
        """Convert the loaded weight to its final representation, which may be in memory of `zeros`. `weight` may be
        gone afterwards."""
        if self._kernels is not None:
            weight, bias = self.weight, None if self.bias is None else self.bias.float()
            del self.weight
            if self._gated:
                weight, bias = alternating(weight), None if bias is None else alternating(bias)
            self._packed = (pack_pairs if self._in_pairs else pack)(weight, zeros)
            self.bias = bias
        elif self.for_onednn:
            self.pack_for_onednn()

    def rows(self, rows_T: torch.Tensor) -> torch.Tensor:
        """Copy rows of the weight, `[T, in]`; of a packed one in float32. Not if it is `for_onednn`."""
        if self._kernels is None:
            return embedding(rows_T, self.weight)
        assert self._packed is not None, "the weight has not been packed"
        return self._kernels.unpack(self._packed, rows_T, (self.out_features, self.in_features))

    def pack_for_onednn(self) -> None:
        """Let oneDNN choose the layout of the weight."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        del self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to `[rows, out]`, in the type of `x`, or in float32 of what `gate` gave; at least one row."""
        if self._packed is None and x.dtype == self._stored:
            return self._multiply(x, self.weight, self.bias)
        if self._packed is None:
            return self._multiply(x.to(self._stored), self.weight, self.bias).to(x.dtype)
        if self._kernels is not None:
            assert not self._gated, "its panels are of gates and of ups in turn"
            return self._kernels.linear(x, self._packed, self.bias, self.out_features)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(self._stored), self._packed, self.bias, "none", [], ""
        )
        return y.to(x.dtype)

    def gate(self, x: torch.Tensor) -> torch.Tensor | None:
        """`silu(gate) * up` of the outputs, `[rows, out / 2]`, or what `Kernels.gated` gives for a product with pairs;
        None if there is no kernel in C for that."""
        if self._kernels is None or self._packed is None:
            return None
        assert self._gated
        return self._kernels.gated(x, self._packed, self.bias, self.out_features // 2)
