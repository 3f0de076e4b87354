"""`baton prefill`: one prefill worker."""

from __future__ import annotations

from pathlib import Path

from common.runtime.config import PrefillSettings
from common.runtime.worker_host import Worker, WorkerHost, run_worker


async def make_worker(settings: PrefillSettings, host: WorkerHost, folder: Path) -> Worker:
    """Load the model and start the transport. Raises `OperatorError` or `TransferError`."""
    # Imported here: torch takes seconds to import, and an occupied port or a wrong path should be reported before.
    from common.engine.engine import Engine
    from common.worker.start import on_its_device, start_worker
    from prefill_worker.core import PrefillCore

    decided = on_its_device(settings)
    engine = await Engine.load(
        decided, folder, host.progress, step_tokens=decided.chunk_size, largest_step=decided.token_budget
    )
    return await start_worker(decided, host, engine, lambda region: PrefillCore(decided, host.me, engine, region))


def main() -> None:
    """Entry point."""
    run_worker(PrefillSettings, "baton prefill", make_worker)


if __name__ == "__main__":
    main()
