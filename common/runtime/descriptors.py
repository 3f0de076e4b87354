"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource


def allow_descriptors(needed: int) -> int:
    """Raise the process's limit of open files to `needed`, as far as the system permits. Returns the limit, at most
    `needed`."""
    soft, hard = (needed if each == resource.RLIM_INFINITY else each for each in _limits())
    if soft < needed:
        wanted = min(needed, hard)
        with contextlib.suppress(OSError, ValueError):  # the system may have other bounds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, _limits()[1]))
            soft = wanted
    return min(soft, needed)


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
