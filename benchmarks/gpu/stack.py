"""The whole stack on one GPU, beside what `transformers` offers: its static batches and its continuous batching.

A model of Qwen3-0.6B's shape with random weights, lengths of ShareGPT, the same prompts to each, one system at a time:
Baton as a prefill and a decode worker that share the GPU, and colocated.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.gpu.engine import SHAPES
from benchmarks.local import local_stack
from benchmarks.models import give_every_token_text
from benchmarks.peers.process import PeerError, free_port, running, wait_until_it_answers
from benchmarks.record import load_figures

REQUESTS, AT_A_TIME, ROUNDS = 192, 64, 2
"""Of each run, of which a system has so many after it has started."""
WARMUP = 16
"""Requests before the first run."""
SYSTEMS = ("baton pair", "baton colocated", "generate_batch", "static batching")
LENGTHS = ("--workload", "sharegpt", "--max-input-tokens", "1500", "--max-output-tokens", "400")
KV_BYTES = 16 * 2**30
SIZES = {
    "BATON_BLOCK_SIZE": "64",
    "BATON_CHUNK_SIZE": "2048",
    "BATON_TOKEN_BUDGET": "4096",
    "BATON_PREFILL_TOKENS": "512",
}
"""What `k8s/overlays/gpu` says; the defaults are for CPUs."""


def run() -> dict[str, Any]:
    """Output tokens per second of each system; prints as it goes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        torch.manual_seed(0)
        Qwen3ForCausalLM(SHAPES["qwen3-0.6b"]).to(torch.bfloat16).save_pretrained(folder)
        give_every_token_text(folder)
        runs: list[dict[str, Any]] = []
        for name in SYSTEMS:
            try:
                runs += runs_of(name, folder, Path(scratch))
            except (PeerError, subprocess.CalledProcessError, SystemExit) as error:
                print(f"{name:16} {error}", flush=True)
                runs.append({"system": name, "error": str(error)})
    rates: dict[str, list[float]] = {}
    for each in runs:
        if "error" not in each:
            rates.setdefault(each["system"], []).append(each["output_tokens_per_s"])
    return {"runs": runs, "output_tokens_per_s": {name: statistics.median(values) for name, values in rates.items()}}


def runs_of(name: str, folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """A system's; prints as it goes."""
    runs: list[dict[str, Any]] = []
    with system(name, folder, scratch) as url:
        for number in range(ROUNDS):
            figures = load(url, seed=number, warmup=0 if runs else WARMUP, output=scratch / "run.json")
            runs.append({"system": name, "round": number, **figures})
            print(f"{name:16} {figures['output_tokens_per_s']:8.0f} tok/s, {figures['failed']} failed", flush=True)
    return runs


def system(name: str, folder: Path, scratch: Path) -> AbstractContextManager[str]:
    """Started, at its URL."""
    if name.startswith("baton"):
        return baton(folder, prefill=int(name.endswith("pair")))
    return transformers(folder, "static" if name.startswith("static") else "continuous", scratch)


@contextmanager
def baton(folder: Path, *, prefill: int) -> Iterator[str]:
    """The stack, all of it on the GPU."""
    options = ["--model", str(folder), "--device", "cuda", "--kv-cache-bytes", str(KV_BYTES)]
    with local_stack([*options, "--prefill", str(prefill), "--decode", "1"], SIZES) as local:
        yield local.url


@contextmanager
def transformers(folder: Path, mode: str, scratch: Path) -> Iterator[str]:
    """Its server: batches of 32, or up to 64 at a time."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.peers.transformers_server", "--model", str(folder), "--mode", mode]
    command += ["--port", str(port), "--device", "cuda", "--batch", "32" if mode == "static" else str(AT_A_TIME)]
    command += ["--kv-tokens", str(128 * 1024), "--batch-tokens", "4096"]
    log, url = scratch / f"{mode}.log", f"http://127.0.0.1:{port}"
    with running(command, dict(os.environ), log) as process:
        wait_until_it_answers(process, f"{url}/health", log)
        yield url


def load(url: str, *, seed: int, warmup: int, output: Path) -> dict[str, float]:
    """One run of the load."""
    command = [sys.executable, "-m", "benchmarks.load", "--url", url, *LENGTHS, "--concurrency", str(AT_A_TIME)]
    command += ["--requests", str(REQUESTS), "--warmup", str(warmup), "--seed", str(seed), "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load_figures(output)
