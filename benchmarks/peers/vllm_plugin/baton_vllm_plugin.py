"""Corrects things of vLLM on few cores for which it has no setting; vLLM loads this plugin in each process.

The folder of this file is put on `PYTHONPATH`, with the metadata by which vLLM finds plugins. Environment variables
switch each correction on, so that vLLM can be measured with and without it:

`BATON_PEER_NIXL_DELAY_US`: NIXL's Python interface sets the delay of its progress thread to 0, so that the thread polls
without pause and takes a core away from the engine. The variable sets a delay.
`BATON_PEER_NIXL_CORE`: NIXL's connector moves the worker's main thread, which computes on a CPU, to the machine's last
core, whatever cores the worker was given, so that a prefill and a decode instance end on the same core. The variable
names the core to use instead.
`ONEDNN_MAX_CPU_ISA`, which limits the instructions of oneDNN: vLLM's own kernels then use no wider ones either.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

_HIDDEN = {
    "AVX2": ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx512_supported"),
    "AVX512_CORE_BF16": ("_is_amx_tile_supported",),
}
"""Values of `ONEDNN_MAX_CPU_ISA` → the functions of `torch.cpu` that tell vLLM of wider instructions."""


def tune() -> None:
    """Apply the corrections that the environment switches on."""
    if delay_us := os.environ.get("BATON_PEER_NIXL_DELAY_US"):
        pause_progress(int(delay_us))
    if core := os.environ.get("BATON_PEER_NIXL_CORE"):
        stay_on(int(core))


def pause_progress(delay_us: int) -> None:
    """Make NIXL agents that are created from now on poll every `delay_us` microseconds."""
    binding = importlib.import_module("nixl._api").nixlBind

    standard: Any = binding.nixlAgentConfig

    class Patient(standard):  # type: ignore[misc]
        """The agent's configuration; it keeps the delay when NIXL's Python interface sets it to 0."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    binding.nixlAgentConfig = Patient


def stay_on(core: int) -> None:
    """Make NIXL's connector reserve the worker's own core for loading KV."""
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    platform.discover_numa_topology = classmethod(lambda cls: [[core]])


def limit_instructions() -> None:
    """Hide from vLLM the instructions that are wider than `ONEDNN_MAX_CPU_ISA` allows; called before it chooses its
    kernels. It is no platform, and returns none. An exception would be ignored, so a failure ends the process."""
    hidden = _HIDDEN.get(os.environ.get("ONEDNN_MAX_CPU_ISA", ""), ())
    cpu = importlib.import_module("torch.cpu") if hidden else None
    for name in hidden:
        if not hasattr(cpu, name):
            raise SystemExit(f"torch.cpu.{name} is gone: the instructions of vLLM cannot be limited")
        setattr(cpu, name, lambda: False)
