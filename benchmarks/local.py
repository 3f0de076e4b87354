"""A local stack for the measurements: `baton serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Local:
    """A running stack."""

    url: str
    pids: dict[str, int]
    """Process ids by role, the supervisor's included."""


@contextmanager
def local_stack(options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Iterator[Local]:
    """Start `baton serve` on a free port with `options` and `BATON_*` variables; end it afterwards."""
    command = [sys.executable, "-m", "common.runtime.cli", "serve", "--port", "0", "--log-level", "warning", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | dict(env or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        found = re.search(r"http://[0-9.]+:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit("the stack did not start")
        pids = {"supervisor": process.pid}
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            pids[words[words.index(b"-m") + 1].decode() + f" {pid}"] = int(pid)
        try:
            yield Local(found.group(), pids)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
