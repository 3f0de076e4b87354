"""Memory of a host in large pages, where there are any."""

from __future__ import annotations

import contextlib
import mmap

import torch


def zeros_in_large_pages(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 `[num_bytes]`, in large pages if the system gives them: whatever lies apart in small ones would need
    an entry of the processor's page tables for every 4 KiB, and a core reads ahead only within a page.

    Raises `RuntimeError` if there is not enough memory.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{num_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8).zero_()
