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
        from common.engine.kernels.backend import TritonBackend  # here, so that only a GPU needs triton

        return TritonBackend(device, batch_invariant=batch_invariant)
    return TorchBackend() if kernels is None else NativeBackend(kernels)
