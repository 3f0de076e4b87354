"""The engine's thread: one model runner, driven from the event loop, which never waits for a step."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from common.contract.errors import OperatorError
from common.contract.kv_layout import Fingerprint
from common.engine.batch import Sampled, Slice
from common.engine.costs import Costs
from common.engine.runner import ModelRunner, load_runner, measure_costs
from common.runtime.checkpoint import config_hash, weights_hash
from common.runtime.config import WorkerSettings

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Engine:
    """A loaded model on its own thread. Every method is called on the event loop's thread."""

    def __init__(
        self,
        executor: ThreadPoolExecutor,
        runner: ModelRunner,
        fingerprint: Fingerprint,
        costs: Costs | None = None,
    ) -> None:
        self._executor = executor
        self.runner = runner
        self.fingerprint = fingerprint
        self.costs = Costs() if costs is None else costs
        """As measured after loading; whoever learns better may refine them."""
        self.num_steps = 0
        """Steps finished; stands still when the engine is wedged."""
        self.last_step_s = 0.0
        """What the last finished step took on the engine's thread, without its wait for the thread."""

    @classmethod
    async def load(
        cls, settings: WorkerSettings, folder: Path, progress: Callable[[int, int], None], *, swap_bytes: int = 0
    ) -> Engine:
        """Load the model and measure its costs on the engine's thread; `progress(done, total)` is called there.

        `swap_bytes` is host memory for the KV of preempted sequences. Raises `OperatorError`.
        """
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        return await asyncio.get_running_loop().run_in_executor(
            executor, cls._load, executor, settings, folder, progress, swap_bytes
        )

    @classmethod
    def _load(
        cls,
        executor: ThreadPoolExecutor,
        settings: WorkerSettings,
        folder: Path,
        progress: Callable[[int, int], None],
        swap_bytes: int,
    ) -> Engine:
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and settings.checksums:
            raise OperatorError("--checksums reads blocks on the CPU; it does not work with --device cuda")
        if device == "cuda":
            log.warning("the kernels have not been tested on a GPU")
        if device == "cpu":
            torch.set_num_threads(settings.num_threads or os.cpu_count() or 1)
        runner = load_runner(
            folder,
            kv_cache_bytes=settings.kv_cache_bytes,
            swap_bytes=swap_bytes,
            block_size=settings.block_size,
            dtype=settings.dtype,
            device=device,
            progress=progress,
            cpu_kernels=settings.cpu_kernels,
        )
        fingerprint = Fingerprint(
            config_hash=config_hash(folder), weights_hash=weights_hash(folder), layout=runner.layout
        )
        log.info("loaded %s on %s: %s, %d blocks", folder.name, device, runner.layout, runner.cache.num_blocks)
        costs = measure_costs(runner)
        log.info("prefill takes %.3f ms for a token", 1e3 * costs.prefill_s_per_token)
        if runner.num_host_blocks:
            log.info("%d host blocks, %.3f ms to swap one", runner.num_host_blocks, 1e3 * costs.swap_s_per_block)
        return cls(executor, runner, fingerprint, costs)

    async def step(
        self,
        slices: Sequence[Slice],
        copies: Sequence[tuple[int, int]] = (),
        swap_outs: Sequence[tuple[int, int]] = (),
        swap_ins: Sequence[tuple[int, int]] = (),
    ) -> list[tuple[Sampled, ...]]:
        """One step, in this order: copy, swap out, swap in, compute `slices`, of which there may be none.

        Pairs are (from, to): blocks for `copies`, (block, host slot) for `swap_outs`, (host slot, block) for
        `swap_ins`. What is swapped out may thus be swapped in at once, and a block that was swapped out may be the
        target of a swap in. See `ModelRunner.step` for the answer.
        """

        def work() -> tuple[list[tuple[Sampled, ...]], float]:
            begin = time.perf_counter()
            for source, destination in copies:
                self.runner.copy_block(source, destination)
            self.runner.swap_out(swap_outs)
            self.runner.swap_in(swap_ins)
            outcome = self.runner.step(slices)
            return outcome, time.perf_counter() - begin

        outcome, self.last_step_s = await self.call(work)
        self.num_steps += 1
        return outcome

    async def call(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the engine's thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """End the thread once the step in flight is over."""
        self._executor.shutdown(wait=True)
