"""Make `common/engine/kernels/tuning.json`: of the tilings that are worth a try, the fastest for each shape."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import kernels
from benchmarks.gpu.timing import graph_us, num_copies
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.tuning import TABLE

_SHAPES = ((1, 1024), (1, 16384), (8, 1024), (8, 16384), (32, 4096), (64, 8192), (256, 1024))
_BLOCK_SIZES = (16, 64)


def run() -> dict[str, Any]:
    """This GPU's entries; writes them into the table."""
    entries = [best_decode(*shape, block_size) for block_size in _BLOCK_SIZES for shape in _SHAPES]
    entries += [best_prefill(block_size) for block_size in _BLOCK_SIZES]
    table = json.loads(TABLE.read_text())
    table[torch.cuda.get_device_name()] = entries
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return {"entries": entries}


def best_decode(batch: int, length: int, block_size: int) -> dict[str, Any]:
    """Over tiles, warps, stages, and how often a context is split."""
    num_bytes = batch * length * 2 * kernels.KV_HEADS * kernels.HEAD_DIM * 2
    scene = kernels.Scene(batch, length, 1, num_copies(num_bytes, most=16), block_size)
    timed = []
    for tile, warps, stages, programs in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7), (1.0, 2.0, 4.0)):
        tiling = DecodeTiling(tile=tile, num_warps=warps, num_stages=stages, programs_per_processor=programs)
        try:
            timed.append((graph_us(kernels.decode_calls(scene, tiling, length)), tiling))
        except OutOfResources:
            continue
    taken, tiling = min(timed, key=lambda each: each[0])
    print(f"decode {batch:4} x {length:6}, blocks of {block_size}: {taken:8.1f} us with {tiling}", flush=True)
    shape = {
        "group": kernels.HEADS // kernels.KV_HEADS,
        "num_rows": batch * kernels.KV_HEADS,
        "max_seq_len": length,
        "block_size": block_size,
    }
    return entry("decode", shape, asdict(tiling))


def entry(kernel: str, shape: dict[str, int], tiling: dict[str, Any]) -> dict[str, Any]:
    """Of the table."""
    return {"kernel": kernel, "head_dim": kernels.HEAD_DIM, "itemsize": 2, "shape": shape, "tiling": tiling}


def best_prefill(block_size: int, context: int = 16384) -> dict[str, Any]:
    """Over rows, tiles, warps and stages, for a chunk at the end of a context."""
    scene = kernels.Scene(1, context, kernels.PREFILL_CHUNK, 1, block_size)
    timed = []
    for rows, tile, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 5)):
        tiling = PrefillTiling(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
        try:
            timed.append((graph_us([kernels.prefill_call(scene, tiling)]), tiling))
        except OutOfResources:
            continue
    taken, tiling = min(timed, key=lambda each: each[0])
    print(f"prefill of {context}, blocks of {block_size}: {taken:8.1f} us with {tiling}", flush=True)
    return entry("prefill", {"group": kernels.HEADS // kernels.KV_HEADS, "block_size": block_size}, asdict(tiling))
