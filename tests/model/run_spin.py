"""Verifies the Promela models with SPIN, and shows that each breakage is caught. For `make model`.

The right models must have every property; each model with one rule left out must lose at least one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
HINT = "SPIN is not installed: the Promela models were not verified. To install it: apt-get install spin gcc"
BREAKAGES = {
    "handoff.pml": {
        "EARLY_REUSE": ("verified", "blocks are reused before the epoch ends"),
        "NO_SETTLE": ("verified", "what was read is admitted without a settle"),
        "NO_LIMBO": ("one_owner", "blocks are freed during a step that names them"),
        "NO_FENCE": ("terminates", "workers let old attempts in"),
        "NOT_IDEMPOTENT": ("no_waste", "a settle is answered `valid` only once"),
        "NO_QUARANTINE": ("one_owner", "blocks are released under an unfinished read"),
    },
    "migration.pml": {
        "NO_DRAIN": ("verified", "the sequence is cut while a step is in flight"),
        "NO_CUT": ("one_generates", "the old worker goes on after the cut"),
        "NO_SETTLE": ("verified", "what was read is admitted without a settle"),
        "EARLY_REUSE": ("verified", "blocks are reused before the epoch ends"),
    },
}
"""Model → what can be left out of it, the property that it then loses, and what it means."""
_SECONDS = 300


def main() -> int:
    """Verify everything; 1 if something is not as it must be."""
    if shutil.which("spin") is None or shutil.which("gcc") is None:
        print(HINT)
        return 0
    fine = True
    for model, breakages in BREAKAGES.items():
        fine &= right(model)
        for flag, (name, meaning) in breakages.items():
            fine &= broken(model, flag, name, meaning)
    print("every property holds, and every breakage is caught" if fine else "NOT as it must be, see above")
    return 0 if fine else 1


def properties(model: str) -> list[str]:
    """The names of a model's properties."""
    return re.findall(r"^ltl (\w+)", (HERE / model).read_text(), re.MULTILINE)


def right(model: str) -> bool:
    """Whether the model as it is has every property."""
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        build(folder, model, [])
        for name in properties(model):
            errors, told = verify(folder, name)
            print(f"{model}: {name}: {'holds' if not errors else 'VIOLATED'} ({told})", flush=True)
            fine &= not errors
    return fine


def broken(model: str, flag: str, name: str, meaning: str) -> bool:
    """Whether the model with one rule less loses this property."""
    with tempfile.TemporaryDirectory() as folder:
        build(folder, model, [f"-D{flag}"], optimise="-O0")
        errors, told = verify(folder, name)
    print(f"{model} with {flag} ({meaning}): {'caught by' if errors else 'NOT caught by'} {name} ({told})", flush=True)
    return errors > 0


def build(folder: str, model: str, flags: list[str], optimise: str = "-O2") -> None:
    """Make the verifier; what finds an error soon is not worth optimising."""
    _run(["spin", *flags, "-a", str(HERE / model)], folder)
    _run(["gcc", optimise, "-DNOFAIR", "-DCOLLAPSE", "-DMEMLIM=4000", "-o", "pan", "pan.c"], folder)


def verify(folder: str, name: str) -> tuple[int, str]:
    """Check one property: errors, and what it took."""
    began = time.monotonic()
    told = _run(["./pan", "-a", "-N", name, "-m1000000"], folder)
    errors = re.search(r"errors: (\d+)", told)
    states = re.search(r"(\d+) states, stored", told)
    complete = "Search not completed" not in told or (errors is not None and errors[1] != "0")
    if errors is None or states is None or not complete or "max search depth too small" in told:
        raise RuntimeError(f"SPIN could not finish:\n{told}")
    return int(errors[1]), f"{states[1]} states, {time.monotonic() - began:.1f} s"


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
