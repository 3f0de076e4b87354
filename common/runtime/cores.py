"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_MOUNTED = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cores_here(mounted: Path = _MOUNTED, own: Path = _OWN) -> int:
    """Cores that this process may use: those of its affinity, or fewer if its control groups (version 2) have a quota
    of CPU time, as containers with a limit do."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(mounted, own)]))


def _quotas(mounted: Path, own: Path) -> Iterator[int]:
    """The quotas of the process's group and of those around it, in whole cores, rounded up."""
    try:
        [group] = (line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError):
        return  # no control groups of version 2
    below = PurePosixPath(group.lstrip("/"))
    for each in (below, *below.parents):
        try:
            quota, period = (mounted / each / "cpu.max").read_text().split()
            yield math.ceil(int(quota) / int(period))
        except (OSError, ValueError):
            continue  # it has none ("max")
