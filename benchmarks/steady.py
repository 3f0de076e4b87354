"""Measure whether the stack's memory grows: memory of every process, stage by stage, over thousands of requests.

    python -m benchmarks.steady --requests 5000

One prefill and one decode worker, the model of 15 million weights, ShareGPT lengths cut to 256 and 64 tokens, 16
requests at a time. Each stage has prompts of its own. The first stages fill the prefix caches, and with them the
gateway's index of cached blocks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.load_run import run_load
from benchmarks.local import local_stack
from benchmarks.models import llama_15m
from benchmarks.record import record

LENGTHS = ("--workload", "sharegpt", "--max-input-tokens", "256", "--max-output-tokens", "64")


def resident_mib(pid: int) -> float:
    """Resident anonymous memory of a process, in MiB: without files and shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--stages", type=int, default=10)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    series: dict[str, list[float]] = {}
    with TemporaryDirectory() as scratch:
        folder = llama_15m(Path(scratch))
        sizes = ["--model", str(folder), "--kv-cache-bytes", str(64 * 2**20)]
        with local_stack(sizes, {}) as local:
            for stage in range(options.stages + 1):
                number = options.requests // options.stages
                load = ["--requests", str(number), "--concurrency", "16", "--seed", str(stage)]
                run_load(local.url, Path(scratch) / "run.json", *LENGTHS, *load)
                for name, pid in local.pids.items():
                    series.setdefault(name.split()[0], []).append(resident_mib(pid))
                print(stage, "  ".join(f"{name} {values[-1]:.1f}" for name, values in series.items()), flush=True)
    # The first stages fill caches, buffers and connections, so only growth over the second half counts.
    growth = {name: values[-1] - values[len(values) // 2] for name, values in series.items()}
    for name, value in growth.items():
        print(f"{name:<16}{value:+7.2f} MiB over the second half, of {series[name][-1]:.1f}")
    if not options.no_record:
        workload = {"requests": options.requests, "stages": options.stages, "lengths": " ".join(LENGTHS)}
        workload["seeds"] = list(range(options.stages + 1))
        figures = {"resident_mib": series, "growth_second_half_mib": growth}
        print(record("steady", workload=workload, figures=figures, seed=0))


if __name__ == "__main__":
    main()
