"""`baton decode`: one decode worker."""

from __future__ import annotations

from pathlib import Path

from common.runtime.clock import monotonic
from common.runtime.config import DecodeSettings
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import PeerNetworks
from common.runtime.wire_guard import guard_allocator, guard_route
from common.runtime.worker_host import Worker, WorkerHost, run_worker


async def make_worker(settings: DecodeSettings, host: WorkerHost, folder: Path) -> Worker:
    """Load the model and start the transport. Raises `OperatorError` or `TransferError`."""
    # Imported here: torch takes seconds to import, and an occupied port or a wrong path should be reported before.
    from common.engine.engine import Engine, device_of
    from common.worker.shell import WorkerShell
    from decode_worker.core import DecodeCore
    from kv_transfer.regions import Region
    from kv_transfer.transports import transport_maker

    settings = settings.on(device_of(settings))
    engine = await Engine.load(
        settings,
        folder,
        host.progress,
        step_tokens=settings.token_budget,
        swap_bytes=settings.swap_bytes,
        graph_seqs=settings.max_num_seqs,
    )
    cache = engine.runner.cache
    region = Region(
        address=cache.address,
        num_blocks=cache.num_blocks,
        block_bytes=cache.layout.block_bytes,
        device="cuda" if cache.device.type == "cuda" else "cpu",
        device_id=cache.device.index or 0,
    )
    guard_allocator(region.device)
    guard_route(settings, region.device)
    keys = CurveKeys.load(settings.curve_keys)
    peers = PeerNetworks.of(settings)
    make_transport = transport_maker(
        settings.transport,
        region,
        host.me,
        settings.host,
        keys,
        cache.synchronize,
        peers,
        settings.max_registrations,
        settings.require_rdma,
    )
    core = DecodeCore(settings, engine, region)
    worker = WorkerShell(core, settings, host.me, host.server, engine, region, make_transport, monotonic)
    await worker.start()
    return worker


def main() -> None:
    """Entry point."""
    run_worker(DecodeSettings, "baton decode", make_worker)


if __name__ == "__main__":
    main()
