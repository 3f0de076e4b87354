"""Compare Baton's engine with llama.cpp on a CPU: the same weights, prompts and number of threads, in turns.

    python -m benchmarks.llama --dtype float32 bfloat16 --rounds 5

Both compute in processes of their own, called directly, without HTTP, a gateway or a scheduler. This favours llama.cpp,
because Baton is a server, and its engine takes requests in the form that a server needs. Both choose the most likely
token. Baton uses the kernels that it chooses by itself for the CPU. llama.cpp is compiled for the CPU, reads the
weights into memory, and uses the fastest of `candidates` for each case. A case is a prompt of 512 tokens as one batch
(the time to its first token), or a decode step of 1 or 8 sequences, each with 512 tokens before it.

Before the turns both continue a prompt greedily, llama.cpp without its flash attention, which rounds more. In float32
their tokens must be the same, and the log probabilities of these almost so, which shows that they have the same
weights. The results so far are recorded after each case. Needs `python -m benchmarks.peers.install_llama_cpp`, and 10
GB of memory for float32.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, UsageError, run, show
from benchmarks.figures import compared
from benchmarks.models import qwen2_05b
from benchmarks.peers.environment import installed, python_of
from benchmarks.peers.install_llama_cpp import ENVIRONMENT, PINS
from benchmarks.record import ROOT, by_cpu, limited_to
from benchmarks.turns import TurnProcess, engine

Settings = Mapping[str, Any]

MODEL = "0.5b"
BLOCK_SIZE = 32
CASES: tuple[tuple[str, tuple[int, ...], int], ...] = (
    ("prompts", (512,), 1),
    ("steps", (1, 512), 5),
    ("steps", (8, 512), 5),
)
"""(kind, its sizes as in `benchmarks.peers.llama_cpp`, times that it is computed in a turn, of which the median
counts)."""
PROMPT = [(7 * position + 1) % 1000 + 5 for position in range(64)]
NUM_TOKENS = 16
"""The prompt that both continue, and by how many tokens."""
MOST_DIFFERENCE = 1e-3
"""Largest difference allowed between the log probabilities of the same token in float32."""


def candidates(dtype: str) -> list[Settings]:
    """The settings of llama.cpp that are tried: KV in the weights' type or, beside bfloat16, in its default, float16;
    flash attention or not."""
    kinds = {"float32": ("float32",), "bfloat16": ("bfloat16", "float16")}
    if dtype not in kinds:
        raise UsageError(f"no comparison in {dtype}: only {' and '.join(kinds)}")
    return [{"flash_attention": flash, "kv": kv} for kv in kinds[dtype] for flash in (False, True)]


def agreement(ours: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]], dtype: str) -> dict[str, Any]:
    """How many first tokens are the same, and how far apart their log probabilities are at most. Raises `SystemExit` if
    the systems do not have the same weights."""
    pairs = list(zip(ours, theirs, strict=True))
    same = next((number for number, (a, b) in enumerate(pairs) if a[0] != b[0]), len(pairs))
    difference = max((abs(a[1] - b[1]) for a, b in pairs[:same]), default=0.0)
    if dtype == "float32" and (same < len(pairs) or difference > MOST_DIFFERENCE):
        raise SystemExit(f"these are other weights: {same} tokens are the same, log probabilities {difference:g} apart")
    return {"same_tokens": same, "of": len(pairs), "logprob_difference": difference}


def turn(process: TurnProcess, case: Sequence[Any], times: int) -> float:
    """Seconds of a turn."""
    return statistics.median(float(process.ask(case)) for _ in range(times))


def trial(
    process: TurnProcess, kind: str, file: str, sizes: Sequence[int], tried: Sequence[Settings]
) -> list[dict[str, Any]]:
    """The settings that were tried, each with the least seconds of three; the fastest first."""
    found = []
    for settings in tried:
        seconds = min(process.ask([kind, file, settings, *sizes]) for _ in range(3))
        found.append({**settings, "seconds": seconds})
        show(f"{kind} {sizes}", found[-1])
    return sorted(found, key=lambda each: each["seconds"])


def measure(
    scratch: Path,
    *,
    dtype: tuple[str, ...] = ("float32", "bfloat16"),
    rounds: int = 5,
    threads: Annotated[int, "of each system"] = 2,
) -> Iterator[Result]:
    """Measure each case in each type: all results so far after each case."""
    if (versions := installed(ENVIRONMENT, PINS)) != PINS:
        raise UsageError("llama.cpp is not installed: python -m benchmarks.peers.install_llama_cpp")
    if limited_to():
        raise UsageError("llama.cpp uses the instructions that it was compiled for")
    tried = {each: candidates(each) for each in dtype}
    folder = scratch / MODEL
    folder.mkdir()
    baton = engine(ROOT, {MODEL: str(qwen2_05b(folder))}, BLOCK_SIZE, threads)
    worker = [str(python_of(ENVIRONMENT)), "-m", "benchmarks.peers.llama_cpp", str(threads)]
    llama = TurnProcess(worker, ROOT, threads)
    peers = {"llama_cpp": {"version": versions.pop("llama-cpp-python"), "with": versions, "settings": tried}}
    peers["llama_cpp"]["instructions"] = llama.ask(["instructions"])
    figures: dict[str, Any] = {"agreement": {}, "cases": []}
    try:
        for each in dtype:
            file = str(scratch / f"{each}.gguf")
            llama.ask(["write", str(folder), each, file])
            told = baton.ask(["tokens", MODEL, each, PROMPT, NUM_TOKENS])
            beside = llama.ask(["tokens", file, tried[each][0], PROMPT, NUM_TOKENS])
            figures["agreement"][each] = agreement(told, beside, each)
            show(f"{each}, agreement", figures["agreement"][each])
            for kind, sizes, times in CASES:
                trials = trial(llama, kind, file, sizes, tried[each])
                chosen = {name: value for name, value in trials[0].items() if name != "seconds"}
                cases = ((baton, [kind, MODEL, each, *sizes]), (llama, [kind, file, chosen, *sizes]))
                taken = in_turns(cases, rounds, times)
                entry = {"dtype": each, "kind": kind, "sizes": sizes, "settings": chosen, "trials": trials}
                figures["cases"].append({**entry, "seconds": compared(taken), "rounds": taken})
                show(f"{each}, {kind} {sizes}", figures["cases"][-1]["seconds"])
                yield Result(name=by_cpu(f"llama-{MODEL}"), figures=figures, peers=peers)
            Path(file).unlink()
    finally:
        baton.close()
        llama.close()


def in_turns(cases: Sequence[tuple[TurnProcess, Sequence[Any]]], rounds: int, times: int) -> list[tuple[float, float]]:
    """Seconds of both systems in each round, without a first round that warms up. The order alternates."""
    taken = []
    for number in range(rounds + 1):
        seconds = [0.0, 0.0]
        for index in (0, 1) if number % 2 else (1, 0):
            seconds[index] = turn(*cases[index], times)
        taken.append((seconds[0], seconds[1]))
    return taken[1:]


if __name__ == "__main__":
    run(measure, __doc__)
