"""What surrounds the start of a process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime.lifecycle import collector_paused, command_of

RESTARTS = """
import os, sys
print(os.getpid(), sys.argv[1], os.environ.get("IT"))
if "takes it away" in sys.argv:
    os.environ.pop("IT", None)
from common.runtime.lifecycle import restart_with
restart_with({**os.environ, "IT": "is set"})
print("goes on")
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs do not start again")
@pytest.mark.parametrize("option", ["keeps it", "takes it away"])
def test_a_program_starts_again_once_as_the_same_process(option: str) -> None:
    command = [sys.executable, "-c", RESTARTS, option]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True, timeout=60)
    first, second, last = done.stdout.splitlines()
    assert first.endswith(f" {option} None")
    assert second == first.replace("None", "is set")
    assert last == "goes on"


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs do not start again")
def test_a_program_without_an_output_starts_again() -> None:
    told = RESTARTS + 'sys.exit(7 if "IT" in os.environ else 3)'
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", told, "keeps it"]
    assert subprocess.run(command, env={}, timeout=60).returncode == 7


@pytest.mark.processes
def test_a_program_that_cannot_start_again_goes_on() -> None:
    lost = RESTARTS.replace("import os, sys", "import os, sys; sys.executable = sys.argv[2]")
    for nowhere in ("", "/nowhere/at/all"):
        command = [sys.executable, "-c", lost, "it", nowhere]
        done = subprocess.run(command, env={}, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.splitlines()[1:] == ["goes on"]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs do not start again")
def test_a_program_that_starts_again_has_its_options() -> None:
    told = RESTARTS.replace('print("goes on")', "print(sys.flags.safe_path)")
    command = [sys.executable, "-P", "-c", told, "keeps it"]
    done = subprocess.run(
        command, env={"PYTHONPATH": os.getcwd()}, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[1:] == [done.stdout.splitlines()[0].replace("None", "is set"), "True"]


IMPORTED = """
import os, runpy, sys
known = {*sys.modules, *sys.stdlib_module_names}
os.execve = lambda *_: sys.exit(" ".join(sorted({name.partition(".")[0] for name in sys.modules} - known)))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere programs do not start again")
@pytest.mark.parametrize(("module", "role"), [("prefill_worker", []), ("common.runtime.cli", ["decode"])])
def test_a_worker_that_starts_again_has_imported_no_library(module: str, role: list[str]) -> None:
    """It imports everything again."""
    command = [sys.executable, "-c", IMPORTED, module, *role, "--not-an-option"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.split() == ["common", "decode_worker" if role else "prefill_worker"]


def test_a_module_imports_from_the_current_folder_only_if_who_starts_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/somewhere"])
    assert command_of("gateway", "--help") == [sys.executable, "-P", "-m", "gateway", "--help"]
    for here in ("", os.getcwd()):  # as `-c` and `-m` have it
        monkeypatch.setattr(sys, "path", [here, "/somewhere"])
        assert command_of("gateway", "--help") == [sys.executable, "-m", "gateway", "--help"]


def test_a_module_is_started_although_the_current_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert command_of("gateway")[1:] == ["-P", "-m", "gateway"]


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("leave(3)", 3),
        ("exit_on_operator_error(operator_error)", 2),
    ],
)
def test_a_program_whose_errors_cannot_be_written_ends_as_it_would(ending: str, code: int) -> None:
    program = f"""
import logging
from common.contract.errors import OperatorError
from common.runtime.lifecycle import exit_on_operator_error, leave

def operator_error():
    raise OperatorError("of an operator")

logging.error("what is left to be written")
{ending}
"""
    buffered = {"PYTHONPATH": os.getcwd()}  # nothing is left to be written with PYTHONUNBUFFERED
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", program], env=buffered, stderr=full, timeout=60)
    assert done.returncode == code


def test_the_collector_rests_and_goes_on_whatever_happens() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 // 0
    assert gc.isenabled()


BROKEN = """
import sys, threading, time
from common.runtime.config import DecodeSettings
from common.runtime.worker_host import run_worker

async def make(settings, host, folder):
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise RuntimeError("a bug")

run_worker(DecodeSettings, "baton decode", make)
"""


@pytest.mark.processes
def test_a_worker_that_ends_by_a_bug_waits_for_no_thread() -> None:
    """A thread may be in a call that never returns."""
    command = [sys.executable, "-c", BROKEN, "--model", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "RuntimeError: a bug" in done.stderr
