"""A process of Baton, or of a measurement, that announces its addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Self

from common.runtime.lifecycle import restart_with
from common.runtime.malloc import with_large_pages


class Process:
    """Runs a Python module; it can be started again at the same control address after it was killed."""

    def __init__(
        self, module: str, options: Sequence[str], *, core: int | None = None, log: Path | None = None
    ) -> None:
        """`core`: the only core that it may use. `log`: the file for its standard error."""
        self.address = self.http = ""
        """Its control channel as HOST:PORT, and the address of its HTTP server, once it is ready."""
        self._command = [sys.executable, "-m", module, *options]
        self._core = core
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and wait until it is ready."""
        reader, writer = os.pipe()
        port = ["--control-port", self.address.rpartition(":")[2]] if self.address else []
        core, environment = self._core, with_large_pages(os.environ | {"OMP_NUM_THREADS": "1"})
        with nullcontext() if self._log is None else self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*self._command, *port, "--announce-fd", str(writer)],
                pass_fds=(writer,),
                env=environment,
                stderr=errors,
                preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
            )
        os.close(writer)
        with os.fdopen(reader) as lines:
            for line in lines:
                said = json.loads(line)
                self.address = said.get("control", self.address)
                self.http = said.get("http", said.get("url", self.http))
                if said.get("ready"):
                    return
        self.close()
        raise SystemExit(f"{' '.join(self._command)} has not started\n{self.log_tail()}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def log_tail(self) -> str:
        """The end of its log; empty if it has none."""
        return "" if self._log is None else self._log.read_text()[-2000:]

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Kill it, if it was started, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def restart_as_a_worker() -> None:
    """Start this program again unless its idle OpenMP threads sleep (they would spin on cores of other threads) and
    `malloc` gives large pages, as for a worker."""
    restart_with(with_large_pages({"OMP_WAIT_POLICY": "passive"} | os.environ))
