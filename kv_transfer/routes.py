"""Which way blocks come from a source: what the transport says of it, sorted into a few kinds."""

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
class Route:
    """How blocks come from one source."""

    way: Way = Way.UNKNOWN
    wire: str = ""
    """The transports and devices in UCX's words, as in `rc_mlx5/mlx5_0:1`."""
    same_host: bool | None = None
    """None where it is not known."""

    def suffices(self, device: str) -> bool:
        """Whether `--require-rdma` accepts it for memory of this device; what is not known is not accepted."""
        return self.way in (Way.RDMA, Way.CUDA_IPC) or (self.way is Way.SHARED_MEMORY and device != "cuda")

    def falls_back(self, device: str) -> bool:
        """Whether UCX has fallen back to a slow way. ZMQ is a choice, and what is not known is not counted."""
        return self.way not in (Way.ZMQ, Way.UNKNOWN) and not self.suffices(device)

    def __str__(self) -> str:
        return f"{self.way} ({self.wire})" if self.wire else self.way


_KINDS = (
    (Way.TCP, re.compile(r"\btcp\b")),
    (Way.SHARED_MEMORY, re.compile(r"\b(cma|sysv|posix|xpmem|knem|self)\b")),
    (Way.RDMA, re.compile(r"\b(rc|dc|ud|srd|gga)(_\w+)?/|\bib\b")),
    (Way.CUDA_IPC, re.compile(r"\bcuda_ipc\b")),
)
"""Slowest first: of several transports for one read the slowest names the way."""


def way_of(wire: str) -> Way:
    """The kind of what UCX names, as in `50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1`."""
    return next((way for way, pattern in _KINDS if pattern.search(wire)), Way.UNKNOWN)
