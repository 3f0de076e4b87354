"""`baton prefill`: one prefill worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime.lifecycle import restart_with
from common.runtime.malloc import with_large_pages

if TYPE_CHECKING:
    from common.runtime.config import PrefillSettings
    from common.runtime.worker_host import Worker, WorkerHost


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
    restart_with(with_large_pages(os.environ))
    # Imported here: a program that starts again imports again what it had imported before.
    from common.runtime.config import PrefillSettings
    from common.runtime.worker_host import run_worker

    run_worker(PrefillSettings, "baton prefill", make_worker)


if __name__ == "__main__":
    main()
