"""The life of a process: start, one-line errors for the operator, signals, and exit."""

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
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from common.contract.errors import OperatorError

EXIT_OPERATOR_ERROR = 2
_RESTARTED = "RESTARTED_PROCESS"
"""The variable of a process that has started again: its number."""
_PR_SET_PDEATHSIG = 1
_SWITCH_INTERVAL_S = 0.0005


def restart_with(environment: Mapping[str, str]) -> None:
    """Start this program again, in this process, with these variables, unless it has them, or was started so before and
    something has taken them away.

    To be called by a program's entry point: nothing stays of the process but its number, its arguments and the files
    that it inherited. Returns if the program cannot be started again.
    """
    missing = environment.items() - os.environ.items()
    marked = {_RESTARTED: str(os.getpid())}
    if sys.platform != "linux" or not sys.executable or not missing or marked.items() <= os.environ.items():
        return
    _flush()
    with suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **marked})  # noqa: S606


def command_of(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of Baton in a process of its own.

    `-m` imports from the current folder before anything else, whatever lies there. `-P` keeps it from that, unless this
    process imports from there, too, as from a checkout that is not installed.
    """
    here = {""}
    with suppress(OSError):  # the folder may be gone
        here.add(os.getcwd())
    from_here = not here.isdisjoint(sys.path)
    return [sys.executable, *([] if from_here else ["-P"]), "-m", module, *arguments]


def exit_on_operator_error(main: Callable[[], None]) -> None:
    """Run `main`; on an `OperatorError`, print it as one line and exit with code 2."""
    try:
        main()
    except OperatorError as error:
        try:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # a normal exit would try to write it again, fail, and end with another code
            leave(EXIT_OPERATOR_ERROR)
        sys.exit(EXIT_OPERATOR_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)


def run(serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run `serve(stop)` on uvloop until it returns; SIGTERM and SIGINT set `stop`."""
    import uvloop

    # The engine's thread and the event loop must switch far more often than Python's default interval of 5 ms allows.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await serve(stop)

    uvloop.run(body())


def end_with_parent(parent: int | None, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send a signal when `parent` dies, so that a killed supervisor leaves no orphan.

    Does nothing if `parent` is None. Exits at once if `parent` has died already.
    """
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(EXIT_OPERATOR_ERROR)


class Announcer:
    """Reports the progress of this process to a supervisor over an inherited pipe: one JSON object on each line."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def say(self, **facts: object) -> None:
        """Write one line; if the supervisor has gone, write nothing from then on."""
        if self._fd is None:
            return
        try:
            os.write(self._fd, json.dumps(facts).encode() + b"\n")
        except OSError:
            self._fd = None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector while large libraries are imported.

    Almost none of the objects that they create is garbage; scanning them again and again takes a worker 200 ms.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from garbage collection; called once, when a process begins to serve.

    A full collection over the objects of the imported libraries takes a worker 100 ms, in the middle of a stream.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules report objects that still exist when they are unloaded


def leave(code: int = 0) -> NoReturn:
    """End the process at once with this code, after it has closed everything.

    A normal exit would spend most of a second of a core on destroying the libraries' objects.
    """
    logging.shutdown()
    _flush()
    os._exit(code)


def _flush() -> None:
    """Write what the standard streams hold, as far as they can be written to."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it is closed
        with suppress(OSError, ValueError):
            stream.flush()
