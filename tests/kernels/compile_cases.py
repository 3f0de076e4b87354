"""Compile the kernels for GPUs that are not here; prints what came of it as JSON. Not in Triton's interpreter.

What the compiler made of the cases stays in the given folder, that of the batch-invariant ones in one of its own.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.compiled import Case, compile_all
from benchmarks.gpu.products import MODELS
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.tuning import TABLE

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

if __name__ == "__main__":
    figures = []
    for name, cases in {"invariant": INVARIANT, "others": CASES}.items():
        os.environ["TRITON_CACHE_DIR"] = str(Path(sys.argv[1], name))  # of the processes that compile
        for case, binaries in zip(cases, compile_all(cases), strict=True):
            figures += [{**asdict(case), **asdict(binary)} for binary in binaries]
    print(json.dumps(figures))
