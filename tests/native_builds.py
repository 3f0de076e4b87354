"""The kernels in C, compiled otherwise than for this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine import native
from common.engine.native import Kernels

EMULATED_TILES = f'-DEMULATED_TILES="{Path(__file__).with_name("emulated_tiles.h")}"'
"""A flag: AMX, whose instructions are emulated."""


def build(folder: Path, *flags: str) -> Kernels:
    """Compile with these flags, too; `folder` takes the place of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(native, "_FLAGS", ("-O1", *native._FLAGS[1:], *flags))
        return native._load()
