"""What glibc's `malloc` does for a process.

It gives large pages only if it is asked, where the system gives none unasked: a worker's activations are there, and a
core looks up fewer pages. A variable asks, which glibc (2.35 and later) reads when a program starts. And it keeps what
is freed, unless it is at the end of a heap.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

_TUNABLE = "glibc.malloc.hugetlb"
_USUAL_PAGE = 4096


def with_large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """These variables, with one that asks for large pages unless they already say whether `malloc` gives them. Where a
    usual page has more than 4 KiB, as on some ARM systems, none asks: a large one may have 512 MiB."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables or mmap.PAGESIZE > _USUAL_PAGE:
        return dict(environ)
    return {**environ, "GLIBC_TUNABLES": f"{tunables}:{_TUNABLE}=1".removeprefix(":")}


def give_memory_back() -> None:
    """Return freed memory to the system. Each thread keeps it in a heap of its own: hundreds of MB after one long text,
    or the weights of a model as they were before they were packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
