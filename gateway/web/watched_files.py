"""Files that the operator may replace while the gateway runs, as Kubernetes does with a mounted secret."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from common.contract.errors import OperatorError
from common.runtime.clock import Clock, monotonic

CHECK_INTERVAL_S: Final = 1.0
"""Least seconds between two checks of the files; they are checked when they are needed."""

_LOG = logging.getLogger(__name__)
_Stamp = tuple[int, int, int] | None
T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """What some files hold. Changed files are read again; if they cannot be used, the error is logged, what they held
    before stays in force, and they are tried again at each check: what was wrong may show in no file."""

    def __init__(
        self,
        what: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        *,
        clock: Clock = monotonic,
        reloaded: Callable[[bool], None] = lambda good: None,
    ) -> None:
        """`read` reads the files or raises `OperatorError`, as this does then. `reloaded` is called with the outcome of
        each attempt to read them again, but of those that fail like the one before. The log names the files as `what`,
        in the plural."""
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._reloaded = reloaded
        self._stamps = self._look()
        self._looked_s = clock()
        self._refused = ""
        """Why the files cannot be used; empty if they can."""
        self._held = read()

    def current(self) -> T:
        """What the files hold, as of the last check."""
        now_s = self._clock()
        if now_s - self._looked_s >= CHECK_INTERVAL_S:
            self._looked_s = now_s
            # Before the files are read: a change during the reading shows at the next check.
            before, self._stamps = self._stamps, self._look()
            if self._refused or self._stamps != before:
                self._read_again()
        return self._held

    def _read_again(self) -> None:
        before, self._refused = self._refused, ""
        try:
            self._held = self._read()
        except OperatorError as error:
            self._refused = str(error)
            if self._refused != before:
                _LOG.error("%s stay as they were: %s", self._what, error)
                self._reloaded(False)
        else:
            _LOG.info("%s were read again", self._what)
            self._reloaded(True)

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    """A value that changes with the file's content, or with the file that a link leads to; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
