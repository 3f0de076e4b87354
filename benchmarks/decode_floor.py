"""Compare decode steps with the least time in which the machine can read their bytes, and do their multiply-adds.

    python -m benchmarks.decode_floor --model 0.5b --threads 1

The floor of a step is (bytes of weights in the checkpoint's dtype + bytes of its sequences' KV) / (best bandwidth at
which an independent loop, `floor.c` over 512 MiB, reads in the same run with as many threads). On a CPU that multiplies
in float32 there is a second floor: the multiply-adds of the weights, at the best rate that a loop over registers
reaches. Steps and loops take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import spread
from benchmarks.models import llama_15m, qwen2_05b
from benchmarks.record import record
from common.contract.kv_layout import DTYPE_BYTES
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.runner import ModelRunner, load_runner
from common.runtime.config import DEFAULTS_BY_DEVICE

MODELS = {"15m": llama_15m, "0.5b": qwen2_05b}
LOOP_BYTES = 512 * 2**20
LOOP_ROUNDS = 2_000_000


class Machine:
    """Runs the loops of `floor.c` with several threads, and keeps the best rates that they have reached."""

    def __init__(self, folder: Path, threads: int) -> None:
        library = folder / "floor.so"
        source = Path(__file__).with_name("floor.c")
        flags = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
        self._loops = ctypes.CDLL(str(library))
        self._loops.read_all.argtypes = [ctypes.c_void_p, ctypes.c_long]
        self._loops.multiply_add.argtypes = [ctypes.c_long, ctypes.c_float]
        for loop in (self._loops.read_all, self._loops.multiply_add):
            loop.restype = ctypes.c_float
        self._threads = ThreadPoolExecutor(threads)
        self._parts = torch.ones(threads, LOOP_BYTES // 4 // threads // 256 * 256)
        self.bytes_per_s = self.flops_per_s = 0.0

    def measure(self) -> None:
        """Run one turn of each loop."""
        seconds = self._time(lambda part: self._loops.read_all(part.data_ptr(), part.numel()))
        self.bytes_per_s = max(self.bytes_per_s, 4 * self._parts.numel() / seconds)
        seconds = self._time(lambda part: self._loops.multiply_add(LOOP_ROUNDS, 1e-9))
        self.flops_per_s = max(self.flops_per_s, 192 * LOOP_ROUNDS * len(self._parts) / seconds)

    def _time(self, loop: Callable[[torch.Tensor], float]) -> float:
        begin = time.perf_counter()
        list(self._threads.map(loop, self._parts))
        return time.perf_counter() - begin


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = MODELS[options.model](Path(folder))
        tokens = max(options.batches) * (options.context + options.steps + 32)
        runner = load_runner(
            path,
            kv_cache_bytes=tokens * 64 * 1024,
            block_size=DEFAULTS_BY_DEVICE["cpu"]["block_size"],
            dtype=options.dtype,
        )
        figures = measure(runner, Machine(Path(folder), options.threads), options)
    print(f"{figures['bandwidth_gb_s']:.1f} GB/s, {figures['gflops']:.0f} GFLOP/s")
    for batch, each in figures["batches"].items():
        print(
            f"batch {batch}: {each['step_ms']['min']:.1f} ms (p50 {each['step_ms']['p50']:.1f}); to read "
            f"{each['floor_ms']:.1f}, {each['ratio']:.2f} times; to compute {each['compute_floor_ms']:.1f}"
        )
    if not options.no_record:
        workload = {"model": options.model, "dtype": options.dtype, "context": options.context}
        name = f"decode-floor-{options.model}-{options.threads}"
        record(name, workload=workload | {"threads": options.threads, "steps": options.steps}, figures=figures, seed=0)


def measure(runner: ModelRunner, machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """Times of steps, and the floors."""
    times = {batch: list(_steps(runner, batch, options.context, options.steps, machine)) for batch in options.batches}
    weights = weight_bytes(runner)
    batches: dict[int, Any] = {}
    for batch, seconds in times.items():
        kv = batch * options.context * runner.layout.block_bytes // runner.layout.block_size
        floor_s = (weights + kv) / machine.bytes_per_s
        numbers = weights // DTYPE_BYTES[runner.layout.dtype]
        batches[batch] = {
            "step_ms": spread([1e3 * each for each in seconds]),
            "kv_bytes": kv,
            "floor_ms": 1e3 * floor_s,
            "compute_floor_ms": 1e3 * 2 * batch * numbers / machine.flops_per_s,
            "ratio": min(seconds) / floor_s,
            "ratio_p50": spread(seconds)["p50"] / floor_s,
        }
    return {
        "weight_bytes": weights,
        "bandwidth_gb_s": machine.bytes_per_s / 1e9,
        "gflops": machine.flops_per_s / 1e9,
        "batches": batches,
    }


def weight_bytes(runner: ModelRunner) -> int:
    """Bytes of the weight matrices that a step reads, counted in the checkpoint's dtype, not in that of the engine."""
    c = runner.config
    q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = (2 * q_out + 2 * kv_out + 3 * c.intermediate_size) * c.hidden_size
    return DTYPE_BYTES[runner.layout.dtype] * (c.num_layers * layer + c.vocab_size * c.hidden_size)


def _steps(runner: ModelRunner, batch: int, context: int, num_steps: int, machine: Machine) -> Iterator[float]:
    """Yield the seconds of each decode step; the machine's loops run between the steps."""
    block_size = runner.layout.block_size
    per_sequence = -(-(context + num_steps + 1) // block_size)
    tables = [list(range(row * per_sequence, (row + 1) * per_sequence)) for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    for row, table in enumerate(tables):
        ids = [(row + 7 * position) % 250 + 5 for position in range(context)]
        runner.step([Slice(token_ids=ids, start=0, block_table=table)])
    for number in range(num_steps + 2):
        position = context + number
        slices = [
            Slice(
                token_ids=[(row + position) % 250 + 5],
                start=position,
                block_table=table,
                samples=(Sample(params=params, choice=0, position=position + 1, token_ids=(), prompt_len=context),),
            )
            for row, table in enumerate(tables)
        ]
        begin = time.perf_counter()
        runner.step(slices)
        if number >= 2:
            yield time.perf_counter() - begin
        machine.measure()


if __name__ == "__main__":
    main()
