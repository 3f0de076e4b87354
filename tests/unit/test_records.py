"""Every recorded run can be repeated: its commit exists, was clean, and is that of the product that it measured."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from needs import require

from benchmarks import record as records
from benchmarks.record import RESULTS, ROOT, is_clean, machine, product_digest, record

NAMES = sorted(path.stem for path in RESULTS.glob("*.json"))
DRAWN_BY_NOBODY = {"idle", "gpu-compile", "worker-memory", "widths-steps", "widths-pulls"}
DRAWN_BY_NOBODY |= {name for name in NAMES if name.startswith("floors-")}
"""Records of runs without randomness."""
BESIDE_OTHERS = {
    name: "vllm" for name in NAMES if name.startswith(("versus-", "goodput-", "vllm-settings-", "bench-agreement"))
}
BESIDE_OTHERS |= {name: "llama_cpp" for name in NAMES if name.startswith("llama-")}


def recorded(name: str) -> dict[str, Any]:
    run: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return run


@pytest.fixture
def history() -> None:
    require("history")


@pytest.mark.parametrize("name", NAMES)
def test_the_commit_is_in_the_history_and_has_the_product_that_was_measured(name: str, history: None) -> None:
    run = recorded(name)
    known = subprocess.run(["git", "merge-base", "--is-ancestor", run["commit"], "HEAD"], cwd=ROOT, check=False)
    assert known.returncode == 0, f"{run['commit']} is no ancestor of this commit"
    assert run["product"] == product_digest(run["commit"])


@pytest.mark.parametrize("name", NAMES)
def test_a_record_says_what_repeats_it(name: str) -> None:
    run = recorded(name)
    assert datetime.fromisoformat(run["recorded_at"]).tzinfo is not None
    assert run["command"]
    assert run["workload"]
    assert run["figures"]
    assert (run["seed"] is None) == (name in DRAWN_BY_NOBODY)
    described = run["machine"]
    assert set(described) - {"limited_to"} == set(machine())
    assert "absent" not in described.values()
    assert described["cpu_flags"], "which kernels were chosen?"


@pytest.mark.parametrize(("name", "peer"), BESIDE_OTHERS.items())
def test_who_took_part_is_told_with_version_and_settings(name: str, peer: str) -> None:
    told = recorded(name)["peers"][peer]
    assert told["version"][0].isdigit()
    assert told["settings"]


def test_there_are_records() -> None:
    assert NAMES


def test_every_measurement_is_in_the_lists_of_contributing() -> None:
    """Among the commands, and in the table of what each measures."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    programs = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    measurements = [name for name, code in programs.items() if re.search(r"\brun\(measure\w*, __doc__\)", code)]
    assert {"versus", "routing_cost"} <= set(measurements)
    commands = [name for name in measurements if not re.search(rf"-m benchmarks\.{name}\b", text)]
    rows = [name for name in measurements if f"\n| `{name}` |" not in text]
    assert (commands, rows) == ([], [])


# --- how they are made -----------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own with one commit."""
    require("history")
    for name in records.PRODUCT:
        path = tmp_path / name
        path = path if path.suffix else path / "code.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "RESULTS", tmp_path / "benchmarks" / "results")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=tree, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(tree: Path) -> str:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--allow-empty", "-m", "change")
    return git(tree, "rev-parse", "HEAD")


def test_the_digest_changes_with_the_product_and_with_nothing_else(tree: Path) -> None:
    first, before = product_digest(), git(tree, "rev-parse", "HEAD")
    (tree / "docs" / "page.md").write_text("what it does\n")
    commit(tree)
    assert product_digest() == first
    for name in records.PRODUCT:
        path = tree / name
        path = path if path.suffix else path / "code.py"
        old = path.read_text()
        path.write_text("# other\n")
        commit(tree)
        assert product_digest() != first, name
        path.write_text(old)
        commit(tree)
        assert product_digest() == first
    (tree / "gateway" / "code.py").rename(tree / "gateway" / "renamed.py")
    commit(tree)
    assert product_digest() != first
    assert product_digest(before) == first


def test_what_is_recorded_and_shown_may_change(tree: Path) -> None:
    assert is_clean()
    (tree / "README.md").write_text("figures\n")
    (tree / "docs" / "results.md").write_text("figures\n")
    (tree / "benchmarks" / "results" / "old.json").write_text("{}\n")
    assert is_clean()
    path = record("speed", workload={"requests": 1}, figures={"ms": 1.0}, seed=None, peers={"vllm": {"version": "1"}})
    assert path == tree / "benchmarks" / "results" / "speed.json"
    run = json.loads(path.read_text())
    assert (run["commit"], run["product"]) == (git(tree, "rev-parse", "HEAD"), product_digest())
    assert run["peers"] == {"vllm": {"version": "1"}}
    assert is_clean()


@pytest.mark.parametrize("name", ["gateway/code.py", "gateway/new.py", "benchmarks/new.py"])
def test_from_a_tree_with_changes_nothing_is_recorded(
    tree: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / name).write_text("# changed\n")
    assert not is_clean()
    path = record("speed", workload={}, figures={}, seed=0)
    path.unlink()
    assert list((tree / "benchmarks" / "results").iterdir()) == []
    assert "not recorded, for there are changes" in capsys.readouterr().err


def test_of_a_tree_that_changes_while_it_is_measured_nothing_is_recorded(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures would stand beside a commit that was not measured, or was so in part."""
    began = records.clean_tree()
    path = record("speed", workload={}, figures={}, seed=0, measured=began)
    assert path.parent == tree / "benchmarks" / "results"
    (tree / "gateway" / "code.py").write_text("# changed\n")
    dirty = records.clean_tree()
    commit(tree)
    for measured in (began, dirty):
        later = record("later", workload={}, figures={}, seed=0, measured=measured)
        later.unlink()
        assert later.parent != tree / "benchmarks" / "results"
        assert "since the run began" in capsys.readouterr().err
