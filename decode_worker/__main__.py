"""`baton decode`: one decode worker."""

from __future__ import annotations

from pathlib import Path

from common.runtime.config import DecodeSettings
from common.runtime.worker_host import Worker, WorkerHost, run_worker


async def make_worker(settings: DecodeSettings, host: WorkerHost, folder: Path) -> Worker:
    """Load the model and start the transport. Raises `OperatorError` or `TransferError`."""
    # Imported here: torch takes seconds to import, and an occupied port or a wrong path should be reported before.
    from common.engine.engine import Engine, device_of
    from common.worker.start import start_worker
    from decode_worker.core import DecodeCore
    from decode_worker.speculation import most_drafted

    decided = settings.on(device_of(settings))
    engine = await Engine.load(
        decided,
        folder,
        host.progress,
        step_tokens=decided.token_budget,
        swap_bytes=decided.swap_bytes,
        graph_seqs=decided.max_num_seqs,
        timed_rows=0 if decided.speculation == "off" else decided.max_num_seqs + most_drafted(decided.max_num_seqs),
    )
    return await start_worker(decided, host, engine, lambda region: DecodeCore(decided, engine, region))


def main() -> None:
    """Entry point."""
    run_worker(DecodeSettings, "baton decode", make_worker)


if __name__ == "__main__":
    main()
