"""What must hold of a worker's memory and devices so that KV blocks move as its operator expects."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from common.contract.errors import OperatorError

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE)


def guard_allocator(device: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse expandable segments on a GPU ("cuda"); what the variables say does not matter to other devices.

    PyTorch then maps a tensor from several pieces of physical memory. NIXL must register what `cudaMalloc` gives: UCX
    opens a GPU's memory to another process by a CUDA IPC handle, which such a mapping does not have.
    Raises `OperatorError`.
    """
    if device != "cuda":
        return
    for variable in _ALLOCATOR_VARIABLES:
        value = environ.get(variable, "")
        if _EXPANDABLE.search(value):
            raise OperatorError(
                f"{variable}={value}: with expandable segments the KV cache on a GPU cannot be registered for "
                "transfers; remove expandable_segments:True from the variable"
            )
