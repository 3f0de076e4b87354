"""Which GPUs of this machine the workers of a local stack get."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """The GPUs of one worker."""

    gpus: tuple[str, ...]
    """What `CUDA_VISIBLE_DEVICES` names: one for each rank, as far as there are any; none if nobody knows."""
    share: float
    """The share of each one's memory that the worker may use."""


def gpus_here(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that a process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = environ.get(VISIBLE)
    if named is not None:
        return [each.strip() for each in takewhile(lambda each: each.strip() != "-1", named.split(",")) if each.strip()]
    numbered = [each for each in devices.glob("nvidia*") if each.name.removeprefix("nvidia").isdigit()]
    return [str(number) for number in range(len(numbered))]


def placed(widths: Sequence[int], gpus: Sequence[str]) -> list[Place]:
    """GPUs for workers of these numbers of ranks, one after another. When none is left the first one comes again;
    workers on one GPU have equal shares of its memory. Without any they may all be on one."""
    if not gpus:
        return [Place((), 1 / len(widths))] * len(widths)
    taken: list[tuple[str, ...]] = []
    begin = 0
    for width in widths:
        taken.append(tuple(gpus[(begin + rank) % len(gpus)] for rank in range(min(width, len(gpus)))))
        begin += width
    workers = Counter(gpu for each in taken for gpu in each)
    return [Place(each, 1 / max(workers[gpu] for gpu in each)) for each in taken]
