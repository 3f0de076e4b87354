"""Which TCP ports processes listen on, as the kernel knows it."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that takes connections."""

    pid: int
    address: IPv4Address | IPv6Address
    port: int

    @property
    def on_loopback(self) -> bool:
        """Whether this machine alone reaches it."""
        mapped = self.address.ipv4_mapped if isinstance(self.address, IPv6Address) else None
        return (mapped or self.address).is_loopback


def listeners(*pids: int) -> list[Listener]:
    """What each of these processes, which must be there, listens on."""
    return [each for pid in pids for each in _listeners_of(pid)]


def descendants(pid: int) -> list[int]:
    """A process and all that it, or one of them, has started."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(each for child in children for each in descendants(child))]


def _listeners_of(pid: int) -> Iterator[Listener]:
    inodes = set(_inodes(Path(f"/proc/{pid}/fd").iterdir()))
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            column = line.split()
            if column[3] == "0A" and column[9] in inodes:
                address, port = column[1].split(":")
                yield Listener(pid, _address(address), int(port, 16))


def _inodes(descriptors: Iterable[Path]) -> Iterator[str]:
    for each in descriptors:
        with suppress(FileNotFoundError):  # closed meanwhile
            if (found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(each))) is not None:
                yield found[1]


def _address(number: str) -> IPv4Address | IPv6Address:
    """The kernel prints words of 32 bits in the machine's byte order."""
    words = [int(number[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(number), 8)]
    packed = b"".join(words)
    return ip_address(socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed))
