"""Measure the cost of disaggregation for one request: TTFT against an isolated engine, and the gap at the handoff.

    python -m benchmarks.handoff [--model demo|15m] [--requests 40] [--prompt-tokens 512] [--seed 0]

There is one request at a time, in turns: the prompt runs in an engine of this process (no server, no handoff); then the
same prompt goes over HTTP through gateway and prefill worker (TTFT: from sending the request to the first chunk of the
stream); then once more through the gateway's dispatcher in this process, for the gaps between the tokens' arrivals.
That time it has a salt of its own: no worker has it cached, and the decode worker reads all of its KV. The time of a
decode step is the median of the later gaps, and includes the step, the network and the event loops.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.command import Result, run
from benchmarks.dispatched import connected, greedy
from benchmarks.figures import spread
from benchmarks.local import Local, counts, local_stack
from benchmarks.models import llama_15m
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.runner import ModelRunner, load_runner
from common.runtime.checkpoint import DEMO_FOLDER
from common.runtime.config import DEFAULTS_BY_DEVICE
from gateway.dispatch.dispatcher import Dispatcher

DECODE_TOKENS = 24
WARM_UP = 5


class Isolated:
    """An engine in this process, on one thread, as each worker of the stack has."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._runner: ModelRunner = load_runner(
            folder, kv_cache_bytes=64 * 2**20, block_size=DEFAULTS_BY_DEVICE["cpu"]["block_size"]
        )

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the KV of so many tokens."""
        layout = self._runner.layout
        return layout.block_bytes * num_tokens // layout.block_size

    def run(self, prompt: list[int]) -> tuple[float, list[float]]:
        """(seconds to the first token, seconds of each decode step)."""
        tokens = list(prompt)
        table = list(range(self._runner.layout.blocks_for(len(prompt) + DECODE_TOKENS)))
        times: list[float] = []
        for _ in range(DECODE_TOKENS):
            start = 0 if not times else len(tokens) - 1
            params = SamplingParams(temperature=0.0, max_tokens=DECODE_TOKENS, ignore_eos=True)
            sample = Sample(params=params, choice=0, position=len(tokens), token_ids=tokens, prompt_len=len(prompt))
            began = time.perf_counter()
            one = Slice(token_ids=tokens[start:], start=start, block_table=table, samples=(sample,))
            ((sampled,),) = self._runner.step([one])
            times.append(time.perf_counter() - began)
            assert isinstance(sampled, SampledToken)
            tokens.append(sampled.token_id)
        return times[0], times[1:]


def over_http(connection: http.client.HTTPConnection, prompt: list[int]) -> float:
    """Seconds from sending the request to the first chunk of its stream."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 0}
    payload = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    elapsed = time.perf_counter() - began
    assert response.status == 200, line
    assert line.startswith(b"data: {"), line
    response.read()
    return elapsed


async def gaps_of(dispatcher: Dispatcher, prompt: list[int], salt: str) -> list[float]:
    """Seconds between a request's tokens, as a gateway receives them. No worker has the prompt cached under `salt`."""
    arrivals = [time.perf_counter() async for _ in dispatcher.generate(greedy(prompt, DECODE_TOKENS, salt=salt))]
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def bytes_read(local: Local) -> float:
    """Bytes of KV that the stack's workers have read from each other."""
    return sum(counts(probe)["baton_transfer_bytes_total"] for probe in local.probes)


async def in_turns(local: Local, folder: Path, requests: int, prompt_tokens: int, seed: int) -> dict[str, list[float]]:
    """Measure in turns, one request at a time."""
    draw = random.Random(seed)
    engine = Isolated(folder)
    connection = http.client.HTTPConnection(local.url.removeprefix("http://"))
    taken: dict[str, list[float]] = {name: [] for name in ("isolated_ttft", "ttft", "step", "first_gap", "gap")}
    async with connected(local.url, folder) as dispatcher:
        for index in range(requests + WARM_UP):
            prompt = [draw.randrange(10, 200) for _ in range(prompt_tokens)]
            isolated_ttft, steps = engine.run(prompt)
            ttft = over_http(connection, prompt)
            before = bytes_read(local)
            first_gap, *gaps = await gaps_of(dispatcher, prompt, salt=f"{seed}-{index}")
            assert bytes_read(local) - before >= engine.kv_bytes(prompt_tokens), "nothing was handed over"
            if index >= WARM_UP:
                taken["isolated_ttft"].append(isolated_ttft)
                taken["ttft"].append(ttft)
                taken["step"] += steps
                taken["first_gap"].append(first_gap)
                taken["gap"] += gaps
    return taken


def figures(taken: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of the times, in milliseconds."""
    p50 = {name: statistics.median(values) for name, values in taken.items()}
    return {f"{name}_ms": spread([1000 * value for value in values]) for name, values in taken.items()} | {
        "ttft_bound_ms": 1100 * p50["isolated_ttft"] + 5,
        "ttft_over_isolated_ms": 1000 * (p50["ttft"] - p50["isolated_ttft"]),
        "first_gap_in_decode_steps": p50["first_gap"] / p50["gap"],
    }


def measure(
    scratch: Path,
    *,
    model: Literal["demo", "15m"] = "demo",
    requests: int = 40,
    prompt_tokens: int = 512,
    seed: int = 0,
) -> Result:
    """The figures of one model."""
    folder = DEMO_FOLDER if model == "demo" else llama_15m(scratch)
    with local_stack(["--model", str(folder)]) as local:
        taken = asyncio.run(in_turns(local, folder, requests, prompt_tokens, seed))
    workload = {"decode_tokens": DECODE_TOKENS}
    return Result(name=f"handoff-{model}", figures=figures(taken), workload=workload)


if __name__ == "__main__":
    run(measure, __doc__)
