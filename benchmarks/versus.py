"""Compare Baton with vLLM on the same machine, weights and prompts: systems take turns at each concurrency.

    python -m benchmarks.versus --model 15m --dtype bfloat16 --concurrency 1 8 16 32 --rounds 5

All systems are up during the whole run (an idle one takes a few percent of a core), and each gets one run of the load
in turn, in another order each time. All have equal cores: a pair has one core for each of its workers, a single system
has both. `baton bench`, in a process of its own, sends the load: token ids, the same to all systems in a round. The
results so far are recorded after each turn, so they survive an interruption. Needs
`python -m benchmarks.peers.install_vllm`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from benchmarks.command import Result, run, show
from benchmarks.figures import compared
from benchmarks.load_run import load_figures, run_load
from benchmarks.local import local_stack
from benchmarks.models import give_every_token_text, llama_15m, qwen2_05b
from benchmarks.peers import vllm

MODELS = {"15m": llama_15m, "0.5b": qwen2_05b}
PAIRS = (("baton pair", "vllm pair"), ("baton colocated", "vllm single"))
SYSTEMS = tuple(name for pair in PAIRS for name in pair)


def start(stack: ExitStack, name: str, folder: Path, dtype: str) -> str:
    """Start a system; return its base URL."""
    common = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(2**30)]
    match name:
        case "baton pair":
            return stack.enter_context(local_stack([*common, "--prefill", "1", "--decode", "1"])).url
        case "baton colocated":
            return stack.enter_context(local_stack([*common, "--prefill", "0", "--decode", "1"])).url
        case "vllm single":
            return stack.enter_context(vllm.single(folder, dtype=dtype))
        case "vllm pair":
            return stack.enter_context(vllm.pair(folder, dtype=dtype))
    raise SystemExit(f"no such system: {name}")


def turns(concurrency: Sequence[int], rounds: int) -> Iterator[tuple[int, int]]:
    """(round, requests at a time) of each turn. Round -1 is a warm-up."""
    yield -1, min(concurrency)
    yield from itertools.product(range(rounds), concurrency)


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of systems and each concurrency: medians, and the ratios of the rounds."""
    made = []
    for ours, theirs in PAIRS:
        for concurrency in sorted({each["concurrency"] for each in runs}):
            rounds = [
                {each["system"]: each for each in runs if (each["concurrency"], each["round"]) == (concurrency, number)}
                for number in sorted({each["round"] for each in runs})
            ]
            rounds = [each for each in rounds if ours in each and theirs in each]
            if not rounds:
                continue
            entry: dict[str, Any] = {"ours": ours, "theirs": theirs, "concurrency": concurrency}
            for figure in ("output_tokens_per_s", "ttft_p50_s", "itl_p99_s"):
                entry[figure] = compared((each[ours][figure], each[theirs][figure]) for each in rounds)
            made.append(entry)
    return made


def measure(
    scratch: Path,
    *,
    model: Literal["15m", "0.5b"] = "15m",
    dtype: str = "bfloat16",
    concurrency: tuple[int, ...] = (1, 8, 16, 32),
    rounds: int = 5,
    minutes: Annotated[float, "after this no other turn begins"] = 600,
    requests: Annotated[int, "for each place of the concurrency, in a run"] = 3,
    workload: Literal["fixed", "sharegpt"] = "fixed",
    input_tokens: int = 512,
    output_tokens: int = 64,
    systems: tuple[str, ...] = SYSTEMS,
) -> Iterator[Result]:
    """Start the systems, and let them take turns: all runs so far after each turn."""
    folder = scratch / "model"
    folder.mkdir()
    MODELS[model](folder)
    give_every_token_text(folder)
    lengths = ["--workload", workload]
    if workload == "fixed":
        lengths += ["--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens)]
    else:
        lengths += ["--max-input-tokens", "1500", "--max-output-tokens", "300"]
    peers = {"vllm": vllm.described(dtype)} if any(name.startswith("vllm") for name in systems) else None
    runs: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * minutes
    with ExitStack() as stack:
        urls = {name: start(stack, name, folder, dtype) for name in systems}
        for number, places in turns(concurrency, rounds):
            if time.monotonic() > end:
                return
            turn = {"concurrency": places, "round": number, "seed": 1000 * places + number + 1}
            load = [*lengths, "--concurrency", str(places), "--requests", str(max(4, requests * places))]
            first = number % len(systems)
            for name in systems[first:] + systems[:first]:
                run_ = run_load(urls[name], scratch / "run.json", *load, "--seed", str(turn["seed"]))
                figures = load_figures(run_)
                assert not figures["failed"] or name.startswith("vllm"), f"{name}: {figures}"
                show(f"{number} {name}, {places}", figures)
                runs += [{"system": name, **turn, **figures}] if number >= 0 else []
            if runs:
                ratios = {"ratios": summary(runs), "runs": runs}
                yield Result(name=f"versus-{model}-{dtype}-{workload}", figures=ratios, peers=peers)


if __name__ == "__main__":
    run(measure, __doc__)
