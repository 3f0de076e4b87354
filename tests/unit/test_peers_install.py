"""What goes into vLLM's environment, and what pip must not bring."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from benchmarks.peers.install_vllm import VLLM, foreign, requirements, write_metadata


def test_media_and_extras_are_left_out_and_torch_is_pinned() -> None:
    declared = ["regex", 'torch==2.13.0+cpu; platform_machine == "x86_64"', "torchvision", 'pandas; extra == "bench"']
    kept = requirements(declared)
    assert kept[0] == "regex"
    assert not any(word.startswith(("torchvision", "pandas;")) for word in kept)
    assert [word for word in kept if word.startswith("torch")] == ["torch==2.13.0+cpu"]


def test_packages_for_a_gpu_are_seen() -> None:
    names = ("torch", "nvidia-cublas", "cuda-toolkit", "torchvision", "regex")
    report: dict[str, object] = {"install": [{"metadata": {"name": name}} for name in names]}
    assert foreign(report) == ["nvidia-cublas", "cuda-toolkit", "torchvision"]


def test_the_metadata_is_a_package_to_python(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    write_metadata(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == f"{VLLM}+cpu"
