"""The kernels compile for GPUs, and fit into them: what the interpreter, which runs anything, cannot tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from benchmarks.gpu import compiled, products
from benchmarks.gpu.tune import MOST_STACK_BYTES
from kernels.compile_cases import ROOT, digest

RECORD = Path(__file__).with_name("compiled.json")


def python(*arguments: str | Path) -> str:
    """What Python prints beside these tests, without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}:{RECORD.parent}"}
    ran = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the compiler makes of every case: the committed record, if it holds, and one that is made now, if not."""
    known: dict[str, Any] = json.loads(RECORD.read_text())
    if known["digest"] == digest(known["files"]):
        return known
    made = tmp_path_factory.mktemp("kernels") / RECORD.name
    python(RECORD.with_name("compile_cases.py"), made)
    warnings.warn(f"{RECORD.relative_to(ROOT)} does not hold any more. Renew it: cp {made} {RECORD}", stacklevel=1)
    new: dict[str, Any] = json.loads(made.read_text())
    return new


@pytest.fixture(scope="module")
def binaries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every case."""
    found: list[dict[str, Any]] = record["binaries"]
    return found


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


def num_added(binaries: list[dict[str, Any]], kernel: str, *, invariant: bool) -> set[int]:
    """How many numbers the sums of a kernel make one."""
    found = [each for each in binaries if (each["kernel"], each["invariant"]) == (kernel, invariant)]
    return {num for each in found for operation, num in each["reductions"] if operation == "addf"}


def test_a_batch_invariant_sum_has_no_order_that_a_layout_decides(binaries: list[dict[str, Any]]) -> None:
    """Threads hold a tile of 16 rows in other parts than one of 128, and `tl.sum` adds the parts. Two numbers have one
    sum. The same kernels without `--batch-invariant` add all keys of a tile at once, so this would see it."""
    for kernel in ("decode", "prefill", "combine"):
        assert num_added(binaries, kernel, invariant=True) == ({1} if kernel == "combine" else {2}), kernel
        assert max(num_added(binaries, kernel, invariant=False)) >= 16, kernel


def test_whether_a_batch_invariant_sum_is_rounded_twice_is_not_left_to_the_compiler(
    binaries: list[dict[str, Any]],
) -> None:
    """Of a multiplication and an addition it makes one instruction, or not, as it finds them. So the only additions are
    those of keys. Products of float32 have some of their own."""
    for kernel in ("decode", "prefill"):
        of_16_bits = [each for each in binaries if each["kernel"] == kernel and each["invariant"] and each["has_bf16"]]
        assert of_16_bits
        for each in of_16_bits:
            assert each["num_addf"] == sum(operation == "addf" for operation, _ in each["reductions"]), each


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


# --- the record ------------------------------------------------------------------------------------------------------


def test_the_record_names_every_file_that_is_imported_to_compile(record: dict[str, Any]) -> None:
    imported = json.loads(python("-c", "import json, compile_cases; print(json.dumps(compile_cases.files()))"))
    assert record["files"] == imported
    assert {"common/engine/kernels/tiles.py", "common/engine/kernels/tuning.json"} < set(imported)


def test_a_record_does_not_hold_for_another_file_or_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.py", "b.py"]
    for name in names:
        (tmp_path / name).write_text("a = 1\n")
    digests = [digest(names, tmp_path)]
    (tmp_path / "b.py").write_text("a = 2\n")
    digests.append(digest(names, tmp_path))
    (tmp_path / "b.py").unlink()
    digests.append(digest(names, tmp_path))
    for module in (triton, torch):
        monkeypatch.setattr(module, "__version__", "0")
        digests.append(digest(names, tmp_path))
    assert len(set(digests)) == len(digests) == 5
