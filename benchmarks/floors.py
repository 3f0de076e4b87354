"""How far decode steps and prompts of the CPU engine are from what the machine can do: read their bytes, and multiply.

    python -m benchmarks.floors --model 0.5b --dtype float32 --threads 1 --rounds 7

A step must read the weights, and the KV of its sequences, at the bandwidth that a loop (`floors.c`, over 512 MiB)
reaches; and it must multiply with each weight for each sequence, and with the KV, at the rate that torch (oneDNN, or
MKL in float32) reaches on the model's largest product, of 512 rows, in float32 if the CPU has no instructions for the
type. The larger of these times is its floor. A prompt must only multiply; it is computed in chunks of 512 tokens. Each
case has a process of its own; the loop, the product and all cases take turns, and a ratio is of one round.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import Result, run, show
from benchmarks.models import MODELS, Model
from benchmarks.record import ROOT, by_cpu
from benchmarks.turns import engine
from common.contract.kv_layout import DTYPE_BYTES
from common.engine.host_memory import zeros_in_large_pages
from common.engine.kv_cache import TORCH_DTYPES
from common.engine.linear import multiplies_natively
from common.engine.model_config import ModelConfig

CONTEXT, BLOCK_SIZE = 512, 32
LOOP_BYTES, PRODUCT_ROWS = 512 * 2**20, 512


@dataclass(frozen=True)
class Needs:
    """What a case must at least read, and multiply and add."""

    num_bytes: int
    num_flops: int


def needs(config: ModelConfig, dtype: str, kind: str, size: int) -> Needs:
    """The needs of a decode step of `size` sequences with `CONTEXT` tokens each, or of a prompt of `size` tokens."""
    c = config
    width = c.num_heads * c.head_dim
    layer = (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size) * c.hidden_size
    head = c.vocab_size * c.hidden_size
    kv_numbers = 2 * c.num_layers * c.num_kv_heads * c.head_dim  # of a token
    if kind == "prompts":
        pairs = size * (size + 1) // 2  # of a token and one that it sees
        return Needs(0, 2 * (size * c.num_layers * layer + head) + 4 * c.num_layers * width * pairs)
    weights = c.num_layers * layer + head
    num_bytes = DTYPE_BYTES[dtype] * (weights + size * CONTEXT * kv_numbers)
    return Needs(num_bytes, size * (2 * weights + 4 * c.num_layers * width * CONTEXT))


class Machine:
    """Measures what the machine can do, with several threads."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: str, threads: int) -> None:
        library = folder / "floors.so"
        source = Path(__file__).with_name("floors.c")
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
        self._read = ctypes.CDLL(str(library)).read_all
        number = ctypes.c_int
        self._read.argtypes, self._read.restype = [ctypes.c_void_p, ctypes.c_long, number, number], ctypes.c_float
        self._threads = ThreadPoolExecutor(threads)
        large = zeros_in_large_pages(LOOP_BYTES // 4096 // threads * threads * 4096)  # where weights are, too
        self._parts = large.view(torch.float32).view(threads, -1).fill_(1.0)
        out, features = 2 * config.intermediate_size, config.hidden_size
        of = TORCH_DTYPES[dtype] if multiplies_natively(TORCH_DTYPES[dtype]) else torch.float32
        self._x = torch.full((PRODUCT_ROWS, features), 0.5, dtype=of)
        self._weight = torch.full((out, features), 0.5, dtype=of)
        torch.set_num_threads(threads)

    def bytes_per_s(self) -> float:
        """One turn of every form of the loop: the fastest one's bandwidth."""

        def read(form: tuple[int, int]) -> None:
            list(self._threads.map(lambda part: self._read(part.data_ptr(), part.numel(), *form), self._parts))

        return 4 * self._parts.numel() / min(seconds_of(partial(read, form)) for form in product((1, 2, 4), (0, 1)))

    def flops_per_s(self) -> float:
        """One turn of the product: the rate of the fastest of five."""
        multiply = partial(torch.nn.functional.linear, self._x, self._weight)
        return 2 * len(self._x) * self._weight.numel() / min(seconds_of(multiply) for _ in range(5))


def seconds_of(work: Callable[[], object]) -> float:
    """The time that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def figures_of(case: Needs, rounds: list[tuple[float, float, float]]) -> dict[str, Any]:
    """The figures of a case; a round is (seconds, bytes per second, operations per second)."""
    read_s = [case.num_bytes / each[1] for each in rounds]
    compute_s = [case.num_flops / each[2] for each in rounds]
    ratios = [each[0] / max(to) for each, *to in zip(rounds, read_s, compute_s, strict=True)]
    return {
        "seconds": statistics.median(each[0] for each in rounds),
        "read_s": statistics.median(read_s),
        "compute_s": statistics.median(compute_s),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def measure(
    scratch: Path,
    *,
    model: Model = "0.5b",
    dtype: str = "float32",
    threads: int = 1,
    rounds: int = 7,
    batches: tuple[int, ...] = (1, 8, 32),
    prompts: tuple[int, ...] = (512, 4096),
) -> Result:
    """Measure all cases in turns."""
    folder = scratch / "model"
    folder.mkdir()
    MODELS[model](folder)
    config = ModelConfig.from_folder(folder)
    machine = Machine(scratch, config, dtype, threads)
    cases = [("steps", size) for size in batches] + [("prompts", size) for size in prompts]
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {case: [] for case in cases}
    with ExitStack() as stack:
        processes = {}
        for case in cases:
            processes[case] = engine(ROOT, {"it": str(folder)}, BLOCK_SIZE, threads)
            stack.callback(processes[case].close)
        for number in range(rounds + 1):
            for (kind, size), process in processes.items():
                at_most = machine.bytes_per_s(), machine.flops_per_s()
                asked = [kind, "it", dtype, size, *([CONTEXT] if kind == "steps" else [])]
                seconds = min(process.ask(asked) for _ in range(5 if kind == "steps" else 1))
                if number:  # the first one warms up
                    times[kind, size].append((seconds, *at_most))
            show(f"round {number}", {f"{kind} {size}": each[-1][0] for (kind, size), each in times.items() if each})
    made = [
        {"kind": kind, "size": size, **figures_of(needs(config, dtype, kind, size), each)}
        for (kind, size), each in times.items()
    ]
    bandwidth, rate = (statistics.median(each[which] for case in times.values() for each in case) for which in (1, 2))
    return Result(
        name=by_cpu(f"floors-{model}-{dtype}-{threads}"),
        figures={"gb_per_s": bandwidth / 1e9, "gflops": rate / 1e9, "cases": made},
        seed=None,
    )


if __name__ == "__main__":
    run(measure, __doc__)
