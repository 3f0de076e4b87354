"""The guard of the operators' port: in a browser, only pages served by this gateway may use it.

Whoever reaches the port may do anything, and the operator's browser reaches it. So a page's request must come from the
same host that it is sent to, whatever the port, and that host must be an IP address or `localhost`. A foreign page has
another origin; a page whose name resolves to this host (DNS rebinding) has a name. Clients that are not browsers send
no `Origin` and are admitted. A page that only reads from its own origin sends none either: on a loopback address its
name gives it away.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.access.cors import Cors
from gateway.access.hosts import Hosts, called_by
from gateway.access.http_guard import as_api_error
from gateway.web.host_names import is_address
from gateway.web.http_errors import ApiError, from_http


def admin_guard(host: str) -> Middleware:
    """The middleware to install in the application on `host`: refuses foreign pages, and answers every error as
    JSON."""
    hosts = Hosts(called_by((), host=host, has_keys=False))

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None and not is_own(origin, request.headers.get("Host", "")):
            return ApiError(403, "requests of this web page are not taken", code="foreign_origin").response()
        if hosts.refuses(request.headers.get("Host")):
            return ApiError(403, "the admin port is not known by the name in Host", code="foreign_host").response()
        cors = Cors(() if origin is None else (origin,))
        response = cors.preflight(request) if cors.is_preflight(request) else await _respond(request, handler)
        response.headers.update(cors.headers(request))
        return response

    return guard


def is_own(origin: str, host: str) -> bool:
    """Whether a page of `origin` may use the server at `host`; both are given as in the headers of these names."""
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host}")
        names = page.hostname, here.hostname
    except ValueError:
        return False
    if page.scheme not in ("http", "https") or names[0] is None or names[0] != names[1]:
        return False
    return names[0] == "localhost" or is_address(names[0])


async def _respond(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return from_http(error, request.path).response(headers)
    except Exception as error:  # noqa: BLE001 (logged in as_api_error)
        return as_api_error(error).response()
