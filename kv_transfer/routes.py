"""The way by which blocks come from a source: what the transport says about it, sorted into a few kinds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """What carries the blocks."""

    RDMA = "rdma"
    CUDA_IPC = "cuda_ipc"
    """From GPU to GPU on one host: NVLink, or PCIe between peers."""
    SHARED_MEMORY = "shared_memory"
    """Host memory to host memory on one host, by the kernel's copy (`cma`) or a shared mapping."""
    TCP = "tcp"
    ZMQ = "zmq"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRoute:
    """The route by which blocks come from one source."""

    way: Way = Way.UNKNOWN
    wire: str = ""
    """The transports and devices, as UCX names them: for example `rc_mlx5/mlx5_0:1`."""
    same_host: bool | None = None
    """Whether the source is on this host; None if that is not known."""

    def suffices(self, device: str) -> bool:
        """Whether `--require-rdma` accepts this route into memory of `device`. An unknown way is not accepted."""
        return self.way in (Way.RDMA, Way.CUDA_IPC) or (self.way is Way.SHARED_MEMORY and device != "cuda")

    def falls_back(self, device: str) -> bool:
        """Whether UCX has fallen back to a slow way. ZMQ is not a fallback but a choice, and an unknown way is not
        counted."""
        return self.way not in (Way.ZMQ, Way.UNKNOWN) and not self.suffices(device)

    def __str__(self) -> str:
        return f"{self.way} ({self.wire})" if self.wire else self.way


_KINDS = (
    (Way.TCP, re.compile(r"\btcp\b")),
    (Way.SHARED_MEMORY, re.compile(r"\b(cma|sysv|posix|xpmem|knem|self)\b")),
    (Way.RDMA, re.compile(r"\b(rc|dc|ud|srd|gga)(_\w+)?/|\bib\b")),
    (Way.CUDA_IPC, re.compile(r"\bcuda_ipc\b")),
)
"""Patterns of the names that UCX uses, the slowest way first: if a read uses several transports, the slowest one
decides its way."""


def way_of(wire: str) -> Way:
    """The way of the transports that UCX names, as in `50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1`."""
    return next((way for way, pattern in _KINDS if pattern.search(wire)), Way.UNKNOWN)
