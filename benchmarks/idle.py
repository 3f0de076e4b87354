"""What the local stack costs when nobody asks anything: CPU time of every process over a quiet period.

python -m benchmarks.idle [--seconds 30]
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.request
from pathlib import Path

from benchmarks.local import Local, local_stack
from benchmarks.record import record


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(local: Local) -> None:
    """One request, so that links, pulls and caches exist as they do in a stack that has served."""
    body = json.dumps({"prompt": "The code of Mira is 4817.", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{local.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    with local_stack() as local:
        ask(local)
        time.sleep(3)
        before = {name: cpu_seconds(pid) for name, pid in local.pids.items()}
        time.sleep(seconds)
        percent = {
            name.split()[0]: 100 * (cpu_seconds(pid) - before[name]) / seconds for name, pid in local.pids.items()
        }
    total = sum(percent.values())
    for name, value in percent.items():
        print(f"{name:<16}{value:6.2f} % of a core")
    print(f"{'total':<16}{total:6.2f} % of a core over {seconds:.0f} s")
    figures = {"percent_of_a_core": percent, "total_percent_of_a_core": total}
    print(record("idle", workload={"seconds": seconds, "prefill": 1, "decode": 1}, figures=figures))


if __name__ == "__main__":
    main()
