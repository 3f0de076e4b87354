"""`malloc` is asked for large pages, and gives back what is freed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.runtime.malloc import give_memory_back, with_large_pages


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_what_the_operator_says_stays(before: Mapping[str, str], after: str) -> None:
    assert with_large_pages({"A": "b", **before}) == {"A": "b", "GLIBC_TUNABLES": after}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="it is glibc that keeps what is freed")
def test_what_is_freed_between_what_is_not_is_given_back() -> None:
    """As weights before they are packed: pieces that are too small for mappings of their own."""

    def resident() -> int:
        (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Anonymous:" in line]
        return int(line.split()[1]) * 1024

    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    pieces, kept, size = [], [], 100_000
    for _ in range(1000):
        pieces.append(libc.malloc(size))
        ctypes.memset(pieces[-1], 1, size)
        kept.append(libc.malloc(5000))
    for piece in pieces:
        libc.free(piece)
    before = resident()
    give_memory_back()
    assert before - resident() > 0.8 * size * len(pieces)
    for piece in kept:
        libc.free(piece)
