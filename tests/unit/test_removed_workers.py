"""What a registry remembers of a removed worker: enough to tell whether another process comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from channel_bench import welcome

from common.contract.ids import Incarnation
from common.contract.messages.session import Role
from gateway.workers import registry as registry_module
from gateway.workers.discovery import Endpoint
from gateway.workers.registry import Registry

A = Endpoint(address="a:1")
LIVES = [Incarnation(f"life-{number}") for number in range(3)]


def live(registry: Registry, endpoint: Endpoint, life: Incarnation) -> int:
    """Add the worker, open a session and remove it; how often it had restarted."""
    registry.add(Role.DECODE, endpoint)
    registry.opened(endpoint.address, life, welcome())
    restarts = registry.workers[endpoint.address].restarts
    registry.remove(endpoint.address)
    return restarts


def test_restarts_are_counted_over_removals() -> None:
    registry = Registry((), (), "c")
    assert live(registry, A, LIVES[0]) == 0
    assert live(registry, A, LIVES[0]) == 0, "it was only out of reach"
    assert live(registry, A, LIVES[1]) == 1
    registry.add(Role.DECODE, A)
    registry.remove(A.address)  # it never answered
    assert live(registry, A, LIVES[2]) == 2
    assert registry.num_restarts == {Role.DECODE: 2}


def test_another_worker_at_the_address_is_no_restart() -> None:
    registry = Registry((), (), "c")
    assert live(registry, replace(A, identity="one"), LIVES[0]) == 0
    assert live(registry, replace(A, identity="other"), LIVES[1]) == 0
    assert live(registry, replace(A, identity="one"), LIVES[2]) == 1


def test_the_last_removed_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAX_GONE", 2)
    registry = Registry((), (), "c")
    for address in ("a:1", "b:1", "c:1"):
        live(registry, Endpoint(address=address), LIVES[0])
    assert len(registry._gone) == 2
    assert live(registry, Endpoint(address="c:1"), LIVES[1]) == 1
    assert live(registry, A, LIVES[1]) == 0
