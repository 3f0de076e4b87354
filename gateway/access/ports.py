"""Ports of the gateway, which are bound before it loads what takes long, so that an occupied one is reported at once.

A port that is bound and on which nobody listens refuses connections, as if it were not bound.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from common.contract.errors import OperatorError
from gateway.access.connections import Listener

_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""The machine lacks an address, or all addresses of a family."""


@dataclass(frozen=True, slots=True)
class BoundPort:
    """A port at every address of a host that this machine has. It refuses connections until `listen`."""

    name: str
    """What an operator knows it by."""
    host: str
    sockets: Sequence[socket.socket]

    @classmethod
    async def open(cls, owner: AsyncExitStack, host: str, port: int, what: str = "") -> BoundPort:
        """Bind a port (0: any free one) until `owner` is closed. `what` begins its name.

        Raises `OperatorError` if somebody listens there, or if this machine has no address of the host.
        """
        name = f"{what}{host}:{port}"
        with _named(name):
            return cls(name, host, await _bind(owner, host, port))

    def listen(self, listener: Listener, scheme: str = "http") -> str:
        """Let `listener` accept connections, and return the URL. Raises `OperatorError` if somebody else listens there
        by now."""
        with _named(self.name):
            for bound in self.sockets:
                listener.listen(bound)
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{listener.port}"


async def _bind(owner: AsyncExitStack, host: str, port: int) -> list[socket.socket]:
    """Sockets at the addresses of `host`: `localhost` is also the IPv6 one where there is none. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in dict.fromkeys((family, address[:2]) for family, _, _, _, address in found):
        try:
            bound = owner.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # the IPv4 address has a socket of its own
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            absent = error
        else:
            sockets.append(bound)
    if absent is not None and not sockets:
        raise absent
    return sockets


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise an `OSError` as an `OperatorError` that names the port."""
    try:
        yield
    except OSError as error:
        raise OperatorError(f"cannot bind {name}: {error.strerror or error}") from error
