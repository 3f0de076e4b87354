"""Runs of the load generator, in a process of its own, by the measurements that compare or repeat them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_load(
    url: str, output: Path, *options: str, timeout_s: float | None = None, may_all_fail: bool = False
) -> dict[str, Any]:
    """Run `baton bench` with `options` on the endpoint at `url`; return the run that it has written to `output`.

    A run without a request that succeeded has a nonzero exit status: it is returned if `may_all_fail`. Raises
    `subprocess.TimeoutExpired` after `timeout_s` seconds.
    """
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.load", "--url", url, "--output", str(output), *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=timeout_s)
    if (done.returncode and not may_all_fail) or not output.exists():
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    run: dict[str, Any] = json.loads(output.read_text())["run"]
    return run


def load_figures(run: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a run that comparisons use."""
    summary = run["summary"]
    return {
        "failed": summary["requests"] - summary["succeeded"],
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "itl_p99_s": summary["itl_s"]["p99"],
        "tpot_p50_s": summary["tpot_s"]["p50"],
    }
