"""Worker pools shared by the end-to-end tests, which each test leaves as it found them: empty; and a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import chromium
import pytest
import pytest_asyncio
from playwright.async_api import Browser
from stack import BLOCK_BYTES, MODEL, Process, Workers

NUM_SMALL_BLOCKS = 40
_PULLING = ("--chunk-size", "64", "--pull-prefixes", "always", "--pull-patience-s", "4")
"""A pull on a busy machine may take longer than its second."""
_OPTIONS = ("--checksums", "--heartbeat-timeout-s", "5")
"""A test that plays a gateway on a busy machine may be silent for longer than the usual timeout."""
_WIRES: dict[str, Any] = {
    "zmq": {"options": ("--transport", "zmq", *_OPTIONS)},
    "nixl-tcp": {"options": _OPTIONS, "env": {"UCX_TLS": "^sm,ib"}},
}

_SHARED = {"llama", *_WIRES, "small decode"}
"""Pools that tests of several files use."""


def _end(pools: list[Workers]) -> None:
    for workers in pools:
        workers.signal()
    for workers in pools:
        workers.wait()
    # At rest they had nothing to drain: whoever took its grace period held something.
    stuck = [line for workers in pools for p in workers.all for line in p.log if "not drained within" in line]
    assert not stuck, stuck


@pytest.fixture(scope="package")
def pools() -> Iterator[dict[str, Workers]]:
    """Every pool that runs, ended when a process goes on to files of another folder."""
    started: dict[str, Workers] = {}
    yield started
    _end(list(started.values()))


@pytest.fixture(scope="module", autouse=True)
def pools_of_one_file(pools: dict[str, Workers]) -> Iterator[None]:
    """Pools that no other file uses end with the file that has started them: even at rest they take memory and time."""
    yield
    _end([pools.pop(name) for name in pools.keys() - _SHARED])


@pytest.fixture
def pool(pools: dict[str, Workers], checkpoint: Callable[[str], Path]) -> Iterator[Callable[..., Workers]]:
    """Get a pool by name, started at first use; every pool used is checked to be empty after the test."""
    used: list[Workers] = []

    def get(name: str, family: str = "llama", **how: object) -> Workers:
        if name not in pools:
            pools[name] = Workers.start(checkpoint(family), **how)  # type: ignore[arg-type]
        used.append(pools[name])
        return pools[name]

    yield get
    for workers in used:
        workers.wait_for_baseline()


@pytest.fixture
def main_pool(pool: Callable[..., Workers]) -> Workers:
    """Two prefill and two decode workers. A crowd fills their batches; a prefix that another one holds is pulled."""
    return pool(
        "llama",
        prefill=2,
        decode=2,
        options=_OPTIONS,
        prefill_options=_PULLING,
        decode_options=("--max-num-seqs", "16"),
    )


@pytest.fixture(scope="package")
def gateways(pools: dict[str, Workers]) -> Iterator[tuple[ExitStack, list[Process]]]:
    """The gateway of the main pool, once it was started, and what ends it, before the pools."""
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def main_gateway(main_pool: Workers, gateways: tuple[ExitStack, list[Process]]) -> Process:
    """A gateway before the main pool."""
    stack, started = gateways
    if not started:
        started.append(stack.enter_context(main_pool.gateway("--served-model-name", MODEL)))
    return started[0]


@pytest.fixture
def over(main_pool: Workers, pool: Callable[..., Workers]) -> Callable[[str], Workers]:
    """Workers whose blocks travel over "nixl" (the main pool), "nixl-tcp" or "zmq"."""
    return lambda wire: main_pool if wire == "nixl" else pool(wire, prefill_options=_PULLING, **_WIRES[wire])


@pytest.fixture
def small_decode(pool: Callable[..., Workers]) -> dict[str, Process]:
    """Decode workers with little memory, by how they share it out: as they come, or so that sequences give way."""
    policies = {
        "default": (),
        "swap": ("--memory-reserve", "-1", "--preempt-by", "swap"),
        "recompute": ("--memory-reserve", "-1", "--preempt-by", "recompute"),
    }
    size = ("--kv-cache-bytes", str(NUM_SMALL_BLOCKS * BLOCK_BYTES))
    workers = pool(
        "small decode",
        prefill=0,
        decode=len(policies),
        options=("--checksums",),
        decode_options=[(*size, *options) for options in policies.values()],
    )
    return dict(zip(policies, workers.decode, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Chromium, for the tests of one file."""
    async with chromium.launched() as running:
        yield running
