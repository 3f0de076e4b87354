"""Memory of a host in large pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.engine.host_memory import zeros_in_large_pages
from common.engine.native.packing import pack, pack_pairs


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
    assert memory.shape == (5 * 2**20 + 1,)
    assert not memory.any()
    memory[:] = 7
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags_at(memory.data_ptr())


@pytest.mark.parametrize("packer", [pack, pack_pairs])
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_packed_weights_are(packer: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert "hg" in flags_at(packer(torch.randn(2000, 600).bfloat16()).data_ptr())


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(RuntimeError, match="bytes"):
        zeros_in_large_pages(2**62)
