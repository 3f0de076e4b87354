"""The files of the page, and the browser's content security policy for them."""

from __future__ import annotations

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


def response(path: str, admin_origin: str | None) -> web.FileResponse:
    """The file at a URL path. Browsers revalidate each time, so they never show an old version."""
    file = PATHS[path]
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": content_security_policy(admin_origin),
        "Content-Type": f"{_TYPES[file.suffix]}; charset=utf-8",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return web.FileResponse(file, headers=headers)
