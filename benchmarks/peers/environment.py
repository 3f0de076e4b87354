"""Virtual environments of peers, with pinned versions."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import venv
from collections.abc import Collection, Mapping
from pathlib import Path


def python_of(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"


def site_of(environment: Path) -> Path:
    """The folder of a virtual environment's packages."""
    return next(environment.glob("lib/python*/site-packages"))


def make(environment: Path) -> None:
    """Make a virtual environment with pip, unless it is there."""
    if not python_of(environment).exists():
        print(f"making {environment}", flush=True)
        venv.create(environment, with_pip=True)


def normalized(name: str) -> str:
    """The form of a package's name in which equal names are equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(environment: Path, names: Collection[str]) -> dict[str, str]:
    """Versions of the packages with these names in `environment`; absent packages are left out."""
    if not python_of(environment).exists():
        return {}
    found = importlib.metadata.distributions(path=[str(site_of(environment))])
    versions = {normalized(str(distribution.metadata["Name"])): distribution.version for distribution in found}
    return {name: versions[name] for name in names if name in versions}


def pip(environment: Path, *arguments: str, capture: bool = False, variables: Mapping[str, str] | None = None) -> str:
    """Run pip, with additional environment variables; return its output if it is captured."""
    command = [str(python_of(environment)), "-m", "pip", "--disable-pip-version-check", *arguments]
    env = os.environ | dict(variables or {})
    done = subprocess.run(command, check=True, text=True, env=env, stdout=subprocess.PIPE if capture else None)
    return done.stdout or ""
