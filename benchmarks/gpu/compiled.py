"""Compile the kernels for a GPU that need not be there, and report the resources that each takes of a multiprocessor.

Launches are made as the engine makes them, on CPU tensors, in processes whose driver knows a compute capability and
nothing else. A launch ends when its binary exists. The binary stays in Triton's cache, also for a GPU that is there.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.gpu.products import MODELS, Product, Scene, untuned
from common.contract.kv_layout import KVLayout
from common.engine.kernels import layer, sampler, tiles
from common.engine.kernels.decode_attention import DecodeTiling, decode_attention
from common.engine.kernels.matmul import matmul
from common.engine.kernels.prefill_attention import PrefillTiling, prefill_attention
from common.engine.kernels.query_runs import aligned_runs, query_runs, query_tiles
from common.engine.kernels.skinny import SkinnyTiling
from common.engine.kernels.tuning import INVARIANT_RUN, Tuning
from common.engine.kv_cache import KVCache
from common.engine.linear import FEW_ROWS, MANY_ROWS


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Resources of a multiprocessor, which its programs share."""

    shared_bytes: int
    """Shared memory; a program can have all of it but `RESERVED_BYTES`."""
    threads: int
    registers: int = 2**16

    @classmethod
    def of(cls, capability: int) -> Multiprocessor:
        """The multiprocessor of a compute capability (times ten). For an unknown capability, that of the next lower
        known one."""
        return _MULTIPROCESSORS[max(each for each in _MULTIPROCESSORS if each <= capability)]


_MULTIPROCESSORS = {
    80: Multiprocessor(164 * 2**10, 2048),
    86: Multiprocessor(100 * 2**10, 1536),
    90: Multiprocessor(228 * 2**10, 2048),
    120: Multiprocessor(100 * 2**10, 1536),
}
RESERVED_BYTES = 2**10
"""Shared memory that each program needs besides its own."""
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK, GROUP = 64, 4
_KV_HEADS = 2
_PROCESSORS = 132
"""Multiprocessors, by which work is cut."""
_PRODUCTS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
"""PTX instructions that multiply matrices, newest first; the first one that a program contains is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch, or some that belong together: "decode", "prefill", "layer", "sampler", "product" or "invariant"."""

    capability: int
    """Compute capability of the GPU to compile for, times ten."""
    kernel: str
    dtype: str = "bfloat16"
    head_dim: int = 128
    block_size: int = BLOCK
    group: int = GROUP
    tiling: DecodeTiling | PrefillTiling | SkinnyTiling | None = None
    """By default what an unknown GPU has."""
    product: Product | None = None
    early: bool = False
    """Whether kernels are launched early (`tiles.early`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A compiled kernel."""

    kernel: str
    registers: int
    """Registers of a thread."""
    stack_bytes: int
    """Stack bytes of a thread: what its registers could not hold."""
    shared_bytes: int
    num_warps: int
    products: str
    """The instruction that multiplies matrices; empty if there is none."""
    programs: int
    """Number of programs that a multiprocessor has room for at a time."""


def binaries(capability: int) -> Iterator[dict[str, Any]]:
    """A row for each binary of the default cases of this compute capability."""
    yield {"kind": "compiler", "capability": capability, "triton": triton.__version__}
    cases = list(default_cases(capability))
    for case, made in zip(cases, compile_all(cases), strict=True):
        shape: dict[str, Any] = {
            "dtype": case.dtype, "head_dim": case.head_dim, "block_size": case.block_size, "group": case.group
        }  # fmt: skip
        if case.product is not None:
            shape = {"dtype": case.dtype, "product": str(case.product)}
        for each in made:
            yield {"kind": "binary", **shape, **asdict(each)}


def default_cases(capability: int) -> Iterator[Case]:
    """The default cases: attention by type and head dimension, then the other kernels."""
    for dtype, head_dim, kernel in itertools.product(("bfloat16", "float32"), HEAD_DIMS, ("decode", "prefill")):
        yield Case(capability=capability, kernel=kernel, dtype=dtype, head_dim=head_dim)
    for kernel in ("layer", "sampler"):
        yield Case(capability=capability, kernel=kernel)
    for product in MODELS["llama-3-8b"]:
        yield Case(capability=capability, kernel="product", product=product)


def compile_all(cases: Sequence[Case]) -> Iterator[list[Binary]]:
    """The binaries of each case. Raises what compiling one raises."""
    for made in compiled(cases):
        if isinstance(made, Exception):
            raise made
        yield made


def compiled(cases: Sequence[Case]) -> Iterator[list[Binary] | Exception]:
    """The binaries of each case, or what compiling it has raised. As many processes compile as there are cores."""
    assert not tiles.INTERPRETED, "unset TRITON_INTERPRET"
    with ProcessPoolExecutor(
        max_workers=min(len(cases), os.cpu_count() or 1),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_compile_only,
    ) as pool:
        for future in [pool.submit(_binaries, case) for case in cases]:
            error = future.exception()
            assert error is None or isinstance(error, Exception), error
            yield error or future.result()


class _Target:
    """The part of Triton's driver interface that compiling needs."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


_compiled: list[Any] = []
"""Kernels that the launches of this process have compiled."""


def _compile_only() -> None:
    """Make every later launch of this process compile the kernel and not run it."""
    launch = JITFunction.run

    def keep(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        _compiled.append(launch(kernel, *args, grid=grid, warmup=True, **options))
        return _compiled[-1]

    JITFunction.run = keep


def _binaries(case: Case) -> list[Binary]:
    _compiled.clear()
    driver.set_active(_Target(case.capability))
    tiles.is_hopper_or_later.cache_clear()
    tiles.LAUNCHES_EARLY = case.early
    if case.kernel in ("decode", "prefill"):
        shared_bytes = Multiprocessor.of(case.capability).shared_bytes
        _attend(case, Tuning("", shared_bytes, copy_engine=case.capability == 90))
    elif case.kernel == "layer":
        _layer(case.dtype, case.head_dim, case.block_size)
    elif case.kernel == "product":
        _product(case)
    elif case.kernel == "invariant":
        _invariant(case)
    else:
        _sample()
    return [_binary(each, case.capability) for each in _compiled]


def _attend(case: Case, tuning: Tuning) -> None:
    dtype: torch.dtype = getattr(torch, case.dtype)
    kv_layer = _kv_layer(case.dtype, case.head_dim, case.block_size)
    q = torch.empty(2, _KV_HEADS * case.group, case.head_dim, dtype=dtype)
    tables, lens, scale = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64), 0.1
    shape = {
        "head_dim": case.head_dim, "itemsize": dtype.itemsize, "block_size": case.block_size, "group": case.group
    }  # fmt: skip
    if case.kernel == "decode":
        decode_tiling = case.tiling or tuning.decode(**shape, num_rows=2 * _KV_HEADS, max_seq_len=1024)
        assert isinstance(decode_tiling, DecodeTiling)
        decode_runs = decode_tiling.runs(
            lens, window=None, max_seq_len=1024, num_kv_heads=_KV_HEADS, num_processors=_PROCESSORS
        )  # fmt: skip
        decode_attention(
            q, kv_layer, tables, lens, decode_runs, window=None, scale=scale, tiling=decode_tiling, out_BHD=q
        )  # fmt: skip
    else:
        tiling = case.tiling or tuning.prefill(**shape)
        assert isinstance(tiling, PrefillTiling)
        _chunk(q, kv_layer, tables, tiling, aligned=False)


def _chunk(
    q: torch.Tensor, kv_layer: torch.Tensor, tables: torch.Tensor, tiling: PrefillTiling, *, aligned: bool
) -> None:
    """Attention of a chunk whose keys are cut into two runs."""
    length, num_tokens = 2 * tiling.tile, tiling.num_tokens(q.shape[1] // _KV_HEADS)
    of_queries = query_tiles([2], [length], num_tokens, tiling.tile, None)
    runs = aligned_runs(of_queries, 1, 2)[0] if aligned else query_runs(of_queries, 1)
    prefill_attention(
        q, kv_layer, tables[:1], torch.tensor([0, 2]), torch.tensor([length]),
        torch.tensor(runs.runs, dtype=torch.int32), torch.tensor(runs.splits, dtype=torch.int32),
        num_places=runs.num_places, window=None, scale=0.1, tiling=tiling, out_THD=q,
    )  # fmt: skip


def _invariant(case: Case) -> None:
    """Attention of decode tokens and of a chunk, and products of few, some and many rows, if they do not depend on the
    batch."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    kv_layer = _kv_layer(case.dtype, case.head_dim, case.block_size)
    q = torch.empty(2, _KV_HEADS * case.group, case.head_dim, dtype=dtype)
    tables, lens = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    shape = {"head_dim": case.head_dim, "itemsize": dtype.itemsize, "block_size": case.block_size}
    shared_bytes = Multiprocessor.of(case.capability).shared_bytes
    decodes, chunks = Tuning("", shared_bytes, copy_engine=case.capability == 90).invariant(**shape)
    for most_of_one in (2, _PROCESSORS):  # each run has a program, or several take turns
        runs = decodes.runs(
            lens, window=None, max_seq_len=most_of_one * INVARIANT_RUN, num_kv_heads=_KV_HEADS,
            num_processors=_PROCESSORS,
        )  # fmt: skip
        decode_attention(q, kv_layer, tables, lens, runs, window=None, scale=0.1, tiling=decodes, out_BHD=q)
    _chunk(q, kv_layer, tables, chunks, aligned=True)
    weight = torch.empty(4096, 4096, dtype=dtype)
    for rows in (FEW_ROWS, FEW_ROWS + 1, MANY_ROWS):
        matmul(torch.empty(rows, 4096, dtype=dtype), weight)


def _kv_layer(dtype: str, head_dim: int, block_size: int) -> torch.Tensor:
    """A layer's view of a cache of two blocks."""
    layout = KVLayout(num_layers=2, num_kv_heads=_KV_HEADS, head_dim=head_dim, block_size=block_size, dtype=dtype)
    return KVCache(layout, 2, torch.device("cpu")).layer(1)


def _layer(dtype_name: str, head_dim: int, block_size: int) -> None:
    dtype: torch.dtype = getattr(torch, dtype_name)
    heads = _KV_HEADS * GROUP
    hidden, qkv = torch.empty(2, 4096, dtype=dtype), torch.empty(2, (heads + 2 * _KV_HEADS) * head_dim, dtype=dtype)
    kv_layer = _kv_layer(dtype_name, head_dim, block_size)
    angles, slots = torch.empty(2, head_dim, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    weight = torch.empty(head_dim, dtype=dtype)
    layer.add_norm(hidden, hidden, hidden[0], 1e-5)
    layer.silu_mul(hidden)
    for norms in (None, (weight, weight)):
        layer.rotate_and_write(qkv, kv_layer, slots, slots, heads, norms, 1e-5, (angles, slots))


def _sample(vocab_size: int = 131072) -> None:
    logits, ones = torch.empty(2, vocab_size), torch.ones(2)
    sampler.best(logits)
    sampler.draw(logits, ones, ones, ones.int(), ones, ones, ones.double(), hiding=True)


def _product(case: Case) -> None:
    product = case.product
    assert product is not None
    tiling = case.tiling or untuned(product.num_columns, _PROCESSORS)
    assert isinstance(tiling, SkinnyTiling)
    Scene(product, FEW_ROWS, torch.device("cpu"), copies=1, drawn=False).kernel_calls(tiling)[0]()


def _binary(compiled: Any, capability: int) -> Binary:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, shared, warps = int(found[1]), compiled.metadata.shared, compiled.metadata.num_warps
    ptx = compiled.asm["ptx"]
    processor, threads = Multiprocessor.of(capability), 32 * warps
    by_registers = processor.registers // (-(-registers // 8) * 8 * threads)
    by_memory = processor.shared_bytes // (shared + RESERVED_BYTES)
    return Binary(
        kernel=compiled.metadata.name.lstrip("_"),
        registers=registers,
        stack_bytes=int(found[2]),
        shared_bytes=shared,
        num_warps=warps,
        products=next((each for each in _PRODUCTS if each in ptx), ""),
        programs=min(by_registers, by_memory, processor.threads // threads),
    )
