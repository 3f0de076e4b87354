"""Compare a worker that drafts tokens with one that does not: they take turns at each concurrency, on three texts.

    python -m benchmarks.speculation --model 15m --dtype float32 --turns 10

The texts: `repeating` is greedy, and with random weights soon repeats itself; in `novel`, sampled from the whole
vocabulary, no three tokens come twice, so that nothing is expected; in `misleading`, sampled from eight tokens,
something is expected all the time, and mostly wrong.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, run
from benchmarks.figures import compared
from benchmarks.load_run import load_figures, run_load
from benchmarks.local import local_stack
from benchmarks.models import MODELS, Model, give_every_token_text

TEXTS: dict[str, dict[str, Any]] = {
    "repeating": {"temperature": 0.0},
    "novel": {"temperature": 1.0},
    "misleading": {"temperature": 1.0, "logit_bias": {str(token): 100 for token in range(1000, 1008)}},
}
"""Text → what it adds to the body of each request."""
SYSTEMS = ("lookup", "off")


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "float32",
    texts: tuple[str, ...] = tuple(TEXTS),
    concurrency: tuple[int, ...] = (1, 4, 16, 64),
    turns: Annotated[int, "runs of each system on each text at each concurrency"] = 10,
    input_tokens: int = 64,
    output_tokens: int = 128,
) -> Iterator[Result]:
    """Start both systems, and let them take turns: all runs so far after each point."""
    folder = scratch / "model"
    folder.mkdir()
    MODELS[model](folder)
    give_every_token_text(folder)
    options = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(2**29), "--prefill", "0"]
    lengths = ["--workload", "fixed", "--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens)]
    done: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {name: stack.enter_context(local_stack(options, {"BATON_SPECULATION": name})).url for name in SYSTEMS}
        for text, places in itertools.product(texts, concurrency):
            for turn in range(-1, turns):  # the first warms up
                for name in SYSTEMS if turn % 2 else SYSTEMS[::-1]:
                    body = {"ignore_eos": True, "seed": turn + 1, **TEXTS[text]}
                    load = ["--concurrency", str(places), "--requests", str(max(8, places))]
                    load += ["--seed", str(1000 * places + turn + 1), "--extra-body", json.dumps(body)]
                    figures = load_figures(run_load(urls[name], scratch / "run.json", *lengths, *load))
                    assert not figures["failed"], (name, figures)
                    if turn >= 0:
                        done.append({"system": name, "text": text, "concurrency": places, "turn": turn, **figures})
            print(text, places, summary(done)[-1]["output_tokens_per_s"], flush=True)
            yield Result(name=f"speculation-{model}-{dtype}", figures={"ratios": summary(done), "runs": done})


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text and each concurrency: medians with drafts and without, and the ratios of the turns."""
    made = []
    for text, places in dict.fromkeys((each["text"], each["concurrency"]) for each in runs):
        of = [each for each in runs if (each["text"], each["concurrency"]) == (text, places)]
        by_turn = itertools.groupby(sorted(of, key=_turn), _turn)
        pairs = [{each["system"]: each for each in turn} for _, turn in by_turn]
        entry: dict[str, Any] = {"text": text, "concurrency": places}
        for figure in ("output_tokens_per_s", "tpot_p50_s", "itl_p99_s"):
            entry[figure] = compared((each["lookup"][figure], each["off"][figure]) for each in pairs)
        made.append(entry)
    return made


def _turn(entry: dict[str, Any]) -> int:
    turn: int = entry["turn"]
    return turn


if __name__ == "__main__":
    run(measure, __doc__)
