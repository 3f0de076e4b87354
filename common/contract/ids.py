"""Identities. The ids of requests, leases and processes are random, so no client can name the state of another client.
A handle is a plain counter: a gateway takes it only from the worker that it gave it to."""

from __future__ import annotations

import itertools
import secrets
from typing import Annotated, NamedTuple, NewType

from pydantic import Field

HANDLE = Field(strict=True, min_length=1, max_length=64)
"""Bounds of every id."""
ATTEMPT = Field(strict=True, ge=1, le=2**31)
"""Bounds of an attempt."""

RequestId = NewType("RequestId", str)
"""One request as processes know it, drawn at random and never taken from a client. A gateway draws one for each prompt,
and one for each choice that parts from others (`gateway.serving.flow`), so a client's request may have several ids. A
sink draws one for each prefix that it pulls."""

Incarnation = NewType("Incarnation", str)
"""One run of one process, drawn at its start: a process restarted at the same address is another worker."""

LeaseId = NewType("LeaseId", str)
"""One pin on offered blocks."""


Handle = NewType("Handle", int)
"""One choice of one attempt, as its gateway names it to the decode worker; never reused in the gateway's life."""


class RequestKey(NamedTuple):
    """A request and the number of the gateway's attempt at it. A newer attempt fences every older one."""

    request: Annotated[RequestId, HANDLE]
    attempt: Annotated[int, ATTEMPT]


def new_request_id() -> RequestId:
    """Draw a request id."""
    return RequestId(secrets.token_hex(16))


_handles = itertools.count(1)


def new_handle() -> Handle:
    """Take the next handle of this process."""
    return Handle(next(_handles))


def new_incarnation() -> Incarnation:
    """Draw the identity of one run of a process."""
    return Incarnation(secrets.token_hex(12))


def new_lease_id() -> LeaseId:
    """Draw a lease id."""
    return LeaseId(secrets.token_hex(12))
