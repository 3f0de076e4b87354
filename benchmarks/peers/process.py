"""Processes of a peer: each starts in a process group of its own, is awaited until it answers, and ends as a group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 300.0
"""Most seconds until a peer must answer: it compiles its model when it starts."""
END_S = 20.0
"""Most seconds until a peer must have ended after it was asked to; then its group is killed."""


class PeerError(Exception):
    """A peer did not start."""


PORTS = range(20_000, 32_000)
"""Below those that Linux gives to connections: a peer listens a minute after its port was chosen."""


def free_port() -> int:
    """A port of the loopback interface, one of `PORTS`, that no process listens on. Raises `PeerError`."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise PeerError("no free port")


def answers(url: str) -> bool:
    """Whether a GET of `url` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def group_members(group: int) -> list[int]:
    """The running processes of a process group; zombies do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group_id = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group_id) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members


def _end_with_parent() -> None:
    """Ask for SIGTERM when the thread that started this process ends (`PR_SET_PDEATHSIG`)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


_groups: set[int] = set()


def groups() -> frozenset[int]:
    """The process groups that `running` has started, and that have not been ended."""
    return frozenset(_groups)


@contextmanager
def paused(stopped: Collection[int]) -> Iterator[None]:
    """Stop process groups. They go on afterwards, or when this process ends, however it does."""
    go_on = 'cat; for group in "$@"; do kill -CONT "-$group"; done'
    command = ["sh", "-c", go_on, "sh", *map(str, stopped)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # `cat` ends with its input
        for group in stopped:
            os.killpg(group, signal.SIGSTOP)
        yield


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` in a process group of its own, with its output in `log`; end the whole group afterwards.

    Enter it on a thread that outlives the context: the process ends with the thread that started it, so that a
    measurement that is killed leaves no process running.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    _groups.add(process.pid)
    try:
        yield process
    finally:
        _groups.discard(process.pid)
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the process group of `process` to end; kill its remaining processes after `END_S`."""
    group = process.pid
    for what, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        if not group_members(group):
            break
        os.killpg(group, what)
        deadline = time.monotonic() + patience_s
        while group_members(group) and time.monotonic() < deadline:
            process.poll()
            time.sleep(0.05)
    process.wait(END_S)


def wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path, patience_s: float = START_S) -> None:
    """Return once `url` gives 200. Raises `PeerError` with the end of the log if the process ends or takes too long."""
    deadline = time.monotonic() + patience_s
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise PeerError(f"{' '.join(map(str, process.args))}\ndoes not answer at {url}:\n{tail}")  # type: ignore[arg-type]
        time.sleep(0.2)
