"""Looks up names of hosts in threads. ZeroMQ would do so on its only I/O thread, where one name whose name servers are
silent stops every link of the process. A lookup of the event loop cannot be cancelled, and an exit would wait for it.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from ipaddress import IPv4Address
from time import monotonic
from typing import Any

from common.runtime.daemon_threads import DaemonThreads

_NUM_THREADS = 16
"""Most names that are looked up at a time. There are several, so that names whose name servers are silent do not delay
the others."""
_KEPT_S = 60.0
"""Longest time for which the result of a lookup is kept for the next `find`, if nobody waits for it any more."""


def is_address(host: str) -> bool:
    """Whether a host is an IPv4 address rather than a name."""
    try:
        IPv4Address(host)
    except ValueError:
        return False
    return True


class Resolver:
    """Looks up the names that a part of a process connects to."""

    def __init__(self, timeout_s: float) -> None:
        """`find` takes at most `timeout_s`."""
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(_NUM_THREADS, "look-up-names")
        self._lookups: dict[str, _Lookup] = {}
        """Lookups whose results nobody has taken yet. A name has one at a time, so that it takes no second thread; one
        that takes longer than `timeout_s` is not begun again, so that it ends."""

    async def find(self, host: str) -> str:
        """The first IPv4 address of a host. Raises as `find_all` does."""
        return host if is_address(host) else (await self.find_all(host))[0]

    async def find_all(self, host: str) -> list[str]:
        """The IPv4 addresses of a name, in the order in which the system gives them. Raises `OSError`, also when it
        takes too long, or `UnicodeError` if the host cannot be a name."""
        for name in [name for name, each in self._lookups.items() if each.is_old()]:
            del self._lookups[name]
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = _Lookup(self._threads, host)
        if not lookup.found.done():
            waiting = asyncio.wrap_future(lookup.found)
            waiting.add_done_callback(_note_error)  # if nobody waits any more
            async with asyncio.timeout(self._timeout_s):
                await asyncio.wait([waiting])
        if self._lookups.get(host) is lookup:
            del self._lookups[host]
        return list(dict.fromkeys(address[0] for *_, address in lookup.found.result()))

    def close(self) -> None:
        """End the threads once every lookup has ended."""
        self._threads.close()


class _Lookup:
    """One call of `getaddrinfo`."""

    def __init__(self, threads: DaemonThreads, host: str) -> None:
        """Begin it. Raises `OSError` if no thread can be started."""
        self.ended_at: float | None = None
        try:
            self.found: Future[list[tuple[Any, ...]]] = threads.submit(
                lambda: socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
            )
        except RuntimeError as error:
            raise OSError(str(error)) from error
        self.found.add_done_callback(self._end)

    def is_old(self) -> bool:
        """Whether it has ended too long ago for its result to be used."""
        return self.ended_at is not None and monotonic() - self.ended_at > _KEPT_S

    def _end(self, _: object) -> None:
        self.ended_at = monotonic()


def _note_error(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an error that nobody has waited for."""
    if not future.cancelled():
        future.exception()
