"""Measure the cost of a decode step outside the model: scheduling, batch, sampling, messages, and asyncio.

    python -m benchmarks.step_overhead --streams 32 256

A real decode worker process serves endless streams to this process, which only reads them. Its model returns
prepared logits (32,000 for each sequence) at once, so the time from step to step is the time outside the model. Numbers
of streams, and greedy and sampled streams, take turns. Microseconds per step:

* `wall`, `cpu`: time from step to step, and processor time of the worker.
* `best`, `draw`: time inside the backend's two operations of the sampler, which read the logits.
* `outside`: `wall` without `best` and `draw`.
* `read`: a plain sum of the same logits. The worker takes it in one step in 4, before `best`; `wall` and `cpu` leave it
  out. `best_over_read` is the ratio of `best` in the other steps to it, so that each comes upon the caches as the step
  before has left them.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import aiohttp

from benchmarks.command import Result, UsageError, run
from benchmarks.endless_streams import PULSE, endless_streams
from benchmarks.figures import cpu_seconds, spread
from benchmarks.models import llama_15m
from benchmarks.process import Process

if TYPE_CHECKING:
    import torch
    from prometheus_client import Metric

    from common.engine.backend import Backend
    from common.engine.batch import Samples
    from common.engine.sampler import ChosenOnDevice

KV_BYTES_PER_STREAM = 2**24
"""More than a stream of the model needs at its longest."""
MOST_STREAMS = 512
READ_EVERY = 4
"""Steps from one plain read of the logits to the next."""
PARTS = ("best", "again", "draw", "read")
"""What is timed; `again` is `best` after a read."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}


# --- the worker process ------------------------------------------------------------------------------------------


def worker_options(folder: Path, most_streams: int) -> list[str]:
    """The command line of a worker for up to `most_streams` streams."""
    options = ["--model", str(folder), "--num-threads", "1", "--log-level", "error", "--dtype", "bfloat16"]
    options += ["--max-num-seqs", str(most_streams), "--kv-cache-bytes", str(KV_BYTES_PER_STREAM * most_streams)]
    options += ["--heartbeat-timeout-s", str(PULSE.timeout_s)]
    return ["--serve", *options]


class SamplerTimes:
    """Seconds and calls of each of `PARTS`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.calls = dict.fromkeys(PARTS, 0)

    def add(self, part: str, begin: float) -> None:
        """Count a call that began at `begin` and has ended now."""
        self.seconds[part] += time.perf_counter() - begin
        self.calls[part] += 1


class TimedBackend:
    """The two operations of a backend that the sampler uses, timed."""

    def __init__(self, backend: Backend, times: SamplerTimes) -> None:
        self._backend, self._times = backend, times

    def best(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend.best`."""
        part = "best"
        if sum(self._times.calls[each] for each in ("best", "again")) % READ_EVERY == 0:
            part, begin = "again", time.perf_counter()
            logits_RV.sum()
            self._times.add("read", begin)
        begin = time.perf_counter()
        best = self._backend.best(logits_RV)
        self._times.add(part, begin)
        return best

    def draw(self, logits_PV: torch.Tensor, best_P: torch.Tensor, samples: Samples) -> torch.Tensor:
        """See `Backend.draw`."""
        begin = time.perf_counter()
        tokens_P = self._backend.draw(logits_PV, best_P, samples)
        self._times.add("draw", begin)
        return tokens_P


def serve_without_model() -> None:
    """Run a decode worker whose model takes no time, and whose metrics tell the times inside the sampler."""
    import torch

    from common.engine import runner
    from common.engine.model import Decoder
    from common.engine.sampler import choose
    from common.runtime.probes import counter
    from decode_worker.__main__ import main as serve
    from decode_worker.core import DecodeCore

    ready: list[torch.Tensor] = []  # of all steps: no stream may have a parameter that changes its logits
    times = SamplerTimes()
    own_metrics = DecodeCore.metrics

    def hidden(self: Decoder, batch: Any, cache: Any, backend: Any) -> Any:
        return None

    def logits(self: Decoder, hidden: Any, rows_R: torch.Tensor, backend: Any) -> torch.Tensor:
        if not ready:
            ready.append(torch.randn(MOST_STREAMS, self.config.vocab_size, generator=torch.Generator().manual_seed(0)))
        return ready[0][: rows_R.numel()]

    def timed_choose(
        logits_NV: torch.Tensor, samples: Any, eos_token_ids: Any, backend: Backend, *known: Any, **named: Any
    ) -> ChosenOnDevice:
        timed = cast("Backend", TimedBackend(backend, times))
        return choose(logits_NV, samples, eos_token_ids, timed, *known, **named)

    def metrics(core: DecodeCore) -> Iterable[Metric]:
        yield from own_metrics(core)
        yield counter("baton_sampler_seconds", "Time inside an operation.", times.seconds, "part")
        yield counter("baton_sampler_calls", "Calls of an operation.", times.calls, "part")

    Decoder.hidden = hidden  # type: ignore[method-assign]
    Decoder.logits = logits  # type: ignore[method-assign]
    DecodeCore.metrics = metrics
    runner.choose = timed_choose  # type: ignore[attr-defined]
    serve()


# --- the measurement ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """What has been counted up to a moment."""

    wall_s: float
    cpu_s: float
    """Processor time of the worker."""
    steps: float
    seconds: Mapping[str, float]
    """Time inside each of `PARTS`."""
    calls: Mapping[str, float]


def per_step(before: Counts, after: Counts) -> dict[str, float]:
    """The figures between two moments, in microseconds per step; see the module's docstring."""
    steps = after.steps - before.steps
    seconds = {part: after.seconds[part] - before.seconds[part] for part in PARTS}
    calls = {part: after.calls[part] - before.calls[part] for part in PARTS}
    wall_us, cpu_us, best_us, draw_us = (
        1e6 * each / steps
        for each in (
            after.wall_s - before.wall_s - seconds["read"],
            after.cpu_s - before.cpu_s - seconds["read"],
            seconds["best"] + seconds["again"],
            seconds["draw"],
        )
    )
    read_us = 1e6 * seconds["read"] / calls["read"]
    return {
        "wall_us": wall_us,
        "cpu_us": cpu_us,
        "best_us": best_us,
        "draw_us": draw_us,
        "outside_us": wall_us - best_us - draw_us,
        "read_us": read_us,
        "best_over_read": 1e6 * seconds["best"] / calls["best"] / read_us,
    }


Taken = dict[str, dict[str, dict[str, list[float]]]]
"""Number of streams → kind of stream → figure → its value in each round."""


async def in_turns(worker: Process, numbers: Sequence[int], rounds: int, seconds: float) -> Taken:
    """The figures of each round, for each number of streams."""
    taken: Taken = {str(number): {kind: {} for kind in KINDS} for number in numbers}
    async with aiohttp.ClientSession() as session, endless_streams(worker.address) as streams:
        for _ in range(rounds):
            for number in numbers:
                for kind, parameters in KINDS.items():
                    streams.start(number, parameters)
                    while await running(session, worker) < number:
                        await asyncio.sleep(0.05)
                    before = await counts(session, worker)
                    await asyncio.sleep(seconds)
                    for name, value in per_step(before, await counts(session, worker)).items():
                        taken[str(number)][kind].setdefault(name, []).append(value)
                    streams.stop()
                    while await running(session, worker):
                        await asyncio.sleep(0.05)
    return taken


async def running(session: aiohttp.ClientSession, worker: Process) -> int:
    """Sequences in the worker's batch."""
    async with session.get(f"http://{worker.http}/ready") as response:
        return int((await response.json())["running"])


async def counts(session: aiohttp.ClientSession, worker: Process) -> Counts:
    """The present counts of the worker."""
    async with session.get(f"http://{worker.http}/metrics") as response:
        text = await response.text()
    [steps] = re.findall(r"^baton_engine_steps_total (\S+)", text, re.MULTILINE)
    seconds, calls = (
        {part: float(value) for part, value in re.findall(rf'^{name}_total{{part="(\w+)"}} (\S+)', text, re.MULTILINE)}
        for name in ("baton_sampler_seconds", "baton_sampler_calls")
    )
    return Counts(time.perf_counter(), cpu_seconds(worker.pid), float(steps), seconds, calls)


def measure(
    scratch: Path,
    *,
    streams: tuple[int, ...] = (32,),
    rounds: int = 7,
    seconds: Annotated[float, "of each round"] = 3.0,
) -> Result:
    """Start the worker, and measure every number and kind of streams."""
    if max(streams) > MOST_STREAMS:
        raise UsageError(f"at most {MOST_STREAMS} streams")
    with Process("benchmarks.step_overhead", worker_options(llama_15m(scratch), max(streams))) as worker:
        taken = asyncio.run(in_turns(worker, streams, rounds, seconds))
    figures = {
        number: {kind: {name: spread(values) for name, values in each.items()} for kind, each in kinds.items()}
        for number, kinds in taken.items()
    }
    return Result(name="step-overhead", figures=figures, workload={"vocabulary": 32000})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        del sys.argv[1]
        serve_without_model()
    else:
        run(measure, __doc__)
