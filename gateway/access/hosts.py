"""Host names that a gateway answers to. A page's author can make the page's host name resolve to any address, this
machine's included (DNS rebinding), and the page then calls the server there as its own origin. No page can do that
with an IP address or `localhost`."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Final

from gateway.web.host_names import is_address, is_loopback

ANY_HOST: Final = "*"
_NOBODYS: Final = ("localhost", "host.docker.internal")
"""Host names that no web page can have."""
_NUM_REMEMBERED: Final = 64
"""Headers whose check is remembered: most clients send the same one."""


def called_by(names: Collection[str], *, host: str, has_keys: bool) -> frozenset[str] | None:
    """Names for `Hosts` to admit, at a gateway that listens at `host`; None if it need not check.

    The names are the operator's. Without any, only a gateway without API keys on a loopback address checks.
    """
    if ANY_HOST in names or (not names and (has_keys or not is_loopback(host))):
        return None
    return frozenset(name.lower() for name in names)


class Hosts:
    """Checks the `Host` header of requests."""

    def __init__(self, names: Collection[str] | None) -> None:
        """`names` are admitted besides IP addresses and `localhost`; None admits any name."""
        self._names = None if names is None else frozenset(names) | frozenset(_NOBODYS)
        self.refuses: Final = lru_cache(_NUM_REMEMBERED)(self._refuses)

    def _refuses(self, host_header: str | None) -> bool:
        """Whether a request names a host that is not this gateway's. A request without the header is not from a
        browser."""
        if self._names is None or host_header is None:
            return False
        host = _without_port(host_header).lower().rstrip(".")
        return host not in self._names and not host.endswith(".localhost") and not is_address(host)


def _without_port(host_header: str) -> str:
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]
