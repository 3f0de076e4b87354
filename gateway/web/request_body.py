"""A request's body: read, inflated and decoded, within the bounds on size and time."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Final, NoReturn

from aiohttp import web

from common.contract.errors import Cause
from gateway.api_settings import Limits
from gateway.web.http_errors import ApiError, invalid

_ENCODINGS: Final = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""What a body may be packed in, with zlib's name for it."""
_EXACT: Final = 2**53
"""Up to which a float tells each integer from the next."""


class BodyReader:
    """Reads the bodies of all requests; those under way together hold at most `max_bodies_bytes`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_bytes = 0
        """Of the bodies that are being read."""

    async def read_json(self, request: web.Request) -> object:
        """The body as JSON, and nothing but JSON; an integer may be written with a point. Raises `ApiError`."""
        limits = self._limits
        body = _Body(request.headers.get("Content-Encoding", "identity"), limits.max_body_bytes)
        if request.content_length is not None and request.content_length > limits.max_body_bytes:
            raise body.too_large()
        held = num_received = 0
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began_s + min(limits.body_grace_s, limits.body_timeout_s)) as deadline:
                # Not `request.read()`, which keeps the bytes for as long as the request is served.
                while chunk := await request.content.readany():
                    num_received += len(chunk)
                    paid_s = limits.body_grace_s + num_received / limits.min_body_bytes_per_s
                    deadline.reschedule(began_s + min(paid_s, limits.body_timeout_s))
                    body.feed(chunk)
                    self._num_bytes += len(body) - held
                    held = len(body)
                    if self._num_bytes > limits.max_bodies_bytes:
                        raise ApiError(429, "too much is being sent at once", code=Cause.CAPACITY)
            return _decode(body.whole(), limits.max_body_values)
        except TimeoutError:
            message = (
                f"a body must arrive within {limits.body_timeout_s:g} s, and after {limits.body_grace_s:g} s have come "
                f"with {limits.min_body_bytes_per_s} bytes a second"
            )
            raise ApiError(408, message) from None
        except web.RequestPayloadError as error:
            raise invalid(None, "the body could not be read", code="invalid_body") from error
        finally:
            self._num_bytes -= held


class _Body:
    """A body as it arrives. What inflates to more than is allowed is given up as soon as that shows."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._content = bytearray()
        self._inflater = None
        if encoding.strip().lower() != "identity":
            window = _ENCODINGS.get(encoding.strip().lower())
            if window is None:
                message = f"a body may have the encodings {', '.join(_ENCODINGS)}"
                raise ApiError(415, message, code="unsupported_encoding")
            self._inflater = zlib.decompressobj(window)

    def feed(self, chunk: bytes) -> None:
        if self._inflater is None:
            self._content += chunk
        else:
            try:
                self._content += self._inflater.decompress(chunk, self._max_bytes + 1 - len(self._content))
            except zlib.error as error:
                raise _not_packed_so() from error
        if len(self._content) > self._max_bytes:
            raise self.too_large()

    def __len__(self) -> int:
        return len(self._content)

    def whole(self) -> bytes:
        if self._inflater is not None and (not self._inflater.eof or self._inflater.unused_data):
            raise _not_packed_so()
        return bytes(self._content)

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def _not_packed_so() -> ApiError:
    return invalid(None, "the body is not what its Content-Encoding says", code="invalid_body")


def _decode(body: bytes, max_values: int) -> object:
    # While C code decodes, nothing else is served, in whatever thread it does: so what takes long is not begun.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise ApiError(413, f"the body holds more than {max_values} JSON values", code="body_too_large")
    try:
        decoded = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error
    return {name: _integral(value) for name, value in decoded.items()} if isinstance(decoded, dict) else decoded


def _integral(value: object, depth: int = 2) -> object:
    """JSON has one kind of number: 2.0 is as good an integer as 2, as JSON Schema says too. So it is in a field and in
    its lists of lists; objects stay as they are, for what is in them may be told to the model."""
    if isinstance(value, float):
        return int(value) if abs(value) <= _EXACT and value.is_integer() else value
    if depth and isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_integral(each, depth - 1) for each in value]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
