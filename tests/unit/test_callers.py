"""What is kept of the keys that have asked: all of those in the file, and little of those that have left it."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from multidict import CIMultiDict
from waiting import StandingClock

from gateway.access.api_keys import MAX_KEYS, ApiKey, Keyring
from gateway.access.callers import Callers
from gateway.observability.metrics import GatewayMetrics
from gateway.web.http_errors import ApiError


class Ring(Keyring):
    """A file whose keys the test sets. Each key is its own name."""

    def __init__(self) -> None:
        self.held: dict[str, ApiKey] = {}

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(self.held.values())

    def find(self, given: str) -> ApiKey | None:
        return self.held.get(given)

    def hold(self, *names: str) -> None:
        """Each may make one request a minute, and one at a time."""
        self.held = {
            name: ApiKey(
                name=name,
                sha256=hashlib.sha256(name.encode()).hexdigest(),
                requests_per_minute=1,
                max_concurrency=1,
            )
            for name in names
        }


class Bench:
    """Callers with such a file, at a time that stands still."""

    def __init__(self) -> None:
        self.ring, self.metrics = Ring(), GatewayMetrics("model")
        self.callers = Callers(self.ring, None, self.metrics, StandingClock())

    def begin(self, name: str) -> AbstractContextManager[None]:
        """A request with this key."""
        request: Any = SimpleNamespace(headers=CIMultiDict({"x-api-key": name}))
        return self.callers.identify(request).request()

    def refused(self, name: str) -> str | None:
        """The limit that refuses a request with this key."""
        try:
            with self.begin(name):
                return None
        except ApiError as error:
            return error.code

    def names(self) -> set[str]:
        """Keys with series."""
        return {
            sample.labels["key"]
            for metric in self.metrics.registry.collect()
            if metric.name == "baton_gateway_requests_limited"
            for sample in metric.samples
        }


def test_a_key_in_the_file_keeps_its_usage_and_one_that_has_left_it_loses_its_series() -> None:
    bench = Bench()
    bench.ring.hold("alice")
    assert bench.refused("alice") is None
    for index in range(2 * MAX_KEYS):
        bench.ring.hold("alice", f"k{index}")
        assert bench.refused(f"k{index}") is None
        assert bench.refused(f"k{index}") == "requests_per_minute"
    assert bench.refused("alice") == "requests_per_minute"
    assert len(bench.callers._meters) <= 4, "twice as many as the file has keys"
    assert len(bench.names()) <= 4
    assert {"alice", f"k{index}"} <= bench.names()


def test_a_key_that_has_left_the_file_is_remembered_while_its_requests_are_open() -> None:
    bench = Bench()
    bench.ring.hold("gone")
    with bench.begin("gone"):
        for index in range(10):
            bench.ring.hold(f"k{index}")
            assert bench.refused(f"k{index}") is None
        bench.ring.hold("gone")
        assert bench.refused("gone") == "concurrency"
