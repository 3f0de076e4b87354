"""Makes `common/engine/kernels/tuning.json`: the fastest of the candidate tilings for each shape.

The table is written after each shape, to its place in the tree and, as a copy, to the folder of the results unless that
is the one of the tree.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu import kernels, products
from benchmarks.gpu.compiled import Case, compiled
from benchmarks.gpu.kernels import Heads
from benchmarks.gpu.products import Product
from benchmarks.gpu.timing import graph_us, num_copies
from benchmarks.record import RESULTS
from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tuning import TABLE, measured_for

_SHAPES = ((1, 1024), (1, 16384), (8, 1024), (8, 16384), (32, 4096), (64, 8192), (256, 1024))
_BLOCK_SIZE = 64
_CONTEXT = 16384
"""Tokens of context at the end of which prefill attention computes its chunk."""
_SHORT_CHUNK = (512, 8192)
"""(tokens, context) of the chunk that decides for how many programs prefill attention cuts keys."""
_PROGRAMS = (1.0, 4.0)
"""Programs per multiprocessor of decode attention, tried with the tilings that were best with the default."""
_NUM_BEST = 4
_MOST_SPLITS = 16
MOST_STACK_BYTES = 512
"""Most stack bytes of a thread. A kernel that spills more is not measured. Prefill attention of 128 rows by four warps
spills 230 to 360, by Triton's version, and is the fastest: two programs share a multiprocessor, and one multiplies
while the other computes exponents."""
_HEADS = {heads.dim: heads for heads in (kernels.LLAMA_8B, kernels.LLAMA_1B)}

_Tiling = TypeVar("_Tiling", DecodeTiling, PrefillTiling, SkinnyTiling)
_Key = TypeVar("_Key", bound=Hashable)


def attention(out: str) -> Iterator[dict[str, Any]]:
    """For each head dimension, an entry for a chunk at the end of a context, and one for each shape of decode
    attention. Each is written to the table, and to its copy in the folder `out`."""
    candidates: dict[str, list[DecodeTiling] | list[PrefillTiling]] = {
        "prefill": prefill_candidates(_capability()), "decode": decode_candidates()
    }  # fmt: skip
    cases = {
        (kernel, dim): _cases(tilings, kernel=kernel, head_dim=dim, block_size=_BLOCK_SIZE, group=heads.group)
        for dim, heads in _HEADS.items()
        for kernel, tilings in candidates.items()
    }
    for (kernel, dim), tilings in fitting(cases).items():
        heads = _HEADS[dim]
        made = (
            [best_prefill(heads, tilings)]
            if kernel == "prefill"
            else (best_decode(batch, length, heads, tilings) for batch, length in _SHAPES)
        )
        for entry, text in made:
            write(entry, torch.cuda.get_device_name(), TABLE, Path(out))
            yield {"kind": "entry", "entry": entry, "text": text}


def few_rows(out: str) -> Iterator[dict[str, Any]]:
    """An entry for each product and number of rows: a tiling, or none if torch is quicker; as by `attention`."""
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    cases = {
        product: _cases(product_candidates(product, processors), kernel="product", product=product)
        for of_model in products.MODELS.values()
        for product in of_model
    }
    for product, tilings in fitting(cases).items():
        scenes = {rows: products.Scene(product, rows, device) for rows in products.ROWS}

        def us(rows: int, tiling: SkinnyTiling, scenes: dict[int, products.Scene] = scenes) -> float:
            scenes[rows].error(tiling)
            return graph_us(scenes[rows].kernel_calls(tiling))

        torch_us = {rows: graph_us(scene.torch_calls()) for rows, scene in scenes.items()}
        for entry, text in best_product(product, tilings, us, torch_us):
            write(entry, torch.cuda.get_device_name(), TABLE, Path(out))
            yield {"kind": "entry", "entry": entry, "text": text}


def write(entry: dict[str, Any], gpu: str, table_path: Path, out: Path) -> None:
    """Put an entry into the table in place of that for the same kernel and shape, and copy the table to `out`. No copy
    goes to `benchmarks/results/`: what is there is a record, and the tree has the table."""
    table = json.loads(table_path.read_text())
    table[gpu] = [each for each in table.get(gpu, []) if measured_for(each) != measured_for(entry)] + [entry]
    text = json.dumps(table, indent=1) + "\n"
    copies = [] if out.resolve() == RESULTS.resolve() else [out / table_path.name]
    for path in (table_path, *copies):
        half = path.with_suffix(".new")
        half.write_text(text)
        os.replace(half, path)


def decode_candidates() -> list[DecodeTiling]:
    """The candidate tilings of decode attention."""
    return [
        DecodeTiling(tile=tile, num_warps=warps, num_stages=stages)
        for tile, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (3, 5, 7))
        if tile < 128 or warps > 2
    ]


def prefill_candidates(capability: int) -> list[PrefillTiling]:
    """The candidate tilings of prefill attention. On a Hopper GPU most are those of the copy engine, to which few
    others have come near. Elsewhere those are left out that spill at every head dimension: they keep many rows in the
    registers of few threads."""
    if capability != 90:
        return [
            PrefillTiling(rows=rows, tile=tile, num_warps=warps, num_stages=stages)
            for rows, tile, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 5))
            if tile == 32 or (rows < 256 and (rows < 128 or warps == 8))
        ]
    copied = [
        PrefillTiling(rows=rows, tile=tile, num_warps=warps, num_stages=stages, copy_engine=True)
        for rows, tile, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3, 4))
        if rows == 128 or warps == 4
    ]
    return [*copied, PrefillTiling(), PrefillTiling(rows=64, num_warps=4)]


def product_candidates(product: Product, num_processors: int) -> list[SkinnyTiling]:
    """Worth a try: a program for each multiprocessor, or some, by splits where there are few outputs."""
    found = []
    for columns, depth, stages in itertools.product((16, 32, 64), (64, 128, 256), (4,)):
        programs = -(-product.num_columns // columns)
        splits = {min(max(1, round(each * num_processors / programs)), _MOST_SPLITS) for each in (1, 2, 4)}
        found += [SkinnyTiling(columns=columns, depth=depth, num_stages=stages, splits=each) for each in sorted(splits)]
    return found


def _cases(tilings: Sequence[Any], **shape: Any) -> list[Case]:
    return [Case(capability=_capability(), tiling=tiling, **shape) for tiling in tilings]


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def fitting(cases: Mapping[_Key, Sequence[Case]]) -> dict[_Key, list[Any]]:
    """The tilings that can be compiled, of which a multiprocessor has room for a program, and which keep most of what
    they use in registers, by key. Those of prefill attention have the number of programs that a multiprocessor has room
    for. All are compiled at once, on every core, which takes most of the time of tuning."""
    found: dict[_Key, list[Any]] = {key: [] for key in cases}
    all_cases = [(key, case) for key, of_key in cases.items() for case in of_key]
    for (key, case), binaries in zip(all_cases, compiled([case for _, case in all_cases]), strict=True):
        if isinstance(binaries, Exception):
            print(f"{case}: {binaries}", flush=True)
        elif all(each.programs > 0 and each.stack_bytes <= MOST_STACK_BYTES for each in binaries):
            tiling = case.tiling
            if isinstance(tiling, PrefillTiling):
                programs = next(each.programs for each in binaries if each.kernel == "prefill")
                tiling = replace(tiling, programs=programs)
            found[key].append(tiling)
    return found


def timed(tilings: Sequence[_Tiling], us: Callable[[_Tiling], float]) -> list[tuple[float, _Tiling]]:
    """(microseconds, tiling), the fastest first; without those that the device does not run, or not right."""
    taken = []
    for tiling in tilings:
        try:
            taken.append((us(tiling), tiling))
        except Exception as error:  # noqa: BLE001 (Triton's errors are no RuntimeError)
            print(f"{tiling}: {error}", flush=True)
    assert taken, "none runs"
    return sorted(taken, key=lambda each: each[0])


def best_decode(
    batch: int, length: int, heads: Heads, tilings: Sequence[DecodeTiling]
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """The fastest tiling, with its number of programs per multiprocessor, as an entry and as text. The grid is that
    for the longest context, which the engine's graphs have."""
    copies = num_copies(batch * length * heads.token_bytes)
    scene = kernels.Scene(batch, length, 1, copies, block_size=_BLOCK_SIZE, heads=heads)

    def us(tiling: DecodeTiling) -> float:
        return graph_us(kernels.decode_calls(scene, tiling, kernels.LONGEST))

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
    """The fastest tiling for a chunk at the end of a context, as an entry and as text. Keys are cut for all programs
    that a multiprocessor has room for, or for one, as is faster for a short chunk."""

    def us(chunk: int, context: int) -> Callable[[PrefillTiling], float]:
        scene = kernels.Scene(1, context, chunk, 1, block_size=_BLOCK_SIZE, heads=heads)
        return lambda tiling: graph_us([kernels.prefill_call(scene, tiling)])

    taken, fastest = timed(tilings, us(kernels.PREFILL_CHUNK, _CONTEXT))[0]
    _, tiling = timed([fastest, replace(fastest, programs=1)], us(*_SHORT_CHUNK))[0]
    text = f"prefill of {_CONTEXT}, d {heads.dim}: {taken:8.1f} us with {tiling}"
    return entry_of("prefill", heads, {"group": heads.group, "block_size": _BLOCK_SIZE}, tiling), text


def best_product(
    product: Product,
    tilings: Sequence[SkinnyTiling],
    us: Callable[[int, SkinnyTiling], float],
    torch_us: dict[int, float],
) -> Iterator[tuple[dict[str, Any], str]]:
    """For each number of rows the fastest tiling, or none if torch is; as an entry and in words.

    All are tried with the fewest and the most rows, and the best of these with the others.
    """
    least, *between, most = sorted(torch_us)
    first = {rows: timed(tilings, partial(us, rows)) for rows in (least, most)}
    best = list(dict.fromkeys(tiling for found in first.values() for _, tiling in found[:_NUM_BEST]))
    for rows in (least, *between, most):
        taken, tiling = (first[rows] if rows in first else timed(best, partial(us, rows)))[0]
        quicker = taken < torch_us[rows]
        entry = {
            "kernel": product.kind,
            "itemsize": 2,
            "shape": {"rows": rows, "outputs": product.outputs, "inputs": product.inputs},
            "tiling": asdict(tiling) if quicker else None,
        }
        text = f"{product}, {rows:2} rows: {taken:8.1f} us with {tiling}, torch {torch_us[rows]:.1f}"
        yield entry, text


def entry_of(kernel: str, heads: Heads, shape: dict[str, int], tiling: DecodeTiling | PrefillTiling) -> dict[str, Any]:
    """An entry of the table."""
    return {"kernel": kernel, "head_dim": heads.dim, "itemsize": 2, "shape": shape, "tiling": asdict(tiling)}
