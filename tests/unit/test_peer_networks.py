"""Which addresses a worker takes for its peers'."""

from __future__ import annotations

import socket
import sys
from ipaddress import IPv4Network

import pytest

from common.contract.errors import OperatorError
from common.runtime import peer_networks
from common.runtime.config import PrefillSettings, load
from common.runtime.peer_networks import PeerNetworks, read_subnets

SUBNETS = [IPv4Network(text) for text in ("10.1.0.0/16", "10.1.2.0/24", "192.168.7.0/24")]


@pytest.mark.parametrize(
    ("options", "networks"),
    [
        ({}, "127.0.0.0/8"),
        ({"host": "10.1.2.3"}, "10.1.2.3/32, 10.1.0.0/16, 10.1.2.0/24"),
        ({"host": "172.20.0.9"}, "172.20.0.9/32"),
        ({"host": "0.0.0.0"}, "127.0.0.0/8, 10.1.0.0/16, 10.1.2.0/24, 192.168.7.0/24"),
        ({"host": "10.1.2.3", "curve_keys": "keys"}, "0.0.0.0/0"),
        ({"host": "10.1.2.3", "curve_keys": "keys", "peer_networks": "10.2.0.0/16"}, "10.2.0.0/16"),
        ({"peer_networks": "10.0.0.0/8, 100.64.0.0/10"}, "10.0.0.0/8, 100.64.0.0/10"),
        ({"peer_networks": ""}, "no network"),
    ],
)
def test_what_they_are(monkeypatch: pytest.MonkeyPatch, options: dict[str, str], networks: str) -> None:
    monkeypatch.setattr(peer_networks, "_subnets", lambda: SUBNETS)
    assert str(PeerNetworks.of(PrefillSettings.model_validate(options))) == networks


@pytest.mark.parametrize(
    ("options", "networks"),
    [
        ({"host": "0.0.0.0"}, "127.0.0.0/8, 10.1.0.0/16"),
        ({"host": "169.254.3.4"}, "169.254.3.4/32"),
        ({"host": "0.0.0.0", "peer_networks": "169.254.0.0/16"}, "169.254.0.0/16"),
    ],
)
def test_link_local_networks_are_only_those_that_the_operator_names(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], networks: str
) -> None:
    """A cloud's metadata service is at 169.254.169.254, and machines have routes to it."""
    link_local = ("169.254.0.0/16", "169.254.169.254/32", "169.254.3.0/24", "128.0.0.0/1")
    subnets = [IPv4Network(text) for text in (*link_local, "10.1.0.0/16")]
    monkeypatch.setattr(peer_networks, "_subnets", lambda: subnets)
    peers = PeerNetworks.of(PrefillSettings.model_validate(options))
    assert str(peers) == networks
    assert peers.admit("169.254.169.254") is ("peer_networks" in options)


@pytest.mark.parametrize(
    ("address", "admitted"),
    [
        ("10.0.0.0", True),
        ("10.255.255.255", True),
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("11.0.0.0", False),
        ("010.0.0.1", False),
        ("10.0.0.256", False),
        ("10.0.0", False),
        ("::ffff:10.0.0.1", False),
        ("ten", False),
        ("", False),
    ],
)
def test_what_is_in_them(address: str, admitted: bool) -> None:
    peers = PeerNetworks((IPv4Network("10.0.0.0/8"), IPv4Network("127.0.0.1/32")))
    assert peers.admit(address) is admitted


def test_the_kernels_table_is_read() -> None:
    def number(address: str) -> str:
        return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}"

    def route(destination: str, gateway: str, mask: str) -> str:
        return f"eth0\t{number(destination)}\t{number(gateway)}\t0001\t0\t0\t0\t{number(mask)}\t0\t0\t0"

    rows = [
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT",
        route("0.0.0.0", "192.0.2.1", "0.0.0.0"),  # the default route
        route("192.0.2.0", "0.0.0.0", "255.255.255.0"),
        route("198.51.100.0", "192.0.2.9", "255.255.255.0"),  # behind a router
        route("169.254.1.1", "0.0.0.0", "255.255.255.255"),
    ]
    assert list(map(str, read_subnets("\n".join(rows)))) == ["192.0.2.0/24", "169.254.1.1/32"]
    assert read_subnets(rows[0]) == []


@pytest.mark.parametrize("text", ["10.0.0.1/8", "ten", "10.0.0.0/33", "fd00::/8", "10.0.0.0/8;"])
def test_what_is_no_network_is_named(text: str) -> None:
    with pytest.raises(OperatorError, match=r"peer-networks: .*is not an IPv4 network"):
        load(PrefillSettings, "baton prefill", ["--peer-networks", text])


@pytest.mark.parametrize("text", ["localhost", "::1", "127.0.0.1:7000", "eth0", ""])
def test_a_host_that_is_no_ipv4_address_is_named(text: str) -> None:
    with pytest.raises(OperatorError, match=r"host: .*is not an IPv4 address"):
        load(PrefillSettings, "baton prefill", ["--host", text])
