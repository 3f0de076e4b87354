"""Where a worker connects to because a message names an address: to its peers' networks, and nowhere else.

Whoever reaches a control port without keys could otherwise have the worker connect to whatever it reaches itself.
UCX's addresses, in the metadata of the transport `nixl`, are not looked at: their form is UCX's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from common.runtime.config import WorkerSettings

LOOPBACK = IPv4Network("127.0.0.0/8")
LINK_LOCAL = IPv4Network("169.254.0.0/16")
"""Where a cloud's metadata service, with the machine's credentials, is: peers only if the operator names it."""
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True, slots=True)
class PeerNetworks:
    """The networks that a worker's peers are in."""

    networks: tuple[IPv4Network, ...]

    @classmethod
    def of(cls, settings: WorkerSettings) -> PeerNetworks:
        """Those that the operator names; by default everywhere with CURVE keys, which a peer must have, and otherwise
        loopback for a worker on loopback, and for any other one the subnets of its address, no link-local ones."""
        if settings.peer_networks is not None:
            return cls(settings.peer_networks)
        if settings.curve_keys is not None:
            return EVERYWHERE
        return cls(_around(IPv4Address(settings.host), _subnets()))

    def admit(self, address: str) -> bool:
        """Whether this is an IPv4 address in one of them."""
        try:
            return any(IPv4Address(address) in network for network in self.networks)
        except ValueError:
            return False

    def __str__(self) -> str:
        return ", ".join(map(str, self.networks)) or "no network"


EVERYWHERE = PeerNetworks((IPv4Network("0.0.0.0/0"),))


def _around(host: IPv4Address, subnets: Iterable[IPv4Network]) -> tuple[IPv4Network, ...]:
    if host.is_loopback:
        return (LOOPBACK,)
    routable = [subnet for subnet in subnets if not subnet.overlaps(LINK_LOCAL)]
    if host.is_unspecified:
        return (LOOPBACK, *routable)
    return (IPv4Network(host), *(subnet for subnet in routable if host in subnet))


def _subnets() -> Sequence[IPv4Network]:
    """The networks that this machine is connected to without a router; none where the system does not tell."""
    try:
        return read_subnets(_ROUTES.read_text())
    except OSError:
        return ()


def read_subnets(routes: str) -> list[IPv4Network]:
    """Those of the kernel's table of routes, whose numbers are in the machine's byte order."""
    rows = [line.split() for line in routes.splitlines()[1:]]
    found = [(_address(row[1]), _address(row[7])) for row in rows if int(row[2], 16) == 0 and int(row[7], 16) != 0]
    return [IPv4Network(f"{network}/{mask}") for network, mask in found]


def _address(number: str) -> IPv4Address:
    return IPv4Address(int(number, 16).to_bytes(4, sys.byteorder))
