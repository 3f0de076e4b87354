"""The operators' API, on a port of its own: list the workers, drain one, let it serve again.

Clients must not be able to reach it, because whoever reaches it can stop the deployment. Requests from browsers are
checked further (`admin_guard`).
"""

from __future__ import annotations

import json

from aiohttp import web

from gateway.dispatch.links import Links
from gateway.operators.admin_guard import admin_guard
from gateway.web.http_errors import ApiError


def create_admin_app(links: Links, host: str) -> web.Application:
    """The app with `GET /workers`, `POST /workers/{id}/drain`, `POST /workers/{id}/resume`; a worker's id is its
    address. `host` is where it will listen."""
    admin = _Admin(links)
    app = web.Application(middlewares=[admin_guard(host)])
    app.router.add_get("/workers", admin.workers)
    app.router.add_post("/workers/{id}/drain", admin.drain)
    app.router.add_post("/workers/{id}/resume", admin.resume)
    return app


class _Admin:
    def __init__(self, links: Links) -> None:
        self._links = links

    async def workers(self, _: web.Request) -> web.Response:
        return _json(200, {"workers": self._links.workers()})

    async def drain(self, request: web.Request) -> web.Response:
        return self._tell(request, drain=True)

    async def resume(self, request: web.Request) -> web.Response:
        return self._tell(request, drain=False)

    def _tell(self, request: web.Request, *, drain: bool) -> web.Response:
        worker = request.match_info["id"]
        known = [each["id"] for each in self._links.workers()]
        if worker not in known:
            raise ApiError(404, f"no such worker: {worker}; there are {', '.join(map(str, known))}")
        if not self._links.tell(worker, drain=drain):
            raise ApiError(503, f"{worker} cannot be reached now")
        return _json(202, {"id": worker, "told": "drain" if drain else "resume"})


def _json(status: int, body: object) -> web.Response:
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")
