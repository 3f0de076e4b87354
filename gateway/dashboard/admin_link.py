"""Link from the dashboard page to the admin port, if the page can reach it and may be told of it. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from gateway.web.host_names import is_address, is_loopback

_HOST = re.compile(r"(localhost|\d{1,3}(?:\.\d{1,3}){3})(?::\d{1,5})?")


@dataclass(frozen=True, slots=True)
class AdminLink:
    """Location of the admin port, where operators list and drain workers."""

    host: str
    """The address that the admin port is bound to."""
    port: int

    def origin(self, host_header: str) -> str | None:
        """The admin port's origin for a page that was loaded from `host_header`: the same host, the other port.

        None if the port cannot be reached at that host, or if the host is neither `localhost` nor an IPv4 address: a
        name may later resolve to another host (DNS rebinding), and a content security policy cannot name an IPv6
        address.
        """
        match = _HOST.fullmatch(host_header)
        if match is None:
            return None
        host = match.group(1)
        if host != "localhost" and not is_address(host):
            return None
        return f"http://{host}:{self.port}" if self._listens_at(host) else None

    def _listens_at(self, host: str) -> bool:
        if is_address(self.host) and ipaddress.ip_address(self.host).is_unspecified:
            return True
        if is_loopback(self.host):
            return is_loopback(host)
        return host == self.host
