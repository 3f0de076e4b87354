"""Whole steps of models of well-known shapes with random weights, against the rates of the device, and what they take
if no result may depend on the batch.

A decode step must read every weight and the KV of every sequence once, so its floor is these bytes divided by the rate
of reading. A prefill must do the products of its matrices and of causal attention, so its floor is these operations
divided by the rate of a large matrix product.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.gpu.child import attempts
from benchmarks.gpu.timing import matmul_flops_per_s, read_bytes_per_s
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.executor import Executor
from common.engine.host_swap import HostSwap
from common.engine.kernels import tiles
from common.engine.kernels.backend import TritonBackend
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.runner import ModelRunner, Submitted
from common.engine.shard import WHOLE
from common.engine.weights import Weights, _allocate, _targets

BLOCK = 64
CHUNK = 2048
STEPS, WARM_UP = 40, 3
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
"""(sequences, tokens of context of each)."""
PREFILLS = (2048, 8192, 32768)
MOST_SEQS = max(batch for batch, _ in DECODES)
INVARIANT_DECODES, INVARIANT_PREFILL = ((1, 2048), (64, 2048)), 8192
PROFILED, PROFILED_CONTEXT, PROFILED_STEPS = (1, 64), 2048, 8


def decode(model: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of a decode step for each of `DECODES`."""
    read_rate = read_bytes_per_s()
    runner, num_weight_bytes = make_runner(SHAPES[model], graphs=True)
    yield from attempts(
        (f"{batch} x {context}", partial(decode_row, model, runner, batch, context, num_weight_bytes, read_rate))
        for batch, context in DECODES
    )


def prefill(model: str) -> Iterator[dict[str, Any]]:
    """Seconds of a prefill for each of `PREFILLS`."""
    matmul_rate = matmul_flops_per_s()
    runner, num_weight_bytes = make_runner(SHAPES[model], graphs=False)
    yield from attempts(
        (str(length), partial(prefill_row, model, runner, length, num_weight_bytes, matmul_rate)) for length in PREFILLS
    )


def profile(model: str) -> Iterator[dict[str, Any]]:
    """Time of each kernel in a decode step."""
    runner, _ = make_runner(SHAPES[model], graphs=True)
    yield from attempts(
        (f"{batch} x {PROFILED_CONTEXT}", partial(profile_row, model, runner, batch)) for batch in PROFILED
    )


def early(model: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of decode steps whose kernels are launched early, and of the same without. Raises `AssertionError`
    if their tokens differ, or the log-probabilities of the likeliest."""
    made = []
    for tiles.LAUNCHES_EARLY in (False, True):
        runner, _ = make_runner(SHAPES[model], graphs=True)
        made.append(
            {
                batch: (
                    *decoded(runner, batch, PROFILED_CONTEXT, STEPS),
                    decoded(runner, batch, PROFILED_CONTEXT, PROFILED_STEPS, logprobs=20)[1],
                )
                for batch in PROFILED
            }
        )
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    for batch in PROFILED:
        (plain_s, *plain), (early_s, *others) = (each[batch] for each in made)
        ms = {"plain_ms": 1e3 * plain_s / STEPS, "early_ms": 1e3 * early_s / STEPS}
        yield {"kind": "early", "model": model, "batch": batch, "context": PROFILED_CONTEXT, **ms}
        assert plain == others, f"other tokens or log-probabilities, {batch} sequences"


def invariant(model: str) -> Iterator[dict[str, Any]]:
    """Milliseconds of decode steps and of a prefill, by the batch-invariant backend and by the other one."""
    plain_ms, invariant_ms = (steps_ms(model, batch_invariant=each) for each in (False, True))
    for step, own_ms in invariant_ms.items():
        yield {
            "kind": "invariant", "model": model, "step": step, "plain_ms": plain_ms[step], "invariant_ms": own_ms,
            "ratio": own_ms / plain_ms[step],
        }  # fmt: skip


def steps_ms(model: str, *, batch_invariant: bool) -> dict[str, float]:
    """Milliseconds of each of `INVARIANT_DECODES`, and of a prefill of `INVARIANT_PREFILL` tokens. The memory that this
    takes is free afterwards."""
    most = max(batch for batch, _ in INVARIANT_DECODES)
    runner, _ = make_runner(SHAPES[model], graphs=True, most_seqs=most, batch_invariant=batch_invariant)
    taken = {
        f"decode {batch} x {context}": 1e3 * decoded(runner, batch, context, STEPS)[0] / STEPS
        for batch, context in INVARIANT_DECODES
    }
    taken[f"prefill {INVARIANT_PREFILL}"] = 1e3 * prefilled_s(runner, INVARIANT_PREFILL)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return taken


def make_runner(
    shape: PreTrainedConfig,
    *,
    graphs: bool,
    most_seqs: int = MOST_SEQS,
    batch_invariant: bool = False,
) -> tuple[ModelRunner, int]:
    """A runner in bfloat16, with `graphs` for up to `most_seqs` sequences, and the bytes of the matrices that a step
    reads."""
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        config = ModelConfig.from_folder(Path(folder))
    weights = random_weights(config, device, batch_invariant=batch_invariant)
    layout = config.layout(BLOCK, "bfloat16")
    tokens = max(max(batch * (context + STEPS + BLOCK) for batch, context in DECODES), max(PREFILLS))
    cache, swap = KVCache(layout, tokens // BLOCK + 512, device), HostSwap(layout, 0, device)
    cache.blocks.normal_()  # contexts are not computed; zeros could be faster to read
    backend = TritonBackend(device, batch_invariant=batch_invariant)
    runner = ModelRunner(Executor(Decoder(config, weights), cache, swap, backend))
    if graphs:
        runner.capture_graphs(most_seqs)
    matrices = [part for layer in weights.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return runner, sum(each.weight.nbytes for each in [*matrices, weights.lm_head])


def random_weights(config: ModelConfig, device: torch.device, *, batch_invariant: bool = False) -> Weights:
    """Weights with the standard deviation of a newly initialised model; norms are 1."""
    torch.manual_seed(0)
    weights = _allocate(config, WHOLE, torch.bfloat16, device, None, batch_invariant)
    for name, target in _targets(config, WHOLE, weights):
        target.tensor.fill_(1.0) if "norm" in name else target.tensor.normal_(std=0.02)
    return weights


def decode_row(
    model: str, runner: ModelRunner, batch: int, context: int, num_weight_bytes: int, read_rate: float
) -> dict[str, Any]:
    """Milliseconds of a decode step. Each step is submitted while the one before runs."""
    step_s = decoded(runner, batch, context, STEPS)[0] / STEPS
    kv_bytes = batch * context * runner.layout.block_bytes // BLOCK
    floor_s = (num_weight_bytes + kv_bytes) / read_rate
    return {
        "kind": "decode", "model": model, "weight_bytes": num_weight_bytes, "batch": batch, "context": context,
        "step_ms": 1e3 * step_s, "floor_ms": 1e3 * floor_s, "over_floor": step_s / floor_s,
    }  # fmt: skip


def decoded(
    runner: ModelRunner, batch: int, context: int, steps: int, logprobs: int | None = None
) -> tuple[float, list[Any]]:
    """Seconds of `steps` decode steps, after `WARM_UP` others, of sequences whose contexts were never computed; and the
    outcomes of all but the last, with so many log-probabilities."""
    blocks = runner.layout.blocks_for(context + WARM_UP + steps)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=10**6, logprobs=logprobs)
    before: Submitted | None = None
    outcomes = []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        position = context + number
        sample = Sample(params=params, choice=0, position=position + 1, token_ids=(), prompt_len=context)
        submitted = runner.submit(
            [
                Slice(
                    token_ids=[7], start=position, block_table=table, samples=(sample,),
                    follows=row if number else None,
                )
                for row, table in enumerate(tables)
            ]
        )  # fmt: skip
        if before is not None:
            outcomes.append(before.outcomes())
        before = submitted
    torch.cuda.synchronize()
    return time.perf_counter() - begin, outcomes


def profile_row(model: str, runner: ModelRunner, batch: int) -> dict[str, Any]:
    """The kernels of a step, the longest first, averaged over several steps by torch's profiler."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        decoded(runner, batch, PROFILED_CONTEXT, PROFILED_STEPS)
    steps = WARM_UP + PROFILED_STEPS
    kernels = [
        {"name": event.key[:120], "calls": event.count / steps, "us": event.self_device_time_total / steps}
        for event in profiler.key_averages()
        if str(event.device_type).endswith("CUDA")
    ]
    kernels.sort(key=lambda kernel: -kernel["us"])
    busy_us = sum(kernel["us"] for kernel in kernels)
    return {
        "kind": "profile", "model": model, "batch": batch, "context": PROFILED_CONTEXT, "busy_us": busy_us,
        "kernels": kernels[:40],
    }  # fmt: skip


def prefill_row(
    model: str, runner: ModelRunner, tokens: int, num_weight_bytes: int, matmul_rate: float
) -> dict[str, Any]:
    """Seconds for a prompt in chunks, and its operations per second as a fraction of a large product's."""
    config, seconds = runner.config, prefilled_s(runner, tokens)
    in_layers = num_weight_bytes // 2 - config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens**2
    operations = 2 * in_layers * tokens + attention
    return {
        "kind": "prefill", "model": model, "weight_bytes": num_weight_bytes, "tokens": tokens, "s": seconds,
        "of_matmul": operations / seconds / matmul_rate,
    }  # fmt: skip


def prefilled_s(runner: ModelRunner, tokens: int) -> float:
    """Seconds for a prompt in chunks, the least of three times."""
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
    return min(taken)
