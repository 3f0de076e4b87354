"""The kernels compile for GPUs, and fit into them: what the interpreter, which runs anything, cannot tell."""

from __future__ import annotations

import json
import os
import re
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiler keeps what it makes."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def binaries(folder: Path) -> list[dict[str, Any]]:
    """Of every case, compiled afresh."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("compile_cases.py")), str(folder)]
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


REDUCTION = re.compile(r'"tt\.reduce"\(.*?axis = (\d+) : i32.*?\n(.*?)\}\) : \(tensor<([\dx]+)x\w+', re.DOTALL)
"""A reduction in Triton's language for GPUs: its axis, what it does with two elements, and the shape that it takes."""


def reductions(folder: Path, kernel: str) -> list[tuple[str, int]]:
    """Of each binary of a kernel: what it does with two elements, and how many it makes one."""
    found = []
    for path in folder.rglob(f"_{kernel}.ttgir"):
        for axis, body, shape in REDUCTION.findall(path.read_text()):
            [operation] = re.findall(r"= arith\.(\w+)", body)
            found.append((operation, int(shape.split("x")[int(axis)])))
    return found


@pytest.mark.usefixtures("binaries")
def test_a_batch_invariant_sum_has_no_order_that_a_layout_decides(folder: Path) -> None:
    """Threads hold a tile of 16 rows in other parts than one of 128, and `tl.sum` adds the parts. Two numbers have one
    sum. The same kernels without `--batch-invariant` add all keys of a tile at once, so this would see it."""
    for kernel in ("decode", "prefill", "combine"):
        sums = {num for operation, num in reductions(folder / "invariant", kernel) if operation == "addf"}
        assert sums == ({1} if kernel == "combine" else {2}), kernel
        others = {num for operation, num in reductions(folder / "others", kernel) if operation == "addf"}
        assert max(others) >= 16, kernel


@pytest.mark.usefixtures("binaries")
def test_whether_a_batch_invariant_sum_is_rounded_twice_is_not_left_to_the_compiler(folder: Path) -> None:
    """Of a multiplication and an addition it makes one instruction, or not, as it finds them. So the only additions are
    those of keys. Products of float32 have some of their own."""
    for kernel in ("decode", "prefill"):
        texts = [path.read_text() for path in (folder / "invariant").rglob(f"_{kernel}.ttgir")]
        of_16_bits = [text for text in texts if "xbf16" in text]
        assert of_16_bits
        for text in of_16_bits:
            assert text.count("arith.addf") == sum("arith.addf" in body for _, body, _ in REDUCTION.findall(text))


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
