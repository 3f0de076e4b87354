"""Measure whether the stack's memory grows: memory of every process, stage by stage, over thousands of requests.

    python -m benchmarks.steady --requests 5000

One prefill and one decode worker, the model of 15 million weights, ShareGPT lengths cut to 256 and 64 tokens, 16
requests at a time. Each stage has prompts of its own. The first stages fill the prefix caches, and with them the
gateway's index of cached blocks.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import Result, run, show
from benchmarks.load_run import run_load
from benchmarks.local import local_stack
from benchmarks.models import llama_15m

LENGTHS = ("--workload", "sharegpt", "--max-input-tokens", "256", "--max-output-tokens", "64")


def resident_mib(pid: int) -> float:
    """Resident anonymous memory of a process, in MiB: without files and shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def measure(scratch: Path, *, requests: int = 5000, stages: int = 10) -> Result:
    """MiB of each process after each stage. The first stages fill caches, so growth is that over the second half."""
    series: dict[str, list[float]] = {}
    sizes = ["--model", str(llama_15m(scratch)), "--kv-cache-bytes", str(64 * 2**20)]
    with local_stack(sizes, {}) as local:
        for stage in range(stages + 1):
            number = requests // stages
            load = ["--requests", str(number), "--concurrency", "16", "--seed", str(stage)]
            run_load(local.url, scratch / "run.json", *LENGTHS, *load)
            for name, pid in local.pids.items():
                series.setdefault(name.split()[0], []).append(resident_mib(pid))
            show(f"stage {stage}, MiB", {name: values[-1] for name, values in series.items()})
    growth = {name: values[-1] - values[len(values) // 2] for name, values in series.items()}
    workload = {"lengths": " ".join(LENGTHS), "seeds": list(range(stages + 1))}
    return Result(name="steady", figures={"resident_mib": series, "growth_second_half_mib": growth}, workload=workload)


if __name__ == "__main__":
    run(measure, __doc__)
