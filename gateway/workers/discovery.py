"""Discovery of workers: named by the operator, resolved from a DNS name, or listed by Kubernetes.

Each source reports the whole list of a role whenever it may have changed. If a source fails, nothing is removed: the
last list stays in use, and each worker's own session shows whether it is alive.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Gauge

from common.contract.messages.session import Role
from common.runtime.clock import Clock
from common.runtime.counting import PlainCounter
from common.runtime.resolver import Resolver

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0
"""Longest pause before a failing source is asked again."""
LONGEST_LOOKUP_S: Final = 15.0
"""Longest time that a list waits for the lookup of a name."""
_SHORTEST_ROUND_S: Final = 1.0
"""Least seconds between two lists of a source whose `changes` ends at once."""
_NO_ADDRESSES: Final = (socket.EAI_NONAME, socket.EAI_NODATA)
"""Errors of a lookup that are the name server's answer: there is no such name, or it has no IPv4 addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A worker's control port as a source lists it."""

    address: str
    """`host:port`."""
    identity: str = ""
    """Identity of the worker at this address; a different identity means that another worker has got the address."""
    serving: bool = True
    """Whether the worker may be given new work: False while it is not ready or terminates."""


Tell = Callable[[Role, Collection[Endpoint]], None]
"""Receives the whole list of a role."""


class WorkerSource(Protocol):
    """A source that lists the workers of one role."""

    async def list_once(self) -> Collection[Endpoint]:
        """The current list. Raises `SourceError`."""
        ...

    async def changes(self, tell: Callable[[Collection[Endpoint]], None]) -> None:
        """Report changes of the list. Returns when the list has to be asked for again. Raises `SourceError`."""
        ...


class SourceError(Exception):
    """A source does not answer, or answers incorrectly."""


class Discovery:
    """Follows one source for each role."""

    def __init__(self, sources: Mapping[Role, WorkerSource], registry: CollectorRegistry, clock: Clock) -> None:
        """Metrics of the lists are added to `registry`."""
        self._sources = sources
        self._clock = clock
        self._listed_at = dict.fromkeys(sources, clock())
        """When the last list of a role came; before the first, when the wait for it began."""
        self._listed = Gauge(
            "baton_gateway_discovered_workers", "Workers in the last list of a role.", ["role"], registry=registry
        )
        self._errors = PlainCounter(
            "baton_gateway_discovery_errors",
            "Times that a list of workers could not be had; the last one goes on being used.",
            ["role"],
            registry=registry,
        )
        age = Gauge(
            "baton_gateway_discovery_age_seconds",
            "Since the last list of a role; before the first, since the start.",
            ["role"],
            registry=registry,
        )
        for role in sources:
            self._errors.labels(role)
            age.labels(role).set_function(partial(self._age_s, role))

    async def run(self, tell: Tell) -> None:
        """Follow the sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for role, source in self._sources.items():
                tasks.create_task(self._follow(role, source, tell))

    def _age_s(self, role: Role) -> float:
        return self._clock() - self._listed_at[role]

    async def _follow(self, role: Role, source: WorkerSource, tell: Tell) -> None:
        known: Collection[Endpoint] | None = None
        pause_s = _FIRST_PAUSE_S

        def told(endpoints: Collection[Endpoint]) -> None:
            nonlocal known
            self._listed.labels(role).set(sum(endpoint.serving for endpoint in endpoints))
            self._listed_at[role] = self._clock()
            if known is None or set(endpoints) != set(known):
                log.info("%s workers: %s", role, ", ".join(sorted(map(_worded, endpoints))) or "none")
            known = endpoints
            tell(role, endpoints)

        def changed(endpoints: Collection[Endpoint]) -> None:
            nonlocal pause_s
            pause_s = _FIRST_PAUSE_S
            told(endpoints)

        while True:
            began = self._clock()
            try:
                told(await source.list_once())
                await source.changes(changed)
                pause_s = _FIRST_PAUSE_S  # not earlier: if lists succeed and watches fail, every round does both
                await asyncio.sleep(max(0.0, _SHORTEST_ROUND_S - (self._clock() - began)))
            except SourceError as error:
                self._errors.labels(role).inc()
                since = "none is known yet" if known is None else f"the {len(known)} known last go on being used"
                log.warning("%s workers cannot be listed (%s): %s", role, since, error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _worded(endpoint: Endpoint) -> str:
    return endpoint.address if endpoint.serving else f"{endpoint.address} (not serving)"


class DnsSource:
    """All IPv4 addresses of a DNS name: of a headless Service, or any other name with several.

    A name that has had addresses and now has none is an empty list, as that of a Service without ready pods. The first
    such answer changes nothing: a Service that is made again, or a name server that starts, may give it for a moment.
    The second one, a period later, is taken. Before the first address it is an error, like a wrong name.
    """

    def __init__(self, host: str, port: int, period_s: float, resolver: Resolver) -> None:
        """The name is resolved again every `period_s`."""
        self._resolver = resolver
        self._host = host
        self._port = port
        self._period_s = period_s
        self._last: Collection[Endpoint] | None = None
        """The last list; None before the first address."""
        self._had_none = False
        """Whether the last answer of a name server was that there are no addresses."""

    async def list_once(self) -> Collection[Endpoint]:
        try:
            found = await self._resolver.find_all(self._host)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be one
            is_answer = isinstance(error, socket.gaierror) and error.errno in _NO_ADDRESSES
            if self._last is None or not is_answer:
                raise SourceError(f"{self._host} does not resolve: {error!r}") from error
            if self._had_none:
                self._last = ()
            self._had_none = True
            return self._last
        self._had_none = False
        self._last = [Endpoint(address=f"{host}:{self._port}") for host in sorted(found)]
        return self._last

    async def changes(self, tell: Callable[[Collection[Endpoint]], None]) -> None:
        await asyncio.sleep(self._period_s)
