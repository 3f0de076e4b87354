"""The kernels compile for GPUs, and fit into them: what the interpreter, which runs anything, cannot tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, products
from benchmarks.gpu.tune import MOST_STACK_BYTES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of every case, compiled afresh."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(Path(__file__).with_name("compile_cases.py"))]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    figures: list[dict[str, Any]] = json.loads(made.stdout)
    return figures


@pytest.mark.timeout(1200)
def test_a_multiprocessor_has_room_for_every_kernel(binaries: list[dict[str, Any]]) -> None:
    kernels = {each["kernel"] for each in binaries}
    assert {
        "decode",
        "combine",
        "prefill",
        "skinny",
        "skinny_sum",
        "matmul",
        "add_norm",
        "silu_mul",
        "rotate_and_write",
        "limit",
        "pick",
    } <= kernels
    assert all(each["programs"] >= 1 for each in binaries)


def test_what_a_kernel_uses_is_in_registers(binaries: list[dict[str, Any]]) -> None:
    """But for prefill attention with a copy engine, which is fastest with rows that nearly fit; `tune` says why."""
    for each in binaries:
        on_hopper = each["capability"] == 90 and each["dtype"] == "bfloat16"
        copied = on_hopper and each["kernel"] == "prefill" and each["block_size"] == 64 and each["head_dim"] <= 128
        most = MOST_STACK_BYTES if copied else 16 if on_hopper else 160
        assert each["stack_bytes"] <= most, each


def test_products_have_the_tensor_cores(binaries: list[dict[str, Any]]) -> None:
    """The newest that there are, if there are rows enough for them."""
    of_prefill = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
    for each in binaries:
        if each["kernel"] in ("decode", "skinny"):
            assert each["products"] == "mma.sync", each
        elif each["kernel"] == "prefill":
            expected = of_prefill[each["capability"]] if each["dtype"] == "bfloat16" else "mma.sync"
            assert each["products"] == expected, each


@pytest.mark.parametrize("product", products.MODELS["llama-3-8b"], ids=str)
def test_no_weights_are_drawn_for_a_product_that_is_only_compiled(
    product: products.Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take longer than the compiler, for each of hundreds of tilings."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(products, "skinny", lambda x, weight, *args, **options: launched.append(weight.shape))
    monkeypatch.setattr(torch.Tensor, "normal_", None)
    compiled._product(compiled.Case(capability=90, kernel="product", product=product))
    assert launched == [(product.outputs, product.inputs)]
