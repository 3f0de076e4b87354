"""MPS for one measurement: found, started, told to processes, ended; and what is said where it cannot be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.gpu.mps import CONTROL, MpsError, mps


def control(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a control program into the path that writes down what it is called with; the file that it writes."""
    (folder / "bin").mkdir()
    program, calls = folder / "bin" / CONTROL, folder / "calls"
    program.write_text(f'#!/bin/sh\nread told\necho "$@:$told:$CUDA_MPS_PIPE_DIRECTORY" >> {calls}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return calls


def test_a_daemon_runs_for_as_long_as_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = control(tmp_path, "exit 0", monkeypatch)
    with mps(tmp_path) as env:
        assert env == {
            "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "mps"),
            "CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "mps-log"),
        }
        assert all(Path(folder).is_dir() for folder in env.values())
        assert calls.read_text() == f"-d::{tmp_path / 'mps'}\n"
    assert calls.read_text().splitlines()[1:] == [f":quit:{tmp_path / 'mps'}"]


def test_it_is_ended_after_a_failure_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = control(tmp_path, "exit 0", monkeypatch)
    with pytest.raises(ZeroDivisionError), mps(tmp_path):
        raise ZeroDivisionError
    assert calls.read_text().splitlines()[1:] == [f":quit:{tmp_path / 'mps'}"]


def test_without_the_program_it_is_said_that_the_gpu_is_time_sliced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsError, match=r"there is no nvidia-cuda-mps-control: .* time slices"), mps(tmp_path):
        pass


def test_a_daemon_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = control(tmp_path, 'echo "An instance of this daemon is already running" >&2; exit 1', monkeypatch)
    with pytest.raises(MpsError, match="ended with 1: An instance of this daemon is already running"), mps(tmp_path):
        pass
    assert len(calls.read_text().splitlines()) == 1, "nobody else's daemon is ended"
