"""What ranks that have a device each say to each other, with gloo in the place of NCCL."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch

from common.engine.device_group import DeviceGroup
from common.engine.shard import Shard

COLUMNS = 11
"""Which two, and three, do not divide."""


def part_of(rank: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank adds, and its columns of a table of all ranks."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(5, COLUMNS, generator=generator).to(dtype)
    columns = Shard(rank, width).of(COLUMNS)
    return torch.full((3, 4), 2.0**rank).to(dtype), table[:, columns.start : columns.stop]


def rank_says(width: int, meeting: str, dtype: torch.dtype, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank is told, in a process of its own."""
    group = DeviceGroup(Shard(rank, width), "gloo", os.open(meeting, os.O_RDWR), 30.0)
    added, columns = part_of(rank, width, dtype)
    told = group.add(added.T), group.beside(columns, COLUMNS)
    group.close()
    return told


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """As many as there are ranks; torch takes each of them a while to import."""
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_add_up_and_lay_their_parts_side_by_side(
    processes: ProcessPoolExecutor, width: int, dtype: torch.dtype
) -> None:
    file = os.memfd_create("meeting")
    run = partial(rank_says, width, f"/proc/{os.getpid()}/fd/{file}", dtype)
    told = list(processes.map(run, range(width)))
    for rank, (added, rows) in enumerate(told):
        assert torch.equal(added, torch.full((4, 3), 2.0**width - 1).to(dtype))
        whole = torch.cat([part_of(each, width, dtype)[1] for each in range(width)], dim=1)
        assert torch.equal(rows, whole) if rank == 0 else rows.shape == (0, COLUMNS)
    os.close(file)
