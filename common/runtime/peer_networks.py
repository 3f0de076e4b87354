"""Limits the addresses from messages that a worker connects to: only those in its peers' networks.

Without this limit, a client of a control port without keys could make the worker connect to any address that the
worker can reach. The UCX addresses in the metadata of the transport `nixl` are not checked: their format is private to
UCX.
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
"""The network of a cloud's metadata service, which hands out the machine's credentials. Its addresses are peers only if
the operator names the network."""
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True, slots=True)
class PeerNetworks:
    """The networks in which a worker accepts peers."""

    networks: tuple[IPv4Network, ...]

    @classmethod
    def of(cls, settings: WorkerSettings) -> PeerNetworks:
        """The networks that the operator names.

        By default: every network if CURVE keys are set, since a peer must then have them; without keys, loopback for a
        worker on loopback, and the subnets of its address, except link-local ones, for any other worker.
        """
        if settings.peer_networks is not None:
            return cls(settings.peer_networks)
        if settings.curve_keys is not None:
            return EVERYWHERE
        return cls(_around(IPv4Address(settings.host), _subnets()))

    def admit(self, address: str) -> bool:
        """Whether `address` is an IPv4 address in one of the networks."""
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
    """The networks that this machine reaches without a router; none if the system has no `/proc/net/route`."""
    try:
        return read_subnets(_ROUTES.read_text())
    except OSError:
        return ()


def read_subnets(routes: str) -> list[IPv4Network]:
    """The subnets in the text of `/proc/net/route`, whose addresses are in the machine's byte order."""
    rows = [line.split() for line in routes.splitlines()[1:]]
    found = [(_address(row[1]), _address(row[7])) for row in rows if int(row[2], 16) == 0 and int(row[7], 16) != 0]
    return [IPv4Network(f"{network}/{mask}") for network, mask in found]


def _address(number: str) -> IPv4Address:
    return IPv4Address(int(number, 16).to_bytes(4, sys.byteorder))
