"""Python processes that see Baton and a chosen set of the distributions that are installed here, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]


def link_only(names: Iterable[str], folder: Path) -> None:
    """Make `folder` the site of these distributions. One that is not installed here is left out."""
    for name in names:
        try:
            files = distribution(name).files or []
        except PackageNotFoundError:  # of another platform or version than this one's: what misses it says so
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python to its end with the site `folder`."""
    environment = {"PATH": os.defpath, "PYTHONPATH": f"{folder}:{ROOT}", "HOME": str(folder)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    return subprocess.run(
        [sys.executable, "-S", *arguments],  # -S: no site-packages
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
