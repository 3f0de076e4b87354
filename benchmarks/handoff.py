"""What disaggregation costs one request: TTFT against an isolated engine, and the gap at the handoff.

    python -m benchmarks.handoff [--requests 40] [--prompt 512] [--seed 0]

One request at a time, turns taken: a run of the same prompt in an engine of this process (no server, no handoff), then
the same prompt through gateway, prefill worker, handoff and decode worker, over HTTP. TTFT is from sending the request
to the first chunk with text; the gaps follow from the arrival of the chunks.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import time

import torch

from benchmarks.local import local_stack
from benchmarks.record import record, spread
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.runner import ModelRunner, load_runner
from common.runtime.checkpoint import DEMO_FOLDER

DECODE_TOKENS = 24


class Isolated:
    """An engine in this process, on one thread, as each worker of the stack has."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._runner: ModelRunner = load_runner(DEMO_FOLDER, kv_cache_bytes=64 * 2**20)

    def run(self, prompt: list[int]) -> tuple[float, list[float]]:
        """Seconds to the first token, and of each decode step."""
        tokens = list(prompt)
        table = list(range(self._runner.layout.blocks_for(len(prompt) + DECODE_TOKENS)))
        times = []
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


def served(connection: http.client.HTTPConnection, prompt: list[int]) -> tuple[float, list[float]]:
    """Seconds to the first chunk, and the gaps between chunks."""
    body = {"prompt": prompt, "max_tokens": DECODE_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    payload = json.dumps(body)
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    arrivals = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            arrivals.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return arrivals[0] - began, gaps


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    engine = Isolated()
    alone: list[float] = []
    alone_steps: list[float] = []
    ttft: list[float] = []
    first_gaps: list[float] = []
    later_gaps: list[float] = []
    with local_stack() as local:
        connection = http.client.HTTPConnection(local.url.removeprefix("http://"))
        for index in range(args.requests + 5):
            prompt = [draw.randrange(10, 200) for _ in range(args.prompt)]
            engine_ttft, steps = engine.run(prompt)
            served_ttft, gaps = served(connection, prompt)
            if index < 5:
                continue
            alone.append(engine_ttft)
            alone_steps += steps
            ttft.append(served_ttft)
            first_gaps.append(gaps[0])
            later_gaps += gaps[1:]
    figures = {
        "isolated_ttft_ms": _ms(alone),
        "served_ttft_ms": _ms(ttft),
        "isolated_step_ms": _ms(alone_steps),
        "served_gap_ms": _ms(later_gaps),
        "first_to_second_token_ms": _ms(first_gaps),
        "ttft_bound_ms": statistics.median(alone) * 1100 + 5,
        "gap_in_served_steps": statistics.median(first_gaps) / statistics.median(later_gaps),
    }
    for name, value in figures.items():
        print(f"{name:<28}" + (f"{value:8.3f}" if isinstance(value, float) else f"{value['p50']:8.3f} (p50)"))
    workload = {
        "model": "demo",
        "prompt_tokens": args.prompt,
        "decode_tokens": DECODE_TOKENS,
        "requests": args.requests,
    }
    print(record("handoff", workload=workload, figures=figures, seed=args.seed))


def _ms(seconds: list[float]) -> dict[str, float]:
    return spread([1000 * value for value in seconds])


if __name__ == "__main__":
    main()
