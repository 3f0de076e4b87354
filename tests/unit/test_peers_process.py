"""Peers that are stopped while others have their turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from stack import wait_until

from benchmarks.peers.process import groups, paused, running

ASLEEP = ["sleep", "600"]


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_peer_is_stopped_for_a_while(tmp_path: Path) -> None:
    before = groups()
    with running(ASLEEP, os.environ, tmp_path / "log") as peer, running(ASLEEP, os.environ, tmp_path / "log") as other:
        assert groups() - before == {peer.pid, other.pid}
        with paused([peer.pid]):
            wait_until(lambda: is_stopped(peer.pid), "it goes on")
            assert not is_stopped(other.pid)
        wait_until(lambda: not is_stopped(peer.pid), "it stays stopped")
    assert groups() == before
    assert peer.returncode == -signal.SIGTERM


def test_a_peer_goes_on_when_the_measurement_is_killed(tmp_path: Path) -> None:
    with running(ASLEEP, os.environ, tmp_path / "log") as peer:
        code = f"from benchmarks.peers.process import paused\nwith paused([{peer.pid}]): print(flush=True) or input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as measurement:  # type: ignore[call-overload]
            assert measurement.stdout is not None
            measurement.stdout.readline()
            wait_until(lambda: is_stopped(peer.pid), "it goes on")
            measurement.kill()
        wait_until(lambda: not is_stopped(peer.pid), "it stays stopped")
