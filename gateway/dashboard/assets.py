"""The files of the page, read once, each with its entity tag; and the browser's content security policy for them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from aiohttp import web

_FOLDER: Final = Path(__file__).parent / "page"
_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_INDEX: Final = "index.html"
PATHS: Final = {
    ("/" if file.name == _INDEX else f"/dashboard/{file.name}"): file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _TYPES
}
"""URL path → file."""


def content_security_policy(admin_origin: str | None) -> str:
    """The policy: only content of this gateway, no inline scripts, no embedding in frames; and requests to the admin
    port, if an origin is given."""
    connect = "'self'" if admin_origin is None else f"'self' {admin_origin}"
    return (
        f"default-src 'self'; connect-src {connect}; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


class Asset:
    """One file of the page."""

    def __init__(self, file: Path) -> None:
        self._body = file.read_bytes()
        self._etag = hashlib.sha256(self._body).hexdigest()[:32]
        self._content_type = _TYPES[file.suffix]

    def response(self, request: web.Request, admin_origin: str | None) -> web.Response:
        """The file, or a 304 if the browser has it. Browsers revalidate each time, so they never show an old
        version."""
        headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": content_security_policy(admin_origin),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        known = request.if_none_match or ()
        if any(tag.value in (self._etag, "*") for tag in known):
            response = web.Response(status=304, headers=headers)
        else:
            response = web.Response(body=self._body, content_type=self._content_type, charset="utf-8", headers=headers)
        response.etag = self._etag
        return response
