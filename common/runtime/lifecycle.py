"""The life of a process: start, one-line errors towards the operator, signals, and the end."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from common.contract.errors import OperatorError

EXIT_OPERATOR_ERROR = 2
_PR_SET_PDEATHSIG = 1
_SWITCH_INTERVAL_S = 0.0005


def exit_on_operator_error(main: Callable[[], None]) -> None:
    """Run `main`; what the operator must change is printed as one line, and the process exits 2."""
    try:
        main()
    except OperatorError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(EXIT_OPERATOR_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


def run(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `serve(stop)` on uvloop until it returns; SIGTERM and SIGINT set `stop`."""
    import uvloop

    # The engine's thread and the event loop take turns far more often than Python's default of 5 ms expects.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    uvloop.run(body())


def end_with_parent(parent: int | None) -> None:
    """Ask the kernel for SIGTERM when `parent` dies, so that a killed supervisor leaves no orphan; inert for None.

    Exits at once if it has died already.
    """
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(EXIT_OPERATOR_ERROR)


class Announcer:
    """Tells a supervisor, over an inherited pipe, how far this process has come: one JSON object a line."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self, **facts: object) -> None:
        """Write one line; a supervisor that has gone is no reason to fail."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(facts).encode() + b"\n")
        except OSError:
            self._fd = None


@contextmanager
def collector_paused() -> Iterator[None]:
    """The garbage collector rests while large libraries are imported.

    Next to nothing of what they make is garbage: to look through it again and again takes a worker 200 ms.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_startup_objects() -> None:
    """Take everything that start-up has made out of the garbage collector's sight, once a process is ready.

    A full collection over what the libraries leave behind takes a worker 100 ms, in the middle of a stream.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules complain of what is still there when they are unloaded


def leave() -> NoReturn:
    """End the process at once, with code 0, when it has closed what it had.

    The interpreter would take most of a second of a core to take apart what the libraries have made.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
