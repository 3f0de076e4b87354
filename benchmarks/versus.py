"""Compare Baton with vLLM on the same machine, weights and prompts: systems take turns at each concurrency.

    python -m benchmarks.versus --model 15m --dtype bfloat16 --concurrency 1 8 16 32 --rounds 5

`benchmarks/systems.py` says how they take turns. `baton bench`, in a process of its own, sends the load. The results so
far are recorded after each turn, so they survive an interruption. Needs `python -m benchmarks.peers.install_vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, run
from benchmarks.load_run import load_figures, run_load
from benchmarks.models import Model
from benchmarks.record import by_cpu
from benchmarks.systems import (
    SYSTEMS,
    Turn,
    Workload,
    compared_pairs,
    in_turns,
    length_options,
    lengths_of,
    part,
    peers_of,
    started,
)


def summary(runs: Sequence[Turn]) -> list[dict[str, Any]]:
    """For each pair of systems and each concurrency: medians, and the ratios of the rounds."""
    return compared_pairs(runs, "concurrency", ("output_tokens_per_s", "ttft_p50_s", "itl_p99_s"))


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "bfloat16",
    concurrency: tuple[int, ...] = (1, 8, 16, 32),
    rounds: int = 5,
    minutes: Annotated[float, "after this no other turn begins"] = 600,
    requests: Annotated[int, "for each place of the concurrency, in a run"] = 3,
    workload: Workload = "fixed",
    input_tokens: int = 512,
    output_tokens: int = 64,
    systems: tuple[str, ...] = SYSTEMS,
    itl_target_s: Annotated[float, "Baton's target between tokens (--standard-itl-s); 0: its default"] = 0.0,
) -> Iterator[Result]:
    """Start the systems, and let them take turns: all runs so far after each turn."""
    lengths, peers = lengths_of(workload, input_tokens, output_tokens), peers_of(systems, model, dtype)
    of_lengths = length_options(workload, lengths)
    target = f"-itl-{itl_target_s:g}" if itl_target_s else ""
    with started(scratch, model, dtype, systems, itl_target_s) as up:

        def load(name: str, places: float, seed: int) -> dict[str, Any]:
            options = ["--concurrency", str(places), "--requests", str(max(4, requests * int(places)))]
            ran = run_load(up[name].url, scratch / "run.json", *of_lengths, *options, "--seed", str(seed))
            figures = load_figures(ran)
            assert not figures["failed"] or name.startswith("vllm"), f"{name}: {figures}"
            return figures

        for runs in in_turns(up, "concurrency", concurrency, rounds=rounds, minutes=minutes, load=load):
            ratios = {"ratios": summary(runs), "runs": runs}
            name = by_cpu(f"versus-{model}-{dtype}-{workload}{part(systems)}{target}")
            yield Result(name=name, figures=ratios, workload=lengths, peers=peers)


if __name__ == "__main__":
    run(measure, __doc__)
