"""What stands before the operators' port: no web page but those that this gateway serves may use it from a browser.

Whoever reaches the port may do anything, and the operator's browser reaches it. So a request that a page makes must
come from the host that it goes to, whatever the port, and that host must be named by its address, or `localhost`: a
foreign page has another origin, and one whose name leads here (DNS rebinding) has a name. What is no browser sends no
`Origin`, and is let in; nor does a page that only reads from its own name, so that after a rebinding it may look.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.web.http_errors import ApiError, from_http, internal_error

MAX_BODY_BYTES: Final = 2**16
_MAX_AGE_S: Final = 600

_LOG = logging.getLogger(__name__)


@web.middleware
async def admin_guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """To be installed in the application: refuses foreign pages, and words every error as JSON."""
    origin = request.headers.get("Origin")
    if origin is not None and not is_own(origin, request.headers.get("Host", "")):
        return ApiError(403, "requests of this web page are not taken", code="foreign_origin").response(1)
    response = _preflight() if _is_preflight(request) else await _respond(request, handler)
    if origin is not None:
        response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})
    return response


def is_own(origin: str, host: str) -> bool:
    """Whether a page of `origin` may use what is served at `host`, the two as in the headers of these names."""
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host}")
        names = page.hostname, here.hostname
    except ValueError:
        return False
    return page.scheme in ("http", "https") and names[0] == names[1] and _is_no_name(names[0])


def _is_no_name(host: str | None) -> bool:
    if host is None or host == "localhost":
        return host is not None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_preflight(request: web.Request) -> bool:
    return (
        request.method == "OPTIONS"
        and "Origin" in request.headers
        and "Access-Control-Request-Method" in request.headers
    )


def _preflight() -> web.Response:
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": "Content-Type",
        "Access-Control-Max-Age": str(_MAX_AGE_S),
    }
    return web.Response(status=204, headers=headers)


async def _respond(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large").response(1)
    try:
        return await handler(request)
    except ApiError as error:
        return error.response(1)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return from_http(error, request.path, MAX_BODY_BYTES).response(1, headers)
    except Exception as error:  # noqa: BLE001 (logged)
        _LOG.error("unexpected error", exc_info=error)
        return internal_error().response(1)
