"""Which tiling a kernel has: that of the nearest shape that was measured, else one that fits."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from common.engine.kernels.decode_attention import DecodeTiling
from common.engine.kernels.prefill_attention import PrefillTiling
from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tiles import num_tiles, padded
from common.engine.kernels.tuning import MEASURED, Tuning
from common.engine.kernels.tuning import TABLE as COMMITTED

SHORT, LONG = DecodeTiling(tile=32, num_warps=2), DecodeTiling(tile=128, programs_per_processor=4.0)
MANY = DecodeTiling(tile=64, num_warps=8)
ROOMY, SMALL = 228 * 2**10, 100 * 2**10


def entry(tiling: DecodeTiling, **shape: int) -> dict[str, Any]:
    """Of a table."""
    fields = {name: getattr(tiling, name) for name in tiling.__slots__}
    return {"kernel": "decode", "head_dim": 128, "itemsize": 2, "shape": shape, "tiling": fields}


TABLE = {
    "A": [
        entry(SHORT, group=4, num_rows=8, max_seq_len=1024, block_size=64),
        entry(LONG, group=4, num_rows=8, max_seq_len=32768, block_size=64),
    ]
}


def decode_of(tuning: Tuning, *, head_dim: int = 128, itemsize: int = 2, max_seq_len: int = 1024) -> DecodeTiling:
    """For a shape of the table but for what is given."""
    return tuning.decode(
        head_dim=head_dim, itemsize=itemsize, block_size=64, group=4, num_rows=8, max_seq_len=max_seq_len
    )


def test_rows_count_more_than_the_longest_context() -> None:
    """A graph for many rows has the longest context that there may be, whatever its rows have."""
    table = {"A": [*TABLE["A"], entry(MANY, group=4, num_rows=2048, max_seq_len=1024, block_size=64)]}
    shape = {"head_dim": 128, "itemsize": 2, "block_size": 64, "group": 4, "max_seq_len": 65536}
    found = {rows: Tuning("A", ROOMY, table).decode(num_rows=rows, **shape) for rows in (8, 64, 512, 2048, 4096)}
    assert found == {8: LONG, 64: LONG, 512: MANY, 2048: MANY, 4096: MANY}


def test_each_batch_of_a_graph_has_what_was_measured_for_its_rows() -> None:
    entries = json.loads(COMMITTED.read_text())["NVIDIA H200"]
    shape = {"head_dim": 128, "itemsize": 2, "block_size": 64, "group": 4, "max_seq_len": 65536}
    tuning = Tuning("NVIDIA H200", ROOMY)
    measured = [each for each in entries if (each["kernel"], each["head_dim"]) == ("decode", 128)]
    for rows in {each["shape"]["num_rows"] for each in measured}:
        candidates = [DecodeTiling(**each["tiling"]) for each in measured if each["shape"]["num_rows"] == rows]
        assert tuning.decode(num_rows=rows, **shape) in candidates


def test_the_nearest_shape_by_ratios() -> None:
    tuning = Tuning("A", ROOMY, TABLE)
    assert decode_of(tuning, max_seq_len=1) == SHORT
    assert decode_of(tuning, max_seq_len=5000) == SHORT
    assert decode_of(tuning, max_seq_len=7000) == LONG  # nearer to 1024, but for ratios
    assert decode_of(tuning, max_seq_len=10**6) == LONG


def test_what_was_measured_for_another_size_of_element_or_head_or_gpu_is_not_used() -> None:
    tuning = Tuning("A", ROOMY, TABLE)
    assert decode_of(tuning, head_dim=64) == DecodeTiling()
    assert decode_of(tuning, itemsize=4).tile == 32
    assert decode_of(Tuning("B", ROOMY, TABLE)) == DecodeTiling()
    assert tuning.prefill(head_dim=128, itemsize=2, block_size=64, group=4) == PrefillTiling()


def test_a_copy_engine_loads_tiles_that_lie_within_a_block() -> None:
    shape = {"head_dim": 128, "itemsize": 2, "block_size": 64, "group": 4}
    entry = {"kernel": "prefill", "head_dim": 128, "itemsize": 2, "shape": {"group": 4, "block_size": 64}}
    tiling = PrefillTiling(rows=64, num_warps=4, copy_engine=True)
    for each in (
        Tuning("", ROOMY, copy_engine=True),
        Tuning("A", ROOMY, {"A": [entry | {"tiling": asdict(tiling)}]}, copy_engine=True),
    ):
        assert each.prefill(**shape).copy_engine
        assert not each.prefill(**shape | {"block_size": 16}).copy_engine
    assert not Tuning("", ROOMY, copy_engine=True).prefill(**shape | {"head_dim": 100}).copy_engine, "rows of 200 bytes"
    assert not Tuning("", ROOMY).prefill(**shape).copy_engine
    assert not Tuning("", ROOMY, copy_engine=True).prefill(**shape | {"itemsize": 4}).copy_engine


def test_a_gpu_that_was_measured_stands_for_its_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads(COMMITTED.read_text())
    assert all(table[name] for name in MEASURED.values())

    def of(name: str, major: int) -> Tuning:
        gpu = SimpleNamespace(name=name, major=major, minor=0, shared_memory_per_multiprocessor=ROOMY)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        return Tuning.of(torch.device("cuda"))

    assert decode_of(of("NVIDIA H200", 9)) == decode_of(of("NVIDIA H100 80GB HBM3", 9)) != DecodeTiling()
    assert decode_of(of("NVIDIA A100", 8)) == DecodeTiling()


def test_what_a_gpu_was_not_measured_for_is_that_of_another_of_its_capability() -> None:
    """A run of tuning that was cut off, or had products only, leaves the rest as it was."""
    of_prefill = {"kernel": "prefill", "head_dim": 128, "itemsize": 2, "shape": {"group": 4, "block_size": 64}}
    table = TABLE | {"B": [of_prefill | {"tiling": asdict(PrefillTiling(rows=64))}]}
    tuning = Tuning("B", ROOMY, table, like="A")
    assert tuning.prefill(head_dim=128, itemsize=2, block_size=64, group=4) == PrefillTiling(rows=64)
    assert decode_of(tuning) == SHORT
    many = {"group": 4, "num_rows": 2048, "max_seq_len": 1024, "block_size": 64}
    own = Tuning("B", ROOMY, table | {"B": [entry(MANY, **many)]}, like="A")
    assert decode_of(own) == SHORT
    assert own.decode(head_dim=128, itemsize=2, **many) == MANY
    instead = entry(MANY, group=4, num_rows=8, max_seq_len=1024, block_size=64)
    assert decode_of(Tuning("B", ROOMY, table | {"B": [instead]}, like="A")) == MANY


def test_large_heads_have_smaller_tiles_where_there_is_less_shared_memory() -> None:
    shape = {"head_dim": 256, "itemsize": 2, "block_size": 64, "group": 4}
    roomy, small = Tuning("", ROOMY).prefill(**shape), Tuning("", SMALL).prefill(**shape)
    assert (roomy.rows, small.rows) == (128, 64)


def product(kind: str, rows: int, tiling: SkinnyTiling | None, itemsize: int = 2) -> dict[str, Any]:
    """Of a table: for a weight of 4096 x 1024."""
    shape = {"rows": rows, "outputs": 4096, "inputs": 1024}
    return {"kernel": kind, "itemsize": itemsize, "shape": shape, "tiling": tiling and asdict(tiling)}


def test_a_product_of_few_rows_is_torchs_unless_a_kernel_was_quicker() -> None:
    one, four = SkinnyTiling(columns=16), SkinnyTiling(splits=2)
    table = [entry(SHORT, group=4, num_rows=8, max_seq_len=1024, block_size=64)]
    table += [product("plain", 1, one), product("plain", 4, four), product("plain", 8, None)]
    tuning = Tuning("A", ROOMY, {"A": table})
    shape = {"outputs": 4096, "inputs": 1024, "itemsize": 2}
    found = {rows: tuning.skinny("plain", rows=rows, **shape) for rows in range(1, 17)}
    assert found == {1: one, 2: None, 3: four, 4: four} | dict.fromkeys(range(5, 17))
    assert tuning.skinny("onto", rows=1, **shape) is None
    assert tuning.skinny("plain", rows=1, **shape | {"itemsize": 4}) is None
    assert tuning.skinny("plain", rows=1, **shape | {"outputs": 4097}) is None
    assert Tuning("B", ROOMY, {"A": table}).skinny("plain", rows=1, **shape) is None
    assert decode_of(tuning) == SHORT, "attention has entries of its own"


def test_sizes_are_those_of_triton() -> None:
    for size in (*range(1, 70), 1023, 1024, 1025, 128256):
        assert padded(size, least=1) == triton.next_power_of_2(size)
        assert padded(size) == max(16, triton.next_power_of_2(size))
        assert all(num_tiles(size, tile) == triton.cdiv(size, tile) for tile in (1, 3, 64, 1024))
