"""Ports of the gateway: bound at once, and listened on once it can answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from common.contract.errors import OperatorError
from gateway.access.connections import ConnectionBounds, Listener
from gateway.access.ports import BoundPort


def connect(port: int) -> None:
    """Raises `ConnectionRefusedError`."""
    socket.create_connection(("127.0.0.1", port)).close()


@asynccontextmanager
async def listener() -> AsyncIterator[Listener]:
    """Of an application that answers nothing."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    made = Listener(runner, ConnectionBounds())
    try:
        yield made
    finally:
        await made.close()
        await runner.cleanup()


async def test_a_port_refuses_connections_until_it_listens() -> None:
    async with AsyncExitStack() as owner, listener() as made:
        port = await BoundPort.open(owner, "127.0.0.1", 0)
        (bound,) = port.sockets
        number = bound.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            connect(number)
        assert port.listen(made) == f"http://127.0.0.1:{number}"
        connect(number)


async def test_of_two_gateways_that_bind_one_port_the_second_one_that_listens_is_told() -> None:
    async with AsyncExitStack() as owner, listener() as first, listener() as second:
        port = await BoundPort.open(owner, "127.0.0.1", 0)
        number = port.sockets[0].getsockname()[1]
        other = await BoundPort.open(owner, "127.0.0.1", number, "the admin port ")
        port.listen(first)
        with pytest.raises(OperatorError, match=f"cannot bind the admin port 127.0.0.1:{number}: .* in use"):
            other.listen(second)
        with pytest.raises(OperatorError, match=f"cannot bind 127.0.0.1:{number}: .* in use"):
            await BoundPort.open(owner, "127.0.0.1", number)
    assert [each.fileno() for each in (*port.sockets, *other.sockets)] == [-1, -1], "left open"


def has_ipv6() -> bool:
    """Whether this machine has an address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as made:
            made.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_the_addresses_of_both_families_have_sockets_of_their_own() -> None:
    """So an IPv4 client has its own address in the socket of IPv4, not one that IPv6 maps it to."""
    async with AsyncExitStack() as owner, listener() as made:
        if not has_ipv6():
            with pytest.raises(OperatorError):
                await BoundPort.open(owner, "::1", 0)
            return
        six = await BoundPort.open(owner, "::", 0)
        assert six.listen(made) == f"http://[::]:{made.port}"
        with pytest.raises(ConnectionRefusedError):
            connect(made.port)
        (await BoundPort.open(owner, "0.0.0.0", made.port)).listen(made)
        connect(made.port)


@pytest.mark.parametrize("absent", [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")])
async def test_addresses_of_a_name_that_this_machine_lacks_are_left_out(
    absent: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As IPv6's of `localhost` where there is no IPv6."""
    async with AsyncExitStack() as owner, listener() as made:
        find(monkeypatch, [absent, (socket.AF_INET, "127.0.0.1")])
        url = (await BoundPort.open(owner, "localhost", 0)).listen(made)
        assert url == f"http://localhost:{made.port}"
        connect(made.port)
        with pytest.raises(OperatorError, match="in use"):
            await BoundPort.open(owner, "localhost", made.port)
        find(monkeypatch, [absent])
        with pytest.raises(OperatorError, match=r"Cannot assign requested address|family not supported"):
            await BoundPort.open(owner, "localhost", 0)


def find(monkeypatch: pytest.MonkeyPatch, found: list[tuple[int, str]]) -> None:
    """Let every name have these addresses."""

    async def look_up(host: str, port: int, **_: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(family, socket.SOCK_STREAM, 0, "", (address, port)) for family, address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
