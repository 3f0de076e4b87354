"""Puts a worker together from its loaded engine and its core."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from common.engine.engine import Engine, device_of
from common.engine.kv_cache import KVCache
from common.runtime.clock import monotonic
from common.runtime.config import WorkerSettings
from common.runtime.ucx import guard_allocator, guard_route
from common.runtime.worker_host import WorkerHost
from common.worker.shell import Core, WorkerShell
from kv_transfer.regions import RankPart, Region
from kv_transfer.transports import transport_maker

_Settings = TypeVar("_Settings", bound=WorkerSettings)


def on_its_device(settings: _Settings) -> _Settings:
    """The settings on the device that the worker uses. Raises `OperatorError` if blocks of its memory could not be
    moved as they say; nothing is loaded yet."""
    device = device_of(settings)
    guard_allocator(device)
    guard_route(settings, device)
    return settings.on(device)


async def start_worker(
    settings: WorkerSettings, host: WorkerHost, engine: Engine, make_core: Callable[[Region], Core]
) -> WorkerShell:
    """A worker whose transport is started. `settings` are those `on_its_device`. Raises `OperatorError` or
    `TransferError`."""
    cache = engine.runner.cache
    region = region_of(cache)
    make_transport = transport_maker(settings, region, host.me, cache.synchronize)
    core = make_core(region)
    worker = WorkerShell(core, settings, host.me, host.server, engine, region, make_transport, monotonic)
    await worker.start()
    return worker


def region_of(cache: KVCache) -> Region:
    """The cache as addresses: every rank's part."""
    head_bytes = cache.layout.block_bytes // cache.layout.num_kv_heads
    return Region(
        parts=tuple(
            RankPart(
                part.address,
                part.heads.start * head_bytes,
                part.heads.stop * head_bytes,
                part.blocks.device.index or 0,
            )
            for part in cache.parts
        ),
        num_blocks=cache.num_blocks,
        block_bytes=cache.layout.block_bytes,
        device="cuda" if cache.device.type == "cuda" else "cpu",
    )
