"""Which GPUs the workers of a local stack get, and how much of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.contract.errors import OperatorError
from common.engine.runner import room_of
from common.runtime.gpus import VISIBLE, Place, gpus_here, placed


def test_the_gpus_are_those_of_the_machine_unless_a_variable_names_some(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_here({}, tmp_path) == ["0", "1"]
    assert gpus_here({VISIBLE: "3, GPU-8f6c"}, tmp_path) == ["3", "GPU-8f6c"]
    assert gpus_here({VISIBLE: ""}, tmp_path) == gpus_here({VISIBLE: "-1"}, tmp_path) == []
    assert gpus_here({VISIBLE: "2,-1,3"}, tmp_path) == ["2"], "CUDA stops at what is no GPU"


@pytest.mark.parametrize(
    ("widths", "gpus", "places"),
    [
        ([1, 1], "01", [("0", 1.0), ("1", 1.0)]),
        ([1, 1], "0", [("0", 0.5), ("0", 0.5)]),
        ([4, 2], "012345", [("0123", 1.0), ("45", 1.0)]),
        ([2, 2, 1], "0123", [("01", 0.5), ("23", 1.0), ("0", 0.5)]),
        ([2, 2], "012", [("01", 0.5), ("20", 0.5)]),
        ([4, 1], "01", [("01", 0.5), ("0", 0.5)]),
        ([2, 1], "", [("", 0.5), ("", 0.5)]),
    ],
)
def test_every_worker_has_gpus_of_its_own_as_far_as_there_are_any(
    widths: list[int], gpus: str, places: list[tuple[str, float]]
) -> None:
    assert placed(widths, list(gpus)) == [Place(tuple(named), share) for named, share in places]


def test_a_cache_takes_what_the_fullest_gpu_has_left() -> None:
    assert room_of([(70, 80), (60, 80)], 1.0, 15, 4, block_bytes=1) == 56
    assert room_of([(70, 80), (60, 80)], 0.5, 15, 4, block_bytes=1) == 23
    assert room_of([(70, 80), (20, 80)], 0.5, 15, 4, block_bytes=18) == 18, "others have taken more than their share"


def test_a_gpu_without_room_for_a_block_is_told_of_with_its_memory() -> None:
    said = "no room for a KV cache on the GPU: with 30 bytes of weights loaded 10 of 80 bytes are free"
    with pytest.raises(OperatorError, match=said):
        room_of([(10, 80)], 0.25, 30, 4, block_bytes=1)
    with pytest.raises(OperatorError, match=said):
        room_of([(10, 80)], 1.0, 30, 4, block_bytes=7)
