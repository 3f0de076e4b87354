"""Which backend computes on a device."""

from __future__ import annotations

import torch

from common.engine.backend import Backend, TorchBackend
from common.engine.native import Kernels
from common.engine.native.backend import NativeBackend


def backend_on(device: torch.device, kernels: Kernels | None, *, batch_invariant: bool) -> Backend:
    """The backend of a device; on a CPU it computes with `kernels`, if there are any. See `TritonBackend` for
    `batch_invariant`; attention on a CPU is so in any case."""
    if device.type != "cpu":
        # Keep sums of many products in float32, however the rows of a product are cut into parts.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        from common.engine.kernels.backend import TritonBackend  # here, so that only a GPU needs triton

        return TritonBackend(device, batch_invariant=batch_invariant)
    return TorchBackend() if kernels is None else NativeBackend(kernels)
