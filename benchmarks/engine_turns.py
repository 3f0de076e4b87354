"""The process of one tree for `benchmarks.turns`: it uses only what both trees have, and nothing of `benchmarks`.

python engine_turns.py '{MODEL: FOLDER}' BLOCK_SIZE
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.contract.kv_layout import DTYPE_BYTES, KVLayout
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.kv_cache import KVCache
from common.engine.native import kernels
from common.engine.runner import load_runner

_KV_BYTES = 192 * 2**20
"""Bytes of KV over all layers that attention goes through in turn: more than the processor's caches hold."""

_CHUNK_SIZE = 512
"""Tokens of a prompt that a prefill worker on a CPU computes at a time."""


def main(models: dict[str, str], block_size: int) -> None:
    """Read one case from each line of standard input, run it, and print its result, or the seconds that it took."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prepare: dict[str, Callable[..., Callable[[], object]]] = {
        "steps": partial(_step, models, block_size),
        "attention": partial(_attention, block_size),
        "prompts": partial(_prompt, models, block_size),
        "tokens": partial(_tokens, models, block_size),
    }
    ready: tuple[list[Any], Callable[[], object]] | None = None
    for line in sys.stdin:
        case = json.loads(line)
        if ready is None or ready[0] != case:
            ready = None  # frees the memory of the last case first
            ready = case, prepare[case[0]](*case[1:])
            ready[1]()
        begin = time.perf_counter()
        result = ready[1]()
        seconds = time.perf_counter() - begin
        print(json.dumps(seconds if result is None else result), flush=True)


def _step(
    models: dict[str, str], block_size: int, model: str, dtype: str, batch: int, context: int
) -> Callable[[], None]:
    """Return a function that runs some greedy decode steps of a model, all at one position. What the cache holds does
    not matter to their time."""
    size = batch * (context + 64) * 64 * 1024
    runner = load_runner(Path(models[model]), kv_cache_bytes=size, block_size=block_size, dtype=dtype)
    per_sequence = runner.layout.blocks_for(context + 1)
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    sample = Sample(params=params, choice=0, position=context + 1, token_ids=(), prompt_len=context)
    runner.cache.blocks.fill_(0.5)
    slices = []
    for row in range(batch):
        table = list(range(row * per_sequence, (row + 1) * per_sequence))
        slices.append(Slice(token_ids=[row % 250 + 5], start=context, block_table=table, samples=(sample,)))

    def run() -> None:
        for _ in range(4 if model == "15m" else 1):
            runner.step(slices)

    return run


def _prompt(models: dict[str, str], block_size: int, model: str, dtype: str, num_tokens: int) -> Callable[[], None]:
    """Return a function that computes a prompt in chunks, as a prefill worker on a CPU does, and its first token."""
    runner = load_runner(Path(models[model]), kv_cache_bytes=2**29, block_size=block_size, dtype=dtype)
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    sample = Sample(params=params, choice=0, position=num_tokens, token_ids=(), prompt_len=num_tokens)
    ids = [7 * position % 250 + 5 for position in range(num_tokens)]
    table = list(range(runner.layout.blocks_for(num_tokens)))
    chunks = []
    for start in range(0, num_tokens, _CHUNK_SIZE):
        end = min(num_tokens, start + _CHUNK_SIZE)
        samples = (sample,) if end == num_tokens else ()
        chunks.append(Slice(token_ids=ids[start:end], start=start, block_table=table, samples=samples))

    def run() -> None:
        for chunk in chunks:
            runner.step([chunk])

    return run


def _tokens(
    models: dict[str, str], block_size: int, model: str, dtype: str, prompt: list[int], num_tokens: int
) -> Callable[[], list[tuple[int, float]]]:
    """Return a function that continues a prompt greedily: (token, its log probability) of each position."""
    runner = load_runner(Path(models[model]), kv_cache_bytes=2**28, block_size=block_size, dtype=dtype)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0)
    table = list(range(runner.layout.blocks_for(len(prompt) + num_tokens)))

    def run() -> list[tuple[int, float]]:
        ids, start, found = prompt, 0, []
        for _ in range(num_tokens):
            end = start + len(ids)
            sample = Sample(params=params, choice=0, position=end, token_ids=(), prompt_len=len(prompt))
            [[token]] = runner.step([Slice(token_ids=ids, start=start, block_table=table, samples=(sample,))])
            assert isinstance(token, SampledToken)
            assert token.logprobs is not None
            found.append((token.token_id, token.logprobs.logprob))
            ids, start = [token.token_id], end
        return found

    return run


def _attention(
    block_size: int, dtype: str, num_kv_heads: int, group: int, head_dim: int, context: int, batch: int
) -> Callable[[], None]:
    """Return a function that runs decode attention over the layers of a KV cache larger than the processor's caches."""
    compiled = kernels()
    assert compiled is not None
    layer_bytes = 2 * num_kv_heads * head_dim * context * batch * DTYPE_BYTES[dtype]
    layout = KVLayout(
        num_layers=max(4, min(32, _KV_BYTES // layer_bytes)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    num_blocks = layout.blocks_for(context) * batch
    cache = KVCache(layout, num_blocks, torch.device("cpu"))
    cache.blocks.fill_(0.5)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(num_blocks, generator=generator).view(batch, -1).contiguous()
    q_NHD = torch.randn(batch, num_kv_heads * group, head_dim, generator=generator)
    lens_N, out_NHD = torch.full((batch,), context), torch.empty_like(q_NHD)

    def run() -> None:
        for index in range(layout.num_layers):
            compiled.attend_decode(q_NHD, cache.layer(index), tables, lens_N, None, head_dim**-0.5, out_NHD)

    return run


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
