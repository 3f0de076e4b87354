"""`baton decode`: one decode worker."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.contract.errors import OperatorError
from common.runtime.checkpoint import resolve_model, vocabulary
from common.runtime.daemon_threads import DaemonThreads
from common.runtime.lifecycle import restart_with
from common.runtime.malloc import with_large_pages

if TYPE_CHECKING:
    from common.engine.engine import DraftCheckpoint
    from common.runtime.config import DecodeSettings
    from common.runtime.worker_host import Worker, WorkerHost


async def make_worker(settings: DecodeSettings, host: WorkerHost, folder: Path) -> Worker:
    """Load the model and start the transport. Raises `OperatorError` or `TransferError`."""
    # Imported here: torch takes seconds to import, and an occupied port or a wrong path should be reported before.
    from common.engine.engine import Engine
    from common.worker.start import on_its_device, start_worker
    from decode_worker.core import DecodeCore

    decided = on_its_device(settings)
    timed_rows = _timed_rows(decided)
    engine = await Engine.load(
        decided,
        folder,
        host.progress,
        step_tokens=decided.token_budget,
        largest_step=decided.token_budget,
        swap_bytes=decided.swap_bytes,
        graph_seqs=max(decided.max_num_seqs, timed_rows),
        timed_rows=timed_rows,
        draft_model=await _draft_model(decided, folder),
    )
    return await start_worker(decided, host, engine, lambda region: DecodeCore(decided, engine, region))


def _timed_rows(settings: DecodeSettings) -> int:
    """The largest step of decodes of which it must be known what it takes; 0 if of none."""
    from common.contract.messages.session import Profile
    from decode_worker.speculation import most_drafted

    if settings.drafts_by != "off":
        return settings.max_num_seqs + most_drafted(settings.max_num_seqs)
    return settings.max_num_seqs if settings.profile is Profile.LATENCY else 0


async def _draft_model(settings: DecodeSettings, folder: Path) -> DraftCheckpoint | None:
    """The draft model that is wanted. Raises `OperatorError` if it cannot be had, or has other tokens."""
    from common.engine.engine import DraftCheckpoint

    name = settings.draft_model
    if name is None or settings.drafts_by not in ("draft", "auto"):
        return None
    finding = DaemonThreads(1, "find-draft-model").submit(lambda: resolve_model(name, weights=True))
    draft_folder = await asyncio.wrap_future(finding)
    ids, others = vocabulary(folder), vocabulary(draft_folder)
    differing = next((token for token, index in others.items() if ids.get(token, index) != index), None)
    if differing is not None:
        raise OperatorError(f"the draft model {name} has another tokenizer than the model: {differing!r} differs")
    return DraftCheckpoint(
        folder=draft_folder, kv_cache_bytes=settings.draft_cache_bytes, graph_seqs=settings.max_num_seqs
    )


def main() -> None:
    """Entry point."""
    restart_with(with_large_pages(os.environ))
    # Imported here: a program that starts again imports again what it had imported before.
    from common.runtime.config import DecodeSettings
    from common.runtime.worker_host import run_worker

    run_worker(DecodeSettings, "baton decode", make_worker)


if __name__ == "__main__":
    main()
