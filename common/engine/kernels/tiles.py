"""Parts of both attention kernels: the addresses of a tile of keys in the paged cache, and a step of online softmax.

Shapes: M rows of queries (tokens times the query heads that share a KV head), N keys of a tile, D head dimension.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels of this process run in Triton's interpreter."""
LAUNCHES_EARLY = False
"""Whether kernels are launched early (`early`). Not by default as long as it is not measured that it gains time and
changes no bit: `python -m benchmarks.gpu engine --only "early llama-3-8b"`."""
LOG2_E = 1.4426950408889634
MOST_ROWS = 2**31 - 1
"""Most rows of a cache of which the copy engine can load tiles: a row's number is a signed 32-bit integer."""
MIN_DOT = 16
"""Least rows, columns and depth that `tl.dot` takes."""


def widens(tensor: torch.Tensor) -> bool:
    """Whether a kernel must convert what it loads from `tensor` to float32 before it multiplies.

    This is so for bfloat16 in the interpreter, which takes bfloat16 for integers.
    """
    return INTERPRETED and tensor.dtype == torch.bfloat16


def padded(size: int, least: int = MIN_DOT) -> int:
    """The power of two that holds `size`.

    Each launch asks for some: Triton's function, which kernels may call, too, takes as long as a third of a launch.
    """
    return max(least, 1 << (size - 1).bit_length())


def num_tiles(size: int, tile: int) -> int:
    """That cover `size`; Triton's `cdiv` is as slow."""
    return -(-size // tile)


@lru_cache(maxsize=1)
def is_hopper_or_later() -> bool:
    """Whether the GPU has a copy engine for tiles (TMA) and launches kernels early: compute capability 9.0 or later."""
    target = None if INTERPRETED else driver.active.get_current_target()
    return target is not None and target.backend == "cuda" and target.arch >= 90


def early() -> dict[str, bool]:
    """Options of a launch that need not wait until the kernels before it in the stream have ended ("programmatic
    dependent launch" in NVIDIA's CUDA programming guide). The kernel must begin with `await_inputs(EARLY)`."""
    if INTERPRETED:
        return {"EARLY": False}
    on = LAUNCHES_EARLY and is_hopper_or_later()
    return {"EARLY": on, "launch_pdl": on}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Let the next kernel be launched as soon as each program of this one has begun, and wait until the kernels before
    this one in the stream have ended. Before it, a kernel may read only what no kernel writes, and write nothing.

    The next kernel waits for the end of this one, which has itself waited for those before it. So every program of
    every kernel that is launched early must come here.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def cache_rows(kv_layer: torch.Tensor) -> int:
    """Rows of D elements in the memory of `kv_layer`, `[num_blocks, K, 2, block_size, D]`, from its first to its last
    one, other layers' included."""
    num_blocks, num_kv_heads, _, block_size, head_dim = kv_layer.shape
    extent = (num_blocks - 1) * kv_layer.stride(0) + (num_kv_heads - 1) * kv_layer.stride(1)
    return extent // head_dim + 2 * block_size


def describe(kv_layer: torch.Tensor, tile: int) -> TensorDescriptor:
    """What the copy engine must know of `kv_layer` to load tiles of keys or of values: its memory as `cache_rows` rows,
    at most `MOST_ROWS`, of which `tile` are loaded at a time."""
    head_dim = kv_layer.shape[-1]
    shape = (cache_rows(kv_layer), head_dim)
    assert shape[0] <= MOST_ROWS
    rows = torch.as_strided(kv_layer, shape, (head_dim, 1), kv_layer.storage_offset())
    return TensorDescriptor.from_tensor(rows, [tile, padded(head_dim)])


@triton.jit
def key_offsets(
    table_ptr, start, seq_len, block_stride, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Offsets `[TILE]` of the keys at positions `[start, start + TILE)` of one head; `start` is a multiple of TILE.

    If a tile lies within one block, one entry of the block table is enough.
    """
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * block_stride + (start % BLOCK_SIZE + tl.arange(0, TILE)) * D
    else:
        positions = start + tl.arange(0, TILE)
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < seq_len, other=0).to(tl.int64)
        return blocks * block_stride + (positions % BLOCK_SIZE) * D


@triton.jit
def load_tile(
    kv_ptr,
    key_offsets_N,
    written_N,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    WIDEN: tl.constexpr,
    MASKED: tl.constexpr,
    like,
):
    """Keys or values `[TILE, D_PAD]`, in the type of `like`, or in float32 if WIDEN. If MASKED, slots that are not
    written give zeros."""
    dims = tl.arange(0, D_PAD)
    place = kv_ptr + key_offsets_N[:, None] + dims[None, :]
    if MASKED:
        tile = tl.load(place, mask=written_N[:, None] & (dims < D)[None, :], other=0.0)
    elif D < D_PAD:
        tile = tl.load(place, mask=(dims < D)[None, :], other=0.0)
    else:
        tile = tl.load(place)
    return tile.to(tl.float32) if WIDEN else tile.to(like.dtype)


@triton.constexpr_function
def _halvings(size):
    """How often `size`, a power of two, can be halved."""
    return size.bit_length() - 1


@triton.jit
def sum_of_keys(weights_MN, IN_ORDER: tl.constexpr):
    """The sum of each row, `[M]`. If IN_ORDER its bits are the same in a tile of any number of rows, with any number of
    warps.

    `tl.sum` adds in an order that follows the layout of the tile among threads, and the layout follows the instruction
    that multiplies. Two numbers have the same sum in either order: so each half is added to the other, until one number
    is left.
    """
    if IN_ORDER:
        for _ in tl.static_range(_halvings(weights_MN.shape[1])):
            halves_M2N = tl.reshape(weights_MN, [weights_MN.shape[0], 2, weights_MN.shape[1] // 2])
            weights_MN = tl.sum(halves_M2N, axis=1)
        return tl.reshape(weights_MN, [weights_MN.shape[0]])
    else:
        return tl.sum(weights_MN, axis=1)


@triton.jit
def soften(
    q_MD, k_ND, v_ND, visible_MN, acc_MD, max_M, sum_M, scale_log2, MASKED: tl.constexpr, IN_ORDER: tl.constexpr
):  # fmt: skip
    """Take a tile of keys and values into the running softmax. Returns (accumulator, maximum, sum); exponents have base
    2. For IN_ORDER see `sum_of_keys`.

    A row that has seen no key yet has maximum -inf and sum 0 ("Online normalizer calculation for softmax", arXiv
    1805.02867). A product of float32 is computed as three products of TF32. They run on the tensor cores, and lose no
    more than the rounding of float32 does.
    """
    scores = tl.dot(q_MD, tl.trans(k_ND), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(visible_MN, scores, float("-inf"))
    highest = tl.maximum(max_M, tl.max(scores, axis=1) * scale_log2)
    base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
    weights = tl.exp2(scores * scale_log2 - base[:, None])
    faded = tl.exp2(max_M - base)
    sum_M = tl.fma(sum_M, faded, sum_of_keys(weights, IN_ORDER))  # else it is up to the compiler where it rounds
    acc_MD = tl.dot(weights.to(v_ND.dtype), v_ND, acc_MD * faded[:, None], input_precision="tf32x3")
    return acc_MD, highest, sum_M
