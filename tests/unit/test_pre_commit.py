"""The hooks for commits run what `make check` runs, with the tools of the project's environment."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
HOOKS_ONLY = {"--force-exclude"}
"""ruff leaves out what it is told to, also of the files that it is given by name."""
MAKE_ONLY = {"."}


def words(command: str, but: set[str]) -> tuple[str, ...]:
    return tuple(word for word in command.split() if word not in but)


def checks() -> list[tuple[str, ...]]:
    """The commands of the target `check`."""
    found = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return [words(line.replace("$(BIN)", ".venv/bin"), MAKE_ONLY) for line in found[1].splitlines()]


def test_hooks_and_make_check_run_the_same_commands() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert [words(hook["entry"], HOOKS_ONLY) for hook in hooks] == checks()
    for hook in hooks:
        assert hook["language"] == "system"
        takes_files = "ruff" in hook["entry"]
        assert hook.get("pass_filenames", True) == takes_files
