"""Processes that compute in turns for a comparison: each reads a case from a line, and answers with a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.runtime.malloc import with_large_pages

ENGINE = Path(__file__).parent / "engine_turns.py"


class TurnProcess:
    """A process that computes what it is asked."""

    def __init__(self, command: Sequence[str], root: Path, threads: int) -> None:
        environment = with_large_pages(os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(threads)})
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, case: Sequence[Any]) -> Any:
        """The answer to this case: of a timed one, seconds. The first turn of a case also prepares it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process that takes turns ended with {self._process.wait(timeout=30)}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def engine(root: Path, models: dict[str, str], block_size: int, threads: int) -> TurnProcess:
    """A process that computes with the engine of a checkout, by `engine_turns`; `models` are folders by name."""
    return TurnProcess([sys.executable, str(ENGINE), json.dumps(models), str(block_size)], root, threads)
