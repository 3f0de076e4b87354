"""A request's body: read, inflated and decoded, within the bounds on size and time."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Final, NoReturn

from aiohttp import web

from gateway.api_settings import Limits
from gateway.http_errors import ApiError, invalid

_ENCODINGS: Final = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
"""What a body may be packed in, with zlib's name for it."""
_EXACT: Final = 2**53
"""Up to which a float tells each integer from the next."""


async def read_json(request: web.Request, limits: Limits) -> object:
    """The body as JSON, and nothing but JSON. Raises `ApiError`."""
    body = _Body(request.headers.get("Content-Encoding", "identity"), limits.max_body_bytes)
    if request.content_length is not None and request.content_length > limits.max_body_bytes:
        raise body.too_large()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            # Not `request.read()`, which keeps the bytes for as long as the request is served.
            while chunk := await request.content.readany():
                body.feed(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_timeout_s} s") from None
    except web.RequestPayloadError as error:
        raise invalid(None, "the body could not be read", code="invalid_body") from error
    return _decode(body.whole())


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

    def whole(self) -> bytes:
        if self._inflater is not None and (not self._inflater.eof or self._inflater.unused_data):
            raise _not_packed_so()
        return bytes(self._content)

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def _not_packed_so() -> ApiError:
    return invalid(None, "the body is not what its Content-Encoding says", code="invalid_body")


def _decode(body: bytes) -> object:
    try:
        return json.loads(body, parse_constant=_refuse_constant, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _number(text: str) -> int | float:
    """JSON has one kind of number: 2.0 is as good an integer as 2, as JSON Schema says too."""
    number = float(text)
    return int(number) if abs(number) <= _EXACT and number.is_integer() else number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
