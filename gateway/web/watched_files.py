"""Files that the operator may replace while the gateway runs, as Kubernetes does with a mounted secret."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

CHECK_INTERVAL_S: Final = 1.0
"""Least seconds between two checks of the files; they are checked when they are needed."""

_Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """Tells whether any of some files has changed. It checks only when asked."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._stamps = self._look()
        self._looked_s = clock()

    def changed(self, *, at_once: bool = False) -> bool:
        """Whether the files have changed since the last check. Ask before reading them: a change during the reading
        shows at the next check. `at_once` ignores the minimum interval."""
        now_s = self._clock()
        if not at_once and now_s - self._looked_s < CHECK_INTERVAL_S:
            return False
        self._looked_s = now_s
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    """A value that changes with the file's content, or with the file that a link leads to; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
