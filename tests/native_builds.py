"""The kernels in C, compiled otherwise than for this CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.engine.native import Kernels, library

EMULATED_TILES = f'-DEMULATED_TILES="{Path(__file__).with_name("emulated_tiles.h")}"'
"""A flag: AMX, whose instructions are emulated."""


def folder_of_run(factory: pytest.TempPathFactory) -> Path:
    """A folder that is one for all processes of the run, so that each build is made once."""
    mine = factory.getbasetemp()
    return (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "kernels"


def build(folder: Path, *flags: str) -> Kernels:
    """Compile with these flags, too; `folder` takes the place of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(library, "_FLAGS", ("-O1", *library._FLAGS[1:], *flags))
        return Kernels(library.load())
