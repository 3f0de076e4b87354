"""Memory of a host in large pages."""

from __future__ import annotations

import itertools
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.host_memory import LargePages, zeros_in_large_pages
from common.engine.native.packing import pack, pack_pairs

LARGE_PAGE = 2 * 2**20


def flags_at(address: int) -> set[str]:
    """The flags of the mapping that an address of this process lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


def test_it_is_zero_and_may_be_in_large_pages() -> None:
    memory = zeros_in_large_pages(5 * 2**20 + 1)
    assert memory.data_ptr() % LARGE_PAGE == 0
    assert memory.shape == (5 * 2**20 + 1,)
    assert not memory.any()
    memory[:] = 7
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags_at(memory.data_ptr())


def test_tensors_lie_side_by_side_from_a_large_page_on() -> None:
    memory = LargePages()
    sizes = [1000, 64, 2**20, 3 * 2**20]
    taken = [memory.zeros(size) for size in sizes]
    assert [len(each) for each in taken] == sizes
    assert taken[0].data_ptr() % LARGE_PAGE == 0
    for value, (each, after) in enumerate(itertools.pairwise(taken), start=1):
        assert 0 <= after.data_ptr() - (each.data_ptr() + len(each)) < 64
        assert after.data_ptr() % 64 == 0
        each[:] = value
    assert [int(each.max()) for each in taken] == [1, 2, 3, 0]


def test_a_tensor_larger_than_what_is_left_has_a_region_of_its_own() -> None:
    memory = LargePages()
    small, large, after = (memory.zeros(size) for size in (1000, 300 * 2**20, 1000))
    assert [each.data_ptr() % LARGE_PAGE for each in (small, large, after)] == [0, 0, 0]
    assert len(large) == 300 * 2**20
    assert not large.any()
    with pytest.raises(RuntimeError, match="bytes"):
        memory.zeros(2**62)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell what memory a process has")
def test_a_region_is_given_back_with_its_last_tensor() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    before = mapped()
    memory = LargePages()
    taken = [memory.zeros(2**20), memory.zeros(2**20)]
    del memory
    assert mapped() - before >= 256 * 2**20
    del taken[0]
    assert mapped() - before >= 256 * 2**20
    del taken[0]
    assert mapped() - before < 2**26


@pytest.mark.parametrize("packer", [pack, pack_pairs])
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_packed_weights_are(packer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "hg" in flags_at(packer(torch.randn(2000, 600).bfloat16()).data_ptr())


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bytes"):
        zeros_in_large_pages(2**62)
