"""Make a virtual environment of its own for llama.cpp on a CPU: `python -m benchmarks.peers.install_llama_cpp`.

`llama-cpp-python` is compiled from its source for this machine's instructions (`GGML_NATIVE`), which takes some four
minutes on two cores and needs a C++ compiler.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from benchmarks.command import call
from benchmarks.peers.environment import installed, make, pip, python_of
from benchmarks.record import ROOT

ENVIRONMENT = ROOT / ".venv-llama"

PINS = {"llama-cpp-python": "0.3.36", "gguf": "0.19.0", "numpy": "2.4.6"}
_CMAKE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
_CHECK = "import gguf, llama_cpp; print(llama_cpp.llama_print_system_info().decode())"


def main(*, environment: Annotated[Path, "the folder (default: %(default)s)"] = ENVIRONMENT) -> None:
    """Install if anything is missing; then print the instructions that llama.cpp was compiled for."""
    if installed(environment, PINS) == PINS:
        print(f"{environment} has the pinned versions", flush=True)
    else:
        make(environment)
        pip(
            environment,
            "install",
            "--quiet",
            *(f"{name}=={version}" for name, version in PINS.items()),
            variables=_CMAKE,
        )
    if subprocess.run([str(python_of(environment)), "-c", _CHECK]).returncode:
        sys.exit("llama.cpp does not run from this environment")
    print(f"ready: {environment}", flush=True)


if __name__ == "__main__":
    call(main, __doc__)
