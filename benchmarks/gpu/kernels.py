"""Each kernel by itself, against the rates of the device and beside torch's attention.

Decode attention is measured at the shapes for which FlashAttention-3 was measured on an H200 (12 µs + bytes / 4.45 TB/s
fits them), with inputs that are in no cache. It is measured with a grid for the contexts' length, and with a grid for
the longest possible context, as the engine's captured graphs have it. Prefill attention is rated by the operations that
a causal mask leaves. Torch's attention gets contiguous contexts, gathered from their blocks beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.child import attempts
from benchmarks.gpu.timing import copy_bytes_per_s, graph_us, num_copies
from common.contract.kv_layout import KVLayout
from common.engine.kernels import layer, sampler
from common.engine.kernels.decode_attention import DecodeTiling, decode_attention
from common.engine.kernels.decode_runs import DecodeRuns
from common.engine.kernels.prefill_attention import PrefillTiling, prefill_attention
from common.engine.kernels.query_runs import longest_run, query_runs, query_tiles
from common.engine.kernels.tuning import Tuning
from common.engine.kv_cache import KVCache
from common.engine.rope import Rope, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention heads of a model in bfloat16."""

    num: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num // self.kv

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in one layer."""
        return 2 * self.kv * self.dim * 2


LLAMA_8B, LLAMA_1B = Heads(num=32, kv=8, dim=128), Heads(num=32, kv=8, dim=64)
BLOCK = 64
LONGEST = 65536
"""Tokens of context that the engine's graphs are captured for."""
DECODE_SHAPES = (
    *((1, 1024), (1, 4096), (1, 16384), (1, 32768), (8, 1024), (8, 4096), (8, 16384), (8, 32768)),
    *((32, 4096), (64, 8192), (256, 1024)),
)
PREFILL_CONTEXTS = (2048, 4096, 8192, 16384, 32768)
PREFILL_CHUNK = 2048
SHORT_CHUNKS = ((64, 32768), (256, 32768), (512, 8192), (1024, 1024))
"""(tokens, context): chunks that leave most of the device idle unless contexts are split and long tiles come first."""


def decode() -> Iterator[dict[str, Any]]:
    """Microseconds of decode attention in one layer, against bytes over the copy rate, FlashAttention-3's fit, and
    torch."""
    copy_rate = copy_bytes_per_s()
    shapes = [
        (f"{batch} x {length}", partial(decode_shape, batch, length, copy_rate)) for batch, length in DECODE_SHAPES
    ]
    yield from attempts([*shapes, ("ragged", partial(decode_ragged, copy_rate))])


def prefill() -> Iterator[dict[str, Any]]:
    """TFLOP/s of prefill attention for a chunk at the end of a context."""
    shapes = [*((PREFILL_CHUNK, context) for context in PREFILL_CONTEXTS), *SHORT_CHUNKS]
    yield from attempts((f"{chunk} of {context}", partial(prefill_chunk, chunk, context)) for chunk, context in shapes)


def others() -> Iterator[dict[str, Any]]:
    """Microseconds of the other kernels of a layer, and of the sampler."""
    for tokens in (64, PREFILL_CHUNK):
        yield from small_kernels(tokens)
    yield from attempts((f"sampler of {batch}", partial(sampling, batch)) for batch in (1, 8, 64, 256))


class Scene:
    """A cache with sequences of one length, and queries; bfloat16 on the device."""

    def __init__(
        self,
        batch: int,
        length: int,
        query_len: int,
        copies: int,
        *,
        block_size: int = BLOCK,
        heads: Heads = LLAMA_8B,
    ) -> None:
        self.heads, self.block_size = heads, block_size
        layout = KVLayout(
            num_layers=1, num_kv_heads=heads.kv, head_dim=heads.dim, block_size=block_size, dtype="bfloat16"
        )
        blocks = layout.blocks_for(length)
        cache = KVCache(layout, copies * batch * blocks, torch.device("cuda"))
        cache.blocks.normal_()
        self.kv_layer = cache.layer(0)
        self.tables = torch.randperm(cache.num_blocks, device="cuda").view(copies, batch, blocks)
        self.lens = torch.full((batch,), length, device="cuda")
        self.q = torch.randn(batch * query_len, heads.num, heads.dim, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.scale = heads.dim**-0.5

    def decode_tiling(self, max_seq_len: int) -> DecodeTiling:
        """The tiling that the engine uses."""
        return Tuning.of(self.q.device).decode(
            head_dim=self.heads.dim, itemsize=2, block_size=self.block_size, group=self.heads.group,
            num_rows=len(self.lens) * self.heads.kv, max_seq_len=max_seq_len,
        )  # fmt: skip

    def prefill_tiling(self) -> PrefillTiling:
        """The tiling that the engine uses."""
        return Tuning.of(self.q.device).prefill(
            head_dim=self.heads.dim, itemsize=2, block_size=self.block_size, group=self.heads.group
        )


def decode_runs(scene: Scene, tiling: DecodeTiling, max_seq_len: int) -> DecodeRuns:
    """Runs of decode attention, as the engine makes them once a step."""
    return tiling.runs(
        scene.lens, window=None, max_seq_len=max_seq_len, num_kv_heads=scene.heads.kv, num_processors=num_processors()
    )  # fmt: skip


def decode_calls(scene: Scene, tiling: DecodeTiling, max_seq_len: int) -> list[Callable[[], object]]:
    """One call for each copy of the cache, as a layer makes it."""
    runs = decode_runs(scene, tiling, max_seq_len)

    def call(tables: torch.Tensor) -> Callable[[], object]:
        return lambda: decode_attention(
            scene.q, scene.kv_layer, tables, scene.lens, runs,
            window=None, scale=scene.scale, tiling=tiling, out_BHD=scene.out,
        )  # fmt: skip

    return [call(tables) for tables in scene.tables]


def decode_shape(batch: int, length: int, copy_rate: float) -> dict[str, Any]:
    """A row of `decode`."""
    heads = LLAMA_8B
    num_bytes = batch * length * heads.token_bytes
    scene = Scene(batch, length, 1, num_copies(num_bytes))
    us, longest_us = (
        graph_us(decode_calls(scene, scene.decode_tiling(max_seq_len), max_seq_len))
        for max_seq_len in (length, LONGEST)
    )
    entry: dict[str, Any] = {
        "kind": "decode_attention",
        "batch": batch,
        "length": length,
        "us": us,
        "longest_us": longest_us,
        "runs_us": graph_us([partial(decode_runs, scene, scene.decode_tiling(LONGEST), LONGEST)]),
        "of_copy_rate": num_bytes / (1e-6 * us) / copy_rate,
        "fa3_fit_us": 12 + 1e6 * num_bytes / 4.45e12,
        "gather_us": graph_us([partial(scene.kv_layer.index_select, 0, table.flatten()) for table in scene.tables]),
        **peers(*gathered(batch, 1, length, heads)),
    }
    entry["over_fa3_fit"] = max(us, longest_us) / entry["fa3_fit_us"]
    return entry


def decode_ragged(copy_rate: float) -> dict[str, Any]:
    """A row of one long sequence among short ones."""
    long, short, num_short = 32768, 1024, 32
    scene = Scene(1 + num_short, long, 1, 2)
    scene.lens[1:] = short
    num_bytes = (long + num_short * short) * scene.heads.token_bytes
    us, longest_us = (
        graph_us(decode_calls(scene, scene.decode_tiling(max_seq_len), max_seq_len)) for max_seq_len in (long, LONGEST)
    )
    return {
        "kind": "decode_ragged", "long": long, "short": short, "num_short": num_short,
        "us": us, "longest_us": longest_us, "of_copy_rate": num_bytes / (1e-6 * us) / copy_rate,
    }  # fmt: skip


def gathered(batch: int, query_len: int, length: int, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[batch, heads, query_len, dim]`, and keys and values `[copies, 2, batch, kv_heads, length, dim]`,
    contiguous as torch's attention takes them; bfloat16."""
    q = torch.randn(batch, heads.num, query_len, heads.dim, dtype=torch.bfloat16, device="cuda")
    copies = num_copies(batch * length * heads.token_bytes)
    kv = torch.empty(copies, 2, batch, heads.kv, length, heads.dim, dtype=torch.bfloat16, device="cuda").normal_()
    return q, kv


def peers(q: torch.Tensor, kv: torch.Tensor) -> dict[str, Any]:
    """Microseconds of torch's attention by the library that it chooses and by cuDNN, or the errors."""
    query_len, length = q.shape[2], kv.shape[4]
    masked: dict[str, Any] = {}
    if query_len == length:
        masked = {"is_causal": True}
    elif query_len > 1:
        masked = {"attn_mask": causal_lower_right(query_len, length)}
    calls = [partial(scaled_dot_product_attention, q, each[0], each[1], enable_gqa=True, **masked) for each in kv]

    def by_cudnn(call: Callable[[], object]) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return timed("sdpa", calls) | timed("cudnn", [partial(by_cudnn, call) for call in calls])


def timed(name: str, calls: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Microseconds of a call, or its error: not every library supports every shape."""
    try:
        for call in calls[:1]:
            call()
        torch.cuda.synchronize()
        return {f"{name}_us": graph_us(calls)}
    except RuntimeError as error:
        return {f"{name}_us": None, f"{name}_error": str(error)[:300]}


def prefill_chunk(chunk: int, context: int) -> dict[str, Any]:
    """A row of `prefill`. `one_program_us` is the time if keys are cut for one program on each multiprocessor."""
    heads = LLAMA_8B
    scene = Scene(1, context, chunk, 1)
    flops = 4 * heads.num * heads.dim * (chunk * context - chunk * (chunk - 1) / 2)
    tiling = scene.prefill_tiling()
    us, one_program_us = (graph_us([prefill_call(scene, each)]) for each in (tiling, replace(tiling, programs=1)))
    return {
        "kind": "prefill_attention", "chunk": chunk, "context": context, "us": us, "programs": tiling.programs,
        "one_program_us": one_program_us, "tflops": 1e-12 * flops / (1e-6 * us),
        **peers(*gathered(1, chunk, context, heads)),
    }  # fmt: skip


def prefill_call(scene: Scene, tiling: PrefillTiling) -> Callable[[], object]:
    """A call of the chunk's attention."""
    query_len = len(scene.q)
    tiles = query_tiles([query_len], scene.lens.tolist(), tiling.num_tokens(scene.heads.group), tiling.tile, None)
    num_programs = num_processors() * tiling.programs
    runs = query_runs(tiles, longest_run(tiles, scene.heads.kv, num_programs, tiling.least_tiles))
    runs_R5, splits_S4 = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in (runs.runs, runs.splits))
    starts = torch.tensor([0, query_len], device="cuda")
    return lambda: prefill_attention(
        scene.q, scene.kv_layer, scene.tables[0], starts, scene.lens, runs_R5, splits_S4,
        num_places=runs.num_places, window=None, scale=scene.scale, tiling=tiling, out_THD=scene.out,
    )  # fmt: skip


def num_processors() -> int:
    """Number of multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def small_kernels(tokens: int) -> Iterator[dict[str, Any]]:
    """Microseconds of the other kernels of a layer of the 8B model. What they read of 64 tokens is in the GPU's
    cache, as it is after a product."""
    heads, hidden, inner = LLAMA_8B, 4096, 14336
    h, delta, gate_up, qkv = (
        torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
        for size in (hidden, hidden, 2 * inner, (heads.num + 2 * heads.kv) * heads.dim)
    )
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    kv_layer = Scene(1, tokens, 1, 1).kv_layer
    slots = torch.arange(tokens, device="cuda")
    blocks, offsets = slots // BLOCK, slots % BLOCK
    table = Rope(RopeConfig(theta=5e5), heads.dim, tokens, h.device).table(torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "add_norm": lambda: layer.add_norm(h, delta, weight, 1e-5),
        "silu_mul": lambda: layer.silu_mul(gate_up),
        "rotate_and_write": lambda: layer.rotate_and_write(
            qkv, kv_layer, blocks, offsets, heads.num, None, 1e-5, (table, slots)
        ),
    }
    for name, call in calls.items():
        yield {"kind": "layer", "kernel": name, "tokens": tokens, "us": graph_us([call])}


def sampling(batch: int, vocabulary: int = 128256) -> dict[str, Any]:
    """Microseconds to choose a token for each row: greedy, by temperature, and by top-k and top-p."""
    logits = torch.randn(batch, vocabulary, device="cuda") * 3
    values, _ = sampler.best(logits)
    ones, zeros = torch.ones(batch, device="cuda"), torch.zeros(batch, device="cuda")
    number = torch.rand(batch, dtype=torch.float64, device="cuda")
    no_k = torch.zeros(batch, dtype=torch.int32, device="cuda")
    top_k, top_p = no_k + 50, 0.9 * ones  # not in a graph: their kernels are not the sampler's
    entry: dict[str, Any] = {"kind": "sampler", "batch": batch, "vocabulary": vocabulary}
    entry["greedy_us"] = graph_us([lambda: sampler.best(logits)])
    entry["temperature_us"] = graph_us(
        [lambda: sampler.draw(logits, values, ones, no_k, ones, zeros, number, hiding=False)]
    )
    entry["top_k_top_p_us"] = graph_us(
        [lambda: sampler.draw(logits, values, ones, top_k, top_p, zeros, number, hiding=True)]
    )
    return entry
