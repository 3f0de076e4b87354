"""Copies between the host and the device that do not wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` (an array, or nested lists) on `device`. Its copy is queued before any work that is queued
    on the device later."""
    if isinstance(values, np.ndarray):  # contiguous: torch copies others by way of memory that is not pinned
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    else:
        tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """Tensors that are being copied from a device to the host. Without tensors, this marks the end of the work queued
    on the device before."""

    def __init__(self, *tensors: torch.Tensor, device: torch.device) -> None:
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            pinned = tuple(torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors)
            for copy, tensor in zip(pinned, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._tensors = pinned
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the copies, and for everything queued on the device before them. Returns the copies."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
