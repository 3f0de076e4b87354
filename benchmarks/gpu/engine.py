"""Whole steps of models of well-known shapes with random weights, against what the device can do.

A decode step must read every weight and the KV of every sequence once: bytes over the copy rate is its floor. A prefill
must do the products of its matrices and of causal attention: operations over the rate of a large product.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.host_swap import HostSwap
from common.engine.kernels.backend import TritonBackend
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.runner import ModelRunner, Submitted
from common.engine.weights import Weights, _allocate, _targets

BLOCK = 64
CHUNK = 2048
STEPS = 40
SHAPES: dict[str, PreTrainedConfig] = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=65536, tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=65536, tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    ),
}  # fmt: skip
DECODES = ((1, 512), (1, 2048), (8, 2048), (64, 2048), (256, 1024))
"""(batch, context)."""
PREFILLS = (2048, 8192, 32768)


def run(copy_rate: float, matmul_rate: float) -> dict[str, Any]:
    """Every shape; prints as it goes."""
    figures = {}
    for name, shape in SHAPES.items():
        runner, num_weight_bytes = make_runner(shape)
        decodes = [decode(runner, batch, context, num_weight_bytes, copy_rate) for batch, context in DECODES]
        prefills = [prefill(runner, length, num_weight_bytes, matmul_rate) for length in PREFILLS]
        figures[name] = {"weight_bytes": num_weight_bytes, "decode": decodes, "prefill": prefills}
        for each in decodes:
            print(
                f"{name} decode {each['batch']:4} x {each['context']}: {each['step_ms']:.2f} ms, "
                f"{each['over_floor']:.2f} times its floor",
                flush=True,
            )
        for each in prefills:
            print(f"{name} prefill {each['tokens']}: {each['s']:.3f} s, {each['of_matmul']:.2f} of the product's rate")
        del runner
        torch.cuda.empty_cache()
    return figures


def make_runner(shape: PreTrainedConfig) -> tuple[ModelRunner, int]:
    """In bfloat16, with graphs; and the bytes of the matrices that a step reads."""
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        config = ModelConfig.from_folder(Path(folder))
    weights = random_weights(config, device)
    layout = config.layout(BLOCK, "bfloat16")
    tokens = max(max(batch * (context + STEPS + BLOCK) for batch, context in DECODES), max(PREFILLS))
    cache, swap = KVCache(layout, tokens // BLOCK + 512, device), HostSwap(layout, 0, device)
    cache.blocks.normal_()  # contexts that were never computed; zeros could be quicker to read
    runner = ModelRunner(Decoder(config, weights), cache, swap, TritonBackend(device))
    runner.capture_graphs(max(batch for batch, _ in DECODES))
    matrices = [part for layer in weights.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return runner, sum(each.weight.nbytes for each in [*matrices, weights.lm_head])


def random_weights(config: ModelConfig, device: torch.device) -> Weights:
    """As small as those of a model that was just initialised; norms are 1."""
    torch.manual_seed(0)
    weights = _allocate(config, torch.bfloat16, device, None)
    for name, parts in _targets(config, weights):
        for part in parts:
            part.fill_(1.0) if "norm" in name else part.normal_(std=0.02)
    return weights


def decode(runner: ModelRunner, batch: int, context: int, num_weight_bytes: int, copy_rate: float) -> dict[str, Any]:
    """Milliseconds of a step, of steps that are each submitted while the one before runs."""
    blocks = -(-(context + STEPS + 4) // BLOCK)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=10**6)

    def slices(position: int, *, follows: bool) -> Sequence[Slice]:
        sample = Sample(params=params, choice=0, position=position + 1, token_ids=(), prompt_len=context)
        return [
            Slice(token_ids=[7], start=position, block_table=table, samples=(sample,), follows=row if follows else None)
            for row, table in enumerate(tables)
        ]

    before: Submitted | None = None
    for number in range(STEPS + 3):
        if number == 3:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        submitted = runner.submit(slices(context + number, follows=number > 0))
        if before is not None:
            before.outcomes()
        before = submitted
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - begin) / STEPS
    kv_bytes = batch * context * runner.layout.block_bytes // BLOCK
    floor_s = (num_weight_bytes + kv_bytes) / copy_rate
    return {
        "batch": batch,
        "context": context,
        "step_ms": 1e3 * step_s,
        "floor_ms": 1e3 * floor_s,
        "over_floor": step_s / floor_s,
    }


def prefill(runner: ModelRunner, tokens: int, num_weight_bytes: int, matmul_rate: float) -> dict[str, Any]:
    """Seconds for a prompt, in chunks, and its operations over the rate of a large product."""
    config = runner.config
    table = list(range(-(-tokens // BLOCK)))
    token_ids = [token % 1000 for token in range(tokens)]
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for start in range(0, tokens, CHUNK):
            submitted = runner.submit(
                [Slice(token_ids=token_ids[start : start + CHUNK], start=start, block_table=table)]
            )
        submitted.outcomes()
        taken.append(time.perf_counter() - begin)
    in_layers = num_weight_bytes // 2 - config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens**2
    operations = 2 * in_layers * tokens + attention
    return {"tokens": tokens, "s": min(taken), "of_matmul": operations / min(taken) / matmul_rate}
