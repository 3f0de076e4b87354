"""What glibc's `malloc` does for a process.

It gives large pages only if it is asked, where the system gives none unasked: a worker's activations are there, and a
core looks up fewer pages. A variable asks, which glibc (2.35 and later) reads when a program starts. And it keeps what
is freed, unless it is at the end of a heap.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

_TUNABLE = "glibc.malloc.hugetlb"


def with_large_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """These variables, by which `malloc` asks for large pages unless they already say whether it does."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables:
        return dict(environ)
    return {**environ, "GLIBC_TUNABLES": f"{tunables}:{_TUNABLE}=1".removeprefix(":")}


def restart_with_large_pages() -> None:
    """Start this program again, in this process, with the variables of `with_large_pages`, unless it has them."""
    environment = with_large_pages(os.environ)
    if sys.platform == "linux" and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 (it is this program)


def give_memory_back() -> None:
    """Return freed memory to the system. Each thread keeps it in a heap of its own: hundreds of MB after one long text,
    or the weights of a model as they were before they were packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
