from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from needs import require
from torch.nn.functional import linear

from common.engine import linear as linear_module
from common.engine import native
from common.engine.linear import Linear, multiplies_natively
from common.engine.native import Kernels

torch.set_num_threads(1)

CPU = torch.device("cpu")


def filled(dtype: torch.dtype, bias: bool = True) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    """A projection, and the weight and bias that it was given."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(24, 16, generator=generator).to(dtype)
    projection = Linear(24, 16, bias=bias, dtype=dtype, device=CPU)
    projection.weight.copy_(weight)
    if projection.bias is None:
        return projection, weight, None
    projection.bias.copy_(torch.randn(24, generator=generator).to(dtype))
    return projection, weight, projection.bias.clone()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_is_a_matrix_product(rows: int, packed: bool, bias: bool) -> None:
    projection, weight, offset = filled(torch.float32, bias)
    if packed:
        projection.pack_for_onednn()
    else:
        projection.pack()
    x = torch.randn(rows, 16)
    torch.testing.assert_close(projection(x), linear(x, weight, offset))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    projection, weight, offset = filled(dtype)
    projection.pack()
    x = torch.randn(5, 16).to(dtype)
    assert offset is not None
    exact = linear(x.double(), weight.double(), offset.double())
    ours = projection(x)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_a_cpu_without_instructions_for_the_type_multiplies_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "multiplies_natively", lambda dtype: dtype == torch.float32)
    projection, _, _ = filled(torch.bfloat16)
    projection.pack()
    assert projection.weight.dtype == torch.float32
    assert projection(torch.randn(2, 16).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "flag"),
    [(torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")],
    ids=["bfloat16", "float16"],
)
def test_a_cpu_multiplies_natively_what_onednn_says_it_can(dtype: torch.dtype, flag: str) -> None:
    """On a machine with the instructions the weight is packed for them; on another one it is float32, and readable."""
    supported = bool(getattr(torch.ops.mkldnn, flag)())
    assert multiplies_natively(dtype) == supported
    with_onednn, _, _ = filled(dtype)
    before = with_onednn.weight.dtype
    with_onednn.pack()
    assert (before, hasattr(with_onednn, "weight")) == ((dtype, False) if supported else (torch.float32, True))


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_type_has_a_flag_of_its_own(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, supported: bool) -> None:
    flags = {torch.bfloat16: supported, torch.float16: not supported}
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: flags[torch.bfloat16])
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: flags[torch.float16])
    assert multiplies_natively(dtype) == flags[dtype]


@pytest.mark.parametrize(
    ("dtype", "pairs", "instructions", "path", "told"),
    [
        (torch.bfloat16, True, True, "pairs", ("amx", False)),
        (torch.bfloat16, False, True, "c", ("avx2", True)),
        (torch.float16, True, True, "onednn", ("onednn", False)),
        (torch.bfloat16, False, False, "c", ("avx2", True)),
        (torch.float16, True, False, "c", ("avx2", True)),
        (torch.float32, True, True, "c", ("avx2", False)),
    ],
    ids=str,
)
def test_onednn_is_for_float16_that_the_cpu_has_instructions_for(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    pairs: bool,
    instructions: bool,
    path: str,
    told: tuple[str, bool],
) -> None:
    taken = []
    monkeypatch.setattr(linear_module, "multiplies_natively", lambda dtype: instructions)
    monkeypatch.setattr(Linear, "pack_for_onednn", lambda self: taken.append("onednn"))
    monkeypatch.setattr(linear_module, "pack", lambda weight, zeros: taken.append("c"))
    monkeypatch.setattr(linear_module, "pack_pairs", lambda weight, zeros: taken.append("pairs"))
    kernels = cast("Kernels", SimpleNamespace(multiplies_pairs=pairs, instructions=("avx2", "amx")))
    projection = Linear(24, 16, bias=True, dtype=dtype, device=CPU, kernels=kernels)
    assert projection.weight.dtype == dtype
    projection.pack()
    assert taken == [path]
    assert projection.products == told


@pytest.mark.parametrize(
    ("dtype", "instructions", "told"),
    [
        (torch.bfloat16, True, ("onednn", False)),
        (torch.bfloat16, False, ("torch", True)),
        (torch.float32, True, ("torch", False)),
    ],
    ids=str,
)
def test_without_kernels_onednn_multiplies_low_precision_that_is_not_widened(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, instructions: bool, told: tuple[str, bool]
) -> None:
    monkeypatch.setattr(linear_module, "multiplies_natively", lambda dtype: instructions)
    projection, _, _ = filled(dtype)
    assert projection.products == told
    elsewhere = Linear(24, 16, bias=False, dtype=dtype, device=torch.device("meta"))
    assert elsewhere.products is None


def test_float32_is_always_native() -> None:
    assert multiplies_natively(torch.float32)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_where_rows_must_not_depend_on_each_other_the_kernels_multiply(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    require("compiler")
    kernels, for_onednn = native.kernels(), list[Linear]()
    assert kernels is not None
    monkeypatch.setattr(linear_module, "multiplies_natively", lambda dtype: True)
    monkeypatch.setattr(Linear, "pack_for_onednn", lambda self: for_onednn.append(self))
    projection = Linear(
        24, 16, bias=False, dtype=torch.float16, device=CPU, kernels=kernels, batch_invariant=batch_invariant
    )
    weight, x = torch.randn(24, 16).half(), torch.randn(5, 16)
    projection.weight.copy_(weight)
    projection.pack()
    if batch_invariant:
        torch.testing.assert_close(projection(x).double(), linear(x.double(), weight.double()), rtol=1e-5, atol=1e-5)
    assert for_onednn == ([] if batch_invariant else [projection])


@pytest.mark.parametrize("bias", [True, False])
def test_in_pairs_a_product_is_that_of_rounded_inputs(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    require("compiler")
    kernels = native.kernels()
    assert kernels is not None
    monkeypatch.setattr(kernels, "multiplies_pairs", True)
    weight, x, offset = torch.randn(24, 40).bfloat16(), torch.randn(5, 40), torch.randn(24).bfloat16()
    projection = Linear(24, 40, bias=bias, dtype=torch.bfloat16, device=CPU, kernels=kernels)
    projection.weight.copy_(weight)
    if projection.bias is not None:
        projection.bias.copy_(offset)
    projection.pack()
    expected = linear(x.bfloat16().double(), weight.double(), offset.double() if bias else None)
    torch.testing.assert_close(projection(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(projection.rows(torch.tensor([23, 0, 17])), weight[[23, 0, 17]])
