"""Measure the cost of a decode step outside the model: scheduling, batch, sampling, messages, and asyncio.

    python -m benchmarks.step_overhead

A real decode worker process serves 32 endless streams to a gateway's dispatcher in this process. Its model returns
prepared logits (32,000 for each sequence) at once, so the time from step to step is the time outside the model. Greedy
and sampled streams take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from benchmarks.idle import cpu_seconds
from benchmarks.models import llama_15m
from benchmarks.record import record, spread
from benchmarks.recovery import Worker
from common.contract.ids import new_incarnation
from common.contract.sampling import SamplingParams
from common.runtime.checkpoint import config_hash
from common.runtime.clock import Pulse, monotonic
from gateway.routing.dispatcher import Dispatcher
from gateway.serving.generation import Generation
from gateway.workers.registry import Registry

KV = ("--dtype", "bfloat16", "--kv-cache-bytes", str(2**30))
"""A KV cache large enough for every stream at its longest."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
}


def main() -> None:
    """Measure, print, record; with `--serve`, be the worker."""
    if sys.argv[1:2] == ["--serve"]:
        del sys.argv[1]
        serve_without_model()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = llama_15m(Path(scratch))
        arguments = ["--model", str(folder), "--num-threads", "1", "--log-level", "error", *KV]
        worker = Worker("benchmarks.step_overhead", ["--serve", *arguments])
        try:
            taken = asyncio.run(measure(folder, worker, options))
        finally:
            worker.process.kill()
    figures = {kind: {name: spread(values) for name, values in each.items()} for kind, each in taken.items()}
    for kind, each in figures.items():
        print(f"{kind:<12}", "  ".join(f"{name} p50 {value['p50']:.0f}" for name, value in each.items()))
    if not options.no_record:
        workload = {name: value for name, value in vars(options).items() if name != "no_record"}
        print(record("step-overhead", workload=workload | {"vocabulary": 32000}, figures=figures, seed=0))


def serve_without_model() -> None:
    """Run a decode worker whose model takes no time."""
    import torch

    from common.engine.model import Decoder
    from decode_worker.__main__ import main as serve

    ready: list[torch.Tensor] = []

    def hidden(self: Decoder, batch: Any, cache: Any, backend: Any) -> Any:
        return None

    def logits(self: Decoder, hidden: Any, rows_R: torch.Tensor, backend: Any) -> torch.Tensor:
        if not ready:
            ready.append(torch.randn(512, self.config.vocab_size, generator=torch.Generator().manual_seed(0)))
        return ready[0][: rows_R.numel()]

    Decoder.hidden = hidden  # type: ignore[method-assign]
    Decoder.logits = logits  # type: ignore[method-assign]
    serve()


async def measure(folder: Path, worker: Worker, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """For each kind of stream, microseconds per step: wall time, and processor time of the worker."""
    registry = Registry((), (worker.address,), config_hash(folder))
    dispatcher = Dispatcher(new_incarnation(), registry, monotonic, Pulse())
    loop = asyncio.create_task(dispatcher.run())
    await dispatcher.wait_usable()
    taken: dict[str, dict[str, list[float]]] = {kind: {"wall_us": [], "cpu_us": []} for kind in KINDS}
    async with aiohttp.ClientSession() as session:
        for _ in range(options.rounds):
            for kind, parameters in KINDS.items():
                streams = [asyncio.create_task(stream(dispatcher, seed, parameters)) for seed in range(options.streams)]
                while await running(session, worker) < options.streams:
                    await asyncio.sleep(0.05)
                before = await counts(session, worker)
                await asyncio.sleep(options.seconds)
                after = await counts(session, worker)
                wall, cpu, steps = (b - a for a, b in zip(before, after, strict=True))
                taken[kind]["wall_us"].append(1e6 * wall / steps)
                taken[kind]["cpu_us"].append(1e6 * cpu / steps)
                for each in streams:
                    each.cancel()
                await asyncio.gather(*streams, return_exceptions=True)
                while await running(session, worker):
                    await asyncio.sleep(0.05)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    return taken


async def running(session: aiohttp.ClientSession, worker: Worker) -> int:
    """Sequences in the worker's batch."""
    async with session.get(f"http://{worker.http}/ready") as response:
        return int((await response.json())["running"])


async def counts(session: aiohttp.ClientSession, worker: Worker) -> tuple[float, float, float]:
    """(time in seconds, the worker's processor time in seconds, its number of steps)."""
    async with session.get(f"http://{worker.http}/metrics") as response:
        [steps] = re.findall(r"^baton_engine_steps_total (\S+)", await response.text(), re.MULTILINE)
    return time.perf_counter(), cpu_seconds(worker.process.pid), float(steps)


async def stream(dispatcher: Dispatcher, seed: int, parameters: dict[str, Any]) -> None:
    """Run one generation after another until cancelled."""
    draw = random.Random(seed)
    token_ids = tuple(draw.randrange(10, 200) for _ in range(64))
    sampling = SamplingParams(max_tokens=1900, ignore_eos=True, seed=seed, **parameters)
    while True:
        work = Generation(token_ids=token_ids, num_choices=1, sampling=sampling, budget_s=120)
        async for _ in dispatcher.generate(work):
            pass


if __name__ == "__main__":
    main()
