"""Compile the kernels for GPUs that are not here: `compile_cases.py FILE` writes the figures to FILE, as a record. Not
in Triton's interpreter.

`compiled.json` is the record that is committed. It holds as long as its digest is that of its files and of the
versions that are installed.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu import compiled
from benchmarks.gpu.compiled import Case
from benchmarks.gpu.products import MODELS
from common.engine.kernels import tiles
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.tuning import TABLE

ROOT = Path(__file__).parents[2]
INVARIANT = [Case(capability=capability, kernel="invariant") for capability in (90, 100, 120, 80)]
CASES = [
    Case(capability=90, kernel="prefill", head_dim=256, block_size=16),
    Case(capability=120, kernel="prefill", head_dim=256),
    Case(capability=80, kernel="prefill"),
    Case(capability=90, kernel="prefill"),
    Case(capability=100, kernel="prefill"),
    Case(capability=90, kernel="prefill", dtype="float32", head_dim=64),
    Case(capability=90, kernel="decode"),
    Case(capability=90, kernel="decode", block_size=16),
    Case(capability=90, kernel="decode", dtype="float32", head_dim=256),
    Case(capability=120, kernel="decode", head_dim=256),
    Case(capability=90, kernel="layer"),
    *(Case(capability=90, kernel=kernel, early=True) for kernel in ("prefill", "decode", "layer")),
    *(Case(capability=90, kernel="product", product=product, early=True) for product in MODELS["llama-3-8b"][1:3]),
    *(
        Case(capability=90, kernel="decode", head_dim=each["head_dim"], tiling=DecodeTiling(**each["tiling"]))
        for each in json.loads(TABLE.read_text())["NVIDIA H200"]
        if each["kernel"] == "decode"
    ),
    Case(capability=90, kernel="sampler"),
    *(Case(capability=90, kernel="product", product=product) for product in MODELS["llama-3-8b"][:4]),
]
"""The largest, and each that is compiled in another way; what takes longest comes first."""

_REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d+) : i32.*?\n(.*?)\}\) : \(tensor<([\dx]+)x\w+', re.DOTALL)
"""A reduction in Triton's language for GPUs: its axis, what it does with two elements, and the shape that it takes."""


def sums_in(text: str) -> dict[str, Any]:
    """What a kernel in Triton's language for GPUs adds up: its additions of floats, and for each reduction what it does
    with two elements, and how many it makes one."""
    reductions = []
    for axis, body, shape in _REDUCTION.findall(text):
        [operation] = re.findall(r"= arith\.(\w+)", body)
        reductions.append([operation, int(shape.split("x")[int(axis)])])
    return {"has_bf16": "xbf16" in text, "num_addf": text.count("arith.addf"), "reductions": reductions}


def digest(files: Sequence[str], root: Path = ROOT) -> str:
    """A digest of what the compiler is given, and of which compiler it is. A file that is missing counts as empty."""
    versions = (triton.__version__, torch.__version__.partition("+")[0], *sys.version_info[:2])
    told = hashlib.sha256(repr(versions).encode())
    for name in files:
        content = (root / name).read_bytes() if (root / name).exists() else b""
        told.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return told.hexdigest()


def files() -> list[str]:
    """The repository's files that this process has imported, and the table of tilings, which they read."""
    paths = {Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    found = {path for path in paths if path.is_relative_to(ROOT) and "site-packages" not in path.parts}
    return sorted(str(path.relative_to(ROOT)) for path in found | {TABLE})


def figures_of(case: Case) -> list[dict[str, Any]]:
    """Each kernel of a case, in a process that only compiles."""
    binaries = compiled._binaries(case)
    return [
        {**asdict(case), "invariant": case.kernel == "invariant", **asdict(binary), **sums_in(kernel.asm["ttgir"])}
        for binary, kernel in zip(binaries, compiled._compiled, strict=True)
    ]


def record() -> dict[str, Any]:
    """Compile every case afresh. The digest is that of the files at the begin: if one changes meanwhile, the record
    does not hold."""
    before = digest(files())
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # of the processes that compile
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), spawn, initializer=compiled._compile_only) as pool:
            cases = dict.fromkeys([*INVARIANT, *CASES])  # the table has some tilings several times
            figures = [each for of_case in pool.map(figures_of, cases) for each in of_case]
            imported = pool.submit(files).result()
    return {"digest": before, "files": imported, "binaries": figures}


def main() -> None:
    """Entry point."""
    assert not tiles.INTERPRETED, "unset TRITON_INTERPRET"
    made = record()
    rows = ",\n".join(f"    {json.dumps(each)}" for each in made.pop("binaries"))
    Path(sys.argv[1]).write_text(f'{json.dumps(made, indent=2)[:-2]},\n  "binaries": [\n{rows}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
