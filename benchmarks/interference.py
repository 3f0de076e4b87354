"""Measure how other work disturbs interactive streams: a very long prompt, a flood of the batch tier, or grammars.

    python -m benchmarks.interference long-prompt [--prompt 32000] [--streams 8]
    python -m benchmarks.interference flood [--flood 200]
    python -m benchmarks.interference grammar [--streams 8] [--rounds 5]

`long-prompt`: streams decode steadily; a long prompt arrives; the gaps between the streams' tokens (ITL) while it is
computed are compared with those before. This is repeated for several chunk sizes, on one worker that computes prompts
and decodes with two threads (colocated), and on a prefill and a decode worker with one thread each (disaggregated).

`flood`: interactive requests arrive one by one while a prefill and a decode worker serve a flood of long requests of
the batch tier or, for comparison, of the interactive tier. The decode worker's cache holds a fraction of the flood.

`grammar`: streams of the demo model decode steadily on a decode worker; a request of 16 choices arrives. In turn, its
choices are free, follow a usual grammar, or follow one that is expensive to compile or to follow. Gateways refuse most
of the expensive grammars; here they bypass that check and reach the worker.

Tokens are received at the gateway's dispatcher, which runs in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from llguidance import grammar_from

from benchmarks.command import Result, run, show
from benchmarks.dispatched import greedy, on_stack, stream
from benchmarks.load.summary import percentile
from benchmarks.models import llama_15m, llama_long
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.runtime.checkpoint import DEMO_FOLDER
from gateway.dispatch.dispatcher import Dispatcher
from gateway.serving.generation import Generation, GenerationFailed

Figures = dict[str, Any]
CHUNK_SIZES = (256, 512, 1024, 2048, 4096)
BEFORE_S = 2.0
"""Seconds before the long prompt with which its time is compared."""


def summary_ms(values: Sequence[float]) -> dict[str, float]:
    """P50, P99 and maximum, in milliseconds."""
    return {
        "p50_ms": 1000 * percentile(values, 50),
        "p99_ms": 1000 * percentile(values, 99),
        "max_ms": 1000 * max(values),
        "n": len(values),
    }


def tokens(draw: random.Random, num: int) -> list[int]:
    """A random prompt, so that no cache holds it."""
    return [draw.randrange(10, 200) for _ in range(num)]


def start(
    dispatcher: Dispatcher, prompts: Sequence[Sequence[int]], most: int, streams: Sequence[list[float]]
) -> list[asyncio.Task[list[int]]]:
    """Start an interactive stream of each prompt."""
    works = [greedy(prompt, most, Tier.INTERACTIVE) for prompt in prompts]
    return [asyncio.create_task(stream(dispatcher, work, times)) for work, times in zip(works, streams, strict=True)]


# --- a very long prompt --------------------------------------------------------------------------------------------


async def beside_long_prompt(dispatcher: Dispatcher, prompt: int, num_streams: int, seed: int) -> Figures:
    """ITL of the streams before and while the long prompt is computed."""
    draw = random.Random(seed)
    streams: list[list[float]] = [[] for _ in range(num_streams)]
    most = 8000
    running = start(dispatcher, [tokens(draw, 128) for _ in streams], most, streams)
    await asyncio.sleep(3)
    injected = time.perf_counter()
    first: list[float] = []
    await stream(dispatcher, greedy(tokens(draw, prompt), 1), first)
    ended = time.perf_counter()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(len(times) < most for times in streams), "a stream ended before the long prompt did"
    before, during = gaps_around(streams, injected, ended)
    return {"itl_before": summary_ms(before), "itl_during": summary_ms(during), "long_ttft_s": first[0] - injected}


def gaps_around(streams: Sequence[Sequence[float]], injected: float, ended: float) -> tuple[list[float], list[float]]:
    """(gaps before, gaps during) of all streams: gaps that ended within `BEFORE_S` before the prompt arrived, and gaps
    that overlap with the time of the prompt. The gap in which the prompt arrived counts only as during."""
    gaps = [(a, b) for times in streams for a, b in itertools.pairwise(times)]
    before = [b - a for a, b in gaps if injected - BEFORE_S < b <= injected]
    during = [b - a for a, b in gaps if b > injected and a < ended]
    return before, during


def measure_long_prompt(folder: Path, chunk: int, prompt: int, streams: int, seed: int, *, colocated: bool) -> Figures:
    """Start a stack and measure one long prompt on it."""
    environment = {
        "BATON_CHUNK_SIZE": str(chunk),
        "BATON_PREFILL_TOKENS": str(chunk),
        "BATON_TOKEN_BUDGET": str(chunk + 64),
        "BATON_KV_CACHE_BYTES": str(256 * 2**20),
        "BATON_LOCAL_PREFILL_TOKENS": "0",
        "BATON_INTERACTIVE_TTFT_S": "60",  # so that costs shorten no chunk
        "BATON_STANDARD_TTFT_S": "60",
    }
    mode = ["--prefill", "0" if colocated else "1"]
    return on_stack(mode, environment, folder, lambda each: beside_long_prompt(each, prompt, streams, seed))


# --- a flood -------------------------------------------------------------------------------------------------------


async def beside_flood(dispatcher: Dispatcher, number: int, requests: int, seed: int, tier: Tier | None) -> Figures:
    """TTFT and ITL of interactive requests that come one by one, beside a flood of `tier` (None: alone)."""
    draw = random.Random(seed)
    flooding: list[asyncio.Task[list[int]]] = []
    finished: list[list[float]] = []
    if tier is not None:
        for _ in range(number):
            times: list[float] = []
            finished.append(times)
            generation = greedy(tokens(draw, 256), 128, tier)
            flooding.append(asyncio.create_task(stream(dispatcher, generation, times)))
        await asyncio.sleep(1)
    ttfts, gaps = [], []
    for _ in range(requests):
        times = []
        began = time.perf_counter()
        await stream(dispatcher, greedy(tokens(draw, 64), 32, Tier.INTERACTIVE), times)
        ttfts.append(times[0] - began)
        gaps += [b - a for a, b in itertools.pairwise(times)]
    still_going = sum(not task.done() for task in flooding)
    await asyncio.gather(*flooding)
    assert all(len(times) == 128 for times in finished), "a request of the flood was not finished"
    return {
        "ttft": summary_ms(ttfts),
        "itl": summary_ms(gaps),
        "flood_going_on_at_the_end": still_going,
    }


def measure_flood(folder: Path, number: int, requests: int, seed: int, tier: Tier | None) -> Figures:
    """Start a stack and measure one flood on it."""
    block_size = 16
    block_bytes = 6 * 2 * 6 * 48 * block_size * 4
    environment = {
        "BATON_BLOCK_SIZE": str(block_size),
        "BATON_KV_CACHE_BYTES": str(600 * block_bytes),  # about a tenth of the flood
        "BATON_LOCAL_PREFILL_TOKENS": "0",
        "BATON_MAX_NUM_SEQS": "16",
    }
    return on_stack([], environment, folder, lambda each: beside_flood(each, number, requests, seed, tier))


# --- grammars ------------------------------------------------------------------------------------------------------

_OBJECT = {"type": "object", "properties": {f"field{number}": {"type": "string"} for number in range(10)}}
_OPTIONAL = {"type": "object", "properties": {f"field{number}": {"type": "integer"} for number in range(300)}}
GRAMMARS: dict[str, str | None] = {
    "free": None,
    "an object with ten fields": grammar_from(
        "json_schema", json.dumps(_OBJECT | {"required": [*_OBJECT["properties"]]})
    ),
    "300 optional fields": grammar_from("json_schema", json.dumps(_OPTIONAL)),
    "ambiguous": grammar_from("lark", "start: e\ne: e e e | e e | /[ -~]/ |"),
    "99,999 repetitions": grammar_from("regex", "a{99999}"),
}
"""Name → grammar that the 16 choices follow."""
ALONE_S = 0.5
BESIDE_S = 1.0
"""The streams run alone for `ALONE_S` seconds before the 16 choices arrive; the choices run for at most `BESIDE_S`."""


async def beside_grammar(dispatcher: Dispatcher, num_streams: int, seed: int, what: str) -> Figures:
    """The gaps between the streams' tokens before and while 16 choices that follow a grammar are generated."""
    draw = random.Random(seed)
    streams: list[list[float]] = [[] for _ in range(num_streams)]
    most = 1900
    running = start(dispatcher, [tokens(draw, 64) for _ in streams], most, streams)
    while not all(streams):
        await asyncio.sleep(0.01)
    await asyncio.sleep(ALONE_S)
    grammar = GRAMMARS[what]
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=32, min_tokens=32, grammar=grammar)
    prompt = tuple(tokens(draw, 64))
    generation = Generation(token_ids=prompt, num_choices=16, sampling=sampling, budget_s=3600, tier=Tier.INTERACTIVE)
    injected = time.perf_counter()
    theirs: list[float] = []
    end = "complete"
    try:
        async with asyncio.timeout(BESIDE_S):
            await stream(dispatcher, generation, theirs)
    except TimeoutError:
        end = "cut off"
    except GenerationFailed as failed:
        end = str(failed.cause)
    ended = time.perf_counter()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert all(len(times) < most for times in streams), "a stream ended before the 16 choices did"
    before, during = gaps_around(streams, injected, ended)
    return {
        "itl_before": summary_ms(before),
        "itl_during": summary_ms(during),
        "their_tokens": len(theirs),
        "their_s": ended - injected,
        "end": end,
    }


def measure_grammars(streams: int, num_rounds: int, seed: int) -> Figures:
    """Start one stack and measure every grammar on it, in turns."""
    rounds: Figures = {what: [] for what in GRAMMARS}

    async def body(dispatcher: Dispatcher) -> None:
        for number in range(num_rounds):
            for what in GRAMMARS:
                found = await beside_grammar(dispatcher, streams, seed + number, what)
                rounds[what].append(found)
                show(what, found)

    on_stack([], {"BATON_LOCAL_PREFILL_TOKENS": "0"}, DEMO_FOLDER, body)
    return rounds


def measure_long_prompts(scratch: Path, prompt: int, streams: int, seed: int) -> Figures:
    """Measure one long prompt by each chunk size, in the two modes by turns."""
    folder, figures = llama_long(scratch), {}
    for chunk in CHUNK_SIZES:
        for mode in ("colocated", "disaggregated"):
            found = measure_long_prompt(folder, chunk, prompt, streams, seed, colocated=mode == "colocated")
            figures[f"{mode}-{chunk}"] = found
            show(f"{mode}-{chunk}", found)
    return figures


def measure_floods(scratch: Path, number: int, requests: int, seed: int) -> Figures:
    """Measure the requests alone, and beside a flood of each tier."""
    folder, figures = llama_15m(scratch), {}
    for name, tier in (("alone", None), ("batch-flood", Tier.BATCH), ("interactive-flood", Tier.INTERACTIVE)):
        figures[name] = measure_flood(folder, number, requests, seed, tier)
        show(name, figures[name])
    return figures


def measure(
    scratch: Path,
    what: Literal["long-prompt", "flood", "grammar"],
    *,
    prompt: int = 32000,
    streams: int = 8,
    flood: int = 200,
    requests: int = 20,
    rounds: int = 5,
    seed: int = 0,
) -> Result:
    """Measure one kind of work."""
    match what:
        case "long-prompt":
            figures = measure_long_prompts(scratch, prompt, streams, seed)
        case "flood":
            figures = measure_floods(scratch, flood, requests, seed)
        case "grammar":
            figures = measure_grammars(streams, rounds, seed)
    return Result(name=f"interference-{what}", figures=figures)


if __name__ == "__main__":
    run(measure, __doc__)
