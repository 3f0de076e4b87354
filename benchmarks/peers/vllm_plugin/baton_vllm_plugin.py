"""Two things about vLLM on few cores that it has no setting for; it loads this in each of its processes.

The folder of this file is put on `PYTHONPATH`, with the metadata by which vLLM finds plugins. What is done is said by
environment variables, so that each can be measured with and without:

`BATON_PEER_NIXL_DELAY_US`: NIXL's Python interface sets the delay of its progress thread to 0: it polls without pause
and takes a core away from the engine.
`BATON_PEER_NIXL_CORE`: NIXL's connector moves the worker's main thread, which on a CPU computes, to the machine's last
core, whatever cores the worker was given: a prefill and a decode instance end on the same one.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def tune() -> None:
    """Apply what the environment asks for."""
    if delay_us := os.environ.get("BATON_PEER_NIXL_DELAY_US"):
        pause_progress(int(delay_us))
    if core := os.environ.get("BATON_PEER_NIXL_CORE"):
        stay_on(int(core))


def pause_progress(delay_us: int) -> None:
    """NIXL agents made from now on poll every `delay_us` microseconds."""
    binding = importlib.import_module("nixl._api").nixlBind

    standard: Any = binding.nixlAgentConfig

    class Patient(standard):  # type: ignore[misc]
        """The agent's configuration, whose delay is not to be set to anything else."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    binding.nixlAgentConfig = Patient


def stay_on(core: int) -> None:
    """The core that NIXL's connector reserves for loading KV is the worker's own."""
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    platform.discover_numa_topology = classmethod(lambda cls: [[core]])
