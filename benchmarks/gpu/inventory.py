"""What a machine with a GPU has, and what its tools and the model tests report. Uses the standard library alone."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, versions

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "nixl", "nixl-cu13"),
    *("pyzmq", "msgpack", "aiohttp", "uvloop", "pydantic", "pydantic-settings", "llguidance", "prometheus-client"),
    *("jinja2", "tqdm", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"),
)
TOOLS = ("nvidia-smi", "compute-sanitizer", "cuobjdump", "ncu", "nsys", "nvcc", "gcc")
GPU_TESTS = (
    *("tests/kernels/test_kernels_model.py", "tests/kernels/test_kernels_invariant.py"),
    *("tests/unit/test_ranks.py", "tests/unit/test_engine_host_swap.py"),
)
SIZE_TESTS = ("tests/kernels/test_kernels_sampler.py", "tests/kernels/test_kernels_large_cache.py")
"""Tests that run anywhere. The second file has the size of real caches only on a GPU."""
_SAY_S = 20.0
_MOST_CHARS = 6000


def inventory() -> Iterator[dict[str, Any]]:
    """Packages, tools, the topology, and the sizes of the GPU's memories."""
    found = versions(PACKAGES)
    absent = [name for name in found if not found[name]]
    text = f"python {platform.python_version()}, absent: {', '.join(absent) or 'nothing'}"
    yield {"kind": "packages", "versions": found, "text": text}
    tools = {name: tool(name) for name in TOOLS}
    yield {"kind": "tools", "paths": tools, "text": "tools: " + ", ".join(name for name in tools if tools[name])}
    for options in (["-L"], ["topo", "-m"]):
        output = said(["nvidia-smi", *options])
        yield {"kind": f"nvidia-smi {' '.join(options)}", "output": output, "text": output}
    sizes = memory_mib(said(["nvidia-smi", "-q", "-d", "MEMORY"]))
    yield {"kind": "memory", "mib": sizes, "text": f"memory, MiB: {sizes}"}


def tool(name: str) -> str:
    """The path of a program; empty if it is not installed."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/usr/local/nvidia/bin") or ""


def said(command: Sequence[str]) -> str:
    """The output of a program, or the error of starting it."""
    try:
        done = subprocess.run(
            [tool(command[0]) or command[0], *command[1:]], capture_output=True, text=True, timeout=_SAY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()[:_MOST_CHARS]


def memory_mib(query: str) -> dict[str, int]:
    """Total MiB of each kind of memory ("FB", "BAR1", ...) in the output of `nvidia-smi -q -d MEMORY`."""
    found = re.findall(r"^ *(\S.*?) Memory Usage\s*\n\s*Total\s*: (\d+) MiB", query, re.MULTILINE)
    return {name: int(size) for name, size in found}


def sanitizer() -> Iterator[dict[str, Any]]:
    """Run attention at two tiny shapes under compute-sanitizer's memcheck. Raises `AssertionError` if that reports an
    error."""
    program = tool("compute-sanitizer")
    if not program:
        yield {"kind": "sanitizer", "tool": "", "text": "there is no compute-sanitizer"}
        return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = [sys.executable, "-m", "benchmarks.gpu.child", "benchmarks.gpu.checks:tiny", "{}"]
        done = subprocess.run(
            [program, "--tool", "memcheck", "--error-exitcode", "9", "--log-file", str(log), *child],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
        report = log.read_text(errors="replace")[-_MOST_CHARS:] if log.exists() else ""
    summary = (re.findall(r"ERROR SUMMARY:.*", report) or ["no summary"])[-1]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    yield {"kind": "sanitizer", "tool": program, "report": report, "rows": rows, "text": f"memcheck: {summary}"}
    assert done.returncode == 0, report


def models() -> Iterator[dict[str, Any]]:
    """Run the tests that need a GPU: whole models, whose greedy tokens in float32 are compared with those of a CPU,
    groups of ranks, and swapped blocks. Raises `AssertionError` if one fails or is skipped."""
    return _tested("model", "-m", "gpu", *GPU_TESTS)


def sizes() -> Iterator[dict[str, Any]]:
    """Run the tests of what depends on size: tokens that are drawn from a vocabulary of 128,256, and a model in the
    last blocks of a cache of more than 2^31 elements. Raises `AssertionError` if one fails or is skipped."""
    return _tested("size", *SIZE_TESTS)


def _tested(kind: str, *options: str) -> Iterator[dict[str, Any]]:
    """A row for each test that pytest runs with these options."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run([*command, *options], cwd=ROOT, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    for case in cases:
        told = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = told[0] if told else "passed"
        name = str(case.get("name"))
        yield {"kind": kind, "test": name, "outcome": outcome, "s": case.get("time"), "text": f"{name}: {outcome}"}
        assert outcome != "skipped", f"{name} needs a GPU"
    assert done.returncode == 0, f"pytest ended with {done.returncode}"
