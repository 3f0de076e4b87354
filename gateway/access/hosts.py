"""By which names a gateway may be called. A page can make a name of its own mean any address, of this machine too (DNS
rebinding), and then calls what it finds there as its own; no page can do that with an address or `localhost`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from gateway.web.host_names import is_address, is_loopback

ANY_HOST: Final = "*"
_NOBODYS: Final = ("localhost", "host.docker.internal")
"""Names that no page can have."""


def called_by(names: Collection[str], *, host: str, has_keys: bool) -> frozenset[str] | None:
    """The names that `Hosts` is to let in, of a gateway that listens at `host`: those that the operator has given.

    Where there are none, only a gateway that asks for no key and is for this machine alone has to look at all.
    """
    if ANY_HOST in names or (not names and (has_keys or not is_loopback(host))):
        return None
    return frozenset(name.lower() for name in names)


class Hosts:
    """Looks at the `Host` of requests."""

    def __init__(self, names: Collection[str] | None) -> None:
        """`names` beside addresses and `localhost`; None for any."""
        self._names = None if names is None else frozenset(names) | frozenset(_NOBODYS)

    def refuses(self, host_header: str | None) -> bool:
        """Whether a request was sent to a name that is not this gateway's. Without the header it is no browser's."""
        if self._names is None or host_header is None:
            return False
        host = _without_port(host_header).lower().rstrip(".")
        return host not in self._names and not host.endswith(".localhost") and not is_address(host)


def _without_port(host_header: str) -> str:
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]
