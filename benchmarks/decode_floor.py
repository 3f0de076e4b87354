"""How far a decode step is from the memory's speed: the bytes that it must read, over what a plain loop reads.

    python -m benchmarks.decode_floor --model 0.5b --threads 1

The floor of a step is (weights, in the checkpoint's type, + the KV of its sequences) / the best bandwidth at which an
independent loop (a sum over 512 MiB) reads in the same run, by as many threads. Steps and loops take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import llama_15m, qwen2_05b
from benchmarks.record import record, spread
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.runner import ModelRunner, load_runner

MODELS = {"15m": llama_15m, "0.5b": qwen2_05b}
LOOP_BYTES = 512 * 2**20


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = MODELS[options.model](Path(folder))
        tokens = max(options.batches) * (options.context + options.steps + 32)
        runner = load_runner(path, kv_cache_bytes=tokens * 64 * 1024, dtype=options.dtype)
        figures = measure(runner, options.batches, options.context, options.steps)
    for batch, each in figures["batches"].items():
        print(f"batch {batch}: {each['step_ms']['p50']:.1f} ms, floor {each['floor_ms']:.1f}: {each['ratio']:.2f}")
    if not options.no_record:
        workload = {"model": options.model, "dtype": options.dtype, "context": options.context}
        name = f"decode-floor-{options.model}-{options.threads}"
        record(name, workload=workload | {"threads": options.threads, "steps": options.steps}, figures=figures, seed=0)


def measure(runner: ModelRunner, batches: Sequence[int], context: int, num_steps: int) -> dict[str, Any]:
    """Times of steps, and the floors."""
    loop = torch.ones(LOOP_BYTES // 4)
    bandwidths: list[float] = []
    times = {batch: list(_steps(runner, batch, context, num_steps, loop, bandwidths)) for batch in batches}
    best = max(bandwidths)
    weights = weight_bytes(runner)
    figures: dict[str, Any] = {"weight_bytes": weights, "bandwidth_gb_s": best / 1e9, "batches": {}}
    for batch, seconds in times.items():
        kv = batch * context * runner.layout.block_bytes // runner.layout.block_size
        floor_s = (weights + kv) / best
        figures["batches"][batch] = {
            "step_ms": spread([1e3 * each for each in seconds]),
            "kv_bytes": kv,
            "floor_ms": 1e3 * floor_s,
            "ratio": min(seconds) / floor_s,
            "ratio_p50": spread(seconds)["p50"] / floor_s,
        }
    return figures


def weight_bytes(runner: ModelRunner) -> int:
    """Of the matrices, all of which a step reads, in the checkpoint's type, whatever they are held in."""
    c = runner.config
    q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = (2 * q_out + 2 * kv_out + 3 * c.intermediate_size) * c.hidden_size
    size = torch.finfo(getattr(torch, runner.layout.dtype)).bits // 8
    return size * (c.num_layers * layer + c.vocab_size * c.hidden_size)


def _steps(
    runner: ModelRunner, batch: int, context: int, num_steps: int, loop: torch.Tensor, bandwidths: list[float]
) -> Any:
    block_size = runner.layout.block_size
    per_sequence = -(-(context + num_steps + 1) // block_size)
    tables = [list(range(row * per_sequence, (row + 1) * per_sequence)) for row in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    for row, table in enumerate(tables):
        ids = [(row + 7 * position) % 250 + 5 for position in range(context)]
        runner.step([Slice(token_ids=ids, start=0, block_table=table)])
    for number in range(num_steps + 2):
        position = context + number
        slices = [
            Slice(
                token_ids=[(row + position) % 250 + 5],
                start=position,
                block_table=table,
                samples=(Sample(params=params, choice=0, position=position + 1, token_ids=(), prompt_len=context),),
            )
            for row, table in enumerate(tables)
        ]
        begin = time.perf_counter()
        runner.step(slices)
        if number >= 2:
            yield time.perf_counter() - begin
        begin = time.perf_counter()
        loop.sum()
        bandwidths.append(LOOP_BYTES / (time.perf_counter() - begin))


if __name__ == "__main__":
    main()
