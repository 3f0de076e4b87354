"""Products of few rows, with what comes after them, against float64, over shapes that hypothesis draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from benchmarks.gpu import products
from common.engine.kernels.skinny import SkinnyTiling, skinny
from common.engine.kernels.tuning import Kind
from common.engine.linear import FEW_ROWS
from kernels.reference import TOLERANCE, error, examples

types = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
tilings = st.builds(
    SkinnyTiling,
    columns=st.sampled_from([16, 32]),
    depth=st.sampled_from([16, 64]),
    splits=st.integers(1, 5),
    num_warps=st.just(4),
    num_stages=st.just(2),
)


@settings(max_examples=examples(40), deadline=None)
@example(
    rows=1,
    inputs=1,
    outputs=64,
    tiling=SkinnyTiling(columns=16, depth=16, splits=1, num_warps=4, num_stages=2),
    gated=False,
    biased=False,
    adds=False,
    dtype=torch.bfloat16,
    seed=53,
)
@given(
    rows=st.integers(1, FEW_ROWS),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 257])),
    outputs=st.one_of(st.integers(1, 40), st.sampled_from([64, 300])),
    tiling=tilings,
    gated=st.booleans(),
    biased=st.booleans(),
    adds=st.booleans(),
    dtype=types,
    seed=st.integers(0, 2**31),
)
def test_a_product_is_that_of_float64(
    device: torch.device,
    rows: int,
    inputs: int,
    outputs: int,
    tiling: SkinnyTiling,
    gated: bool,
    biased: bool,
    adds: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    width = 2 * outputs if gated else outputs
    x, weight = torch.randn(rows, inputs).to(device, dtype), torch.randn(width, inputs).to(device, dtype)
    bias = torch.randn(width).to(device, dtype) if biased else None
    onto = torch.randn(rows, outputs).to(device, dtype) if adds else None
    expected, size = reference(x, weight, bias, gated, onto)
    out = skinny(x, weight, bias, tiling, gated=gated, onto_MN=onto)
    assert out.dtype == dtype
    assert out.shape == (rows, outputs)
    assert onto is None or out.data_ptr() == onto.data_ptr()
    assert bool(((out.double() - expected).abs() <= tolerance(dtype) * size).all())


def tolerance(dtype: torch.dtype) -> float:
    """Largest error, relative to the terms. In bfloat16 the result is rounded: by the interpreter towards zero, which
    loses up to 2^-7."""
    return 2**-7 + 1e-5 if dtype == torch.bfloat16 else TOLERANCE[dtype]


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    onto: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and how large its terms are, which rounding goes by."""
    expected, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    if gated:
        (gate, up), (gate_size, up_size) = expected.chunk(2, -1), size.chunk(2, -1)
        expected, size = silu(gate) * up, 1.1 * gate_size * up.abs() + gate.abs() * up_size
    if onto is not None:
        expected, size = expected + onto.double(), size + onto.double().abs()
    return expected, size


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_is_the_same_beside_others_and_every_time(device: torch.device, splits: int) -> None:
    """The partial sums are added in one order, whatever the number of rows. In the interpreter numpy multiplies, and on
    some CPUs its sums depend on a row's place, so each row keeps its place there."""
    torch.manual_seed(1)
    x, weight = torch.randn(FEW_ROWS, 200).to(device), torch.randn(50, 200).to(device)
    tiling = SkinnyTiling(columns=16, depth=32, splits=splits)
    out = skinny(x, weight, None, tiling)
    assert torch.equal(skinny(x, weight, None, tiling), out)
    for row in (0, 1, 6, FEW_ROWS - 1):
        assert torch.equal(skinny(x[: row + 1], weight, None, tiling)[row], out[row])
        others = torch.randn(FEW_ROWS, 200).to(device)
        others[row] = x[row]
        assert torch.equal(skinny(others, weight, None, tiling)[row], out[row])
        if device.type == "cuda":
            assert torch.equal(skinny(x[row : row + 1], weight, None, tiling)[0], out[row])


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    x, weight = torch.ones(3, 20).to(device), torch.ones(10, 20).to(device)
    x[1, 5] = float("nan")
    out = skinny(x, weight, None, SkinnyTiling(columns=16, depth=16, splits=2))
    assert bool(out[1].isnan().all())
    assert bool((out[[0, 2]] == 20).all())


@pytest.mark.parametrize("kind", ["plain", "gate", "onto"])
def test_before_it_is_timed_a_product_is_compared_with_torchs(
    device: torch.device, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = products.Scene(products.Product(kind=kind, outputs=48, inputs=80), 3, device, copies=2)
    before, tiling = scene.onto.clone(), SkinnyTiling(columns=16, depth=32, splits=2)
    assert 0 < scene.error(tiling) < products.TOLERANCE
    for call in scene.kernel_calls(tiling):
        call()
    assert torch.equal(scene.onto, before), "what is timed does not pile up where the next one is compared"
    own, by_torch = scene.kernel_calls(tiling)[1](), scene.torch_calls()[1]()
    assert isinstance(own, torch.Tensor)
    assert isinstance(by_torch, torch.Tensor)
    added = before.double() if kind == "onto" else 0
    assert error(own, by_torch.double() + added) < 2 * products.TOLERANCE

    monkeypatch.setattr(products, "skinny", lambda *args, **options: 1.1 * skinny(*args, **options))
    with pytest.raises(AssertionError, match="off by"):
        scene.error(tiling)


def test_without_a_table_every_multiprocessor_has_a_program() -> None:
    for num_columns in (17, 4096, 14336):
        tiling = products.untuned(num_columns, 132)
        programs = -(-num_columns // tiling.columns)
        assert programs * tiling.splits >= 132
        assert tiling.splits == 1 or programs * (tiling.splits - 1) < 132
