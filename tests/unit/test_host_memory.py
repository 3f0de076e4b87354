"""Memory of a host in large pages."""

from __future__ import annotations

import itertools
import mmap
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_a_large_tensor_has_pages_of_its_own_and_one_that_is_too_large_for_the_rest_begins_others() -> None:
    memory = LargePages()
    small, large, after = (memory.zeros(size) for size in (1000, 40 * 2**20, 1000))
    assert [each.data_ptr() % LARGE_PAGE for each in (small, large)] == [0, 0]
    assert after.data_ptr() == small.data_ptr() + 1024
    assert len(large) == 40 * 2**20
    assert not large.any()
    parts = [memory.zeros(30 * 2**20) for _ in range(9)]
    assert [part.data_ptr() % LARGE_PAGE == 0 for part in parts] == [False] * 8 + [True]
    with pytest.raises(RuntimeError, match="bytes"):
        memory.zeros(2**62)


def test_a_region_is_given_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = []

    def mapped(*arguments: Any, **named: Any) -> mmap.mmap:
        made = Mapped(*arguments, **named)
        regions.append(weakref.ref(made))
        return made

    class Mapped(mmap.mmap):
        """Of which there can be weak references."""

    monkeypatch.setattr("common.engine.host_memory.mmap.mmap", mapped)
    memory = LargePages()
    taken = [memory.zeros(2**20), memory.zeros(2**20)]
    (region,) = regions
    del memory, taken[0]
    assert region() is not None
    del taken[0]
    assert region() is None


@pytest.mark.parametrize("packer", [pack, pack_pairs])
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_packed_weights_are(packer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "hg" in flags_at(packer(torch.randn(2000, 600).bfloat16()).data_ptr())


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bytes"):
        zeros_in_large_pages(2**62)
