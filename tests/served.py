"""A local stack for tests, from outside: its process, its children, its log."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from stack import leftovers_in

_numbers = itertools.count()


class Stack:
    """A running `baton serve`."""

    def __init__(
        self,
        *options: str,
        wait: bool = True,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """With variables of its own, and in a folder, from which the first process imports nothing."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "UCX_"))}
        self.mark = f"STACK={next(_numbers)}-of-{os.getpid()}"
        environment |= dict([self.mark.split("=")]) | dict(variables or {})
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.popen = subprocess.Popen(
            [sys.executable, *(["-P"] if folder else []), "-m", "common.runtime.cli", "serve", "--port", "0", *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.log: list[str] = []
        self._logger = threading.Thread(target=self._collect_log, daemon=True)
        self._logger.start()
        assert self.popen.stdout is not None
        self.ready = self.popen.stdout.readline() if wait else ""
        self.url = ""
        if found := re.search(r"http://[0-9.]+:\d+", self.ready):
            self.url = found.group()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever a test came to, nothing goes on running."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def pid_of(self, part: str) -> int | None:
        """The child whose command line has this part: a module, or `--control-port N`."""
        for pid in self.children():
            with contextlib.suppress(OSError):  # it has just ended
                if f" {part} " in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                    return pid
        return None

    def logged(self, pattern: str) -> list[str]:
        """The lines of its log with something like this."""
        return [line for line in self.log if re.search(pattern, line)]

    def leftovers(self) -> list[dict[str, int]]:
        """What the workers hold that they should not hold at rest."""
        probes = {match.group(1) for line in self.log if (match := re.search(r"probes on (\S+)", line))}
        assert len(probes) == len(self.children()) - 1
        left = []
        for probe in probes:
            with urllib.request.urlopen(f"http://{probe}/ready", timeout=10) as response:
                left.append(leftovers_in(json.load(response)))
        return [each for each in left if each]

    def hand_over(self) -> None:
        """Have a decode worker read the KV of a prompt from a prefill worker; the stack explains its routing."""
        body = json.dumps({"prompt": "o v e r " * 100, "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.headers["x-baton-route"] == "handoff"

    def wait(self) -> tuple[int, str]:
        """Its exit code and everything that it logged."""
        code = self.popen.wait(timeout=40)
        self._logger.join(5)
        return code, "\n".join(self.log)

    def end(self, number: int) -> tuple[int, str]:
        """Signal the stack and wait."""
        self.popen.send_signal(number)
        return self.wait()

    def _collect_log(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log.append(line.rstrip())
