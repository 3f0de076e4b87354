"""Makes `common/engine/kernels/tuning.json`: the fastest of the candidate tilings for each shape.

The table is written after each shape, to its place in the tree and to the folder of the results.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu import kernels
from benchmarks.gpu.compiled import Case, compile_all
from benchmarks.gpu.kernels import Heads
from benchmarks.gpu.timing import graph_us, num_copies
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.tuning import TABLE

_SHAPES = ((1, 1024), (1, 16384), (8, 1024), (8, 16384), (32, 4096), (64, 8192), (256, 1024))
_BLOCK_SIZE = 64
_CONTEXT = 16384
"""Tokens of context at the end of which prefill attention computes its chunk."""
_PROGRAMS = (1.0, 4.0)
"""Programs per multiprocessor of decode attention, tried with the tilings that were best with the default."""
_NUM_BEST = 4
_MOST_STACK_BYTES = 128
"""Most stack bytes of a thread. A kernel that spills more is not measured."""
_HEADS = {heads.dim: heads for heads in (kernels.LLAMA_8B, kernels.LLAMA_1B)}

_Tiling = TypeVar("_Tiling", DecodeTiling, PrefillTiling)


def decode(head_dim: int, out: str) -> Iterator[dict[str, Any]]:
    """An entry for each shape. Each is written to the table, and to its copy in the folder `out`."""
    heads = _HEADS[head_dim]
    tilings = fitting("decode", heads, decode_candidates())
    for batch, length in _SHAPES:
        entry, text = best_decode(batch, length, heads, tilings)
        write(entry, torch.cuda.get_device_name(), TABLE, Path(out))
        yield {"kind": "entry", "entry": entry, "text": text}


def prefill(head_dim: int, out: str) -> Iterator[dict[str, Any]]:
    """An entry for a chunk at the end of a context, written as in `decode`."""
    heads = _HEADS[head_dim]
    entry, text = best_prefill(heads, fitting("prefill", heads, prefill_candidates()))
    write(entry, torch.cuda.get_device_name(), TABLE, Path(out))
    yield {"kind": "entry", "entry": entry, "text": text}


def write(entry: dict[str, Any], gpu: str, table_path: Path, out: Path) -> None:
    """Put an entry into the table in place of that for the same kernel and shape, and copy the table to `out`."""
    table = json.loads(table_path.read_text())
    table[gpu] = [each for each in table.get(gpu, []) if _key(each) != _key(entry)] + [entry]
    text = json.dumps(table, indent=1) + "\n"
    for path in (table_path, out / table_path.name):
        half = path.with_suffix(".new")
        half.write_text(text)
        os.replace(half, path)


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["kernel"], entry["head_dim"], entry["itemsize"], tuple(sorted(entry["shape"].items()))


def decode_candidates() -> list[DecodeTiling]:
    """The candidate tilings of decode attention."""
    return [
        DecodeTiling(tile=tile, num_warps=warps, num_stages=stages)
        for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7))
    ]


def prefill_candidates() -> list[PrefillTiling]:
    """The candidate tilings of prefill attention, without those that spill at every head dimension: they keep many rows
    in the registers of few threads."""
    return [
        PrefillTiling(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
        for rows, tile, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 5))
        if tile == 32 or (rows < 256 and (rows < 128 or warps == 8))
    ]


def fitting(kernel: str, heads: Heads, tilings: Sequence[_Tiling]) -> list[_Tiling]:
    """The tilings of which a multiprocessor has room for a program, and which spill little.

    It compiles them on every core, which takes most of the time of tuning.
    """
    major, minor = torch.cuda.get_device_capability()
    cases = [
        Case(
            capability=10 * major + minor, kernel=kernel, head_dim=heads.dim, block_size=_BLOCK_SIZE,
            group=heads.group, tiling=tiling,
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


def timed(tilings: Sequence[_Tiling], us: Callable[[_Tiling], float]) -> list[tuple[float, _Tiling]]:
    """(microseconds, tiling) of each tiling, the fastest first, without tilings that the device cannot run."""
    taken = []
    for tiling in tilings:
        try:
            taken.append((us(tiling), tiling))
        except RuntimeError as error:
            print(f"{tiling}: {error}", flush=True)
    assert taken, "none runs"
    return sorted(taken, key=lambda each: each[0])


def best_decode(
    batch: int, length: int, heads: Heads, tilings: Sequence[DecodeTiling]
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The fastest tiling, with its number of programs per multiprocessor, as an entry and as text."""
    copies = num_copies(batch * length * heads.token_bytes, most=16)
    scene = kernels.Scene(batch, length, 1, copies, block_size=_BLOCK_SIZE, heads=heads)

    def us(tiling: DecodeTiling) -> float:
        return graph_us(kernels.decode_calls(scene, tiling, length))

    first = timed(tilings, us)
    best = [tiling for _, tiling in first[:_NUM_BEST]]
    more = timed([replace(tiling, programs_per_processor=programs) for tiling in best for programs in _PROGRAMS], us)
    taken, tiling = min(first[0], more[0], key=lambda each: each[0])
    shape = {
        "group": heads.group, "num_rows": batch * heads.kv, "max_seq_len": length, "block_size": _BLOCK_SIZE
    }  # fmt: skip
    text = f"decode {batch:4} x {length:6}, d {heads.dim}: {taken:8.1f} us with {tiling}"
    return entry_of("decode", heads, shape, tiling), text


def best_prefill(heads: Heads, tilings: Sequence[PrefillTiling]) -> tuple[dict[str, Any], str]:
    """The fastest tiling for a chunk at the end of a context, as an entry and as text."""
    scene = kernels.Scene(1, _CONTEXT, kernels.PREFILL_CHUNK, 1, block_size=_BLOCK_SIZE, heads=heads)
    taken, tiling = timed(tilings, lambda tiling: graph_us([kernels.prefill_call(scene, tiling)]))[0]
    text = f"prefill of {_CONTEXT}, d {heads.dim}: {taken:8.1f} us with {tiling}"
    return entry_of("prefill", heads, {"group": heads.group, "block_size": _BLOCK_SIZE}, tiling), text


def entry_of(kernel: str, heads: Heads, shape: dict[str, int], tiling: DecodeTiling | PrefillTiling) -> dict[str, Any]:
    """An entry of the table."""
    return {"kernel": kernel, "head_dim": heads.dim, "itemsize": 2, "shape": shape, "tiling": asdict(tiling)}
