"""A load test with pictures: raise the rate of requests until the targets are missed, then plot latency and goodput.

make serve                                    # in another terminal
.venv/bin/python examples/load_test.py FOLDER [options of `baton bench sweep`]

FOLDER gets `sweep.json` and the pictures. A later option wins, for example `--url http://127.0.0.1:8001 --rate 1`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = [sys.executable, "-m", "benchmarks.load"]
LOAD = ["--rate", "4", "--requests", "40", "--warmup", "4", "--input-tokens", "128", "--output-tokens", "32"]
TARGETS = ["--ttft-target-s", "0.5", "--tpot-target-s", "0.05"]


def main(folder: Path, options: list[str]) -> None:
    """Measure and plot."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "sweep.json"
    sweep = [*BENCH, "sweep", *LOAD, *TARGETS, *options, "--output", str(results)]
    plot = [*BENCH, "plot", str(results), "--folder", str(folder)]
    for command in (sweep, plot):
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(code)  # it has said why


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
