"""Compare workers that draft tokens with one that does not: they take turns on four texts.

    python -m benchmarks.speculation --model 15m --dtype float32 --turns 10
    python -m benchmarks.speculation --systems fixed off --texts repeating misleading --turns 5

`lookup` drafts what occurred before in the text, or in the prediction that a client sends; `auto` also by a draft
model, which is the model without its last layers; `fixed` looks four tokens up wherever it can, whether that pays or
not. `again` does not draft, as `off`, and shows what equal workers differ by: one may be faster than another for as
long as it lives, so that all start anew for each turn.

The texts: `repeating` is greedy, and with random weights soon repeats itself; in `novel`, sampled from the whole
vocabulary, no three tokens come twice, so that nothing is expected; in `misleading`, sampled from eight tokens,
something is expected all the time, and mostly wrong. `edit` is novel, one request after the other, and its clients send
the answer as the prediction, with one word in sixteen changed.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

from benchmarks.command import Result, run
from benchmarks.figures import compared
from benchmarks.load_run import load_figures, run_load
from benchmarks.local import Local, counts, local_stack
from benchmarks.models import Model, model_with_texts, without_last_layers

TEXTS: dict[str, dict[str, Any]] = {
    "repeating": {"temperature": 0.0},
    "novel": {"temperature": 1.0},
    "misleading": {"temperature": 1.0, "logit_bias": {str(token): 100 for token in range(1000, 1008)}},
}
"""Text → what it adds to the body of each request."""
DRAFTED, RIGHT = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
_SETTINGS = {
    "lookup": {"BATON_SPECULATION": "lookup"},
    "auto": {"BATON_SPECULATION": "auto"},
    "fixed": {"BATON_SPECULATION": "lookup", "BATON_DRAFT_TOKENS": "4"},
    "again": {"BATON_SPECULATION": "off"},
    "off": {"BATON_SPECULATION": "off"},
}
"""System → its settings."""
_EDITS, _EDIT_TOKENS = 4, 256
"""Requests of a turn on `edit`, one after the other, and the tokens of each answer."""
_WORDS_BETWEEN_EDITS = 16


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "float32",
    systems: Annotated[tuple[str, ...], "with off"] = ("lookup", "auto", "again", "off"),
    texts: tuple[str, ...] = (*TEXTS, "edit"),
    concurrency: tuple[int, ...] = (1, 4, 16, 64),
    draft_layers: Annotated[int, "layers of the draft model"] = 4,
    turns: Annotated[int, "starts of each system, and runs on each text at each concurrency"] = 10,
    input_tokens: int = 64,
    output_tokens: int = 128,
) -> Iterator[Result]:
    """In each turn start all systems, and let them take turns at each point: all runs so far after each turn."""
    folder = model_with_texts(scratch, model)
    draft_model = without_last_layers(folder, scratch / "draft", draft_layers)
    options = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(2**29), "--prefill", "0"]
    points = [(text, places) for text in texts for places in (concurrency if text in TEXTS else (1,))]
    lengths = input_tokens, output_tokens
    done: list[dict[str, Any]] = []
    for turn in range(turns):
        order = systems if turn % 2 else systems[::-1]
        with ExitStack() as stack:
            stacks: dict[str, Local] = {}
            for name in order:
                env = _SETTINGS[name] | ({"BATON_DRAFT_MODEL": str(draft_model)} if name == "auto" else {})
                stacks[name] = stack.enter_context(local_stack(options, env))
            for name in order:
                _loaded(stacks[name].url, scratch, "repeating", max(concurrency), turns + turn, lengths)
            for text, places in points:
                for name in order:
                    before = _drafts(stacks[name])
                    if text == "edit":
                        figures = _edited(stacks[name].url, stacks["off"].url, turn, input_tokens)
                    else:
                        figures = _loaded(stacks[name].url, scratch, text, places, turn, lengths)
                    drafts = {what: num - before[what] for what, num in _drafts(stacks[name]).items()}
                    done.append(
                        {"system": name, "text": text, "concurrency": places, "turn": turn, **figures, **drafts}
                    )
        for entry in summary(done):
            rate = entry["output_tokens_per_s"]
            print(turn, entry["text"], entry["concurrency"], entry["system"], rate, entry["acceptance"], flush=True)
        record = f"speculation-{model}-{dtype}" + ("-fixed" if "fixed" in systems else "")
        yield Result(name=record, figures={"ratios": summary(done), "runs": done})


def _drafts(stack: Local) -> dict[str, float]:
    """Tokens that the workers have drafted so far, and those of them that were right."""
    [probe] = stack.probes
    metrics = counts(probe)
    return {"drafted": metrics[DRAFTED], "right": metrics[RIGHT]}


def _loaded(url: str, scratch: Path, text: str, places: int, seed: int, lengths: tuple[int, int]) -> dict[str, float]:
    """Figures of requests on a text, so many at a time; `lengths` are their tokens of input and output."""
    load = ["--workload", "fixed", "--input-tokens", str(lengths[0]), "--output-tokens", str(lengths[1])]
    load += ["--concurrency", str(places), "--requests", str(max(8, min(4 * places, 128)))]
    load += ["--seed", str(1000 * places + seed)]
    load += ["--extra-body", json.dumps({"ignore_eos": True, "seed": seed, **TEXTS[text]})]
    figures = load_figures(run_load(url, scratch / "run.json", *load))
    assert not figures["failed"], (url, figures)
    return figures


def _edited(url: str, plain_url: str, seed: int, input_tokens: int) -> dict[str, float]:
    """Figures of requests, one after the other, whose answers are predicted but for some words."""
    draw = random.Random(seed)
    tpots: list[float] = []
    gaps: list[float] = []
    num_tokens, busy_s = 0, 0.0
    for _ in range(_EDITS):
        body: dict[str, Any] = {
            "prompt": [draw.randrange(1, 4000) for _ in range(input_tokens)],
            "max_tokens": _EDIT_TOKENS,
            "temperature": 1.0,
            "seed": draw.randrange(2**31),
            "ignore_eos": True,
        }
        words = "".join(text for _, text in _chunks(plain_url, body)).split()
        for index in range(_WORDS_BETWEEN_EDITS, len(words), _WORDS_BETWEEN_EDITS):
            words[index] = f"w{draw.randrange(1, 4000)}"
        predicted = body | {"prediction": {"type": "content", "content": "".join(f"{word} " for word in words)}}
        begin = time.perf_counter()
        times = [at for at, _ in _chunks(url, predicted)]
        busy_s += times[-1] - begin
        num_tokens += len(words)
        tpots.append((times[-1] - times[0]) / (len(words) - 1))
        gaps += [after - before for before, after in itertools.pairwise(times)]
    return {
        "output_tokens_per_s": num_tokens / busy_s,
        "itl_p99_s": statistics.quantiles(gaps, n=100, method="inclusive")[-1],
        "tpot_p50_s": statistics.median(tpots),
    }


def _chunks(url: str, body: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Each chunk of a streamed answer: when it came, in seconds, and its text."""
    content = json.dumps({**body, "stream": True}).encode()
    with urlopen(Request(f"{url}/v1/completions", content, {"Content-Type": "application/json"})) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                for choice in json.loads(line[len("data: ") :])["choices"]:
                    if choice["text"]:
                        yield now, choice["text"]


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text, concurrency and system: its medians and those of the workers that do not draft, the ratios of the
    turns, and the share of drafted tokens that were right, None if there were none. A worker that drafts is compared
    with the mean of `off` and `again`, if there are both, and `again` with `off`."""
    made = []
    for text, places in dict.fromkeys((each["text"], each["concurrency"]) for each in runs):
        of = [each for each in runs if (each["text"], each["concurrency"]) == (text, places)]
        by_turn = itertools.groupby(sorted(of, key=_turn), _turn)
        turns = [{each["system"]: each for each in turn} for _, turn in by_turn]
        for system in (each for each in _SETTINGS if each in turns[0] and each != "off"):
            entry: dict[str, Any] = {"text": text, "concurrency": places, "system": system}
            drafted, right = (sum(each[system][what] for each in turns) for what in ("drafted", "right"))
            entry["acceptance"] = right / drafted if drafted else None
            plain = [name for name in ("off", "again") if name in turns[0] and name != system]
            for figure in ("output_tokens_per_s", "tpot_p50_s", "itl_p99_s"):
                entry[figure] = compared(
                    (each[system][figure], statistics.fmean(each[name][figure] for name in plain)) for each in turns
                )
            made.append(entry)
    return made


def _turn(entry: dict[str, Any]) -> int:
    turn: int = entry["turn"]
    return turn


if __name__ == "__main__":
    run(measure, __doc__)
