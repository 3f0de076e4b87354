"""The whole stack on one GPU, beside static and continuous batching of `transformers`.

The model has Qwen3-0.6B's shape and random weights; lengths are ShareGPT's. Each system gets the same prompts, one
system at a time. Baton runs as a prefill and a decode worker that share the GPU, by time slices and by MPS, and
colocated. A system that does not answer in `START_S` is killed, and so is a load that takes longer than `LOAD_S`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.gpu.engine import SHAPES
from benchmarks.gpu.mps import mps
from benchmarks.load_run import load_figures, run_load
from benchmarks.models import give_every_token_text
from benchmarks.peers.process import free_port, running, wait_until_it_answers

REQUESTS, AT_A_TIME, ROUNDS = 192, 64, 2
"""Requests of a run, requests at a time, and runs of each started system but for static batching, which takes a minute
for one."""
WARMUP = 16
"""Requests before the first run."""
LENGTHS = ("--workload", "sharegpt", "--max-input-tokens", "1500", "--max-output-tokens", "400")
KV_BYTES = 16 * 2**30
DEVICE = "cuda"
START_S = 100.0
"""Seconds in which a system must compile, capture its graphs and answer."""
LOAD_S = 100.0
"""Seconds that a run of the load may take."""


def run(system: str, scratch: str) -> Iterator[dict[str, Any]]:
    """Output tokens per second of a system, one row for each run. The model is made in `scratch`, once for all
    systems."""
    folder = made(Path(scratch) / "model", SHAPES["qwen3-0.6b"])
    with serving(system, folder, Path(scratch)) as url:
        for number in range(1 if system.startswith("static") else ROUNDS):
            output = Path(scratch) / "run.json"
            figures = load(url, seed=number, warmup=0 if number else WARMUP, output=output, timeout_s=LOAD_S)
            yield {"kind": "run", "system": system, "round": number, **figures}


def made(folder: Path, shape: Any) -> Path:
    """The folder of a checkpoint with random weights. A complete one from an earlier measurement is used again."""
    complete = folder / "complete"
    if not complete.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        Qwen3ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
        give_every_token_text(folder)
        complete.touch()
    return folder


def command_of(system: str, folder: Path, port: int) -> list[str]:
    """The command that starts the system on a port of the loopback interface."""
    if system.startswith("baton"):
        prefill = "0" if system.endswith("colocated") else "1"
        return [
            sys.executable, "-m", "common.runtime.cli", "serve", "--port", str(port), "--restart", "never",
            "--log-level", "warning", "--model", str(folder), "--device", DEVICE, "--kv-cache-bytes", str(KV_BYTES),
            "--prefill", prefill, "--decode", "1",
        ]  # fmt: skip
    mode, batch = ("static", 32) if system.startswith("static") else ("continuous", AT_A_TIME)
    return [
        sys.executable, "-m", "benchmarks.peers.transformers_server", "--model", str(folder), "--mode", mode,
        "--port", str(port), "--device", DEVICE, "--batch", str(batch), "--kv-tokens", str(128 * 1024),
        "--batch-tokens", "4096",
    ]  # fmt: skip


@contextmanager
def serving(system: str, folder: Path, scratch: Path) -> Iterator[str]:
    """Start the system; yields its URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    ready = f"{url}/ready" if system.startswith("baton") else f"{url}/health"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with ExitStack() as stack:
        if system.endswith("MPS"):
            environment |= stack.enter_context(mps(scratch))
        log = scratch / "system.log"
        stack.enter_context(started(command_of(system, folder, port), environment, ready, log, START_S))
        yield url


@contextmanager
def started(command: list[str], env: dict[str, str], url: str, log: Path, patience_s: float) -> Iterator[None]:
    """Start a process and wait until it answers at `url`. Its output is printed at the end.

    Raises `PeerError`, with the end of the output, if the process ends or does not answer within `patience_s` seconds.
    """
    try:
        with running(command, env, log) as process:
            wait_until_it_answers(process, url, log, patience_s)
            yield
    finally:
        print(log.read_text(errors="replace"), flush=True)


def load(url: str, *, seed: int, warmup: int, output: Path, timeout_s: float) -> dict[str, float]:
    """The figures of one run of the load. Raises `subprocess.TimeoutExpired` after `timeout_s` seconds."""
    options = [*LENGTHS, "--concurrency", str(AT_A_TIME), "--requests", str(REQUESTS), "--warmup", str(warmup)]
    return load_figures(run_load(url, output, *options, "--seed", str(seed), timeout_s=timeout_s))
