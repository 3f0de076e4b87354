"""Compare Baton with vLLM on the same machine, weights and prompts: systems take turns at each concurrency.

    python -m benchmarks.versus --model 15m --dtype bfloat16 --concurrency 1 8 16 32 --rounds 5

All systems are up during the whole run (an idle one takes a few percent of a core), and each gets one run of the load
in turn, in another order each time. All have equal cores: a pair has one core for each of its workers, a single system
has both. `baton bench`, in a process of its own, sends the load: token ids, the same to all systems in a round. The
results so far are recorded after each turn, so they survive an interruption. Needs
`python -m benchmarks.peers.install_vllm`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures import compared
from benchmarks.load_run import load_figures, run_load
from benchmarks.local import local_stack
from benchmarks.models import give_every_token_text, llama_15m, qwen2_05b
from benchmarks.peers import vllm
from benchmarks.record import record

MODELS = {"15m": llama_15m, "0.5b": qwen2_05b}
PAIRS = (("baton pair", "vllm pair"), ("baton colocated", "vllm single"))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="15m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=600, help="after this no other turn begins")
    parser.add_argument("--requests", type=int, default=3, help="for each place of the concurrency, in a run")
    parser.add_argument("--workload", choices=["fixed", "sharegpt"], default="fixed")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--systems", nargs="+", default=[name for pair in PAIRS for name in pair])
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "model"
        folder.mkdir()
        MODELS[options.model](folder)
        give_every_token_text(folder)
        urls = {name: start(stack, name, folder, options.dtype) for name in options.systems}
        runs: list[dict[str, Any]] = []
        for turn in turns(urls, options, Path(scratch)):
            runs.extend(turn)
            if runs and not options.no_record:
                keep(runs, options)
    for line in lines(summary(runs)):
        print(line)


def keep(runs: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Record the runs so far."""
    workload = {name: value for name, value in vars(options).items() if name != "no_record"}
    name = f"versus-{options.model}-{options.dtype}-{options.workload}"
    peers = {"vllm": vllm.Settings(dtype=options.dtype).described()}
    record(name, workload=workload, figures={"ratios": summary(runs), "runs": runs}, seed=0, peers=peers)


def start(stack: ExitStack, name: str, folder: Path, dtype: str) -> str:
    """Start a system; return its base URL."""
    common = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(2**30)]
    settings = vllm.Settings(dtype=dtype)
    match name:
        case "baton pair":
            return stack.enter_context(local_stack([*common, "--prefill", "1", "--decode", "1"])).url
        case "baton colocated":
            return stack.enter_context(local_stack([*common, "--prefill", "0", "--decode", "1"])).url
        case "vllm single":
            return stack.enter_context(vllm.single(folder, cores=[0, 1], settings=settings))
        case "vllm pair":
            return stack.enter_context(vllm.pair(folder, prefill_core=0, decode_core=1, settings=settings))
    raise SystemExit(f"no such system: {name}")


def turns(urls: dict[str, str], options: argparse.Namespace, scratch: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each turn (a round at one concurrency), the figures of every system's run. The first round is a
    warm-up."""
    end = time.monotonic() + 60 * options.minutes
    for number in range(-1, options.rounds):
        for concurrency in options.concurrency if number >= 0 else [min(options.concurrency)]:
            if time.monotonic() > end:
                return
            turn = []
            names = list(urls)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seed = 1000 * concurrency + number + 1
                figures = run(urls[name], options, concurrency, seed=seed, scratch=scratch)
                assert not figures["failed"] or name.startswith("vllm"), f"{name}: {figures}"
                if number >= 0:
                    turn.append({"system": name, "concurrency": concurrency, "round": number, "seed": seed, **figures})
                print(f"{number:2} {name:16} {concurrency:3} {figures['output_tokens_per_s']:8.1f} tok/s", flush=True)
            yield turn


def run(url: str, options: argparse.Namespace, concurrency: int, *, seed: int, scratch: Path) -> dict[str, float]:
    """Figures of one run of the load."""
    lengths = ["--max-input-tokens", "1500", "--max-output-tokens", "300"]
    if options.workload == "fixed":
        lengths = ["--input-tokens", str(options.input_tokens), "--output-tokens", str(options.output_tokens)]
    number = max(4, options.requests * concurrency)
    at_once = ["--concurrency", str(concurrency), "--requests", str(number), "--seed", str(seed)]
    return load_figures(run_load(url, scratch / "run.json", "--workload", options.workload, *lengths, *at_once))


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


def lines(figures: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table for the terminal."""
    made = [f"{'':34} {'tok/s':>20} {'ratio (min - max)':>22} {'TTFT p50':>9} {'ITL p99':>8}"]
    for each in figures:
        rate = each["output_tokens_per_s"]
        who = f"{each['ours']} / {each['theirs']}"
        made.append(
            f"{who:30} {each['concurrency']:3} {rate['ours']:9.1f} / {rate['theirs']:8.1f}"
            f" {rate['ratio']:6.2f} ({rate['ratio_min']:.2f} - {rate['ratio_max']:.2f})"
            f" {each['ttft_p50_s']['ratio']:9.2f} {each['itl_p99_s']['ratio']:8.2f}"
        )
    return made


if __name__ == "__main__":
    main()
