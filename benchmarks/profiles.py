"""Compare one packed pool of decode workers with two pools that have a profile each, on mixed tiers, at equal cores.

    python -m benchmarks.profiles --model 15m --dtype float32 --rounds 3

`packed` has two decode workers with the profile throughput, `profiles` one of each; both compute the prompts there too
(`--prefill 0`), so that all cores are these workers'. Requests of the tiers `interactive` and `standard` arrive in two
Poisson processes that do not wait for answers; a mix is the share of the former. As in `benchmarks.goodput`, a request
is good if its time to first token and the mean gap between its tokens are within the targets of its tier, and goodput
is good requests per second of arrivals. The systems take turns, with the same arrivals and prompts in a round. The
results so far are recorded after each mix and rate.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, run
from benchmarks.figures import compared
from benchmarks.goodput import goodput_figures
from benchmarks.load_run import run_load
from benchmarks.local import local_stack
from benchmarks.models import MODELS, Model, give_every_token_text

SYSTEMS = {"packed": ["--decode", "2"], "profiles": ["--decode", "1", "--latency", "1"]}
"""System → its pools."""
TIERS = ("interactive", "standard")


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "float32",
    mixes: Annotated[tuple[float, ...], "shares of interactive requests"] = (0.2, 0.5, 0.8),
    rates: Annotated[tuple[float, ...], "requests per second of both tiers"] = (6, 12, 18),
    interactive_ttft_s: float = 0.5,
    interactive_itl_s: float = 0.01,
    standard_ttft_s: float = 2.0,
    standard_itl_s: float = 0.05,
    rounds: int = 3,
    seconds: Annotated[float, "of arrivals in a run"] = 15.0,
    input_tokens: int = 64,
    output_tokens: int = 128,
) -> Iterator[Result]:
    """Start both systems, and let them take turns: all runs so far after each mix and rate."""
    folder = scratch / "model"
    folder.mkdir()
    MODELS[model](folder)
    give_every_token_text(folder)
    targets = {"interactive": (interactive_ttft_s, interactive_itl_s), "standard": (standard_ttft_s, standard_itl_s)}
    env = {
        f"BATON_{tier.upper()}_{kind}_S": str(s)
        for tier, both in targets.items()
        for kind, s in zip(("TTFT", "ITL"), both, strict=True)
    }
    options = ["--model", str(folder), "--dtype", dtype, "--kv-cache-bytes", str(2**28), "--prefill", "0"]
    lengths = ["--workload", "fixed", "--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens)]
    done: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {name: stack.enter_context(local_stack([*options, *pools], env)).url for name, pools in SYSTEMS.items()}

        def load(name: str, tier: str, rate: float, seed: int) -> dict[str, Any]:
            ttft_s, itl_s = targets[tier]
            body = json.dumps({"service_tier": tier, "temperature": 1.0})
            arrivals = ["--rate", str(rate), "--seed", str(seed), "--duration-s", str(seconds), "--extra-body", body]
            arrivals += ["--timeout-s", "60", "--ttft-target-s", str(ttft_s), "--tpot-target-s", str(itl_s)]
            output = scratch / f"{tier}.json"
            return goodput_figures(run_load(urls[name], output, *lengths, *arrivals, may_all_fail=True), seconds)

        with ThreadPoolExecutor(len(TIERS)) as pool:
            for mix, rate in itertools.product(mixes, rates):
                share = {"interactive": mix, "standard": 1 - mix}
                for turn in range(rounds):
                    for name in sorted(SYSTEMS, reverse=bool(turn % 2)):
                        seed = 1000 * (turn + 1)
                        of_tier = [pool.submit(load, name, t, share[t] * rate, seed + n) for n, t in enumerate(TIERS)]
                        figures = {tier: each.result() for tier, each in zip(TIERS, of_tier, strict=True)}
                        done.append({"system": name, "mix": mix, "rate": rate, "turn": turn, **figures})
                for entry in summary(done)[-len(TIERS) - 1 :]:
                    print(entry, flush=True)
                yield Result(name=f"profiles-{model}-{dtype}", figures={"ratios": summary(done), "runs": done})


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each mix, rate and tier, and both tiers together: goodput with two profiles against one packed pool."""
    made = []
    for mix, rate in dict.fromkeys((each["mix"], each["rate"]) for each in runs):
        of = [each for each in runs if (each["mix"], each["rate"]) == (mix, rate)]
        pairs = [
            {each["system"]: each for each in of if each["turn"] == turn} for turn in sorted({e["turn"] for e in of})
        ]
        for tiers in (*((tier,) for tier in TIERS), TIERS):
            goodput = [
                tuple(sum(pair[name][tier]["goodput"] for tier in tiers) for name in ("profiles", "packed"))
                for pair in pairs
            ]
            made.append({"mix": mix, "rate": rate, "tier": " and ".join(tiers), "goodput": compared(goodput)})
    return made


if __name__ == "__main__":
    run(measure, __doc__)
