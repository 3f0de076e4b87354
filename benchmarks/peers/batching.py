"""Plain `transformers` as the engine of a server: batch after batch, or its own continuous batching. Greedy only.

A `Job` is handed to an engine, which puts each token into the job's queue when the token's step has ended. In a batch
the rows that have ended stay in place, and are computed, until the longest row has ended: this is the cost of static
batching. Clients do not have to wait for the longest row: every token is delivered after its step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList


class EngineError(Exception):
    """The engine failed on a job."""


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A request in an engine."""

    prompt: Sequence[int]
    max_tokens: int
    arrived_s: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: uuid4().hex)
    tokens: asyncio.Queue[list[int] | EngineError] = field(default_factory=asyncio.Queue)
    """Generated tokens that are not delivered yet, or the error that ended the job."""


class Engine(Protocol):
    """The interface of an engine to the server."""

    def submit(self, job: Job) -> None:
        """Accept a job."""

    def cancel(self, job: Job) -> None:
        """Give this job up: its client has left."""

    def lifetime(self) -> Any:
        """An asynchronous context in which the engine runs."""


class _EachStep(StoppingCriteria):  # type: ignore[misc]
    """Called after each step: delivers the new tokens, and reports which rows have ended."""

    def __init__(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        self._jobs = jobs
        self._loop = loop
        self._outputs: list[list[int]] = [[] for _ in jobs]
        self._ended = [False] * len(jobs)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """`input_ids` is [rows, padded prompt and output]."""
        fresh = []
        tokens = input_ids[:, -1].tolist()  # all rows at once, since each transfer waits for the device
        for row, (job, output) in enumerate(zip(self._jobs, self._outputs, strict=True)):
            if not self._ended[row]:
                output.append(tokens[row])
                fresh.append((job, output[-1:]))
                self._ended[row] = len(output) >= job.max_tokens
        self._loop.call_soon_threadsafe(_deliver, fresh)
        return torch.tensor(self._ended, device=input_ids.device)


def _deliver(fresh: Sequence[tuple[Job, list[int] | EngineError]]) -> None:
    for job, tokens in fresh:
        job.tokens.put_nowait(tokens)


class BatchAfterBatch:
    """Static batching: a batch starts when it is full or no other job has come for `patience_s`, and the batch before
    it has ended."""

    def __init__(self, model: Any, batch_size: int, patience_s: float) -> None:
        self._model = model
        self._batch_size = batch_size
        self._patience_s = patience_s
        self._waiting: list[Job] = []
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "generate")

    def submit(self, job: Job) -> None:
        """Queue the job until its batch starts."""
        self._waiting.append(job)
        self._changed.set()

    def cancel(self, job: Job) -> None:
        """Remove a waiting job; the row of a job in a batch stays until the batch ends."""
        with suppress(ValueError):
            self._waiting.remove(job)

    @asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        """Run batches until the end of the context."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self._thread.shutdown(cancel_futures=True)

    def leaves_at(self, arrivals_s: Sequence[float]) -> float:
        """The time at which the waiting jobs start, if no other job arrives."""
        if not arrivals_s:
            return math.inf
        return -math.inf if len(arrivals_s) >= self._batch_size else arrivals_s[-1] + self._patience_s

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            leaves_at = self.leaves_at([job.arrived_s for job in self._waiting])
            if leaves_at > time.monotonic():
                self._changed.clear()
                with suppress(TimeoutError):
                    delay_s = None if leaves_at == math.inf else leaves_at - time.monotonic()
                    await asyncio.wait_for(self._changed.wait(), delay_s)
                continue
            jobs, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
            try:
                await loop.run_in_executor(self._thread, self._generate, jobs, loop)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                _deliver([(job, EngineError(str(error))) for job in jobs])

    def _generate(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        """Pad to the longest prompt, and generate until the longest output has ended."""
        width = max(len(job.prompt) for job in jobs)
        prompts = torch.zeros(len(jobs), width, dtype=torch.long)
        mask = torch.zeros_like(prompts)
        for row, job in enumerate(jobs):
            prompts[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        config = GenerationConfig(
            max_new_tokens=max(job.max_tokens for job in jobs), do_sample=False, pad_token_id=0, eos_token_id=None
        )
        steps = StoppingCriteriaList([_EachStep(jobs, loop)])
        with torch.inference_mode():
            self._model.generate(
                prompts.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                generation_config=config,
                stopping_criteria=steps,
            )


class Continuous:
    """The continuous batching of `transformers`, the base of its `generate_batch`, fed request by request."""

    def __init__(self, model: Any, *, batch_size: int, num_blocks: int, page_size: int, batch_tokens: int) -> None:
        page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # until 5.17
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1),
            # Graphs, running ahead of the device, and the attention implementation are left to the library.
            ContinuousBatchingConfig(
                **{page: page_size},
                num_blocks=num_blocks,
                max_batch_tokens=batch_tokens,
                max_requests_per_batch=batch_size,
            ),
        )

    def submit(self, job: Job) -> None:
        """Pass the job to the manager."""
        seen = 0

        def look(result: Any) -> None:
            nonlocal seen
            if result.error is not None:
                job.tokens.put_nowait(EngineError(result.error))
                return
            fresh = result.generated_tokens[seen:]
            seen += len(fresh)
            if fresh:
                job.tokens.put_nowait(fresh)

        self._manager.register_result_handler(job.id, look)
        self._manager.add_request(
            list(job.prompt),
            request_id=job.id,
            max_new_tokens=job.max_tokens,
            streaming=True,
            eos_token_id=-1,
        )

    def cancel(self, job: Job) -> None:
        """Cancel the job in the manager."""
        self._manager.cancel_request(job.id)

    @asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        """Run the manager's thread until the end of the context."""
        self._manager.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._manager.stop, block=True, timeout=10)
