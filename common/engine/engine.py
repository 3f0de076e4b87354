"""The engine's thread: one model runner, driven from the event loop, which never waits for a step."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from common.contract.errors import OperatorError
from common.contract.kv_layout import Fingerprint
from common.engine.batch import Sampled, Slice
from common.engine.runner import ModelRunner, load_runner
from common.runtime.checkpoint import config_hash, weights_hash
from common.runtime.config import WorkerSettings

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Engine:
    """A loaded model on its own thread. Every method is called on the event loop's thread."""

    def __init__(self, executor: ThreadPoolExecutor, runner: ModelRunner, fingerprint: Fingerprint) -> None:
        self._executor = executor
        self.runner = runner
        self.fingerprint = fingerprint
        self.num_steps = 0
        """Steps finished; stands still when the engine is wedged."""

    @classmethod
    async def load(cls, settings: WorkerSettings, folder: Path, progress: Callable[[int, int], None]) -> Engine:
        """Load the model on the engine's thread; `progress(done, total)` is called there. Raises `OperatorError`."""
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        return await asyncio.get_running_loop().run_in_executor(
            executor, cls._load, executor, settings, folder, progress
        )

    @classmethod
    def _load(
        cls,
        executor: ThreadPoolExecutor,
        settings: WorkerSettings,
        folder: Path,
        progress: Callable[[int, int], None],
    ) -> Engine:
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and settings.checksums:
            raise OperatorError("--checksums reads blocks on the CPU; it does not work with --device cuda")
        if device == "cuda":
            log.warning("attention on CUDA is the plain reference: correct, and slow")
        if device == "cpu":
            torch.set_num_threads(settings.num_threads or os.cpu_count() or 1)
        runner = load_runner(
            folder,
            kv_cache_bytes=settings.kv_cache_bytes,
            block_size=settings.block_size,
            dtype=settings.dtype,
            device=device,
            progress=progress,
        )
        fingerprint = Fingerprint(
            config_hash=config_hash(folder), weights_hash=weights_hash(folder), layout=runner.layout
        )
        log.info("loaded %s on %s: %s, %d blocks", folder.name, device, runner.layout, runner.cache.num_blocks)
        return cls(executor, runner, fingerprint)

    async def step(self, slices: Sequence[Slice], copies: Sequence[tuple[int, int]] = ()) -> list[tuple[Sampled, ...]]:
        """Copy blocks `(source, destination)`, then compute `slices`; see `ModelRunner.step`."""

        def work() -> list[tuple[Sampled, ...]]:
            for source, destination in copies:
                self.runner.copy_block(source, destination)
            return self.runner.step(slices)

        outcome = await self.call(work)
        self.num_steps += 1
        return outcome

    async def call(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the engine's thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """End the thread once the step in flight is over."""
        self._executor.shutdown(wait=True)
