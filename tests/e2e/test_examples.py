"""Every script of `examples/` runs with the demo model, as the README says, and does what it is there to show."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Stack

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """The local stack with the demo model."""
    with Stack() as running:
        assert running.ready.startswith("ready"), running.wait()
        yield running
        code, log = running.end(signal.SIGTERM)
    assert code == 0, log
    assert "Traceback" not in log, log


def run(name: str, *arguments: str) -> str:
    """Run an example to its end; what it printed."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_openai_client_streams_the_answer(stack: Stack) -> None:
    answer, usage = run("openai_client.py", "--url", stack.url).splitlines()
    assert answer.strip() == "4817"
    assert usage.endswith(" out")
    other = run("openai_client.py", "--url", stack.url, "The code of Ida is 3352. What is the code of Ida?")
    assert other.splitlines()[0].strip() == "3352"


def test_the_engine_answers_without_servers() -> None:
    assert run("offline_engine.py").strip() == "4817"


def test_the_load_test_measures_and_draws(stack: Stack, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    small = ("--requests", "4", "--warmup", "1", "--max-steps", "2", "--bisections", "0", "--rate", "20")
    printed = run("load_test.py", str(folder), "--url", stack.url, *small)
    body = json.loads((folder / "sweep.json").read_text())
    outcomes = [point["run"]["summary"]["outcomes"] for point in body["points"]]
    assert outcomes
    assert all(each == {"ok": 4} for each in outcomes)
    pictures = sorted(folder.glob("*.png"))
    assert pictures
    assert all(picture.read_bytes().startswith(b"\x89PNG") and str(picture) in printed for picture in pictures)


def test_the_load_test_ends_when_nobody_answers(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "load_test.py"), str(tmp_path), "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_load_test_without_a_folder_says_how_it_is_called() -> None:
    command = [sys.executable, str(EXAMPLES / "load_test.py"), "--rate", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "FOLDER [options" in done.stderr


def test_every_example_is_in_the_readme_and_tested_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    readme, tests = (ROOT / "README.md").read_text(), Path(__file__).read_text()
    assert names
    assert all(f"(examples/{name})" in readme and f'run("{name}"' in tests for name in names)
