"""Compare Baton with vLLM by the requests that meet two targets at once, while requests arrive at given rates.

    python -m benchmarks.goodput --model 15m --dtype float32 --rates 2 4 6 8 --ttft-s 1.0 --itl-s 0.05 --rounds 3

The load is open-loop: requests arrive in a Poisson process and wait for no other one. `benchmarks/systems.py` says how
the systems take turns; in a round all have the same arrivals and prompts. As in DistServe (section 2), a request is
good if its time to first token (TTFT) and its time per output token (TPOT: the mean gap between its tokens) are both
within their targets. A request that fails, is refused, or takes longer than `--timeout-s` is not good. Goodput is good
requests per second of arrivals. The results so far are recorded after each rate. Needs
`python -m benchmarks.peers.install_vllm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, run
from benchmarks.load_run import run_load
from benchmarks.models import Model
from benchmarks.record import by_cpu
from benchmarks.systems import (
    SYSTEMS,
    Turn,
    Workload,
    compared_pairs,
    in_turns,
    length_options,
    lengths_of,
    part,
    peers_of,
    started,
)

ATTAINMENT = 0.9
"""Share of requests that must be good for a rate to count as held."""


def goodput_figures(run: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The figures of one run of the load generator, whose requests arrived in `seconds`.

    Latencies are None if no request succeeded.
    """
    summary = run["summary"]
    ttft_s, tpot_s, itl_s, lag_s = (summary[name] or {} for name in ("ttft_s", "tpot_s", "itl_s", "lag"))
    return {
        "requests": summary["requests"],
        "failed": summary["requests"] - summary["succeeded"],
        "good": summary["goodput"]["good"],
        "good_share": summary["goodput"]["attainment"],
        "goodput": summary["goodput"]["good"] / seconds,
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "ttft_p90_s": ttft_s.get("p90"),
        "tpot_p90_s": tpot_s.get("p90"),
        "itl_p99_s": itl_s.get("p99"),
        "send_lag_p99_s": lag_s["send_s"]["p99"],
    }


def held(runs: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """For each system: the good share at each rate, over the requests of all rounds, and the highest rate that holds.

    A rate holds if at least `ATTAINMENT` of its requests are good; the highest one is None if none holds.
    """
    systems: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(each["system"] for each in runs):
        at: dict[float, float] = {}
        for rate in sorted({each["rate"] for each in runs if each["system"] == name}):
            of = [each for each in runs if (each["system"], each["rate"]) == (name, rate)]
            at[rate] = sum(each["good"] for each in of) / sum(each["requests"] for each in of)
        highest = max((rate for rate, share in at.items() if share >= ATTAINMENT), default=None)
        shares = [{"rate": rate, "good_share": share} for rate, share in at.items()]
        systems[name] = {"highest_rate": highest, "shares": shares}
    return systems


def summary(runs: Sequence[Turn]) -> dict[str, Any]:
    """What each system holds, and for each pair of systems and each rate medians and the ratios of the rounds."""
    ratios = compared_pairs(runs, "rate", ("goodput", "good_share", "output_tokens_per_s"))
    return {"systems": held(runs), "ratios": ratios}


def measure(
    scratch: Path,
    *,
    model: Model = "15m",
    dtype: str = "float32",
    rates: Annotated[tuple[float, ...], "requests per second"] = (2, 4, 6, 8),
    ttft_s: Annotated[float, "target: most seconds to a request's first token"] = 1.0,
    itl_s: Annotated[float, "target: most seconds between a request's tokens, in the mean (TPOT)"] = 0.05,
    rounds: int = 3,
    seconds: Annotated[float, "of arrivals at each rate"] = 20.0,
    timeout_s: Annotated[float, "seconds that a request may take in all"] = 60.0,
    minutes: Annotated[float, "after this no other rate begins"] = 600,
    workload: Workload = "sharegpt",
    input_tokens: Annotated[int, "of a prompt, with fixed"] = 512,
    output_tokens: Annotated[int, "of an answer, with fixed"] = 64,
    systems: tuple[str, ...] = SYSTEMS,
) -> Iterator[Result]:
    """Start the systems, and let them take turns at each rate: all runs so far after each rate."""
    lengths = lengths_of(workload, input_tokens, output_tokens)
    options = [*length_options(workload, lengths), "--duration-s", str(seconds)]
    options += ["--timeout-s", str(timeout_s), "--ttft-target-s", str(ttft_s), "--tpot-target-s", str(itl_s)]
    peers = peers_of(systems, model, dtype)
    with started(scratch, model, dtype, systems) as up:

        def load(name: str, rate: float, seed: int) -> dict[str, Any]:
            arrivals = ["--rate", str(rate), "--seed", str(seed)]
            run = run_load(up[name].url, scratch / "run.json", *options, *arrivals, may_all_fail=True)
            return goodput_figures(run, seconds)

        for runs in in_turns(up, "rate", rates, rounds=rounds, minutes=minutes, load=load):
            figures = {**summary(runs), "runs": runs}
            name = by_cpu(f"goodput-{model}-{dtype}-{workload}{part(systems)}")
            yield Result(name=name, figures=figures, workload=lengths, peers=peers)


if __name__ == "__main__":
    run(measure, __doc__)
