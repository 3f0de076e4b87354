"""The kernels, one by one, against what the device can do and, where they are installed, against others' kernels.

Decode attention is measured at the shapes for which FlashAttention-3 was measured on an H200 (12 µs + bytes / 4.45 TB/s
fits them), with inputs that are in no cache; prefill attention by the arithmetic that causality leaves to do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.timing import graph_us, num_copies
from common.engine.kernels import layer, sampler
from common.engine.kernels.decode_attention import DecodeTiling, decode_attention
from common.engine.kernels.prefill_attention import PrefillTiling, prefill_attention, query_tiles
from common.engine.kernels.tuning import Tuning
from common.engine.rope import Rope, RopeConfig

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 64
"""Of Llama-3-8B, with blocks of 64 tokens."""
DECODE_SHAPES = (
    *((1, 1024), (1, 4096), (1, 16384), (1, 32768), (8, 1024), (8, 4096), (8, 16384), (8, 32768)),
    *((32, 4096), (64, 8192), (256, 1024)),
)
PREFILL_CONTEXTS = (2048, 4096, 8192, 16384, 32768)
PREFILL_CHUNK = 2048


def run(copy_rate: float) -> dict[str, Any]:
    """Every measurement; prints as it goes."""
    return {
        "decode_attention": [decode_shape(batch, length, copy_rate) for batch, length in DECODE_SHAPES],
        "decode_ragged": decode_ragged(copy_rate),
        "prefill_attention": [prefill_context(context) for context in PREFILL_CONTEXTS],
        "layer": small_kernels(64, copy_rate) + small_kernels(PREFILL_CHUNK, copy_rate),
        "sampler": [sampling(batch) for batch in (1, 8, 64, 256)],
    }


class Scene:
    """A cache with sequences of one length, and queries; bf16 on the device."""

    def __init__(self, batch: int, length: int, query_len: int, copies: int, block_size: int = BLOCK) -> None:
        blocks = -(-length // block_size)
        shape = (copies * batch * blocks, 1, 2, KV_HEADS, block_size, HEAD_DIM)
        self.kv_layer = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()[:, 0]
        order = torch.randperm(shape[0], device="cuda")
        self.tables = order.view(copies, batch, blocks)
        self.lens = torch.full((batch,), length, device="cuda")
        self.q = torch.randn(batch * query_len, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.scale = HEAD_DIM**-0.5


def decode_calls(scene: Scene, tiling: DecodeTiling, length: int) -> list[Callable[[], object]]:
    """One call for each copy of the cache."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def call(tables: torch.Tensor) -> Callable[[], object]:
        return lambda: decode_attention(
            scene.q, scene.kv_layer, tables, scene.lens, window=None, scale=scene.scale, max_seq_len=length,
            num_processors=processors, tiling=tiling, out_BHD=scene.out,
        )  # fmt: skip

    return [call(tables) for tables in scene.tables]


def decode_shape(batch: int, length: int, copy_rate: float) -> dict[str, Any]:
    """Microseconds for a layer, against bytes over the copy rate, and against FlashAttention-3."""
    num_bytes = batch * length * 2 * KV_HEADS * HEAD_DIM * 2
    scene = Scene(batch, length, 1, num_copies(num_bytes))
    tiling = Tuning.of(scene.q.device).decode(
        head_dim=HEAD_DIM,
        itemsize=2,
        block_size=BLOCK,
        group=HEADS // KV_HEADS,
        num_rows=batch * KV_HEADS,
        max_seq_len=length,
    )
    ours = graph_us(decode_calls(scene, tiling, length))
    entry: dict[str, Any] = {
        "batch": batch,
        "length": length,
        "us": ours,
        "of_copy_rate": num_bytes / (1e-6 * ours) / copy_rate,
        "fa3_fit_us": 12 + 1e6 * num_bytes / 4.45e12,
        "sdpa_us": sdpa_us(batch, length),
        "flashinfer_us": flashinfer_us(scene, batch, length),
    }
    entry["over_fa3_fit"] = ours / entry["fa3_fit_us"]
    print(
        f"decode {batch:4} x {length:6}: {ours:8.1f} us, {entry['of_copy_rate']:.2f} of the copy rate, "
        f"{entry['over_fa3_fit']:.2f} of FA3's fit, SDPA {entry['sdpa_us']:.0f}, FlashInfer {entry['flashinfer_us']}",
        flush=True,
    )
    return entry


def decode_ragged(copy_rate: float) -> dict[str, Any]:
    """One long sequence among short ones, which must not be waited for."""
    long, short, num_short = 32768, 1024, 32
    scene = Scene(1 + num_short, long, 1, 2)
    scene.lens[1:] = short
    num_bytes = (long + num_short * short) * 2 * KV_HEADS * HEAD_DIM * 2
    tiling = Tuning.of(scene.q.device).decode(
        head_dim=HEAD_DIM,
        itemsize=2,
        block_size=BLOCK,
        group=HEADS // KV_HEADS,
        num_rows=(1 + num_short) * KV_HEADS,
        max_seq_len=long,
    )
    us = graph_us(decode_calls(scene, tiling, long))
    entry = {"long": long, "short": short, "num_short": num_short, "us": us}
    entry["of_copy_rate"] = num_bytes / (1e-6 * us) / copy_rate
    print(f"decode {num_short} x {short} and {long}: {us:8.1f} us, {entry['of_copy_rate']:.2f} of the copy rate")
    return entry


def sdpa_us(batch: int, length: int) -> float:
    """Torch's attention to keys and values that lie side by side, not in blocks."""
    num_bytes = batch * length * 2 * KV_HEADS * HEAD_DIM * 2
    q = torch.randn(batch, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    shape = (num_copies(num_bytes, most=8), 2, batch, KV_HEADS, length, HEAD_DIM)
    kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    return graph_us([partial(scaled_dot_product_attention, q, each[0], each[1], enable_gqa=True) for each in kv])


def flashinfer_us(scene: Scene, batch: int, length: int) -> float | None:
    """FlashInfer's batched decode on the same blocks; None where it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    blocks = scene.tables.shape[2]
    calls = []
    for tables in scene.tables[:8]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32) * blocks, tables.flatten().int(),
            torch.full((batch,), (length - 1) % BLOCK + 1, dtype=torch.int32), HEADS, KV_HEADS, HEAD_DIM, BLOCK,
            q_data_type=torch.bfloat16,
        )  # fmt: skip
        calls.append(lambda w=wrapper: w.run(scene.q, scene.kv_layer))
    return graph_us(calls)


def prefill_context(context: int) -> dict[str, Any]:
    """TFLOP/s of a chunk at the end of a context."""
    scene = Scene(1, context, PREFILL_CHUNK, 1)
    flops = 4 * HEADS * HEAD_DIM * (PREFILL_CHUNK * context - PREFILL_CHUNK * (PREFILL_CHUNK - 1) / 2)
    entry: dict[str, Any] = {"chunk": PREFILL_CHUNK, "context": context}
    entry["us"] = graph_us([prefill_call(scene, Tuning.of(scene.q.device).prefill(
        head_dim=HEAD_DIM, itemsize=2, block_size=BLOCK, group=HEADS // KV_HEADS
    ))])  # fmt: skip
    entry["tflops"] = 1e-12 * flops / (1e-6 * entry["us"])
    print(f"prefill {PREFILL_CHUNK} of {context:6}: {entry['us']:8.1f} us, {entry['tflops']:.0f} TFLOP/s", flush=True)
    return entry


def prefill_call(scene: Scene, tiling: PrefillTiling) -> Callable[[], object]:
    """The chunk's attention."""
    tiles = query_tiles([PREFILL_CHUNK], tiling.num_tokens(HEADS // KV_HEADS))
    tiles_Q2 = torch.tensor(tiles, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, PREFILL_CHUNK], device="cuda")
    return lambda: prefill_attention(
        scene.q, scene.kv_layer, scene.tables[0], starts, scene.lens, tiles_Q2,
        window=None, scale=scene.scale, tiling=tiling, out_THD=scene.out,
    )  # fmt: skip


def small_kernels(tokens: int, copy_rate: float) -> list[dict[str, Any]]:
    """The others of a layer of the 8B model; microseconds, and those that their bytes take at the copy rate."""
    hidden, inner = 4096, 14336
    h, delta, gate_up, qkv = (
        torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
        for size in (hidden, hidden, 2 * inner, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    )
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    kv_layer = Scene(1, tokens, 1, 1).kv_layer
    slots = torch.arange(tokens, device="cuda")
    blocks, offsets = slots // BLOCK, slots % BLOCK
    cos, sin = Rope(RopeConfig(theta=5e5), HEAD_DIM, h.device).angles(slots, torch.bfloat16)
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "add_norm": (4 * h.nbytes, lambda: layer.add_norm(h, delta, weight, 1e-5)),
        "silu_mul": (1.5 * gate_up.nbytes, lambda: layer.silu_mul(gate_up)),
        "rotate_and_write": (
            2 * qkv.nbytes,
            lambda: layer.rotate_and_write(qkv, kv_layer, blocks, offsets, HEADS, None, 1e-5, cos, sin),
        ),
    }
    made = []
    for name, (num_bytes, call) in calls.items():
        made.append({"kernel": name, "tokens": tokens, "us": graph_us([call] * 20)})
        made[-1]["floor_us"] = 1e6 * num_bytes / copy_rate
        print(
            f"{name:17} {tokens:5} tokens: {made[-1]['us']:7.1f} us, bytes alone {made[-1]['floor_us']:.1f}", flush=True
        )
    return made


def sampling(batch: int, vocabulary: int = 128256) -> dict[str, Any]:
    """Microseconds to choose a token for each row: the likeliest, a random one, one of top-k and top-p."""
    logits = torch.randn(batch, vocabulary, device="cuda") * 3
    values, _ = sampler.best(logits)
    ones, zeros = torch.ones(batch, device="cuda"), torch.zeros(batch, device="cuda")
    number = torch.rand(batch, dtype=torch.float64, device="cuda")
    no_k = torch.zeros(batch, dtype=torch.int32, device="cuda")
    entry: dict[str, Any] = {"batch": batch, "vocabulary": vocabulary}
    entry["greedy_us"] = graph_us([lambda: sampler.best(logits)])
    entry["temperature_us"] = graph_us(
        [lambda: sampler.draw(logits, values, ones, no_k, ones, zeros, number, hiding=False)]
    )
    entry["top_k_top_p_us"] = graph_us(
        [lambda: sampler.draw(logits, values, ones, no_k + 50, 0.9 * ones, zeros, number, hiding=True)]
    )
    print(f"sampler {batch:4} rows: " + ", ".join(f"{k} {v:.0f}" for k, v in entry.items() if "_us" in k), flush=True)
    return entry
