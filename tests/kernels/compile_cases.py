"""Compile the kernels for GPUs that are not here; prints what came of it as JSON. Not in Triton's interpreter."""

import json
from dataclasses import asdict

from benchmarks.gpu.compiled import Case, compile_all

CASES = {
    80: [Case(kernel="prefill")],
    90: [
        Case(kernel="decode"),
        Case(kernel="prefill"),
        Case(kernel="decode", block_size=16),
        Case(kernel="prefill", head_dim=256, block_size=16),
        Case(kernel="decode", dtype="float32", head_dim=256),
        Case(kernel="prefill", dtype="float32", head_dim=64),
        Case(kernel="layer"),
        Case(kernel="sampler"),
    ],
    100: [Case(kernel="prefill")],
    120: [Case(kernel="decode", head_dim=256), Case(kernel="prefill", head_dim=256)],
}
"""By compute capability: the largest, and each that is compiled in another way."""

if __name__ == "__main__":
    print(
        json.dumps(
            [
                {"capability": capability, **asdict(case), **asdict(binary)}
                for capability, cases in CASES.items()
                for case, binaries in zip(cases, compile_all(cases, capability), strict=True)
                for binary in binaries
            ]
        )
    )
