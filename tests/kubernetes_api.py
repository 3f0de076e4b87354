"""A Kubernetes API server that knows EndpointSlices: listed and watched over real HTTP, it fails as real ones do."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from kubernetes_asyncio import client

NAMESPACE = "models"
PREFILL, DECODE = "baton-prefill", "baton-decode"


@dataclass
class Pod:
    """One endpoint of a slice."""

    host: str
    uid: str
    ready: bool | None = True
    terminating: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "addresses": [self.host],
            "conditions": {"ready": self.ready, "serving": True, "terminating": self.terminating},
            "targetRef": {"kind": "Pod", "name": self.uid, "uid": self.uid, "namespace": NAMESPACE},
        }


@dataclass
class FakeApi:
    """The server; what it is asked, and how it behaves, which tests change at any time."""

    url: str = ""
    slices: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    oldest: int = 0
    """A watch from before it is answered with 410."""
    history: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    down: bool = False
    """Every request is answered with 503, and watches are cut."""
    refuses_watches: int | None = None
    """The status that watches are answered with at once."""
    refusal: str | None = None
    """The body of that answer, instead of what an API server says: somebody before it answers."""
    says: str | None = None
    """A line that each watch begins with."""
    deaf: bool = False
    """Watches hear nothing, and do not end."""
    delay_s: float = 0.0
    """Before a list is answered."""
    lists_as: str | None = None
    """The body of a list, instead of what there is."""
    watch_delay_s: float = 0.0
    """Before the head of a watch's answer."""
    num_lists: int = 0
    num_watches: int = 0
    watches: set[asyncio.Queue[dict[str, Any] | None]] = field(default_factory=set)
    _runner: web.AppRunner | None = None
    _port: int = 0

    # --- what happens in the cluster -----------------------------------------------------------------------------

    def put(
        self,
        name: str,
        service: str,
        pods: Sequence[Pod],
        port: int = 7000,
        *,
        port_name: str = "control",
        address_type: str = "IPv4",
        silently: bool = False,
    ) -> None:
        """A slice is there, or has changed. Of no pods it has null endpoints, and null ports: Kubernetes looks up the
        number of a named port in pods."""
        self.version += 1
        slice_ = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "resourceVersion": str(self.version),
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": address_type,
            "endpoints": [pod.as_json() for pod in pods] or None,
            "ports": [{"name": "probes", "port": 9000}, {"name": port_name, "port": port, "protocol": "TCP"}]
            if pods
            else None,
        }
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = slice_
        if not silently:
            self._say({"type": kind, "object": slice_})

    def delete(self, name: str, *, silently: bool = False) -> None:
        """A slice is gone."""
        self.version += 1
        slice_ = self.slices.pop(name)
        slice_["metadata"]["resourceVersion"] = str(self.version)
        if not silently:
            self._say({"type": "DELETED", "object": slice_})

    def bookmark(self) -> None:
        """Nothing has happened up to now."""
        self.version += 1
        metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
        self._say({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}})

    def forget_history(self) -> None:
        """What watches began with is too old now."""
        self.history.clear()
        self.version += 1
        self.oldest = self.version
        self.cut()

    def cut(self) -> None:
        """Every watch ends."""
        for each in self.watches:
            each.put_nowait(None)

    def _say(self, event: dict[str, Any]) -> None:
        self.history.append((self.version, json.loads(json.dumps(event))))
        for each in self.watches:
            each.put_nowait(event)

    # --- HTTP ----------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        service = request.query["labelSelector"].partition("=")[2]
        if request.query.get("watch") in ("true", "True"):
            return await self._watch(request, service)
        self.num_lists += 1
        await asyncio.sleep(self.delay_s)
        if self.down:
            return web.json_response({"kind": "Status", "code": 503, "message": "no leader"}, status=503)
        if self.lists_as is not None:
            return web.Response(text=self.lists_as, content_type="application/json")
        items = [
            each for each in self.slices.values() if each["metadata"]["labels"]["kubernetes.io/service-name"] == service
        ]
        return web.json_response(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSliceList",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items,
            }
        )

    async def _watch(self, request: web.Request, service: str) -> web.StreamResponse:
        self.num_watches += 1
        await asyncio.sleep(self.watch_delay_s)
        if self.down or self.refuses_watches:
            code = self.refuses_watches or 503
            if self.refusal is not None:
                return web.Response(text=self.refusal, status=code)
            return web.json_response({"kind": "Status", "code": code, "message": "no", "reason": "No"}, status=code)
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        if self.says is not None:
            await response.write(self.says.encode() + b"\n")
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for version, past in self.history:
            if version > since:
                events.put_nowait(past)
        self.watches.add(events)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while (event := await events.get()) is not None and not self.down:
                    labels = event["object"]["metadata"].get("labels", {})
                    about = labels.get("kubernetes.io/service-name", service)
                    if about == service and not self.deaf:
                        await response.write(json.dumps(event).encode() + b"\n")
        except TimeoutError:
            while self.deaf:
                await asyncio.sleep(0.1)
        finally:
            self.watches.discard(events)
        return response

    def client(self) -> client.ApiClient:
        """The real client of this server, without the list of authorities, which takes a while to read."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ssl, "create_default_context", lambda **_: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
            return client.ApiClient(client.Configuration(host=self.url))

    async def start(self) -> None:
        """Listen on loopback: where it did before, if it did."""
        app = web.Application()
        app.router.add_get(f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", self.handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Connections are closed, and refused from now on."""
        if self._runner is not None:
            self.cut()
            await self._runner.cleanup()
            self._runner = None


@asynccontextmanager
async def running_api() -> AsyncIterator[FakeApi]:
    """A server on loopback."""
    api = FakeApi()
    await api.start()
    try:
        yield api
    finally:
        api.deaf = False
        await api.stop()
