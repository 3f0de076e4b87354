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
failed. docs/gpu.md says how to use a machine that is there for a quarter of an hour.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.command import UsageError, call
from benchmarks.gpu import records
from benchmarks.gpu.parts import PARTS, compile_, device
from benchmarks.gpu.runner import LINES, OK, Measurement, run
from benchmarks.record import RESULTS, ROOT, machine

Part = Literal["check", "kernels", "tune", "engine", "transfer", "stack", "compile", "record"]


def main(
    parts: tuple[Part, ...],
    *,
    out: Annotated[Path, "folder of the results; default benchmarks/results"] = RESULTS,
    limit: Annotated[float, "seconds for all of them; default 3600"] = 3600.0,
    only: Annotated[tuple[str, ...], "measurements, as the table names them"] = (),
    without: Annotated[tuple[str, ...], "measurements to leave out"] = (),
    capability: Annotated[int, "of the GPU that `compile` is for; default 90"] = 90,
) -> None:
    """Measure the parts, or make records."""
    if "record" in parts and len(parts) > 1:
        raise UsageError("record is no part of a run")
    out = out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        plan = planned(parts, out, Path(scratch), capability)
        if parts == ("record",):
            records.write(out / LINES, planned([*PARTS, "compile"], out, Path(scratch), capability))
            return
        needs_gpu = set(plan) - {"compile"}
        if needs_gpu and not (shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()):
            sys.exit("error: no NVIDIA GPU: `pytest tests/kernels` tests without one what the kernels compute")
        measurements = [*([device()] if needs_gpu else []), *(each for part in plan.values() for each in part)]
        outcomes = run(
            chosen(measurements, only, without),
            out,
            limit,
            begin={"command": f"python -m benchmarks.gpu {' '.join(parts)}", "machine": machine()},
            state=lambda: records.tree(ROOT),
        )
    if out == RESULTS:
        records.write(out / LINES, plan)
    if any(each.status != OK for each in outcomes):
        sys.exit(1)


def planned(names: Sequence[str], out: Path, scratch: Path, capability: int) -> dict[str, list[Measurement]]:
    """The measurements of each part."""
    plan = {name: PARTS[name](out, scratch) for name in names if name in PARTS}
    return plan | ({"compile": compile_(capability)} if "compile" in names else {})


def chosen(measurements: Sequence[Measurement], only: Sequence[str], without: Sequence[str] = ()) -> list[Measurement]:
    """The measurements that `only` names (all if it is empty), but for those that `without` names; and in any case that
    of the device, which the others are compared with."""
    names = {each.name for each in measurements}
    if unknown := {*only, *without} - names:
        sys.exit(f"error: no measurement {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    wanted = (set(only) or names) - set(without)
    return [each for each in measurements if each.name in wanted or each.part == "device"]


if __name__ == "__main__":
    call(main, __doc__)
