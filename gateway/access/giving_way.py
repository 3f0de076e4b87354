"""Which connection is closed in favour of a new one when there are as many as may be.

Clients are told apart by address. Idle connections keep nobody out: one of them always gives way, of the address that
has most connections if possible. Neither do the connections of one address keep the others out: if it has more than the
new one's address then has, it also loses connections that are not idle, but on which nothing is being served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TypeVar

Held = TypeVar("Held")


class Use(StrEnum):
    """What a connection is used for."""

    IDLE = "idle"
    """Every request has been answered, and nothing of another one has come."""
    UNSERVED = "unserved"
    """There is no request to be served: a TLS handshake is in progress, or a request's head is to come, or the client
    is reading the end of its last answer."""
    ARRIVING = "arriving"
    """The body of a request is arriving, and no other request is being served."""
    SERVING = "serving"
    """A request that has arrived is being served."""


def first_to_go(held: Mapping[Held, str], client: str, use_of: Callable[[Held], Use]) -> Held | None:
    """The connection to close in favour of a new one of the address `client`; None if there is none, and the new one is
    to be turned away. `held` has the address of each connection, the oldest first."""
    num = Counter(held.values())
    num[client] += 1
    most = max(num.values())
    crowds_out = most > num[client]
    oldest: dict[tuple[bool, Use], Held] = {}
    """By whether the address has most connections, and by use."""
    for each, address in held.items():
        is_crowd, use = num[address] == most, use_of(each)
        if is_crowd and (use is Use.IDLE or (crowds_out and use is Use.UNSERVED)):
            return each
        oldest.setdefault((is_crowd, use), each)
    order = [(False, Use.IDLE), *([(True, Use.ARRIVING)] if crowds_out else [])]
    return next((oldest[kind] for kind in order if kind in oldest), None)
