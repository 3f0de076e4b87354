"""Measure vLLM with several settings for a model and dtype, at 8 requests at a time.

    python -m benchmarks.vllm_settings --model 15m --dtype float32

`candidates` are what is tried. One is up at a time, so that large models fit; after a warm-up it gets the load
`--runs` times, of which the median counts. `benchmarks.versus` and `benchmarks.goodput` use the best of them
(`vllm.chosen`) at every concurrency and rate. The results so far are recorded after each candidate. Needs
`python -m benchmarks.peers.install_vllm`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.command import Result, run, show
from benchmarks.load_run import load_figures, run_load
from benchmarks.models import Model, model_with_texts
from benchmarks.peers import vllm
from benchmarks.peers.vllm import FORMS, Settings, best
from benchmarks.record import by_cpu

CONCURRENCY = 8


def candidates(form: str, done: Sequence[Mapping[str, Any]]) -> Iterator[Settings]:
    """The settings that are tried: several sizes of a step, then the other settings with the best size. `done` are the
    runs so far, to which the run of each candidate is appended before the next is asked for."""
    yield from (Settings(max_num_batched_tokens=number) for number in (512, 1024, 2048, 4096))
    chosen = Settings(**best(each for each in done if each["form"] == form)["settings"])
    yield replace(chosen, threads="bound")
    if form == "single":
        yield replace(chosen, reserved_cores=1)


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "float32",
    runs: int = 3,
    requests: int = 24,
    input_tokens: int = 512,
    output_tokens: int = 64,
) -> Iterator[Result]:
    """Start each candidate in its turn, and measure it: all candidates so far after each one."""
    folder = model_with_texts(scratch, model)
    options = ["--workload", "fixed", "--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens)]
    options += ["--concurrency", str(CONCURRENCY), "--requests", str(requests)]
    done: list[dict[str, Any]] = []
    for form in FORMS:
        for settings in candidates(form, done):
            with FORMS[form](folder, dtype=dtype, settings=settings) as url:
                made = [
                    load_figures(run_load(url, scratch / "run.json", *options, "--seed", str(seed)))
                    for seed in range(runs + 1)
                ][1:]
            figures = {name: statistics.median(each[name] for each in made) for name in made[0]}
            done.append({"form": form, "settings": asdict(settings), **figures})
            show(f"{form} {settings}", figures)
            peers = {"vllm": vllm.described(dtype, {})}
            yield Result(name=by_cpu(f"vllm-settings-{model}-{dtype}"), figures={"runs": done}, peers=peers)


if __name__ == "__main__":
    run(measure, __doc__)
