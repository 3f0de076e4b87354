"""Identities. Handles are unguessable: a client that does not know one cannot name another client's state."""

from __future__ import annotations

import secrets
from typing import Annotated, NamedTuple, NewType

from pydantic import Field

HANDLE = Field(strict=True, min_length=1, max_length=64)
"""Bounds of every id."""
ATTEMPT = Field(strict=True, ge=1, le=2**31)
"""Bounds of an attempt."""

RequestId = NewType("RequestId", str)
"""One ask of one client, for the life of that ask; drawn by the gateway and never taken from a client."""

Incarnation = NewType("Incarnation", str)
"""One life of one process, drawn at its start: the same address restarted is another worker."""

LeaseId = NewType("LeaseId", str)
"""One pin on offered blocks."""


class RequestKey(NamedTuple):
    """A request and the gateway's try at it. A newer attempt fences every older one."""

    request: Annotated[RequestId, HANDLE]
    attempt: Annotated[int, ATTEMPT]


def new_request_id() -> RequestId:
    """Draw a request id."""
    return RequestId(secrets.token_hex(16))


def new_incarnation() -> Incarnation:
    """Draw the identity of a process life."""
    return Incarnation(secrets.token_hex(12))


def new_lease_id() -> LeaseId:
    """Draw a lease id."""
    return LeaseId(secrets.token_hex(12))
