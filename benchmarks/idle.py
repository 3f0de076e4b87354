"""Measure the cost of an idle local stack: CPU time of every process over a period without requests.

python -m benchmarks.idle [--seconds 20] [--rounds 5]
"""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Annotated

from benchmarks.command import Result, run
from benchmarks.figures import cpu_seconds, spread
from benchmarks.local import Local, local_stack


def ask(local: Local) -> None:
    """Send one request, so that links, pulls and caches exist as in a stack that has served."""
    body = json.dumps({"prompt": "The code of Mira is 4817.", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{local.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()


def measured(local: Local, seconds: float) -> dict[str, float]:
    """Percent of a core that each process uses over `seconds`."""
    before = {name: cpu_seconds(pid) for name, pid in local.pids.items()}
    time.sleep(seconds)
    return {name.split()[0]: 100 * (cpu_seconds(pid) - before[name]) / seconds for name, pid in local.pids.items()}


def measure(scratch: Path, *, seconds: Annotated[float, "of each round"] = 20.0, rounds: int = 5) -> Result:
    """Percent of a core of each process, and of all, over the rounds."""
    with local_stack() as local:
        ask(local)
        time.sleep(3)
        found = [measured(local, seconds) for _ in range(rounds)]
    percent = {name: spread([each[name] for each in found]) for name in found[0]}
    total = spread([sum(each.values()) for each in found])
    figures = {"percent_of_a_core": percent, "total_percent_of_a_core": total}
    return Result(name="idle", figures=figures, workload={"prefill": 1, "decode": 1}, seed=None)


if __name__ == "__main__":
    run(measure, __doc__)
