"""The checks of attention that `benchmarks.gpu check` makes on a GPU, here at small shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Batch, Shape, check, outputs

SMALL = (
    Shape(lens=(40, 0, 5), heads=4, kv_heads=2, head_dim=16, block_size=16, dtype="float32"),
    Shape(lens=(40, 9), heads=4, kv_heads=2, head_dim=16, block_size=16, window=20),
    Shape(lens=(40, 1), queries=(20, 1), heads=4, kv_heads=2, head_dim=16, block_size=16, dtype="float32"),
)


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_a_right_kernel_passes(device: torch.device, shape: Shape) -> None:
    row = check(shape, device, 10**5)
    assert row["elements"] > 10**5
    errors = {name: value for name, value in row.items() if name.startswith("error")}
    assert errors.keys() == ({"error"} if shape.queries else {"error_40", f"error_{checks.LONGEST}"})
    assert all(0 < value < row["tolerance"] for value in errors.values())


def test_the_sequences_have_the_first_and_the_last_block(device: torch.device) -> None:
    """Of a cache most of which is nobody's; what they have not written of their own blocks is zero."""
    shape = SMALL[0]
    batch = Batch(shape, device, 10**5)
    used = sorted(block for table in batch.tables for block in table)
    assert (used[0], used[-1]) == (0, len(batch.kv_layer) - 1)
    finite = batch.kv_layer.isfinite().flatten(1).all(1).nonzero().flatten().tolist()
    assert finite == used
    last = batch.kv_layer[batch.tables[0][-1]]
    assert not last[..., 40 % 16 :, :].any()
    assert last[..., : 40 % 16, :].all()


Call = Callable[[], object]


def spoiled(value: Callable[[int], float]) -> Callable[[Call, torch.Tensor], list[torch.Tensor]]:
    """`outputs`, with an element of each made what a wrong kernel might."""

    def made(call: Call, out: torch.Tensor) -> list[torch.Tensor]:
        found = outputs(call, out)
        for number, each in enumerate(found):
            each[0, 0, 0] += value(number)
        return found

    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda number: 0.1, "off by"),
        (lambda number: float("nan"), "off by inf"),
        (lambda number: 1e-7 * number, "not the same twice"),
    ],
)
def test_a_wrong_kernel_is_found(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, value: Callable[[int], float], message: str
) -> None:
    monkeypatch.setattr(checks, "outputs", spoiled(value))
    with pytest.raises(AssertionError, match=message):
        check(SMALL[0], device, 0)
