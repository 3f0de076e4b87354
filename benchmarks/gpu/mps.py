"""NVIDIA's Multi-Process Service (MPS) for the processes of one measurement.

Without it the kernels of two processes on one GPU take turns in time slices. A daemon of the same user can be started
without changing the GPU's compute mode or any other of its settings; it listens in a folder of its own, so that other
processes keep away from it (docs.nvidia.com/deploy/mps).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_S = 20.0
"""Seconds in which the daemon must start, or end."""


class MpsError(Exception):
    """MPS cannot be used here."""


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """Run a daemon; yields the variables by which processes find it. Raises `MpsError` if it cannot be started."""
    program = shutil.which(CONTROL)
    if program is None:
        raise MpsError(f"there is no {CONTROL}: the two workers share the GPU by time slices")
    pipes, logs = folder / "mps", folder / "mps-log"
    for each in (pipes, logs):
        each.mkdir(parents=True, exist_ok=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    done = _call([program, "-d"], env)
    if done.returncode:
        raise MpsError(f"{CONTROL} -d ended with {done.returncode}: {done.stdout.strip()[-500:]}")
    try:
        yield env
    finally:
        _call([program], env, "quit\n")


def _call(command: list[str], env: dict[str, str], told: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=os.environ | env,
            input=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MpsError(f"{CONTROL} has not answered in {START_S:g} s") from error
