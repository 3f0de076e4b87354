"""Make `common/engine/kernels/tuning.json`: of the tilings that are worth a try, the fastest for each shape."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.compiled import Case, compile_all
from benchmarks.gpu.timing import graph_us, num_copies
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.tuning import TABLE

_SHAPES = ((1, 1024), (1, 16384), (8, 1024), (8, 16384), (32, 4096), (64, 8192), (256, 1024))
_BLOCK_SIZES = (16, 64)
_PROGRAMS = (1.0, 4.0)
"""Of decode attention, for each multiprocessor: tried with the tilings that were best with the default."""
_NUM_BEST = 4
_MOST_STACK_BYTES = 128
"""Of a thread: a kernel that keeps more of what it uses in memory is not worth a try."""

_Tiling = TypeVar("_Tiling", DecodeTiling, PrefillTiling)


def run() -> dict[str, Any]:
    """This GPU's entries; writes them into the table."""
    entries = []
    for block_size in _BLOCK_SIZES:
        decode_tilings = compiled("decode", block_size, decode_candidates())
        prefill_tilings = compiled("prefill", block_size, prefill_candidates())
        entries += [best_decode(*shape, block_size, decode_tilings) for shape in _SHAPES]
        entries.append(best_prefill(block_size, prefill_tilings))
    table = json.loads(TABLE.read_text())
    table[torch.cuda.get_device_name()] = entries
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    return {"entries": entries}


def decode_candidates() -> list[DecodeTiling]:
    """Worth a try."""
    return [
        DecodeTiling(tile=tile, num_warps=warps, num_stages=stages)
        for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7))
    ]


def prefill_candidates() -> list[PrefillTiling]:
    """Worth a try."""
    return [
        PrefillTiling(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
        for rows, tile, stages in itertools.product((64, 128, 256), (32, 64, 128), (2, 3, 5))
        for warps in (4, 8)
    ]


def compiled(kernel: str, block_size: int, tilings: Sequence[_Tiling]) -> list[_Tiling]:
    """Those of which a multiprocessor has room for a program, and which keep most of what they use in registers.

    Compiles them on every core, which is what tuning takes longest for.
    """
    major, minor = torch.cuda.get_device_capability()
    cases = [
        Case(
            capability=10 * major + minor, kernel=kernel, head_dim=kernels.HEAD_DIM, block_size=block_size,
            group=kernels.HEADS // kernels.KV_HEADS, tiling=tiling,
        )
        for tiling in tilings
    ]  # fmt: skip
    compared = zip(cases, compile_all(cases), strict=True)
    unfit = [
        case.tiling
        for case, binaries in compared
        if any(each.programs == 0 or each.stack_bytes > _MOST_STACK_BYTES for each in binaries)
    ]
    return [each for each in tilings if each not in unfit]


def best_decode(batch: int, length: int, block_size: int, tilings: Sequence[DecodeTiling]) -> dict[str, Any]:
    """The fastest tiling, and how often it splits a context."""
    num_bytes = batch * length * 2 * kernels.KV_HEADS * kernels.HEAD_DIM * 2
    scene = kernels.Scene(batch, length, 1, num_copies(num_bytes, most=16), block_size)

    def timed(tilings: Sequence[DecodeTiling]) -> list[tuple[float, DecodeTiling]]:
        taken = [(graph_us(kernels.decode_calls(scene, each, length)), each) for each in tilings]
        return sorted(taken, key=lambda each: each[0])

    first = timed(tilings)
    best = [tiling for _, tiling in first[:_NUM_BEST]]
    more = timed([replace(tiling, programs_per_processor=programs) for tiling in best for programs in _PROGRAMS])
    taken, tiling = min(first[0], more[0], key=lambda each: each[0])
    print(f"decode {batch:4} x {length:6}, blocks of {block_size}: {taken:8.1f} us with {tiling}", flush=True)
    shape = {
        "group": kernels.HEADS // kernels.KV_HEADS,
        "num_rows": batch * kernels.KV_HEADS,
        "max_seq_len": length,
        "block_size": block_size,
    }
    return entry("decode", shape, asdict(tiling))


def best_prefill(block_size: int, tilings: Sequence[PrefillTiling], context: int = 16384) -> dict[str, Any]:
    """The fastest tiling for a chunk at the end of a context."""
    scene = kernels.Scene(1, context, kernels.PREFILL_CHUNK, 1, block_size)
    timed = [(graph_us([kernels.prefill_call(scene, tiling)]), tiling) for tiling in tilings]
    taken, tiling = min(timed, key=lambda each: each[0])
    print(f"prefill of {context}, blocks of {block_size}: {taken:8.1f} us with {tiling}", flush=True)
    return entry("prefill", {"group": kernels.HEADS // kernels.KV_HEADS, "block_size": block_size}, asdict(tiling))


def entry(kernel: str, shape: dict[str, int], tiling: dict[str, Any]) -> dict[str, Any]:
    """Of the table."""
    return {"kernel": kernel, "head_dim": kernels.HEAD_DIM, "itemsize": 2, "shape": shape, "tiling": tiling}
