"""The group of ranks that have a device each: they add up, and gather, by NCCL."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed
from torch.nn.functional import pad

from common.engine.shard import Shard

Collectives = Literal["nccl", "gloo"]
"""gloo computes on the CPU, also for ranks that share a device."""


class DeviceGroup:
    """A `Group` of processes on one machine; there is at most one in a process. Sums are in the type of what is added,
    in an order that NCCL chooses by its size. Used by one thread, on the current stream of its device."""

    def __init__(self, shard: Shard, collectives: Collectives, meeting_fd: int, timeout_s: float) -> None:
        """Wait until all ranks have come, at most `timeout_s`. `meeting_fd` is a file that they share, at first
        empty."""
        self.shard = shard
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # by which they find one another: all are on this machine
        distributed.init_process_group(
            collectives,
            store=distributed.FileStore(f"/proc/self/fd/{meeting_fd}", shard.width),  # type: ignore[attr-defined]
            rank=shard.rank,
            world_size=shard.width,
            timeout=timedelta(seconds=timeout_s),
        )

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group.add`."""
        summed = x.contiguous()
        distributed.all_reduce(summed)
        return summed

    def beside(self, x_RV: torch.Tensor, num_columns: int) -> torch.Tensor:
        """See `Group.beside`."""
        shards = [Shard(rank, self.shard.width) for rank in range(self.shard.width)]
        sizes = [len(shard.of(num_columns)) for shard in shards]
        num_rows, widest = x_RV.shape[0], max(sizes)
        parts = x_RV.new_empty(len(sizes), num_rows, widest)
        own = pad(x_RV, (0, widest - x_RV.shape[1])).contiguous()
        distributed.all_gather(list(parts), own)
        if self.shard.rank:
            return x_RV.new_empty(0, num_columns)
        return torch.cat([part_RV[:, :size] for part_RV, size in zip(parts, sizes, strict=True)], dim=1)

    def close(self) -> None:
        """Leave the group. NCCL would wait for the other ranks; it ends with the process."""
        if distributed.get_backend() != "nccl":
            distributed.destroy_process_group()
