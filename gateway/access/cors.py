"""Which web pages may call the API from a browser: those of the origins that the operator has named.

No cookie means anything here, so no answer allows credentials; what a page knows is its API key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from aiohttp import web

ANY_ORIGIN: Final = "*"
EXPLAINED: Final = ("route", "prefill", "decode", "cached-tokens", "expected-ttft-ms", "prefix-from", "prefix-tokens")
"""What is said of a routing decision (`gateway.routing.router`)."""
_METHODS: Final = "GET, POST, OPTIONS"
_EXPOSED: Final = ", ".join(
    (
        "Retry-After",
        "X-Request-Id",
        *(f"x-baton-{what}" for what in EXPLAINED),
        *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
    )
)
_MAX_AGE_S: Final = 600
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9-]{1,64}( ?, ?[A-Za-z0-9-]{1,64}){0,31}")


class Cors:
    """What a browser is told. Without origins: nothing, so that it keeps answers from every page of other origins."""

    def __init__(self, origins: Collection[str] = ()) -> None:
        """`origins` as browsers write them, `https://example.org:8443`; or `*`, which is any."""
        self._origins = frozenset(origins)

    def is_preflight(self, request: web.Request) -> bool:
        """Whether a browser asks beforehand, for a page that may call. It has no key with it."""
        return (
            request.method == "OPTIONS"
            and "Access-Control-Request-Method" in request.headers
            and self._allows(request.headers.get("Origin"))
        )

    def preflight(self, request: web.Request) -> web.Response:
        """The answer to that: the page may send what it has named."""
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_S)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    def refuses(self, request: web.Request) -> bool:
        """Whether a browser sends this for a page of another site, which may not. Without a preflight: a page may send
        text to anybody, who need not know that it is JSON.

        Browsers say so in `Sec-Fetch-Site`, over HTTPS and to `localhost`; else most name the page's origin; and of the
        others what is not called JSON is not taken.
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
        """What every answer says, preflights included."""
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
