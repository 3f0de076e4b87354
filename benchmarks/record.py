"""What a recorded run carries besides its figures, so that it can be repeated."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median, 90th percentile and maximum."""
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "p50": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max": ordered[-1],
        "n": len(ordered),
    }


def record(
    name: str,
    *,
    workload: dict[str, Any],
    figures: dict[str, Any],
    seed: int | None = None,
    command: str | None = None,
) -> Path:
    """Write `benchmarks/results/NAME.json`; `command` is what repeats it, by default this process's command line."""
    dirty = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    ours = " ".join(["python", *(["-m"] if sys.argv[0].endswith(".py") else []), *_module(), *sys.argv[1:]])
    run = {
        "command": command or ours,
        "commit": _git("rev-parse", "HEAD") + ("+changes" if dirty else ""),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), **_versions()},
        "workload": workload,
        "seed": seed,
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(run, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    """What it prints; nothing where this is no checkout, or there is no git."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _module() -> list[str]:
    return [f"benchmarks.{Path(sys.argv[0]).stem}"]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "nixl", "pyzmq", "aiohttp", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def load_figures(output: Path) -> dict[str, float]:
    """What comparisons keep of a run of `benchmarks.load`, from the file that it wrote."""
    summary = json.loads(output.read_text())["run"]["summary"]
    return {
        "failed": summary["requests"] - summary["succeeded"],
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "itl_p99_s": summary["itl_s"]["p99"],
        "tpot_p50_s": summary["tpot_s"]["p50"],
    }
