"""What `make` does on machines that are not as its author's: another Python, or settings in variables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import require

pytestmark = pytest.mark.processes

MAKEFILE = Path(__file__).parents[2] / "Makefile"
PIPLESS = 'case "$*" in *pip*) exit 1;; esac\n'
OLDER = 'case "$*" in *version_info*) exit 1;; esac\n'
OWN = {"MODEL", "PREFILL", "DECODE", "LATENCY", "PREFILL_TP", "DECODE_TP", "PORT", "PYTHON"}
"""Variables of the Makefile that somebody's environment may have."""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def make(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {
        name: value for name, value in os.environ.items() if name not in OWN and not name.startswith(("BATON_", "MAKE"))
    }
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=folder,
        env=given | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with a Python that notes how it was called, instead of making an environment."""
    require("make")
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / "pyproject.toml").touch()
    script(tmp_path / "python", 'echo "$*" >> calls; mkdir -p .venv/bin; cp good .venv/bin/python\n')
    script(tmp_path / "good", "exit 0\n")
    return tmp_path


@pytest.mark.parametrize("left", [None, PIPLESS, OLDER], ids=["nothing", "no pip", "older"])
def test_an_environment_that_cannot_be_used_is_made_anew(folder: Path, left: str | None) -> None:
    """A failed attempt leaves one: without Debian's python3-venv it has no pip, and it may be of an older Python."""
    if left is not None:
        script(folder / ".venv/bin/python", left)
    assert make(folder, "PYTHON=./python", ".venv/.installed").returncode == 0
    assert (folder / "calls").read_text() == "-m venv --clear .venv\n"
    assert (folder / ".venv/.installed").exists()


def test_an_environment_that_can_be_used_is_kept(folder: Path) -> None:
    script(folder / ".venv/bin/python", "exit 0\n")
    assert make(folder, "PYTHON=./python", ".venv/.installed").returncode == 0
    assert not (folder / "calls").exists()


def test_what_the_stack_serves_may_be_set_in_variables(folder: Path) -> None:
    script(folder / ".venv/bin/python", "exit 0\n")
    (folder / ".venv/.installed").touch()
    variables = {"BATON_MODEL": "/models/x", "BATON_PREFILL": "2", "BATON_PORT": "9000"}
    told = make(folder, "--dry-run", "serve", **variables).stdout
    assert '--model "/models/x" --prefill 2 --decode 1' in told
    assert "--port 9000" in told
    for model in ("/models/y", "/my models (all)/y"):
        assert f'--model "{model}" ' in make(folder, "--dry-run", "serve", MODEL=model, **variables).stdout
    assert '--model "demo" --prefill 1' in make(folder, "--dry-run", "serve").stdout


def test_no_document_has_a_copy_installed_where_make_has_installed_the_checkout() -> None:
    """`.venv/bin/baton` would run the copy from then on, whatever is edited."""
    root = MAKEFILE.parent
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").glob("*.py")]
    lines = [line for path in documents for line in path.read_text().splitlines() if ".venv/bin/pip install" in line]
    assert not [line for line in lines if "install -e" not in line]


def test_the_searches_of_the_model_find_what_they_import() -> None:
    """They are a script, beside tests that find each other by pytest's settings. Settings of other servers may be in
    the environment."""
    require("make")
    (line,) = make(MAKEFILE.parent, "--dry-run", "model").stdout.splitlines()[-1:]
    named = f"{line} 'a refusal, and a lost message'"
    command = named.replace(".venv/bin/python", sys.executable)
    ran = subprocess.run(
        command,
        shell=True,
        cwd=MAKEFILE.parent,
        env=os.environ | {"BATON_MAX_NUM_SEQS": "many"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "every promise kept" in ran.stdout
