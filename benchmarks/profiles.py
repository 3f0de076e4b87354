"""Compare two pools of decode workers that have a profile each with one packed pool, on mixed tiers, at equal cores.

    python -m benchmarks.profiles --model 15m --dtype float32 --rounds 3

`profiles` has a decode worker of each profile, of which the one for latency drafts by lookup; `packed` has two for
throughput, which do not draft, and `drafting` two that do, where it pays. All compute the prompts there too
(`--prefill 0`), so that all cores are these workers'. Requests of the tiers `interactive` and `standard` arrive in two
Poisson processes that do not wait for answers; a mix is the share of the former. As in `benchmarks.goodput`, a request
is good if its time to first token and the mean gap between its tokens are within the targets of its tier, and goodput
is good requests per second of arrivals. Of the answers' texts, as in `benchmarks.speculation`, drafts gain nothing on
`novel` ones, and much on `repeating` ones. The systems take turns, with the same arrivals and prompts in a round. The
results so far are recorded after each text, mix and rate.
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
from benchmarks.models import Model, model_with_texts
from benchmarks.speculation import TEXTS

SYSTEMS: dict[str, tuple[list[str], dict[str, str]]] = {
    "profiles": (["--decode", "1", "--latency", "1"], {}),
    "packed": (["--decode", "2"], {}),
    "drafting": (["--decode", "2"], {"BATON_SPECULATION": "lookup"}),
}
"""System → its pools, and further settings."""
PACKED = ("packed", "drafting")
TIERS = ("interactive", "standard")


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "float32",
    texts: tuple[str, ...] = ("novel", "repeating"),
    mixes: Annotated[tuple[float, ...], "shares of interactive requests"] = (0.2, 0.5, 0.8),
    rates: Annotated[tuple[float, ...], "requests per second of both tiers"] = (12, 24, 36),
    interactive_ttft_s: float = 0.5,
    interactive_itl_s: float = 0.01,
    standard_ttft_s: float = 2.0,
    standard_itl_s: float = 0.05,
    rounds: int = 3,
    seconds: Annotated[float, "of arrivals in a run"] = 8.0,
    input_tokens: int = 64,
    output_tokens: int = 128,
) -> Iterator[Result]:
    """Start all systems, and let them take turns: all runs so far after each text, mix and rate."""
    folder = model_with_texts(scratch, model)
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
        urls = {
            name: stack.enter_context(local_stack([*options, *pools], env | more)).url
            for name, (pools, more) in SYSTEMS.items()
        }

        def load(name: str, text: str, tier: str, rate: float, seed: int) -> dict[str, Any]:
            ttft_s, itl_s = targets[tier]
            body = json.dumps({"service_tier": tier, "ignore_eos": True, "seed": seed, **TEXTS[text]})
            arrivals = ["--rate", str(rate), "--seed", str(seed), "--duration-s", str(seconds), "--extra-body", body]
            arrivals += ["--timeout-s", "60", "--ttft-target-s", str(ttft_s), "--tpot-target-s", str(itl_s)]
            output = scratch / f"{tier}.json"
            return goodput_figures(run_load(urls[name], output, *lengths, *arrivals, may_all_fail=True), seconds)

        with ThreadPoolExecutor(len(TIERS)) as pool:
            for text, mix, rate in itertools.product(texts, mixes, rates):
                share = {"interactive": mix, "standard": 1 - mix}
                for turn in range(rounds):
                    for name in sorted(SYSTEMS, reverse=bool(turn % 2)):
                        seeds = range(1000 * (turn + 1), 1000 * (turn + 1) + len(TIERS))
                        asked = [
                            pool.submit(load, name, text, tier, share[tier] * rate, seed)
                            for tier, seed in zip(TIERS, seeds, strict=True)
                        ]
                        figures = {tier: each.result() for tier, each in zip(TIERS, asked, strict=True)}
                        at = {"text": text, "mix": mix, "rate": rate, "turn": turn}
                        done.append({"system": name, **at, **figures})
                for each in ratios(done)[-len(PACKED) :]:
                    print(text, mix, rate, each["against"], each["goodput"], flush=True)
                yield Result(
                    name=f"profiles-{model}-{dtype}",
                    figures={"break_even": break_even(ratios(done)), "ratios": ratios(done), "runs": done},
                )


def ratios(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text, mix, rate and tier, and both tiers together: goodput with two profiles against each of the packed
    pools."""
    made = []
    for at in dict.fromkeys((each["text"], each["mix"], each["rate"]) for each in runs):
        of = [each for each in runs if (each["text"], each["mix"], each["rate"]) == at]
        turns = [{each["system"]: each for each in of if each["turn"] == turn} for turn in {e["turn"]: 0 for e in of}]
        for tiers in (*((tier,) for tier in TIERS), TIERS):
            for packed in PACKED:
                goodput = [(_goodput(each["profiles"], tiers), _goodput(each[packed], tiers)) for each in turns]
                where = dict(zip(("text", "mix", "rate"), at, strict=True))
                made.append({**where, "tier": " and ".join(tiers), "against": packed, "goodput": compared(goodput)})
    return made


def break_even(of: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each text, mix and packed pool: the least rate, interpolated between those that were measured, from which on
    two profiles have at least its goodput, over both tiers, at all higher ones; None if they have less at the
    highest one."""
    made = []
    for case in dict.fromkeys((each["text"], each["mix"], each["against"]) for each in of):
        points = sorted(
            (each["rate"], each["goodput"]["ours"] - each["goodput"]["theirs"])
            for each in of
            if (each["text"], each["mix"], each["against"]) == case and each["tier"] == " and ".join(TIERS)
        )
        rate, ahead = points[-1]
        least = rate if ahead >= 0 else None
        for lower, gain in reversed(points[:-1]):
            if least is None:
                break
            if gain < 0:
                least = lower + (rate - lower) * gain / (gain - ahead)
                break
            least, rate, ahead = lower, lower, gain
        made.append({**dict(zip(("text", "mix", "against"), case, strict=True)), "rate": least})
    return made


def _goodput(figures: dict[str, Any], tiers: Sequence[str]) -> float:
    goodput: float = sum(figures[tier]["goodput"] for tier in tiers)
    return goodput


if __name__ == "__main__":
    run(measure, __doc__)
