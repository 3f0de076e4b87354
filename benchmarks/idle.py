"""Measure the cost of an idle local stack: CPU time of every process over a period without requests.

python -m benchmarks.idle [--seconds 20] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request

from benchmarks.figures import cpu_seconds, spread
from benchmarks.local import Local, local_stack
from benchmarks.record import record


def ask(local: Local) -> None:
    """Send one request, so that links, pulls and caches exist as in a stack that has served."""
    body = json.dumps({"prompt": "The code of Mira is 4817.", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{local.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with local_stack() as local:
        ask(local)
        time.sleep(3)
        rounds = [measured(local, options.seconds) for _ in range(options.rounds)]
    percent = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
    total = spread([sum(each.values()) for each in rounds])
    for name, value in (percent | {"total": total}).items():
        print(f"{name:<16}{value['p50']:6.2f} % of a core ({value['min']:.2f} to {value['max']:.2f})")
    figures = {"percent_of_a_core": percent, "total_percent_of_a_core": total}
    workload = {"seconds": options.seconds, "rounds": options.rounds, "prefill": 1, "decode": 1}
    print(record("idle", workload=workload, figures=figures, seed=None))


def measured(local: Local, seconds: float) -> dict[str, float]:
    """Percent of a core that each process uses over `seconds`."""
    before = {name: cpu_seconds(pid) for name, pid in local.pids.items()}
    time.sleep(seconds)
    return {name.split()[0]: 100 * (cpu_seconds(pid) - before[name]) / seconds for name, pid in local.pids.items()}


if __name__ == "__main__":
    main()
