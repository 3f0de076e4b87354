"""Variables that benchmarks and documents name are settings: a stale one ends a process at its start."""

from __future__ import annotations

import re
from pathlib import Path

from common.runtime.config import ENV_PREFIX, DecodeSettings, GatewaySettings, PrefillSettings, ServeSettings

ROOT = Path(__file__).parents[2]
OTHERS = ("BATON_BENCH_", "BATON_KV_SIZE_", "BATON_PEER_")
"""Of tools that are no role; and of the peers that are measured."""


def test_every_variable_is_a_setting() -> None:
    roles = (GatewaySettings, PrefillSettings, DecodeSettings, ServeSettings)
    known = {ENV_PREFIX + name.upper() for role in roles for name in role.model_fields}
    patterns = ("README.md", "SECURITY.md", "benchmarks/**/*.py", "docs/**/*.md", "k8s/**/*.yaml")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    named = {
        (path.name, found)
        for path in files
        for found in re.findall(r"\bBATON_[A-Z][A-Z_]*[A-Z]\b", path.read_text())
        if not found.startswith(OTHERS) and not found.endswith("_SERVICE_HOST")  # which Kubernetes sets
    }
    assert len(named) > 5
    assert sorted((file, name) for file, name in named if name not in known | {"BATON_SOME_NAME"}) == []
