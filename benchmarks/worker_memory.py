"""Measure the memory of a decode worker on a CPU, at its peak while it loads and once it serves.

    python -m benchmarks.worker_memory

What it takes beyond its weights and its KV cache is the interpreter with its libraries, and whatever is held twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from benchmarks.command import Result, run, show
from benchmarks.idle import ask
from benchmarks.local import local_stack
from benchmarks.models import MODELS
from common.contract.kv_layout import DTYPE_BYTES

KV_MIB = 256


def status(pid: int) -> dict[str, int]:
    """MiB of a process: at its peak, with the pages of its files; now; and now without them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if " kB" in rest}
    own = kib["RssAnon"] + kib["RssShmem"]
    return {"peak_mib": kib["VmHWM"] >> 10, "resident_mib": kib["VmRSS"] >> 10, "own_mib": own >> 10}


def num_weights(folder: Path) -> int:
    """Numbers in the checkpoint; a tied table counts once."""
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118  # it has no iterator


def worker(folder: Path, dtype: str) -> dict[str, int]:
    """Memory of a decode worker that has served a request."""
    options = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(KV_MIB << 20)]
    with local_stack([*options, "--prefill", "0", "--decode", "1"]) as local:
        ask(local)
        return status(next(pid for name, pid in local.pids.items() if name.startswith("decode_worker")))


def measure(scratch: Path, *, models: tuple[str, ...] = tuple(MODELS)) -> Iterator[Result]:
    """MiB of the weights and of the worker, for each model and type; what there is so far after each."""
    rows: list[dict[str, Any]] = []
    for model in models:
        folder = scratch / model
        folder.mkdir()
        MODELS[model](folder)
        for dtype in ("float32", "bfloat16"):
            found: dict[str, Any] = {"model": model, "dtype": dtype, "kv_mib": KV_MIB}
            found["weights_mib"] = num_weights(folder) * DTYPE_BYTES[dtype] >> 20
            found |= worker(folder, dtype)
            found["beyond_mib"] = found["own_mib"] - found["weights_mib"] - KV_MIB
            rows.append(found)
            show(f"{model} {dtype}", found)
            yield Result(name="worker-memory", figures={"rows": rows}, workload={"models": list(models)}, seed=None)


if __name__ == "__main__":
    run(measure, __doc__)
