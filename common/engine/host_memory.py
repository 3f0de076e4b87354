"""Memory of a host in large pages, where there are any."""

from __future__ import annotations

import contextlib
import mmap

import torch

_LARGE_PAGE, _LINE = 2 * 2**20, 64
_REGION = 256 * 2**20


def zeros_in_large_pages(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 `[num_bytes]`, in large pages if the system gives them: whatever lies apart in small ones would need
    an entry of the processor's page tables for every 4 KiB, and a core reads ahead only within a page.

    They begin with a page, and have the last one for themselves. Raises `RuntimeError` if there is not enough memory.
    """
    return _region(num_bytes)[:num_bytes].zero_()


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, of the host or a GPU. Torch's allocator for hosts raises a
    `RuntimeError`."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


class LargePages:
    """Memory for many tensors, side by side in large pages: one that has no whole page of its own would be in small
    ones. It is given back when the last tensor of a region is gone. A large tensor has pages of its own."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Zeros, uint8 `[num_bytes]`, that begin with a line of the caches.

        Raises `RuntimeError` if there is not enough memory.
        """
        if num_bytes > _REGION // 8:
            return zeros_in_large_pages(num_bytes)
        if num_bytes > len(self._rest):
            self._rest = _region(_REGION)
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // _LINE) * _LINE :]
        return taken.zero_()


def _region(num_bytes: int) -> torch.Tensor:
    """At least so many bytes: whole pages, of which the system gives those that are written to."""
    length = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
    try:
        mapped = mmap.mmap(-1, length + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{num_bytes} bytes: {error}") from error
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -region.data_ptr() % _LARGE_PAGE
    return region[begin : begin + length]
