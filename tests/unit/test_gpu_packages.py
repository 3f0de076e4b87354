"""The archive of what a machine with a GPU lacks has the versions that the project says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from benchmarks.record import ROOT

pytestmark = pytest.mark.processes

PYTHON = """#!{python}
# Stands in for python3: notes what pip is to install, and makes the files that the script then looks for.
import os, sys
from pathlib import Path

words = sys.argv[1:]
if words[:3] != ["-m", "pip", "install"]:
    os.execv({python!r}, [{python!r}, *words])
with open(os.environ["INSTALLED"], "a") as file:
    print(*words[words.index("--target") + 2 :], file=file)
site = Path(words[words.index("--target") + 1])
for name in (
    "pydantic-9.dist-info/METADATA", ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
    ".nixl_cu13.mesonpy.libs/plugins/libplugin_GDS.so", "nixl_cu13.libs/ucx/libuct_cuda.so.0",
    "nixl_cu13.libs/ucx/libuct_ib.so.0",
):
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text("Requires-Dist: pydantic-core==9.1\\n")
"""


def test_the_archive_has_the_versions_of_the_project(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    archive, installed = tmp_path / "a.tar.xz", tmp_path / "installed"
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "INSTALLED": str(installed)}
    script = ROOT / "benchmarks" / "gpu" / "packages.sh"
    done = subprocess.run(["bash", str(script), str(archive)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (set(line.split()) for line in installed.read_text().splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["worker"] + extras["dev"]
    carried = re.compile(r"pydantic|llguidance|pyzmq|msgpack|nixl|pytest-asyncio")
    assert {each for each in wanted if carried.match(each)} <= first
    assert any(each.startswith("nixl-cu13>=") for each in first)
    assert second == {"pydantic-core==9.1"}
    with tarfile.open(archive) as packed:
        names = {Path(each).name for each in packed.getnames()}
    assert {"libplugin_UCX.so", "libuct_cuda.so.0"} <= names
    assert not {"libplugin_GDS.so", "libuct_ib.so.0"} & names
