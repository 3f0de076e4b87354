"""Which hosts are this machine's own."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without brackets, is of this machine alone."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
