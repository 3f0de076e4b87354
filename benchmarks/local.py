"""A local stack for the measurements: `baton serve` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen


@dataclass(frozen=True)
class Local:
    """A running stack."""

    url: str
    pids: dict[str, int]
    """Process ids by role, including the supervisor's."""
    probes: tuple[str, ...]
    """Where each worker tells its metrics, as `host:port`."""


def counts(probe: str) -> dict[str, float]:
    """The counters and gauges of the worker that tells them at `probe`, summed over labels."""
    with urlopen(f"http://{probe}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


@contextmanager
def local_stack(options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Iterator[Local]:
    """Start `baton serve` on a free port with `options` and `BATON_*` variables; end it afterwards.

    Fails if a process of the stack died meanwhile, so that no such stack is measured.
    """
    command = [sys.executable, "-m", "common.runtime.cli", "serve", "--port", "0", "--restart", "never"]
    command += ["--log-level", "warning", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | dict(env or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            # Skip lines that libraries print first: UCX writes warnings to standard output.
            found = next(filter(None, (re.search(r"http://[0-9.]+:\d+", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit("the stack did not start")
            pids, probes = {"supervisor": process.pid}, []
            for pid in children(process.pid):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                pids[words[words.index(b"-m") + 1].decode() + f" {pid}"] = pid
                if b"--http-port" in words:
                    probes.append(f"127.0.0.1:{words[words.index(b'--http-port') + 1].decode()}")
            yield Local(found.group(), pids, tuple(probes))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def children(pid: int) -> list[int]:
    """The child processes of `pid`, by scanning `/proc`: not every kernel lists them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            _, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid:
                found.append(int(stat.parent.name))
    return found
