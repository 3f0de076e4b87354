"""The engine: one model runner on its own thread, driven from the event loop, which never waits for a step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from common.contract.errors import OperatorError
from common.contract.kv_layout import Fingerprint
from common.engine.batch import NOTHING_DRAFTED, Decodes, Drafted, Drafting, Slice, StepResult
from common.engine.drafter import Drafter
from common.engine.engine_thread import EngineThread
from common.engine.host_memory import lacks_memory
from common.engine.ranks import GroupPlan
from common.engine.runner import ModelRunner, Submitted, load_runner
from common.engine.timing import measure_costs, time_rows
from common.runtime.checkpoint import config_hash, unchanged, weights_hash
from common.runtime.config import DeviceType, WorkerSettings
from common.runtime.cores import cores_here
from common.runtime.daemon_threads import DaemonThreads
from common.scheduling.costs import DEEP_TOKENS, Costs
from common.scheduling.row_times import RowTimes

log = logging.getLogger(__name__)
_TESTED = (9, 0)
"""Compute capability of the GPUs on which the kernels have run: H100 and H200 (docs/gpu.md)."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Started:
    """A step that has begun on the engine's thread. Times are from `time.perf_counter`."""

    begin: float
    end: float
    """When the engine's thread had done its part of the step. Without a GPU that is the whole step."""
    submitted: Submitted
    drafted: Drafted
    """Tokens of which the step knew nothing before; see `Drafting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """The draft model that a worker is to load."""

    folder: Path
    kv_cache_bytes: int
    graph_seqs: int
    """On a GPU, its passes over up to so many sequences become CUDA graphs."""


def device_of(settings: WorkerSettings) -> DeviceType:
    """The device that a worker uses. "auto" means a GPU if there is one, otherwise the CPU."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


class Engine:
    """A loaded model on its own thread. Every method is called on the event loop's thread."""

    def __init__(
        self,
        thread: EngineThread,
        runner: ModelRunner,
        fingerprint: Fingerprint,
        costs: Costs | None = None,
        row_times: RowTimes | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._thread = thread
        self._waiter = EngineThread("waiter")
        """Waits for a GPU while the engine's thread submits the next step. Without a GPU this starts no thread."""
        self.runner = runner
        self.fingerprint = fingerprint
        self.costs = Costs() if costs is None else costs
        """Costs measured after loading. Callers that measure better may refine them."""
        self.row_times = row_times
        """What steps of decodes take, measured after loading; None if it was not measured."""
        self.drafter = drafter
        """The draft model; None if there is none."""
        self.num_steps = 0
        """Steps finished. Stops growing if the engine hangs."""
        self.busy_s = 0.0
        """Durations of all finished steps, summed."""
        self._last_end = 0.0

    @classmethod
    async def load(
        cls,
        settings: WorkerSettings,
        folder: Path,
        progress: Callable[[int, int], None],
        *,
        step_tokens: int,
        largest_step: int = 0,
        swap_bytes: int = 0,
        graph_seqs: int = 0,
        timed_rows: int = 0,
        draft_model: DraftCheckpoint | None = None,
    ) -> Engine:
        """Load the model and measure its costs on the engine's thread; `progress(done, total)` is called there.

        `settings.device` must not be "auto" (see `device_of`). Costs are measured by steps of up to `step_tokens`
        tokens. On a GPU a step of `largest_step` tokens is run, so that memory that does not suffice for it is missed
        now. `swap_bytes` is host memory for the KV of preempted sequences. On a GPU, steps of up to `graph_seqs` decode
        tokens become CUDA graphs; 0 makes none. Steps of up to `timed_rows` decode tokens are timed; 0 times
        none. `draft_model` is loaded beside the model, timed in the same way, and drafts at most `timed_rows` sequences
        at once. Raises `OperatorError`.
        """
        thread = EngineThread("engine")

        def work() -> Engine:
            device = settings.device
            assert device != "auto", "nobody has looked for a device"
            if device == "cuda" and settings.checksums:
                raise OperatorError("--checksums reads blocks on the CPU; it does not work with --device cuda")
            if device == "cuda" and not torch.cuda.is_available():
                unusable = "torch finds no GPU that it can use here (is its driver 580 or later?)"
                raise OperatorError(f"--device cuda: {unusable}; set --device cpu")
            if device == "cuda" and (capability := torch.cuda.get_device_capability()) != _TESTED:
                log.warning("the kernels have not been tested on a GPU of compute capability %d.%d", *capability)
            width = settings.tensor_parallel
            if device == "cuda" and width > 1:
                log.warning("a worker of several ranks has not been tested on several GPUs")
            num_threads = settings.num_threads or max(1, cores_here() // width)
            if device == "cpu":
                torch.set_num_threads(num_threads)
            try:
                # First: the model's cache may take the rest of a GPU's memory.
                draft_runner = None if draft_model is None else _load_draft_model(settings, draft_model)
                with unchanged(folder):
                    # Hash every byte of the files while they are loaded: loading brings them into memory.
                    hashing = DaemonThreads(1, "hash-weights").submit(lambda: weights_hash(folder, num_threads))
                    runner = load_runner(
                        folder,
                        kv_cache_bytes=settings.kv_cache_bytes,
                        gpu_reserve_bytes=settings.gpu_reserve_bytes,
                        gpu_share=settings.gpu_share,
                        swap_bytes=swap_bytes,
                        block_size=settings.block_size,
                        dtype=settings.dtype,
                        device=device,
                        progress=progress,
                        cpu_kernels=settings.cpu_kernels,
                        batch_invariant=settings.batch_invariant,
                        group=_group_plan(settings, device, num_threads),
                    )
                    if device == "cuda":
                        if graph_seqs:
                            runner.capture_graphs(graph_seqs, progress)
                        runner.warm_up(largest_step)
                    fingerprint = Fingerprint(
                        config_hash=config_hash(folder), weights_hash=hashing.result(), layout=runner.layout
                    )
                costs = measure_costs(runner, step_tokens)
                row_times = time_rows(runner, timed_rows) if timed_rows else None
                drafter = None
                if draft_runner is not None:
                    drafter = Drafter(draft_runner, time_rows(draft_runner, timed_rows), runner.config.vocab_size)
            except torch.OutOfMemoryError as error:
                advice = (
                    "lower --kv-cache-bytes, --token-budget or --max-num-seqs, or raise --gpu-reserve-bytes; if the "
                    "weights alone do not fit, serve a smaller model or divide it (--tensor-parallel)"
                )
                raise OperatorError(f"the GPU's memory does not suffice: {advice} ({error})") from error
            except (MemoryError, RuntimeError) as error:
                if not lacks_memory(error):
                    raise
                advice = "lower --kv-cache-bytes, or serve a smaller model"
                raise OperatorError(f"this machine's memory does not suffice: {advice} ({error})") from error
            log.info("loaded %s on %s: %s, %d blocks", folder.name, device, runner.layout, runner.cache.num_blocks)
            log.info(
                "prefill takes %.3f ms for a token, %.3f more at a depth of %d, and %.1f for a step",
                1e3 * costs.prefill_s_per_token,
                1e3 * costs.depth_s * DEEP_TOKENS,
                DEEP_TOKENS,
                1e3 * costs.step_s,
            )
            if runner.num_host_blocks:
                log.info("%d host blocks, %.3f ms to swap one", runner.num_host_blocks, 1e3 * costs.swap_s_per_block)
            return cls(thread, runner, fingerprint, costs, row_times, drafter)

        return await thread.run(work)

    def submit(
        self,
        slices: Sequence[Slice],
        copies: Sequence[tuple[int, int]] = (),
        swap_outs: Sequence[tuple[int, int]] = (),
        swap_ins: Sequence[tuple[int, int]] = (),
        decodes: Decodes | None = None,
        drafting: Drafting | None = None,
    ) -> asyncio.Future[Started]:
        """Submit one step: draft, copy, swap out, swap in, and compute `decodes` and `slices` (possibly none), in this
        order.

        Pairs are (from, to): blocks for `copies`, (block, host slot) for `swap_outs`, (host slot, block) for
        `swap_ins`. So one step can swap KV out and in again, and can swap into a block that it swaps out. Steps run in
        the order of their submission. The future is done when the engine's thread has done its part; `finish` waits for
        the end of the step.
        """

        def work() -> Started:
            begin = time.perf_counter()
            drafted, with_drafts = NOTHING_DRAFTED, decodes
            if drafting is not None:
                assert self.drafter is not None, "there is no draft model"
                drafted, with_drafts = self.drafter.draft(drafting, decodes)
            for source, destination in copies:
                self.runner.copy_block(source, destination)
            self.runner.swap_out(swap_outs)
            self.runner.swap_in(swap_ins)
            submitted = self.runner.submit(slices, with_drafts)
            return Started(begin, time.perf_counter(), submitted, drafted)

        return self._thread.run(work)

    async def finish(self, step: asyncio.Future[Started]) -> StepResult:
        """Wait for the end of a step, and count it as finished. Raises what has failed it."""
        started = await step
        submitted, end = started.submitted, started.end
        if submitted.done:
            outcomes = submitted.outcomes()
        else:
            # The event loop may hear of the end later, by what it does then.
            outcomes, end = await self._waiter.run(lambda: (submitted.outcomes(), time.perf_counter()))
        # A step that was submitted while another one ran on the GPU began when that one ended.
        between_s = max(0.0, started.begin - self._last_end)
        duration_s = end - max(started.begin, self._last_end)
        self.busy_s += duration_s
        self._last_end = end
        self.num_steps += 1
        return StepResult(
            outcomes=outcomes,
            scores=submitted.scores(),
            chosen=submitted.chosen(),
            drafted=started.drafted,
            duration_s=duration_s,
            between_s=between_s,
        )

    def call(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Run `work` on the engine's thread, after everything submitted before and before everything submitted
        later."""
        return self._thread.run(work)

    def close(self) -> None:
        """End the threads once the steps in flight are over. If one does not end, what it uses stays as it is."""
        if self._thread.close() and self._waiter.close():
            self.runner.close()
        else:
            log.error("a step does not end; the process ends without it")


def _group_plan(settings: WorkerSettings, device: DeviceType, num_threads: int) -> GroupPlan | None:
    if settings.tensor_parallel == 1:
        return None
    return GroupPlan(
        width=settings.tensor_parallel,
        num_threads=num_threads,
        pulse=settings.pulse,
        device=device,
        collectives="nccl" if device == "cuda" else None,
    )


def _load_draft_model(settings: WorkerSettings, draft_model: DraftCheckpoint) -> ModelRunner:
    runner = load_runner(
        draft_model.folder,
        kv_cache_bytes=draft_model.kv_cache_bytes,
        block_size=settings.block_size,
        dtype=settings.dtype,
        device=settings.device,
        cpu_kernels=settings.cpu_kernels,
        structured_output=False,
    )
    if settings.device == "cuda":
        runner.capture_graphs(draft_model.graph_seqs)
        runner.warm_up()
    log.info("loaded %s to draft: %d blocks", draft_model.folder.name, runner.cache.num_blocks)
    return runner
