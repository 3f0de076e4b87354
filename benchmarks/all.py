"""Record every measurement again, one after another, from one commit.

    python -m benchmarks.all [--only NAME ...] [--skip NAME ...]

A measurement that fails, or takes twice its expected time, is reported at the end; the others are recorded all the
same, and the documents' tables are made again. Nothing else should run on the machine. `vllm_settings`, `versus` and
`goodput` need `python -m benchmarks.peers.install_vllm`, and `llama` needs `python -m
benchmarks.peers.install_llama_cpp`; the soaks need root and iproute2.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

from benchmarks.command import UsageError, call
from benchmarks.record import ROOT, is_clean


@dataclass(frozen=True)
class Measurement:
    """One command, and the minutes that it takes on two cores."""

    command: str
    minutes: float

    @property
    def name(self) -> str:
        """The name of its module, with the arguments that distinguish it from other measurements of that module."""
        words = self.command.removeprefix("benchmarks.").replace("--model ", "").replace("--dtype ", "").split()
        told = [word for word in words if not word.startswith("-") and not word.replace(".", "").isdigit()]
        return "-".join(told)


MEASUREMENTS = (
    Measurement("benchmarks.idle", 2.5),
    Measurement("benchmarks.handoff --model demo", 1),
    Measurement("benchmarks.handoff --model 15m", 1),
    Measurement("benchmarks.recovery --rounds 40", 6),
    Measurement("benchmarks.recovery --ranks 2 --rounds 20", 6),
    Measurement("benchmarks.step_overhead --streams 32 256 --rounds 3 --seconds 2", 2.5),
    Measurement("benchmarks.scheduler_cost --steps 400", 4),
    Measurement("benchmarks.routing_cost", 0.5),
    Measurement("benchmarks.gateway", 13),
    Measurement("benchmarks.overload", 6.5),
    Measurement("benchmarks.modes --rate 6 --requests 240", 6),
    Measurement("benchmarks.steady --requests 5000", 7),
    Measurement("benchmarks.memory", 4),
    Measurement("benchmarks.worker_memory", 1),
    Measurement("benchmarks.interference long-prompt", 10),
    Measurement("benchmarks.interference flood", 4),
    Measurement("benchmarks.interference grammar", 1.5),
    Measurement("benchmarks.autoscale", 5),
    Measurement("benchmarks.speculation", 40),
    Measurement("benchmarks.speculation --systems fixed off --texts repeating misleading --turns 5", 8),
    Measurement("benchmarks.profiles", 25),
    Measurement("benchmarks.widths", 8),
    Measurement("benchmarks.gpu compile --capability 90", 3),
    Measurement("benchmarks.floors --model 0.5b --dtype float32 --rounds 5", 10),
    Measurement("benchmarks.floors --model 0.5b --dtype bfloat16 --rounds 5", 10),
    Measurement("benchmarks.vllm_settings --model 15m --dtype float32 --runs 2", 18),
    Measurement("benchmarks.versus --model 15m --dtype float32 --rounds 3 --requests 6 --minutes 10", 12),
    Measurement("benchmarks.versus --model 15m --dtype bfloat16 --rounds 3 --requests 6 --minutes 10", 12),
    Measurement(
        "benchmarks.versus --model 15m --dtype float32 --workload sharegpt --concurrency 1 8 32 --rounds 3 "
        "--requests 2 --minutes 5",
        8,
    ),
    Measurement(
        "benchmarks.versus --model 15m --dtype bfloat16 --workload sharegpt --concurrency 1 8 32 --rounds 3 "
        "--requests 2 --minutes 4",
        7,
    ),
    Measurement("benchmarks.versus --model 0.5b --dtype bfloat16 --rounds 3 --requests 2 --minutes 60", 70),
    Measurement(
        "benchmarks.versus --model 0.5b --dtype bfloat16 --workload sharegpt --concurrency 1 8 32 --rounds 3 "
        "--requests 1 --minutes 66",
        75,
    ),
    Measurement("benchmarks.goodput --model 15m --dtype float32 --workload sharegpt --rounds 3 --minutes 30", 35),
    Measurement(
        "benchmarks.goodput --model 0.5b --dtype bfloat16 --workload sharegpt --rates 0.25 0.5 0.75 --ttft-s 2 "
        "--itl-s 0.2 --seconds 30 --rounds 3 --minutes 45",
        50,
    ),
    Measurement("benchmarks.llama", 12),
    Measurement("pytest -q -s tests/chaos/test_soak.py", 8),
)


def measure(measurement: Measurement) -> tuple[str, float]:
    """Run a measurement; return (its outcome, the minutes that it took)."""
    began = time.monotonic()
    environment = os.environ | {"SOAK_REQUESTS": "500", "SOAK_RECORD": "1"}
    command = [sys.executable, "-m", *measurement.command.split()]
    try:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=120 * measurement.minutes, check=False
        ).returncode
        outcome = "recorded" if code == 0 else f"failed with {code}"
    except subprocess.TimeoutExpired:
        outcome = "took too long"
    return outcome, (time.monotonic() - began) / 60


NAMES = tuple(each.name for each in MEASUREMENTS)


def main(*, only: Annotated[tuple[str, ...], ", ".join(NAMES)] = NAMES, skip: tuple[str, ...] = ()) -> None:
    """Run the chosen measurements, print their outcomes, and make the pages."""
    if unknown := {*only, *skip} - set(NAMES):
        raise UsageError(f"no measurement {', '.join(sorted(unknown))}")
    if not is_clean():
        raise SystemExit("error: there are changes since the last commit: commit first, so that this can be repeated")
    chosen = [each for each in MEASUREMENTS if each.name in only and each.name not in skip]
    outcomes = {}
    for each in chosen:
        print(f"=== {each.name}: some {each.minutes:g} minutes", flush=True)
        outcomes[each.name] = measure(each)
    for name, (outcome, minutes) in outcomes.items():
        print(f"{name:<36} {minutes:5.1f} min  {outcome}")
    subprocess.run([sys.executable, "-m", "benchmarks.results_page"], cwd=ROOT, check=True)
    if any(outcome != "recorded" for outcome, _ in outcomes.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    call(main, __doc__)
