"""Workers from Kubernetes: the EndpointSlices of a headless Service, listed and watched.

Only lists are authoritative. A list follows each watch, and corrects one that was cut or missed an event. A watch lasts
at most `resync_s`, so a lost event has an effect for at most that long.
Imported only if Kubernetes is used, because its client comes with the extra `kubernetes`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes_asyncio import client, config, watch
from kubernetes_asyncio.client.exceptions import ApiException

from common.contract.errors import OperatorError
from gateway.workers.discovery import Endpoint, SourceError

log = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S: Final = 10.0
"""Time limit for a list, and for the start of a watch."""
_WATCH_GRACE_S: Final = 10.0
"""Seconds after the requested end of a watch at which a silent watch is given up."""
_SERVICE: Final = "kubernetes.io/service-name"
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_EXPIRED: Final = 410
"""Status for a watch whose start version no longer exists."""
_PORT_NAME: Final = "control"
"""Name of a worker's control port in a slice."""
_ADDRESS_TYPE: Final = "IPv4"
"""Address type of the slices that are used. With both IP families, slices of each type list all endpoints."""
_READ_BYTES: Final = 2**21
"""Most bytes of an answer that are buffered. An event of a watch, up to 1.5 MiB, is a line, and must fit."""


async def open_api(namespace: str | None) -> tuple[client.ApiClient, str]:
    """A client of the API server, and the namespace to use.

    In a pod the client uses its service account, and asks the API server past any proxy; elsewhere it uses `kubectl`'s
    configuration (`KUBECONFIG`). The default namespace is the pod's own, elsewhere `default`. Raises `OperatorError`.
    """
    settings = client.Configuration()
    settings.disable_strict_ssl_verification = True  # from Python 3.13 on it refuses CAs without key identifiers (EKS)
    own, in_pod = "default", "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        if in_pod:
            config.load_incluster_config(client_configuration=settings)
            own = _NAMESPACE_FILE.read_text().strip()
        else:
            await config.load_kube_config(client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise OperatorError(f"cannot find the Kubernetes API server: {error}") from error
    api = client.ApiClient(settings)
    if in_pod:
        _ignore_proxies(api)
    return api, namespace or own


def _ignore_proxies(api: client.ApiClient) -> None:
    """Give the client a session that does not read `HTTPS_PROXY`. `NO_PROXY` is no remedy: for a cluster it has
    networks (`10.0.0.0/8`), which the client does not know."""
    session = api.rest_client.pool_manager
    connector = session.connector
    session.detach()
    api.rest_client.pool_manager = aiohttp.ClientSession(connector=connector, read_bufsize=_READ_BYTES)


class EndpointSliceSource:
    """The endpoints of one Service."""

    def __init__(self, api: client.ApiClient, namespace: str, service: str, *, resync_s: float = 60.0) -> None:
        self._api = client.DiscoveryV1Api(api)
        self._namespace = namespace
        self._service = service
        self._resync_s = resync_s
        self._slices: dict[str, Any] = {}
        self._version = ""
        self._warned = False

    @cached_property
    def _watch(self) -> watch.Watch:
        """One for all watches: each one made reads the system's list of authorities, which takes 30 ms."""
        return watch.Watch("V1EndpointSlice")

    async def list_once(self) -> Collection[Endpoint]:
        try:
            found = await self._api.list_namespaced_endpoint_slice(
                self._namespace, label_selector=f"{_SERVICE}={self._service}", _request_timeout=_REQUEST_TIMEOUT_S
            )
            self._slices = {each.metadata.name: each for each in found.items}
            self._version = found.metadata.resource_version
            endpoints = self._endpoints()
        except Exception as error:
            raise SourceError(_worded(error)) from error
        self._warn_of_address_types()
        return endpoints

    async def changes(self, tell: Callable[[Collection[Endpoint]], None]) -> None:
        events = self._watch.stream(
            self._begin_watch,
            label_selector=f"{_SERVICE}={self._service}",
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=max(1, round(self._resync_s)),
            _request_timeout=self._resync_s + _WATCH_GRACE_S,
        )
        try:
            while True:
                try:
                    event = await anext(events)
                    endpoints = self._endpoints() if self._apply(event) else None
                except (StopAsyncIteration, TimeoutError):
                    return  # the list that follows shows all changes
                except SourceError:
                    raise
                except Exception as error:
                    if isinstance(error, ApiException) and error.status == _EXPIRED:
                        return
                    raise SourceError(_worded(error)) from error
                if endpoints is not None:
                    tell(endpoints)
        finally:
            await asyncio.shield(events.close())

    async def _begin_watch(self, **options: Any) -> Any:
        """The watch's response, once its head has arrived. The client library accepts any status, and waits for the
        head as long as for an event, so both are checked here."""
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                response = await self._api.list_namespaced_endpoint_slice(self._namespace, **options)
        except TimeoutError as error:
            raise SourceError(_worded(error)) from error
        if response.status != HTTPStatus.OK:
            response.close()
            raise ApiException(status=response.status, reason=response.reason)
        return response

    def _warn_of_address_types(self) -> None:
        types = {each.address_type for each in self._slices.values()}
        if types and _ADDRESS_TYPE not in types and not self._warned:
            self._warned = True
            log.warning(
                "the Service %s has addresses of type %s alone: workers are found by %s addresses",
                self._service,
                ", ".join(sorted(types)),
                _ADDRESS_TYPE,
            )

    def _apply(self, event: Any) -> bool:
        """Apply an event to the slices. Returns whether it shows that the list is up to date: bookmarks do, too."""
        if not isinstance(event, dict):
            raise SourceError("a watch sent what is no event")
        kind, slice_ = event["type"], event["object"]
        match kind:
            case "ADDED" | "MODIFIED":
                self._slices[slice_.metadata.name] = slice_
            case "DELETED":
                self._slices.pop(slice_.metadata.name, None)
            case "BOOKMARK":
                pass
            case _:
                return False
        return True

    def _endpoints(self) -> Collection[Endpoint]:
        """The endpoints of all slices. An endpoint may be in two slices for a moment; it serves if one of them says
        so."""
        found: dict[tuple[str, str], Endpoint] = {}
        for slice_ in self._slices.values():
            for endpoint in _endpoints(slice_):
                known = found.get((endpoint.address, endpoint.identity))
                if known is None or endpoint.serving:
                    found[endpoint.address, endpoint.identity] = endpoint
        # An address that a new pod has just got may be listed for both pods; the serving one is kept.
        best = sorted(found.values(), key=lambda each: (each.serving, each.identity))
        return list({each.address: each for each in best}.values())


def _endpoints(slice_: Any) -> Iterable[Endpoint]:
    port = next((each.port for each in slice_.ports or () if each.name == _PORT_NAME and each.port), None)
    if port is None or slice_.address_type != _ADDRESS_TYPE:
        return
    for each in slice_.endpoints or ():
        conditions, host = each.conditions, each.addresses[0]
        ready = conditions is None or conditions.ready is not False
        ends = conditions is not None and bool(conditions.terminating)
        identity = each.target_ref.uid if each.target_ref is not None and each.target_ref.uid else ""
        yield Endpoint(address=f"{host}:{port}", identity=identity, serving=ready and not ends)


def _worded(error: Exception) -> str:
    if isinstance(error, ApiException):
        return f"the API server answers {error.status} {error.reason or ''}".rstrip()
    if isinstance(error, TimeoutError):
        return "the API server does not answer in time"
    if isinstance(error, aiohttp.ClientError | OSError):
        return str(error) or type(error).__name__
    return f"the API server's answer makes no sense: {type(error).__name__}: {str(error)[:200]}"
