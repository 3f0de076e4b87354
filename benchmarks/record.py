"""Records a run with everything that is needed to repeat it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Run = dict[str, Any]
"""A recorded run, as parsed from its JSON file."""

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PRODUCT = ("common", "decode_worker", "gateway", "kv_transfer", "prefill_worker", "pyproject.toml")
"""The paths that run in production; the rest of the tree measures, tests, deploys or documents them."""
PACKAGES = ("torch", "nixl", "pyzmq", "aiohttp", "transformers")
_FLAGS = re.compile(r"(avx|amx|fma$|f16c$|sse4)")
"""CPU flags by which kernels are selected, here or in the libraries."""


def record(
    name: str,
    *,
    workload: dict[str, Any],
    figures: dict[str, Any],
    seed: int | None,
    peers: dict[str, Any] | None = None,
    command: str | None = None,
    measured: dict[str, str] | None = None,
) -> Path:
    """Write `benchmarks/results/NAME.json`, and return its path.

    `seed` is None if nothing is drawn at random; `peers` are versions and settings of the other systems that took part;
    `command` repeats the run, and defaults to this process's command line; `measured` is what `clean_tree` gave before
    it, and defaults to what it gives now. A tree with uncommitted changes cannot be reproduced, nor one that has become
    another meanwhile, so the file then goes to the folder for temporary files instead.
    """
    now = clean_tree()
    reproducible = bool(now) and measured in (None, now)
    ours = " ".join(["python", *(["-m"] if sys.argv[0].endswith(".py") else []), *_module(), *sys.argv[1:]])
    run: Run = {
        "command": command or ours,
        **tree(),
        "recorded_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "workload": workload,
        "seed": seed,
        **({"peers": peers} if peers else {}),
        "figures": figures,
    }
    folder = RESULTS
    if not reproducible:
        folder = Path(tempfile.gettempdir())
        why = f"there are changes since {run['commit'][:7]}, or since the run began"
        print(f"not recorded, for {why}", file=sys.stderr)
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(run, indent=2) + "\n")
    return path


def recorded(name: str) -> Run | None:
    """The recorded run of this name; None if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


RECORDED_ONCE = frozenset({"bench-agreement", "claims", "decode-floor-15m-1", "reserve", "routing"})
"""Names of records whose program is in the history, at the commit of the record."""

CPU_SUFFIXES = {"amx_bf16": "-amx", "avx512f": "", "avx2": "-avx2"}
"""Instructions, widest first → what stands behind the names of records of a CPU with them."""


LIMITS = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512-bf16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
    },
}
"""Instructions → the variables by which all that computes in a run uses no wider ones: oneDNN and the kernels in C,
torch, and MKL. vLLM's own kernels follow the first one through `benchmarks/peers/vllm_plugin`."""


def limit_instructions(widest: str) -> None:
    """Make this process, which has not computed yet, and those that it starts use no wider instructions."""
    os.environ.update(LIMITS[widest])


def limited_to() -> str | None:
    """The widest instructions that this process may use, if `limit_instructions` has limited them, or the one variable
    that the kernels in C follow, too."""
    found = next((each for each, variables in LIMITS.items() if variables.items() <= os.environ.items()), None)
    return found or os.environ.get("ONEDNN_MAX_CPU_ISA") or None


def by_cpu(name: str) -> str:
    """The name of a record of what depends on the widest instructions of this machine's CPU, and on their limit."""
    flags = cpuinfo("flags").split()
    suffix = next((suffix for each, suffix in CPU_SUFFIXES.items() if each in flags), "")
    return f"{name}{suffix}-as-{limit}" if (limit := limited_to()) else name + suffix


def of_any_cpu(name: str) -> str:
    """The name of a record without what says which CPU it is of."""
    for limit in LIMITS:
        name = name.removesuffix(f"-as-{limit}")
    for suffix in filter(None, CPU_SUFFIXES.values()):
        name = name.removesuffix(suffix)
    return name


def instructions(machine: Mapping[str, Any]) -> str:
    """The widest instruction set that kernels may use on the CPU of a recorded machine, and the limit that was set."""
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next(
        (name for flag, name in names.items() if flag in machine.get("cpu_flags", ())), "unknown instructions"
    )
    limits = {"avx2": "AVX2", "avx512-bf16": "AVX-512 with bf16"}
    return f"{widest}, limited to {limits.get(limit, limit)}" if (limit := machine.get("limited_to")) else widest


def tree() -> dict[str, str]:
    """The commit, and its product."""
    return {"commit": git("rev-parse", "HEAD"), "product": product_digest()}


def clean_tree() -> dict[str, str]:
    """`tree()`, if it is clean; else empty."""
    return tree() if is_clean() else {}


def product_digest(commit: str = "HEAD") -> str:
    """SHA-256 over the paths of `PRODUCT` in a commit: equal digests mean the same product."""
    return hashlib.sha256(git("ls-tree", commit, "--", *PRODUCT).encode()).hexdigest()


def is_clean() -> bool:
    """Whether the tree equals the last commit, apart from results and the pages made from them."""
    mine = ("README.md", "docs", "benchmarks/results")
    return not git("status", "--porcelain", "--", ".", *(f":!{each}" for each in mine))


def machine() -> dict[str, Any]:
    """The properties of this machine that influence a run."""
    return {
        "cpu": cpuinfo("model name"),
        "cpu_flags": sorted(each for each in cpuinfo("flags").split() if _FLAGS.match(each)),
        **({"limited_to": limit} if (limit := limited_to()) else {}),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: found or "absent" for package, found in versions(PACKAGES).items()},
    }


def git(*arguments: str) -> str:
    """The output of a git command; empty if this is not a checkout, or git is missing."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _module() -> list[str]:
    return [f"benchmarks.{Path(sys.argv[0]).stem}"]


def cpuinfo(field: str) -> str:
    """What Linux tells of the first processor; empty if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of each package; empty if it is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
