"""What Baton does on a GPU, measured.

    python -m benchmarks.gpu compile    what the kernels take of a multiprocessor; needs no GPU
    python -m benchmarks.gpu tune       makes the tuning table of this GPU
    python -m benchmarks.gpu kernels    every kernel, against the device and against others' kernels
    python -m benchmarks.gpu engine     whole steps of models of well-known shapes, against their floors
    python -m benchmarks.gpu transfer   NIXL between two processes on the GPU
    python -m benchmarks.gpu stack      the whole stack on the GPU, beside transformers' static and continuous batching

Each part takes less than 8 minutes, prints a short table, and writes `benchmarks/results/gpu-PART.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import compiled
from benchmarks.record import record

PARTS = ("compile", "tune", "kernels", "engine", "transfer", "stack")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--capability", type=int, default=90, help="to compile for; default 90")
    options = parser.parse_args()
    if options.part == "compile":
        command = f"python -m benchmarks.gpu compile --capability {options.capability}"
        workload = {"capability": options.capability}
        print(
            record(
                "gpu-compile", workload=workload, figures=compiled.run(options.capability), seed=None, command=command
            )
        )
        return
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device: the kernels' correctness is tested by `pytest tests/kernels` without one")
    from benchmarks.gpu import engine, kernels, stack, transfer, tune
    from benchmarks.gpu.timing import copy_bytes_per_s, matmul_flops_per_s

    copy_rate, matmul_rate = copy_bytes_per_s(), matmul_flops_per_s()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: copies {1e-12 * copy_rate:.2f} TB/s, bf16 products {1e-12 * matmul_rate:.0f} TFLOP/s", flush=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "tune": tune.run,
        "kernels": lambda: kernels.run(copy_rate),
        "engine": lambda: engine.run(copy_rate, matmul_rate),
        "transfer": transfer.run,
        "stack": stack.run,
    }
    figures = parts[options.part]()
    device = {"gpu": gpu, "copy_bytes_per_s": copy_rate, "matmul_flops_per_s": matmul_rate}
    command = f"python -m benchmarks.gpu {options.part}"
    print(record(f"gpu-{options.part}", workload=device, figures=figures, seed=0, command=command))


if __name__ == "__main__":
    main()
