"""Compare the CPU engine of this tree with that of another checkout: decode steps and decode attention, in turns.

    git worktree add --detach /tmp/before COMMIT
    python -m benchmarks.against /tmp/before [--rounds 15] [--threads 1] [--block-sizes 32 16]

Each tree computes in a process of its own. In a round each tree takes one turn, in alternating order. The result is the
ratio of the two turns, which stays valid on a machine whose speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

STEPS = (
    ("15m", "float32", 1, 512),
    ("15m", "float32", 8, 512),
    ("15m", "float32", 32, 512),
    ("15m", "bfloat16", 8, 512),
    ("0.5b", "bfloat16", 1, 512),
    ("0.5b", "bfloat16", 8, 512),
)
"""(model, dtype, sequences, context in tokens) of each decode step."""
ATTENTION = (
    ("float32", 6, 1, 48, 512, 8),
    ("float32", 6, 1, 48, 512, 32),
    ("float32", 4, 2, 64, 128, 32),
    ("float32", 4, 2, 64, 1024, 8),
    ("float32", 8, 1, 64, 1024, 4),
    ("bfloat16", 2, 7, 64, 512, 8),
    ("bfloat16", 2, 7, 64, 2048, 8),
    ("bfloat16", 2, 7, 64, 8192, 2),
    ("bfloat16", 8, 4, 128, 512, 8),
    ("bfloat16", 8, 4, 128, 2048, 4),
)
"""(dtype, KV heads, query heads of each, head dimension, context, sequences) of one layer's decode attention."""
_KV_BYTES = 192 * 2**20
"""Bytes of KV over all layers that attention goes through in turn: more than the processor's caches hold."""


class Tree:
    """A process that computes with the engine of one checkout."""

    def __init__(self, root: Path, models: dict[str, str], block_size: int, threads: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(models), str(block_size)],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, case: list[Any]) -> float:
        """Seconds of one turn of this case. The first turn of a case also prepares it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of a tree ended with {self._process.wait(timeout=30)}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def main() -> None:
    """Entry point."""
    from benchmarks.figures import spread
    from benchmarks.models import llama_15m, qwen2_05b
    from benchmarks.record import ROOT, record

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, clean")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--block-sizes", type=int, nargs=2, default=(32, 16), metavar=("HERE", "THERE"), help="slots of a KV block"
    )
    parser.add_argument("--name", default="against", help="of the record")
    options = parser.parse_args()
    git = ["git", "-C", str(options.other)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        parser.error(f"{options.other} has changes")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    figures: dict[str, Any] = {"steps": [], "attention": []}
    with tempfile.TemporaryDirectory() as folder:
        models = {name: Path(folder) / name for name in ("15m", "0.5b")}
        for path in models.values():
            path.mkdir()
        paths = {"15m": str(llama_15m(models["15m"])), "0.5b": str(qwen2_05b(models["0.5b"]))}
        roots = (ROOT, options.other)
        trees = [
            Tree(root, paths, size, options.threads) for root, size in zip(roots, options.block_sizes, strict=True)
        ]
        for kind, cases in (("steps", STEPS), ("attention", ATTENTION)):
            for case in cases:
                times = _turns(trees, [kind, *case], options.rounds)
                ratios = [ours / theirs for ours, theirs in zip(*times, strict=True)]
                ms = [1e3 * min(each) for each in times]
                figures[kind].append({"case": case, "ms": ms, "ratio": spread(ratios), "of_fastest": ms[0] / ms[1]})
                print(f"{kind} {case}: {ms[0]:.2f} / {ms[1]:.2f} ms, ratio {spread(ratios)['p50']:.3f}", flush=True)
        for tree in trees:
            tree.close()
    workload = {"other": commit, "rounds": options.rounds, "threads": options.threads}
    workload["block_sizes"] = list(options.block_sizes)
    record(options.name, workload=workload, figures=figures, seed=0)


def _turns(trees: list[Tree], case: list[Any], rounds: int) -> list[list[float]]:
    """Seconds of each tree's turns, without a first turn of each that warms up."""
    times: list[list[float]] = [[] for _ in trees]
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            seconds = trees[index].seconds(case)
            if number:
                times[index].append(seconds)
    return times


# --- in the processes: only what both trees have ---------------------------------------------------------------------


def child(models: dict[str, str], block_size: int) -> None:
    """Read one case from each line of standard input, run it, and print the seconds that it took."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prepare = {"steps": partial(_step, models, block_size), "attention": partial(_attention, block_size)}
    ready: tuple[list[Any], Callable[[], None]] | None = None
    for line in sys.stdin:
        case = json.loads(line)
        if ready is None or ready[0] != case:
            ready = None  # frees the memory of the last case first
            ready = case, prepare[case[0]](*case[1:])
            ready[1]()
        begin = time.perf_counter()
        ready[1]()
        print(time.perf_counter() - begin, flush=True)


def _step(
    models: dict[str, str], block_size: int, model: str, dtype: str, batch: int, context: int
) -> Callable[[], None]:
    """Return a function that runs some greedy decode steps of a model, all at one position."""
    from common.contract.sampling import SamplingParams
    from common.engine.batch import Sample, Slice
    from common.engine.runner import load_runner

    size = batch * (context + 64) * 64 * 1024
    runner = load_runner(Path(models[model]), kv_cache_bytes=size, block_size=block_size, dtype=dtype)
    per_sequence = runner.layout.blocks_for(context + 1)
    params = SamplingParams(temperature=0.0, max_tokens=10**6)
    sample = Sample(params=params, choice=0, position=context + 1, token_ids=(), prompt_len=context)
    slices = []
    for row in range(batch):
        table = list(range(row * per_sequence, (row + 1) * per_sequence))
        ids = [(row + 7 * position) % 250 + 5 for position in range(context)]
        runner.step([Slice(token_ids=ids, start=0, block_table=table)])
        slices.append(Slice(token_ids=[row % 250 + 5], start=context, block_table=table, samples=(sample,)))

    def run() -> None:
        for _ in range(4 if model == "15m" else 1):
            runner.step(slices)

    return run


def _attention(
    block_size: int, dtype: str, num_kv_heads: int, group: int, head_dim: int, context: int, batch: int
) -> Callable[[], None]:
    """Return a function that runs decode attention over the layers of a KV cache larger than the processor's caches."""
    from common.contract.kv_layout import DTYPE_BYTES, KVLayout
    from common.engine.kv_cache import KVCache
    from common.engine.native import kernels

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
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
