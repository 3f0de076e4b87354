"""Looks up names of hosts in threads. ZeroMQ would do so on its only I/O thread, and so one name whose name servers are
silent would stop every link of the process."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from ipaddress import IPv4Address
from typing import Any

from common.runtime.daemon_threads import DaemonThreads

_NUM_THREADS = 4
"""Most names that are looked up at a time. There are several, so that a name whose name servers are silent does not
delay the others."""


def is_address(host: str) -> bool:
    """Whether a host is an IPv4 address rather than a name."""
    try:
        IPv4Address(host)
    except ValueError:
        return False
    return True


class Names:
    """The names that a process connects to."""

    def __init__(self, timeout_s: float) -> None:
        """`find` takes at most `timeout_s`."""
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(_NUM_THREADS, "look-up-names")
        self._finding: dict[str, Future[list[tuple[Any, ...]]]] = {}
        """Lookups that have not ended, some of which nobody waits for any more. A name has one at a time, so that it
        takes no second thread."""

    async def find(self, host: str) -> str:
        """The IPv4 address of a host. Raises `OSError`, also when it takes too long, or `UnicodeError` if the host
        cannot be a name."""
        if is_address(host):
            return host
        finding = self._finding.get(host)
        if finding is None or finding.done():
            self._finding = {name: each for name, each in self._finding.items() if not each.done()}
            finding = self._threads.submit(lambda: socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM))
            self._finding[host] = finding
        async with asyncio.timeout(self._timeout_s):
            (*_, found), *_ = await asyncio.shield(asyncio.wrap_future(finding))
        return str(found[0])

    def close(self) -> None:
        """End the threads, each after the lookup that it is at."""
        self._threads.close()
