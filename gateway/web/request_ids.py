"""`X-Request-Id`: the id of one HTTP request for its client, for proxies and in the log."""

from __future__ import annotations

import logging
import secrets
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from common.runtime.logs import about

HEADER: Final = "X-Request-Id"
MAX_CHARS: Final = 128
"""Longest id accepted from a client."""
REQUEST_ID: Final = web.RequestKey("request_id", str)
ACCEPTED: Final = web.RequestKey("accepted", bool)
"""Set on a generating request once it is valid; from then on `RequestLife` logs its events."""
REFUSAL: Final = web.RequestKey("refusal", dict[str, str])
"""What the log is to say of a refused request besides its path and status, by field."""

_LOG = logging.getLogger(__name__)


@web.middleware
async def name_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the client's id for the request, or draw one; log refused requests with it."""
    given = request.headers.getall(HEADER, [])
    usable = len(given) == 1 and 0 < len(given[0]) <= MAX_CHARS and given[0].isascii() and given[0].isprintable()
    request[REQUEST_ID] = name = given[0] if usable else secrets.token_hex(16)
    response = await handler(request)
    if request.method == "POST" and response.status >= 400 and not request.get(ACCEPTED, False):
        refusal = request.get(REFUSAL, {})
        fields = about("refused", x_request_id=name, path=request.path, status=response.status, **refusal)
        told = "".join(f", {field} {value}" for field, value in refusal.items())
        _LOG.info("request %s refused with %d%s", name, response.status, told, extra=fields)
    return response


async def echo_name(request: web.Request, response: web.StreamResponse) -> None:
    """Return the request's id in the response's headers."""
    if (name := request.get(REQUEST_ID)) is not None:
        response.headers[HEADER] = name
