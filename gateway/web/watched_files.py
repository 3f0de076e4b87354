"""Files that the operator may replace while the gateway runs, as Kubernetes does with a mounted secret."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

CHECK_INTERVAL_S: Final = 1.0
"""Files are looked at when they are needed, at most once in so many seconds."""

_Stamp = tuple[int, int, int] | None


class WatchedFiles:
    """Tells whether any of some files has changed. Nothing runs in between: whoever needs the files asks."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._stamps = self._look()
        self._looked_s = clock()

    def changed(self, *, at_once: bool = False) -> bool:
        """Whether they are others than when this was last asked. To be asked before they are read: what changes while
        they are read shows the next time. `at_once` looks however little time has passed."""
        now_s = self._clock()
        if not at_once and now_s - self._looked_s < CHECK_INTERVAL_S:
            return False
        self._looked_s = now_s
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> _Stamp:
    """What changes with a file's content, or with the file that a link leads to; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
