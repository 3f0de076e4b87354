"""The files of the page, read once, each with its entity tag; and the policy under which a browser runs them."""

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
"""Path in the URL → file."""


def content_security_policy(admin_origin: str | None) -> str:
    """Only what this gateway itself serves, no script in the page's text, in nobody's frame; and, where there is one,
    requests to the admin port."""
    connect = "'self'" if admin_origin is None else f"'self' {admin_origin}"
    return (
        f"default-src 'self'; connect-src {connect}; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


class Asset:
    """One file."""

    def __init__(self, file: Path) -> None:
        self._body = file.read_bytes()
        self._etag = hashlib.sha256(self._body).hexdigest()[:32]
        self._content_type = _TYPES[file.suffix]

    def response(self, request: web.Request, admin_origin: str | None) -> web.Response:
        """The file, or a 304 for a browser that has it: it asks each time, so that it never shows an old one."""
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
