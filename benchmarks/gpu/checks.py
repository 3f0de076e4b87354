"""Attention at shapes of real models against float64, in caches of more than 2^31 elements.

Decode attention is replayed from a graph, once with a grid for the batch's contexts and once with a grid for the
longest possible context. Each case is computed twice over a poisoned output; the two outputs must be equal bit by bit.
Cache elements that no sequence has written are NaN.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.child import attempts
from benchmarks.gpu.timing import captured
from benchmarks.record import ROOT
from common.contract.kv_layout import KVLayout
from common.engine.kernels.decode_attention import decode_attention
from common.engine.kernels.prefill_attention import prefill_attention
from common.engine.kernels.query_runs import longest_run, query_runs, query_tiles
from common.engine.kernels.tuning import Tuning
from common.engine.kv_cache import KVCache

LONGEST = 65536
BEYOND = 2**31
"""Least number of elements of a cache: a 32-bit offset does not reach the last one."""
NAN = float("nan")
_INTERPRETED_PROCESSORS = 8
"""Number of multiprocessors to assume without a GPU, so that contexts are split as on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A ragged batch of one layer."""

    lens: tuple[int, ...]
    """Tokens of each sequence."""
    queries: tuple[int, ...] = ()
    """Number of last tokens of each sequence whose attention is computed; empty for a decode batch."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    window: int | None = None
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        lens = ",".join(map(str, self.lens[:4])) + (f",.. ({len(self.lens)})" if len(self.lens) > 4 else "")
        queries = f" chunks {','.join(map(str, self.queries))}" if self.queries else ""
        window = f" window {self.window}" if self.window else ""
        kind = f"{self.heads}/{self.kv_heads}/{self.head_dim} b{self.block_size} {self.dtype}{window}"
        return f"{kind}: {lens}{queries}"


DECODE = (
    Shape(lens=(1,)),
    Shape(lens=(64, 65)),
    Shape(lens=(16384,)),
    Shape(lens=(32768, 1, 63, 0, 1000, 4096)),
    Shape(lens=(2048,) * 64),
    Shape(lens=(512,) * 256),
    Shape(lens=(5000, 300), head_dim=64),
    Shape(lens=(3000, 17, 1), heads=14, kv_heads=2, head_dim=64),
    Shape(lens=(8192, 4096, 100), window=4096),
    Shape(lens=(4000, 31), heads=16, head_dim=256),
    Shape(lens=(2500, 64), kv_heads=32, head_dim=96),
    Shape(lens=(2500, 64), kv_heads=32, head_dim=80),
    Shape(lens=(1000, 129, 16), block_size=16),
    Shape(lens=(1000, 129, 16), dtype="float16"),
    Shape(lens=(1000, 129, 16), dtype="float32"),
)
PREFILL = (
    Shape(lens=(2048,), queries=(2048,)),
    Shape(lens=(8192,), queries=(2048,)),
    Shape(lens=(4000, 300, 1, 129), queries=(500, 300, 1, 1)),
    Shape(lens=(32768,), queries=(33,)),
    Shape(lens=(20000, 100), queries=(70, 60), window=4096),
    Shape(lens=(2048, 700), queries=(1024, 77), head_dim=64),
    Shape(lens=(1500, 9), queries=(1000, 9), heads=14, kv_heads=2, head_dim=64),
    Shape(lens=(6000, 100), queries=(1000, 100), window=4096),
    Shape(lens=(2000, 100), queries=(700, 100), heads=16, head_dim=256),
    Shape(lens=(1000, 100), queries=(700, 100), kv_heads=32, head_dim=96),
    Shape(lens=(1000, 100), queries=(700, 100), block_size=16),
    Shape(lens=(1000, 100), queries=(700, 100), dtype="float32"),
)
_FEW = (Shape(lens=(70, 5), heads=8, kv_heads=2), Shape(lens=(70, 5), queries=(20, 5), heads=8, kv_heads=2))


def decode() -> Iterator[dict[str, Any]]:
    """A row for each shape of `DECODE`. Raises `RuntimeError` at the end if one failed."""
    return _checked(DECODE, BEYOND)


def prefill() -> Iterator[dict[str, Any]]:
    """A row for each shape of `PREFILL`. Raises `RuntimeError` at the end if one failed."""
    return _checked(PREFILL, BEYOND)


def tiny() -> Iterator[dict[str, Any]]:
    """Two shapes in small caches, for tools that slow the kernels down."""
    return _checked(_FEW, 0)


def _checked(shapes: tuple[Shape, ...], least_elements: int) -> Iterator[dict[str, Any]]:
    device = torch.device("cuda")
    return attempts((str(shape), partial(check, shape, device, least_elements)) for shape in shapes)


def check(shape: Shape, device: torch.device, least_elements: int) -> dict[str, Any]:
    """The row of a shape. Raises `AssertionError` if an output is wrong or differs between the two runs."""
    reference = _reference()
    batch = Batch(shape, device, least_elements)
    expected = batch.expected(reference.attention)
    tolerance = reference.TOLERANCE[batch.q.dtype]
    kind = "prefill" if shape.queries else "decode"
    row: dict[str, Any] = {
        "kind": kind,
        "case": str(shape),
        "shape": asdict(shape),
        "elements": batch.num_elements,
        "tolerance": tolerance,
    }
    for longest in (max(1, *shape.lens), LONGEST) if kind == "decode" else (0,):
        call = batch.decode(longest) if kind == "decode" else batch.prefill()
        first, second = outputs(call, batch.out)
        error = reference.error(first, expected)
        row[f"error_{longest}" if longest else "error"] = error
        assert error < tolerance, f"off by {error:.2e} of {tolerance:.0e}, in a grid for {longest}: {shape}"
        assert torch.equal(first, second), f"not the same twice, in a grid for {longest}: {shape}"
    return row


def outputs(call: Callable[[], object], out: torch.Tensor) -> list[torch.Tensor]:
    """Two outputs of `call`, which writes into `out`. On a GPU, `call` is captured in a graph that is replayed."""
    replay = captured([call]).replay if out.is_cuda else call
    made = []
    for _ in range(2):
        out.fill_(NAN)
        replay()
        made.append(out.clone())
    return made


class Batch:
    """A shape's queries and its cache. The sequences' blocks are spread from the first to the last block."""

    def __init__(self, shape: Shape, device: torch.device, least_elements: int) -> None:
        torch.manual_seed(sum(shape.lens))
        self.shape = shape
        layout = KVLayout(
            num_layers=2, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, block_size=shape.block_size,
            dtype=shape.dtype,
        )  # fmt: skip
        counts = [max(1, layout.blocks_for(length)) for length in shape.lens]
        least = least_elements // (layout.num_layers * 2 * shape.kv_heads * shape.block_size * shape.head_dim)
        cache = KVCache(layout, max(least, sum(counts)) + 2, device)
        cache.blocks.fill_(NAN)
        self.kv_layer, self.num_elements = cache.layer(1), cache.blocks.numel()
        spread = torch.linspace(0, cache.num_blocks - 1, sum(counts), dtype=torch.float64).long()
        spread[-1] = cache.num_blocks - 1
        blocks = spread[torch.randperm(len(spread))].tolist()
        ends = list(itertools.accumulate(counts))
        self.tables = [blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
        for table, length in zip(self.tables, shape.lens, strict=True):
            for index, block in enumerate(table):
                cache.blocks[block].normal_()
                # As in the engine, slots after the last token of a block in use are zero.
                cache.blocks[block][..., max(0, length - index * shape.block_size) :, :] = 0
        width = max(counts)
        padded = [table + [2**20] * (width - len(table)) for table in self.tables]  # no such block exists
        self.tables_BM = torch.tensor(padded, device=device)
        self.lens_B = torch.tensor(shape.lens, device=device)
        self.queries = shape.queries or (1,) * len(shape.lens)
        self.q = torch.randn(
            sum(self.queries), shape.heads, shape.head_dim, dtype=self.kv_layer.dtype, device=device
        )  # fmt: skip
        self.out = torch.empty_like(self.q)
        self.scale = shape.head_dim**-0.5
        self._num_processors = (
            torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else _INTERPRETED_PROCESSORS
        )
        self._tuning = Tuning.of(device) if device.type == "cuda" else Tuning("", 0)
        self._known = {
            "head_dim": shape.head_dim, "itemsize": self.q.itemsize, "block_size": shape.block_size,
            "group": shape.heads // shape.kv_heads,
        }  # fmt: skip

    def expected(self, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The reference's output, over a small copy of the blocks in use."""
        numbers = itertools.count()
        compact = torch.stack([self.kv_layer[block] for table in self.tables for block in table])
        tables = [[next(numbers) for _ in table] for table in self.tables]
        return attention(self.q, compact, tables, self.queries, self.shape.lens, self.shape.window, self.scale)

    def decode(self, max_seq_len: int) -> Callable[[], object]:
        """A call of decode attention with a grid for contexts of up to `max_seq_len` tokens."""
        num_rows = len(self.queries) * self.shape.kv_heads
        tiling = self._tuning.decode(**self._known, num_rows=num_rows, max_seq_len=max_seq_len)
        if not self.q.is_cuda:
            tiling = replace(tiling, tile=16, least_tiles=1)

        def call() -> None:
            runs = tiling.runs(
                self.lens_B, window=self.shape.window, max_seq_len=max_seq_len, num_kv_heads=self.shape.kv_heads,
                num_processors=self._num_processors,
            )  # fmt: skip
            decode_attention(
                self.q, self.kv_layer, self.tables_BM, self.lens_B, runs,
                window=self.shape.window, scale=self.scale, tiling=tiling, out_BHD=self.out,
            )  # fmt: skip

        return call

    def prefill(self) -> Callable[[], object]:
        """A call of prefill attention."""
        tiling, device = self._tuning.prefill(**self._known), self.q.device
        starts = torch.tensor([0, *itertools.accumulate(self.queries)], device=device)
        num_tokens = tiling.num_tokens(self._known["group"])
        tiles = query_tiles(self.queries, self.shape.lens, num_tokens, tiling.tile, self.shape.window)
        num_programs = self._num_processors * tiling.programs
        longest = longest_run(tiles, self.shape.kv_heads, num_programs, tiling.least_tiles)
        runs = query_runs(tiles, longest if self.q.is_cuda else 1)
        runs_R5, splits_S4 = (torch.tensor(each, dtype=torch.int32, device=device) for each in (runs.runs, runs.splits))
        return lambda: prefill_attention(
            self.q, self.kv_layer, self.tables_BM, starts, self.lens_B, runs_R5, splits_S4,
            num_places=runs.num_places, window=self.shape.window, scale=self.scale, tiling=tiling, out_THD=self.out,
        )  # fmt: skip


def _reference() -> Any:
    """The module with the reference implementation that the kernels' tests use."""
    spec = importlib.util.spec_from_file_location("kernels_reference", ROOT / "tests" / "kernels" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
