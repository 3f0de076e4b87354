"""Which tiling a kernel is compiled with: a table made by measurement, for each GPU and shape, and defaults.

`tuning.json` maps a GPU's name to entries; an entry has the kernel, the shape that it was measured for and the tiling.
A shape that is not in the table takes the nearest one that is, of the same head dimension and type; a GPU that is not
in it has defaults.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.tiles import padded

TABLE = Path(__file__).with_name("tuning.json")


class Tuning:
    """The entries of one GPU."""

    def __init__(self, gpu: str, table: dict[str, Any] | None = None) -> None:
        """`gpu` as `torch.cuda.get_device_name` gives it."""
        self._entries = (_table() if table is None else table).get(gpu, [])

    def decode(
        self, *, head_dim: int, itemsize: int, block_size: int, group: int, num_rows: int, max_seq_len: int
    ) -> DecodeTiling:
        """For sequences times KV heads (`num_rows`) that are up to `max_seq_len` long; elements of `itemsize` bytes."""
        shape = {"group": group, "num_rows": num_rows, "max_seq_len": max_seq_len, "block_size": block_size}
        tuned = self._nearest("decode", head_dim, itemsize, shape)
        # Tiles of keys and values, as many as there are stages, must fit into a multiprocessor's 227 KiB.
        size = padded(head_dim) * itemsize
        default = {"num_stages": 5 if size <= 256 else 3, "tile": 64 if size <= 512 else 32}
        return DecodeTiling(**(tuned or default))

    def prefill(self, *, head_dim: int, itemsize: int, block_size: int, group: int) -> PrefillTiling:
        """For any chunks."""
        tuned = self._nearest("prefill", head_dim, itemsize, {"group": group, "block_size": block_size})
        default = {} if padded(head_dim) * itemsize <= 512 else {"rows": 64, "tile": 32}
        return PrefillTiling(**(tuned or default))

    def _nearest(self, kernel: str, head_dim: int, itemsize: int, shape: dict[str, int]) -> dict[str, Any]:
        """The tiling of the entry whose shape is nearest, by ratios; empty without any."""
        wanted = (kernel, head_dim, itemsize)
        entries = [each for each in self._entries if (each["kernel"], each["head_dim"], each["itemsize"]) == wanted]

        def distance(entry: dict[str, Any]) -> float:
            return sum(abs(math.log2(max(1, size) / max(1, entry["shape"][name]))) for name, size in shape.items())

        return dict(min(entries, key=distance)["tiling"]) if entries else {}


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table
