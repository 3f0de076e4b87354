"""The process of a measurement: calls a function, and writes each row that it yields as a line of JSON.

    python -m benchmarks.gpu.child MODULE:FUNCTION '{"argument": 1}'

Only rows go to standard output. Whatever else this process or a library prints goes to standard error, and processes
started from here do not inherit the pipe. At SIGUSR1 the process prints the stack of each of its threads.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def main(function: str, arguments: str) -> None:
    """Entry point."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = function.partition(":")
    for row in getattr(importlib.import_module(module), name)(**json.loads(arguments)):
        rows.write(json.dumps(plain(row), allow_nan=False) + "\n")
        rows.flush()


def attempts(made: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """The row that each (name, function) makes; if that fails, a row with the error. Raises `RuntimeError` at the end
    if one failed."""
    failed = []
    for name, make in made:
        try:
            row = make()
        except Exception as error:  # noqa: BLE001 (Triton's errors are no RuntimeError)
            failed.append(name)
            row = {"kind": "failed", "name": name, "error": str(error)[:1000], "text": f"{name}: {str(error)[:200]}"}
        yield row
    if failed:
        raise RuntimeError(f"{len(failed)} failed: {', '.join(failed)}")


def plain(value: Any) -> Any:
    """The value with strings in place of the floats that JSON lacks (NaN and infinities)."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
