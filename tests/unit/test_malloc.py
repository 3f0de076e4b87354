"""`malloc` is asked for large pages, and gives back what is freed."""

from __future__ import annotations

import ctypes
import mmap
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
def test_what_the_operator_says_stays(before: Mapping[str, str], after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 4096)
    assert with_large_pages({"A": "b", **before}) == {"A": "b", "GLIBC_TUNABLES": after}


def test_where_usual_pages_are_larger_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 KiB, as in systems for ARM, a large one has 512 MiB."""
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)
    for before in ({"A": "b"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}):
        assert with_large_pages(before) == before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="it is glibc that keeps what is freed")
def test_what_is_freed_between_what_is_not_is_given_back() -> None:
    """As weights before they are packed: pieces that are too small for mappings of their own."""

    def resident() -> int:
        (line,) = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Anonymous:" in line]
        return int(line.split()[1]) * 1024

    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    size, freed = 100_000, 1000
    pieces = [libc.malloc(size) for _ in range(2 * freed)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[::2]:  # of one size: what stays lies between what goes, whatever gaps the heap had before
        libc.free(piece)
    before = resident()
    give_memory_back()
    after = resident()
    for piece in pieces[1::2]:
        libc.free(piece)
    assert before - after > 0.8 * size * freed
