"""Which web pages may call the API from a browser: pages of the origins that the operator has named.

The API uses no cookies, so no answer allows credentials; a page authenticates with an API key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from aiohttp import web

ANY_ORIGIN: Final = "*"
EXPLAINED: Final = ("route", "prefill", "decode", "cached-tokens", "expected-ttft-ms", "prefix-from", "prefix-tokens")
"""Suffixes of the `x-baton-*` headers that explain a routing decision (`gateway.dispatch.router`)."""
_METHODS: Final = "GET, POST, OPTIONS"
_EXPOSED: Final = ", ".join(
    (
        "Retry-After",
        "X-Request-Id",
        "X-Should-Retry",
        *(f"x-baton-{what}" for what in EXPLAINED),
        *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
    )
)
_MAX_AGE_S: Final = 600
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9-]{1,64}( ?, ?[A-Za-z0-9-]{1,64}){0,31}")


class Cors:
    """CORS headers. Without configured origins there are none, so browsers withhold answers from foreign pages."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        """`origins` in the browsers' notation, such as `https://example.org:8443`; `*` allows any origin."""
        self._origins = frozenset(origins)

    def is_preflight(self, request: web.Request) -> bool:
        """Whether this is a browser's preflight for a page that may call. Preflights carry no API key."""
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._allows(request.headers.get("Origin"))
        )

    def preflight(self, request: web.Request) -> web.Response:
        """The answer to a preflight: the page may send the headers that it has named."""
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_S)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    def refuses(self, request: web.Request) -> bool:
        """Whether a browser sends this request for a page of another site that may not call the API.

        Not every such request has a preflight: a page may send text to any server, and the text may be JSON. Browsers
        state the relation of the sites in `Sec-Fetch-Site`, over HTTPS and to `localhost`; otherwise most send the
        page's `Origin`. Requests of other browsers are refused unless their content type is JSON.
        """
        headers = request.headers
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        if self._allows(origin):
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        if origin is not None:
            return origin.partition("://")[2].lower() != headers.get("Host", "").lower()
        browser = "Referer" in headers or headers.get("User-Agent", "").startswith("Mozilla/")
        return browser and request.content_type != "application/json"

    def headers(self, request: web.Request) -> Mapping[str, str]:
        """CORS headers of every answer, preflights included."""
        if not self._origins:
            return {}
        origin = request.headers.get("Origin")
        if origin is None or not self._allows(origin):
            return {"Vary": "Origin"}
        return {
            "Access-Control-Allow-Origin": ANY_ORIGIN if ANY_ORIGIN in self._origins else origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def _allows(self, origin: str | None) -> bool:
        return origin is not None and (ANY_ORIGIN in self._origins or origin in self._origins)
