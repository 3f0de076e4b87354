"""Products of few rows by the kernel, beside torch's: those of decode steps of models of well-known shapes; bfloat16.

Torch has what it does today: the product and the gates one after the other. The addition to the residual is the next
norm's then, and the kernel's at once; it is counted as nothing for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, silu

from benchmarks.gpu.child import attempts
from benchmarks.gpu.timing import copy_bytes_per_s, graph_us, num_copies
from common.engine.kernels import layer
from common.engine.kernels.skinny import SkinnyTiling, skinny
from common.engine.kernels.tuning import Kind
from common.engine.linear import FEW_ROWS, sum_in_float32

ROWS = tuple(2**power for power in range(FEW_ROWS.bit_length()))
TOLERANCE = 2e-2
"""Largest ‖kernel - float32‖ / ‖float32‖ that is accepted. Triton's interpreter truncates where a GPU rounds to
bfloat16: it errs by 1.1e-2 for gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A weight `[outputs, inputs]`, and what goes with its product."""

    kind: Kind
    outputs: int
    inputs: int

    @property
    def num_columns(self) -> int:
        """Columns of the result."""
        return self.outputs // 2 if self.kind == "gate" else self.outputs

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in bfloat16."""
        return 2 * self.outputs * self.inputs

    def __str__(self) -> str:
        return f"{self.kind} {self.outputs} x {self.inputs}"


MODELS = {
    "llama-3-8b": (
        Product(kind="plain", outputs=6144, inputs=4096),
        Product(kind="onto", outputs=4096, inputs=4096),
        Product(kind="gate", outputs=28672, inputs=4096),
        Product(kind="onto", outputs=4096, inputs=14336),
        Product(kind="plain", outputs=128256, inputs=4096),
    ),
    "qwen3-0.6b": (
        Product(kind="plain", outputs=4096, inputs=1024),
        Product(kind="onto", outputs=1024, inputs=2048),
        Product(kind="gate", outputs=6144, inputs=1024),
        Product(kind="onto", outputs=1024, inputs=3072),
        Product(kind="plain", outputs=151936, inputs=1024),
    ),
}


class Scene:
    """Rows, and so many copies of a weight that none is found in a cache."""

    def __init__(
        self, product: Product, rows: int, device: torch.device, copies: int | None = None, *, drawn: bool = True
    ) -> None:
        """Numbers are drawn at random or, if not `drawn`, are those that the memory happens to hold."""
        torch.manual_seed(rows)
        sum_in_float32()  # torch's products are those of a worker
        self.product = product
        copies = num_copies(product.num_bytes) if copies is None else copies

        def random(*shape: int, std: float = 1.0) -> torch.Tensor:
            numbers = torch.empty(*shape, dtype=torch.bfloat16, device=device)
            return numbers.normal_(std=std) if drawn else numbers

        self.x = random(rows, product.inputs)
        self.onto = random(rows, product.num_columns)
        self.weights = [random(product.outputs, product.inputs, std=product.inputs**-0.5) for _ in range(copies)]

    def kernel_calls(self, tiling: SkinnyTiling) -> list[Callable[[], object]]:
        """One for each copy; those that add to something add to the same copy of `onto`."""
        onto = self.onto.clone() if self.product.kind == "onto" else None
        gated = self.product.kind == "gate"
        return [partial(skinny, self.x, weight, None, tiling, gated=gated, onto_MN=onto) for weight in self.weights]

    def torch_calls(self) -> list[Callable[[], object]]:
        """The same by torch, with the small kernels beside it."""

        def call(weight: torch.Tensor) -> torch.Tensor:
            out = linear(self.x, weight)
            return layer.silu_mul(out) if self.product.kind == "gate" else out

        return [partial(call, weight) for weight in self.weights]

    def error(self, tiling: SkinnyTiling) -> float:
        """How far from float32 the kernel is. Raises `AssertionError` if two results differ, or are far off."""
        x = self.x.float()
        expected = linear(x, self.weights[0].float())
        if self.product.kind == "gate":
            gate, up = expected.chunk(2, -1)
            expected = silu(gate) * up
        if self.product.kind == "onto":
            expected = expected + self.onto.float()
        made = []
        for _ in range(2):
            out = self.kernel_calls(tiling)[0]()
            assert isinstance(out, torch.Tensor)
            made.append(out.clone())
        assert torch.equal(*made), f"not the same twice: {self.product}, {tiling}"
        error = float((made[0].float() - expected).norm() / expected.norm())
        assert error < TOLERANCE, f"off by {error:.2e}: {self.product}, {tiling}"
        return error


def untuned(num_columns: int, num_processors: int) -> SkinnyTiling:
    """The tiling that gives each multiprocessor a program; of a gated product `num_columns` are the gates."""
    programs = -(-num_columns // SkinnyTiling().columns)
    return SkinnyTiling(splits=max(1, -(-num_processors // programs)))


def measured() -> Iterator[dict[str, Any]]:
    """Microseconds of each product by the untuned kernel and by torch, and what reading the weight takes at least."""
    copy_rate = copy_bytes_per_s()
    yield from attempts(
        (f"{product}, {rows} rows", partial(product_row, model, product, rows, copy_rate))
        for model, products in MODELS.items()
        for product in products
        for rows in (1, 4, FEW_ROWS)
    )


def product_row(model: str, product: Product, rows: int, copy_rate: float) -> dict[str, Any]:
    """A row of `measured`."""
    device = torch.device("cuda")
    scene = Scene(product, rows, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiling = untuned(product.num_columns, processors)
    error = scene.error(tiling)
    us, torch_us = graph_us(scene.kernel_calls(tiling)), graph_us(scene.torch_calls())
    return {
        "kind": "product", "model": model, "product": product.kind, "outputs": product.outputs,
        "inputs": product.inputs, "rows": rows, "us": us, "torch_us": torch_us,
        "floor_us": 1e6 * product.num_bytes / copy_rate, "error": error,
    }  # fmt: skip
