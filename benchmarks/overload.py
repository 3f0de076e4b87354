"""Measure what users get while more requests arrive than can be served.

    python -m benchmarks.overload [--rounds 3]

First the capacity is measured: requests per second of a closed loop of 32 clients. This is the throughput of machines
that are never idle, and not the rate that can be served in time; the share of its first tokens that met the target is
reported, too. Then requests of the tier `interactive` arrive in a Poisson process at multiples of the capacity, up to
three. A request is good if its first token came within the tier's target and the gaps between its tokens did, too;
goodput is the rate times the share of good requests. Requests that are refused should be refused at once, so the time
to a refusal is measured, too. Load generator, gateway and workers share the machine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.command import Result, run, show
from benchmarks.figures import spread
from benchmarks.load.record import Outcome, Record
from benchmarks.load.summary import Targets, ttft_s
from benchmarks.load_run import run_load
from benchmarks.local import local_stack
from benchmarks.models import llama_15m

TARGETS = Targets(ttft_s=0.5, tpot_s=0.1, itl_s=None)
INPUT_TOKENS, OUTPUT_TOKENS = 256, 32
SHARES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def load(url: str, output: Path, options: Sequence[str]) -> list[Record]:
    """Run the load generator once; return the record of each request."""
    lengths = ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
    run = run_load(url, output, "--workload", "fixed", *lengths, "--timeline", *options)
    return [Record.from_json(each) for each in run["timeline"]["records"]]


def capacity(url: str, scratch: Path) -> tuple[float, float]:
    """(requests per second of a closed loop of 32 clients, share of them that met the targets)."""
    records = load(url, scratch / "capacity.json", ["--concurrency", "32", "--requests", "200", "--seed", "999"])
    assert all(each.outcome is Outcome.OK for each in records), "the tier standard waits"
    return per_second(records), sum(TARGETS.met_by(each) for each in records) / len(records)


def per_second(records: Sequence[Record]) -> float:
    """Requests per second, from the first one sent to the last one ended."""
    return len(records) / (max(each.ended_s for each in records) - min(each.sent_s for each in records))


def figures(records: Sequence[Record], rate: float) -> dict[str, Any]:
    """The figures of one run at one rate, in requests per second. Goodput is the rate times the share of good requests:
    the number of requests is that of the rate, and the span of their arrivals is drawn at random. Only a 429 counts as
    refused; a 503 counts as a failure, however soon it came."""
    accepted = [each for each in records if each.outcome is Outcome.OK]
    refused = [each for each in records if each.outcome is Outcome.REFUSED and each.status == 429]
    others = len(records) - len(accepted) - len(refused)
    good = [each for each in accepted if TARGETS.met_by(each)]
    return {
        "rate": rate,
        "requests": len(records),
        "accepted": len(accepted),
        "refused": len(refused),
        "neither": others,
        "goodput": rate * len(good) / len(records),
        "accepted_that_met_the_target": len(good) / max(1, len(accepted)),
        "ttft_s": spread([ttft_s(each) for each in accepted]) if accepted else None,
        "refusal_s": spread([each.ended_s - each.sent_s for each in refused]) if refused else None,
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Goodput over load, and its ratio at three times the capacity to the best: medians of the rounds. At three times
    the capacity, the share of accepted requests on time and the slowest refusal are those of the worst round."""
    goodput = {share: statistics.median(r["goodput"] for r in runs if r["share"] == share) for share in SHARES}
    most = [r for r in runs if r["share"] == SHARES[-1]]
    refusals = [r["refusal_s"] for r in most if r["refusal_s"]]
    return {
        "goodput": {str(share): value for share, value in goodput.items()},
        "goodput_at_most_over_best": goodput[SHARES[-1]] / max(goodput.values()),
        "accepted_that_met_the_target_at_most": min(r["accepted_that_met_the_target"] for r in most),
        "refusal_p50_s": statistics.median(each["p50"] for each in refusals) if refusals else None,
        "refusal_p90_s": statistics.median(each["p90"] for each in refusals) if refusals else None,
        "refusal_max_s": max(each["max"] for each in refusals) if refusals else None,
        "neither_accepted_nor_refused": sum(r["neither"] for r in runs),
    }


def measure(
    scratch: Path, *, rounds: int = 3, seconds: Annotated[float, "of arrivals at each rate"] = 15.0, seed: int = 0
) -> Result:
    """Measure the capacity, then every share of it in every round."""
    runs: list[dict[str, Any]] = []
    with local_stack(["--model", str(llama_15m(scratch))], {"BATON_LOCAL_PREFILL_TOKENS": "0"}) as local:
        load(local.url, scratch / "warm.json", ["--concurrency", "8", "--requests", "40"])
        most, on_time = capacity(local.url, scratch)
        show("capacity", {"requests/s": most, "on time": on_time})
        for number in range(rounds):
            for share in SHARES if number % 2 == 0 else SHARES[::-1]:
                rate, seed = share * most, seed + 100 * number + int(100 * share)
                arrivals = ["--rate", f"{rate:.3f}", "--duration-s", str(seconds), "--seed", str(seed)]
                arrivals += ["--extra-body", json.dumps({"service_tier": "interactive"})]
                run = {"share": share, "round": number, "seed": seed}
                runs.append(run | figures(load(local.url, scratch / f"{number}-{share}.json", arrivals), rate))
                show(f"round {number}", runs[-1])
    found = {"capacity": most, "capacity_that_met_the_target": on_time, "summary": summary(runs), "runs": runs}
    workload: dict[str, Any] = {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS, "tier": "interactive"}
    workload |= {"model": "llama 15m", "ttft_target_s": TARGETS.ttft_s, "tpot_target_s": TARGETS.tpot_s}
    return Result(name="overload", figures=found, workload=workload)


if __name__ == "__main__":
    run(measure, __doc__)
