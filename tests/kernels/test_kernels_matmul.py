"""Products with weights against float64, and their bits: a row's are the same beside any others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.engine.kernels import matmul as module
from common.engine.kernels.matmul import matmul
from common.engine.kernels.tiles import INTERPRETED
from common.engine.linear import Linear
from kernels.ordered import multiply_in_order
from kernels.reference import TOLERANCE, examples

TYPES = (torch.float32, torch.float16, torch.bfloat16)
SUBNORMAL = 2**-24
"""The least number of float16."""


@settings(max_examples=examples(40), deadline=None)
@example(rows=1, inputs=1, outputs=1, biased=True, dtype=torch.bfloat16, seed=1)
@example(rows=300, inputs=70, outputs=130, biased=False, dtype=torch.bfloat16, seed=2)
@given(
    rows=st.one_of(st.integers(1, 70), st.sampled_from([128, 129, 300])),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 257])),
    outputs=st.one_of(st.integers(1, 40), st.sampled_from([64, 128, 300])),
    biased=st.booleans(),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**31),
)
def test_a_product_is_that_of_float64(
    device: torch.device, rows: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs).to(device, dtype), torch.randn(outputs, inputs).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype) if biased else None
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    out = matmul(x, weight, bias)
    assert out.dtype == dtype
    # The interpreter rounds bfloat16 towards zero, which loses up to 2^-7.
    tolerance = 2**-7 + 1e-5 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    assert bool(((out.double() - expected).abs() <= tolerance * size + SUBNORMAL).all())


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at another place, and in a tile of another size; before they are rounded, which hides most differences. In
    the interpreter numpy multiplies, whose sums depend on the number of rows: there the kernel's products are added one
    after another. So only a GPU shows whether its instructions for tiles of different sizes give the same bits."""
    multiply_in_order(monkeypatch)
    torch.manual_seed(1)
    x, weight = torch.randn(300, 200).to(device, dtype), torch.randn(150, 200).to(device, dtype)
    bias = torch.randn(150).to(device, dtype)
    out = matmul(x, weight, bias, out_dtype=torch.float32)
    for first, end in ((0, 1), (299, 300), (5, 21), (100, 117), (60, 124), (7, 72), (0, 128), (150, 279)):
        rows = matmul(x[first:end].contiguous(), weight, bias, out_dtype=torch.float32)
        assert torch.equal(rows, out[first:end])


@pytest.mark.skipif(not INTERPRETED, reason="a GPU may add in an order that the tile does not tell")
def test_inputs_that_are_cut_otherwise_give_other_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above fails if their number at a time depends on the number of rows."""
    multiply_in_order(monkeypatch)
    torch.manual_seed(1)
    x, weight = torch.randn(40, 200), torch.randn(50, 200)
    out = matmul(x, weight)
    monkeypatch.setattr(module, "_DEPTH_BYTES", 64)
    assert not torch.equal(matmul(x, weight), out)


def test_a_weight_is_multiplied_by_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no kernels in C, and whoever multiplies."""
    multiply_in_order(monkeypatch)
    torch.manual_seed(1)
    linear = Linear(50, 40, bias=True, dtype=torch.bfloat16, device=device, batch_invariant=True)
    assert linear.bias is not None
    linear.weight.normal_()
    linear.bias.normal_()
    linear.pack()
    assert linear.weight.shape == (50, 40)
    x = torch.randn(3, 40).to(device, torch.bfloat16)
    assert torch.equal(linear(x), matmul(x, linear.weight, linear.bias))
    assert torch.equal(linear(x[1:2]), linear(x)[1:2])
