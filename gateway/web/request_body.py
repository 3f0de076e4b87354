"""Request bodies: reads and decodes them, within bounds on size and time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Final, NoReturn

from aiohttp import web

from common.contract.errors import Cause
from gateway.api_settings import Limits
from gateway.web.http_errors import ApiError, invalid

_EXACT: Final = 2**53
"""Up to this magnitude a float represents every integer exactly."""
_TURN_BYTES: Final = 2**18
"""Bytes of bodies that are decoded before other tasks get a turn of the event loop."""


class BodyReader:
    """Reads the bodies of all requests; bodies being read hold at most `max_bodies_bytes` together.

    At the bound, the client that holds most loses its largest body, so that no client can keep the others out.
    """

    def __init__(self, limits: Limits, client_of: Callable[[web.Request], str]) -> None:
        """`client_of` returns a client's identity, which tells clients apart."""
        self._limits = limits
        self._client_of = client_of
        self._reading: set[_Body] = set()
        self._num_bytes = 0
        """Bytes of all bodies being read."""
        self._decoding = asyncio.Lock()
        self._num_decoded = 0
        """Bytes decoded since other tasks last got a turn."""

    async def read_json(self, request: web.Request) -> object:
        """Read the body as JSON; integers may be written with a decimal point. Raises `ApiError`."""
        limits = self._limits
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise ApiError(415, "a body must not be compressed", code="unsupported_encoding")
        body = _Body(self._client_of(request), limits.max_body_bytes)
        if request.content_length is not None and request.content_length > limits.max_body_bytes:
            raise body.too_large()
        self._reading.add(body)
        try:
            if request.content.is_eof():  # all of it has come with the head, so no timer is needed
                await self._receive(request, body)
            else:
                await self._receive_in_time(request, body)
            return await self._decoded(body)
        except web.RequestPayloadError as error:
            raise invalid(None, "the body could not be read", code="invalid_body") from error
        finally:
            self._reading.discard(body)
            self._num_bytes -= len(body)

    async def _receive_in_time(self, request: web.Request, body: _Body) -> None:
        limits = self._limits
        body.began_s = asyncio.get_running_loop().time()
        due_s = body.began_s + min(limits.body_grace_s, limits.body_timeout_s)
        try:
            async with asyncio.timeout_at(due_s) as body.deadline:
                await self._receive(request, body)
        except TimeoutError:
            if body.given_up:
                raise _too_much() from None
            message = (
                f"a body must arrive within {limits.body_timeout_s:g} s, and after {limits.body_grace_s:g} s have come "
                f"with {limits.min_body_bytes_per_s} bytes a second"
            )
            raise ApiError(408, message) from None

    async def _receive(self, request: web.Request, body: _Body) -> None:
        limits = self._limits
        # `request.read()` would keep the bytes for as long as the request is served.
        while chunk := await request.content.readany():
            self._num_bytes += len(chunk)
            body.feed(chunk)
            self._make_room()
            if body.given_up:
                raise _too_much()
            if body.deadline is not None:
                paid_s = limits.body_grace_s + len(body) / limits.min_body_bytes_per_s
                body.deadline.reschedule(body.began_s + min(paid_s, limits.body_timeout_s))

    async def _decoded(self, body: _Body) -> object:
        """Decode a body that has arrived. Many can arrive at the same moment, so they take turns."""
        body.deadline = None
        async with self._decoding:
            if self._num_decoded >= _TURN_BYTES:
                self._num_decoded = 0
                await asyncio.sleep(0)
            if body.given_up:
                raise _too_much()
            self._num_decoded += len(body)
            decoded = _decode(body.content, self._limits.max_body_values)
        if len(body) >= _TURN_BYTES:  # its form is checked in another turn
            await asyncio.sleep(0)
        return decoded

    def _make_room(self) -> None:
        """Give up the largest body of the client that holds most, if all bodies together exceed the bound."""
        if self._num_bytes <= self._limits.max_bodies_bytes:
            return
        held: Counter[str] = Counter()
        going_on = [body for body in self._reading if not body.given_up]
        for body in going_on:
            held[body.client] += len(body)
        if held.total() > self._limits.max_bodies_bytes:
            ((most, _),) = held.most_common(1)
            given_up = max((body for body in going_on if body.client == most), key=len)
            given_up.give_up()
            if given_up.deadline is None:  # it has arrived, and nothing wakes it before its turn
                self._num_bytes -= len(given_up)
                given_up.content.clear()


class _Body:
    """A body while it arrives."""

    deadline: asyncio.Timeout | None = None
    """Deadline of the body's arrival; None once all of it has arrived."""
    began_s = 0.0
    """When it began to arrive."""

    def __init__(self, client: str, max_bytes: int) -> None:
        self.client = client
        self.content = bytearray()
        self.given_up = False
        self._max_bytes = max_bytes

    def give_up(self) -> None:
        """Mark the body as given up, and wake its reader."""
        self.given_up = True
        if self.deadline is not None:
            self.deadline.reschedule(asyncio.get_running_loop().time())

    def feed(self, chunk: bytes) -> None:
        self.content += chunk
        if len(self.content) > self._max_bytes:
            raise self.too_large()

    def __len__(self) -> int:
        return len(self.content)

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def _too_much() -> ApiError:
    return ApiError(429, "too much is being sent at once", code=Cause.CAPACITY)


def _decode(body: bytearray, max_values: int) -> object:
    # Decoding in C blocks all other requests, in any thread, so bodies that would take long are refused before it.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise ApiError(413, f"the body holds more than {max_values} JSON values", code="body_too_large")
    try:
        decoded = _JSON.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(decoded, dict):
        return decoded
    return {name: _integral(value) if type(value) in (float, list) else value for name, value in decoded.items()}


def _integral(value: object, depth: int = 2) -> object:
    """Turn floats without a fraction into integers: JSON has one kind of number, so 2.0 is as good an integer as 2, as
    JSON Schema says too. Applies to a field's value and to its lists of lists. Objects stay unchanged, because the
    model may be shown their content."""
    if isinstance(value, float):
        return int(value) if abs(value) <= _EXACT and value.is_integer() else value
    if depth and isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [  # a long prompt has many numbers, so these need no call
            int(each)
            if type(each) is float and -_EXACT <= each <= _EXACT and each.is_integer()
            else _integral(each, depth - 1)
            if type(each) is list
            else each
            for each in value
        ]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_JSON: Final = json.JSONDecoder(parse_constant=_refuse_constant)
