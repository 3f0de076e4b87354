"""Types of settings whose values are written in forms of their own: addresses, networks, origins."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from common.contract.messages.fields import ADDRESS_PATTERN

_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")

_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")

Port = Annotated[int, Field(ge=0, le=65535)]
Width = Annotated[int, Field(ge=1, le=16)]
"""Ranks of a worker."""
LogLevel = Literal["debug", "info", "warning", "error"]


def address(text: str) -> str:
    """`text`, if it is a `host:port` to which a process can connect; raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if re.match(ADDRESS_PATTERN, text) is None or not 0 < int(port) <= 65535:
        raise ValueError(f"{text!r} is not host:port")
    if _HOST.fullmatch(host) is None:
        raise ValueError(f"{text!r}: the host must be a name or an IPv4 address")
    return text


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _ipv4(text: str) -> str:
    try:
        return str(IPv4Address(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is not an IPv4 address") from error


def _network(text: object) -> object:
    try:
        return IPv4Network(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"{text!r} is not an IPv4 network, as in 10.0.0.0/8: {error}") from error


def _origin(text: str) -> str:
    if text != "*" and _ORIGIN.fullmatch(text) is None:
        raise ValueError(
            f"{text!r} is no origin as browsers write it: https://host, with a :port that is not the default"
        )
    return text


Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode, BeforeValidator(_split)]
"""Origins of web pages, as a tuple or separated by commas."""
HostNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9._-]{1,253})$")], ...], NoDecode, BeforeValidator(_split)
]
"""Names of hosts, as a tuple or separated by commas."""
ModelNames = Annotated[
    tuple[Annotated[str, Field(max_length=256, pattern=r"^[!-~]+$")], ...], NoDecode, BeforeValidator(_split)
]
"""Names of a model, as a tuple or separated by commas."""
WorkerAddresses = Annotated[tuple[Annotated[str, AfterValidator(address)], ...], NoDecode, BeforeValidator(_split)]
"""`host:port` of several workers, as a tuple or separated by commas."""
Networks = Annotated[tuple[Annotated[IPv4Network, BeforeValidator(_network)], ...], NoDecode, BeforeValidator(_split)]
"""IPv4 networks, as a tuple or separated by commas."""
IPv4 = Annotated[str, AfterValidator(_ipv4)]
"""An IPv4 address."""
