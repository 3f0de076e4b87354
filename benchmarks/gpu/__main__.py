"""Measure Baton on a GPU.

    python -m benchmarks.gpu check      what the machine has; whether the kernels and the engine are right
    python -m benchmarks.gpu kernels    every kernel, against the device's rates and beside torch's attention
    python -m benchmarks.gpu tune       makes the tuning table of this GPU
    python -m benchmarks.gpu engine     whole steps of models of well-known shapes, against their floors
    python -m benchmarks.gpu transfer   NIXL between two processes on the GPU
    python -m benchmarks.gpu stack      the whole stack on the GPU, beside transformers' static and continuous batching
    python -m benchmarks.gpu compile    resources that the kernels take of a multiprocessor; needs no GPU
    python -m benchmarks.gpu record     makes records of the rows in `--out`; needs a checkout

Several parts are one run. Each measurement has a process and a time limit of its own. Its rows are appended one by one
to `gpu.jsonl` in the folder `--out`, and its output goes to `gpu.log`. A table at the end names the measurements that
failed. docs/gpu.md says how to use a machine that is there for half an hour.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import parts, records
from benchmarks.gpu.runner import LINES, OK, Measurement, run
from benchmarks.record import RESULTS, ROOT, machine


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        plan = planned(options.parts, options.out, Path(scratch), options.capability)
        if options.parts == ["record"]:
            records.write(
                options.out / LINES, planned([*parts.PARTS, "compile"], options.out, Path(scratch), options.capability)
            )
            return
        needs_gpu = set(plan) - {"compile"}
        if needs_gpu and not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
            sys.exit("error: no NVIDIA GPU: `pytest tests/kernels` tests without one what the kernels compute")
        first = [parts.device()] if needs_gpu else []
        measurements = [*first, *(each for part in plan.values() for each in part)]
        outcomes = run(
            chosen(measurements, options.only),
            options.out,
            options.limit,
            begin={"command": f"python -m benchmarks.gpu {' '.join(options.parts)}", "machine": machine()},
            state=lambda: records.tree(ROOT),
        )
    if options.out == RESULTS:
        records.write(options.out / LINES, plan)
    if any(each.status != OK for each in outcomes):
        sys.exit(1)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*parts.PARTS, "compile", "record"], metavar="PART")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results; default benchmarks/results")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of them; default 3600")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measurements, as the table names them")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that `compile` is for; default 90")
    options = parser.parse_args(arguments)
    if "record" in options.parts and len(options.parts) > 1:
        parser.error("record is no part of a run")
    options.out = options.out.resolve()
    return options


def planned(names: Sequence[str], out: Path, scratch: Path, capability: int) -> dict[str, list[Measurement]]:
    """The measurements of each part."""
    plan = {name: parts.PARTS[name](out, scratch) for name in names if name in parts.PARTS}
    return plan | ({"compile": parts.compile_(capability)} if "compile" in names else {})


def chosen(measurements: Sequence[Measurement], only: Sequence[str] | None) -> list[Measurement]:
    """The measurements of these names, and that of the device, which the others are compared with. All without
    names."""
    if only is None:
        return list(measurements)
    names = {each.name for each in measurements}
    if unknown := set(only) - names:
        sys.exit(f"error: no measurement {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    return [each for each in measurements if each.name in only or each.part == "device"]


if __name__ == "__main__":
    main()
