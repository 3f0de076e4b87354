"""The tiling with which a kernel is compiled: from a table of measurements for each GPU and shape, or a default.

`tuning.json` maps a GPU's name to entries; an entry has the kernel, the shape that it was measured for and the tiling.
A shape that is not in the table takes the nearest one that is, of the same head dimension and type. Shapes that were
not measured on a GPU are those of a GPU of its compute capability (`MEASURED`). Without any there are defaults, which
fit into the registers and the shared memory of every GPU from compute capability 8.0 on.
Products of few rows are otherwise: a weight that is not in the table, or for which torch was quicker, is torch's.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tiles import MOST_ROWS, padded

Kind = Literal["plain", "gate", "onto"]
"""What goes with a product of few rows: nothing, gates after it, or an addition after it."""
KINDS: tuple[Kind, ...] = get_args(Kind)
TABLE = Path(__file__).with_name("tuning.json")
INVARIANT_RUN = 2048
"""Keys of a run of attention whose results do not depend on the batch."""
MEASURED = {(9, 0): "NVIDIA H200"}
"""Compute capability → a GPU of it that is in the table."""
_WEIGHTS = {"max_seq_len": 0.25}
"""How much a ratio of shapes counts, where not 1. A captured graph has the longest context that there may be, whatever
the contexts are, and so says little of it."""


class Tuning:
    """The tilings for one GPU."""

    def __init__(
        self,
        gpu: str,
        shared_bytes: int,
        table: dict[str, Any] | None = None,
        *,
        like: str | None = None,
        copy_engine: bool = False,
    ) -> None:
        """`gpu` is the name that `torch.cuda.get_device_name` gives, `like` that of a GPU whose entries count where it
        has none; `shared_bytes` is the shared memory of a multiprocessor; `copy_engine` is whether to use the one for
        tiles (TMA), which was measured on Hopper GPUs."""
        self._shared_bytes, self._copy_engine = shared_bytes, copy_engine
        table = _table() if table is None else table
        entries = list(table.get(gpu, []))
        own = {measured_for(each) for each in entries}
        entries += [each for each in table.get(like or gpu, []) if measured_for(each) not in own]
        self._entries = [each for each in entries if each["kernel"] not in KINDS]
        self._skinny: dict[tuple[Any, ...], SkinnyTiling | None] = {}
        """By kind, bytes of an element and shape; None where torch is quicker."""
        for each in entries:
            if each["kernel"] in KINDS:
                shape, tiling = each["shape"], each["tiling"]
                key = (each["kernel"], each["itemsize"], shape["outputs"], shape["inputs"], shape["rows"])
                self._skinny[key] = SkinnyTiling(**tiling) if tiling else None

    @classmethod
    def of(cls, device: torch.device) -> Tuning:
        """The tilings for the GPU `device`."""
        gpu = torch.cuda.get_device_properties(device)
        like = MEASURED.get((gpu.major, gpu.minor))
        return cls(gpu.name, gpu.shared_memory_per_multiprocessor, like=like, copy_engine=gpu.major == 9)

    def decode(
        self, *, head_dim: int, itemsize: int, block_size: int, group: int, num_rows: int, max_seq_len: int
    ) -> DecodeTiling:
        """The tiling of decode attention for `num_rows` (sequences times KV heads) of at most `max_seq_len` tokens.
        Elements have `itemsize` bytes."""
        shape = {"group": group, "num_rows": num_rows, "max_seq_len": max_seq_len, "block_size": block_size}
        if tuned := self._nearest("decode", head_dim, itemsize, shape):
            return DecodeTiling(**tuned)
        size = padded(head_dim)
        return DecodeTiling(num_stages=5 if size * itemsize <= 256 else 3, tile=64 if itemsize == 2 else 4096 // size)

    def prefill(
        self, *, head_dim: int, itemsize: int, block_size: int, group: int, cache_rows: int = 0
    ) -> PrefillTiling:
        """The tiling of prefill attention, for chunks of any length. `cache_rows` is what `tiles.cache_rows` gives for
        the cache: where there are too many, the copy engine is not used."""
        if tuned := self._nearest("prefill", head_dim, itemsize, {"group": group, "block_size": block_size}):
            tiling = PrefillTiling(**tuned)
            if not tiling.copy_engine or _copied(head_dim, itemsize, block_size, tiling.tile, cache_rows):
                return tiling
        return self._default_prefill(head_dim, itemsize, block_size, cache_rows)

    def invariant(
        self, *, head_dim: int, itemsize: int, block_size: int, cache_rows: int = 0, run: int = INVARIANT_RUN
    ) -> tuple[DecodeTiling, PrefillTiling]:
        """The tilings for decode tokens and for chunks with which a row has the same bits in both, whatever the batch:
        with one tile of keys, and runs of `run` keys, which also set the order of sums in a tile. The table has none of
        these. `cache_rows` as for `prefill`."""
        prefill = self._default_prefill(head_dim, itemsize, block_size, cache_rows)
        assert run % prefill.tile == 0
        run_tiles, num_stages = run // prefill.tile, 5 if padded(head_dim) * itemsize <= 256 else 3
        decode = DecodeTiling(tile=prefill.tile, num_stages=num_stages, run_tiles=run_tiles)
        return decode, replace(prefill, run_tiles=run_tiles)

    def _default_prefill(self, head_dim: int, itemsize: int, block_size: int, cache_rows: int) -> PrefillTiling:
        if itemsize == 4:  # float32: three TF32 products for each one, so more rows do not fit into the registers
            return PrefillTiling(rows=16, tile=32 if padded(head_dim) <= 128 else 16, num_warps=4)
        copied = self._copy_engine and _copied(head_dim, itemsize, block_size, PrefillTiling().tile, cache_rows)
        if padded(head_dim) <= 128 and copied:
            return PrefillTiling(num_warps=4, copy_engine=True, programs=2)
        if padded(head_dim) <= 128:
            return PrefillTiling()
        if self._shared_bytes >= 160 * 2**10:
            return PrefillTiling(tile=32)
        return PrefillTiling(rows=64, tile=32, num_warps=4)

    def skinny(self, kind: Kind, *, rows: int, outputs: int, inputs: int, itemsize: int) -> SkinnyTiling | None:
        """For rows of `inputs` elements of `itemsize` bytes and a weight of `outputs` rows; None for torch.

        What was measured for the next power of two of `rows` counts.
        """
        return self._skinny.get((kind, itemsize, outputs, inputs, 1 << (rows - 1).bit_length()))

    def _nearest(self, kernel: str, head_dim: int, itemsize: int, shape: dict[str, int]) -> dict[str, Any]:
        """The tiling of the entry whose shape is nearest, measured by ratios; empty if there is no entry."""
        wanted = (kernel, head_dim, itemsize)
        entries = [each for each in self._entries if (each["kernel"], each["head_dim"], each["itemsize"]) == wanted]

        def distance(entry: dict[str, Any]) -> float:
            return sum(
                _WEIGHTS.get(name, 1.0) * abs(math.log2(max(1, size) / max(1, entry["shape"][name])))
                for name, size in shape.items()
            )

        return dict(min(entries, key=distance)["tiling"]) if entries else {}


def measured_for(entry: dict[str, Any]) -> tuple[Any, ...]:
    """What an entry of the table is measured for."""
    return entry["kernel"], entry.get("head_dim"), entry["itemsize"], tuple(sorted(entry["shape"].items()))


def _copied(head_dim: int, itemsize: int, block_size: int, tile: int, cache_rows: int) -> bool:
    """Whether a copy engine can load tiles of keys: a tile must lie in one block, a row be of 16-byte units, and each
    row of the cache have a number."""
    return block_size % tile == 0 and head_dim * itemsize % 16 == 0 and cache_rows <= MOST_ROWS


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table
