"""Files in memory."""

from __future__ import annotations

import ctypes
import os

_MFD_CLOEXEC = 1


def memory_file(name: str) -> int:
    """Make an empty file in memory. Returns its descriptor, which a new program does not inherit. The name is for
    readers of `/proc`. Raises `OSError`.

    `os` lacks the call where Python was built for a glibc before 2.27, as conda's is; the libc of today has it.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    file: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file
