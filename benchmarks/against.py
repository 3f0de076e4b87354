"""Compare the CPU engine of this tree with that of another checkout: decode steps, decode attention and prompts, in
turns.

    git worktree add --detach /tmp/before COMMIT
    python -m benchmarks.against /tmp/before [--rounds 15] [--threads 1] [--block-sizes 32 16] [--only prompts]

Each tree computes in a process of its own. In a round each tree takes one turn, in alternating order. The result is the
ratio of the two turns, which stays valid on a machine whose speed drifts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, UsageError, run, show
from benchmarks.figures import spread
from benchmarks.models import llama_15m, qwen2_05b
from benchmarks.record import ROOT
from benchmarks.turns import TurnProcess, engine

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
PROMPTS = (
    ("15m", "float32", 512),
    ("15m", "float32", 2000),
    ("15m", "bfloat16", 512),
    ("0.5b", "float32", 512),
    ("0.5b", "bfloat16", 512),
)
"""(model, dtype, tokens) of each prompt, computed as one chunk."""


def measure(
    scratch: Path,
    other: Annotated[Path, "the other checkout, clean"],
    *,
    rounds: int = 15,
    threads: int = 1,
    block_sizes: Annotated[tuple[int, int], "slots of a KV block: here, there"] = (32, 16),
    only: Annotated[tuple[str, ...], "steps, attention, prompts"] = ("steps", "attention", "prompts"),
    name: Annotated[str, "of the record"] = "against",
) -> Result:
    """Measure every case on both trees."""
    git = ["git", "-C", str(other)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        raise UsageError(f"{other} has changes")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    cases: dict[str, Sequence[tuple[Any, ...]]] = {"steps": STEPS, "attention": ATTENTION, "prompts": PROMPTS}
    if unknown := set(only) - set(cases):
        raise UsageError(f"no kind of case {', '.join(sorted(unknown))}")
    figures: dict[str, Any] = {kind: [] for kind in only}
    models = {name: scratch / name for name in ("15m", "0.5b")}
    for path in models.values():
        path.mkdir()
    paths = {"15m": str(llama_15m(models["15m"])), "0.5b": str(qwen2_05b(models["0.5b"]))}
    trees = [engine(root, paths, size, threads) for root, size in zip((ROOT, other), block_sizes, strict=True)]
    for kind in only:
        for case in cases[kind]:
            times = _turns(trees, [kind, *case], rounds)
            ratio = spread([ours / theirs for ours, theirs in zip(*times, strict=True)])
            ms = [1e3 * min(each) for each in times]
            figures[kind].append({"case": case, "ms": ms, "ratio": ratio, "of_fastest": ms[0] / ms[1]})
            show(f"{kind} {case}", {"ms": f"{ms[0]:.2f} / {ms[1]:.2f}", "ratio": ratio})
    for tree in trees:
        tree.close()
    return Result(name=name, figures=figures, workload={"other": commit})


def _turns(trees: list[TurnProcess], case: list[Any], rounds: int) -> list[list[float]]:
    """Seconds of each tree's turns, without a first turn of each that warms up."""
    times: list[list[float]] = [[] for _ in trees]
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            seconds = trees[index].ask(case)
            if number:
                times[index].append(seconds)
    return times


if __name__ == "__main__":
    run(measure, __doc__)
