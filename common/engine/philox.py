"""Counter-based random numbers: a token's number follows from its key and counter, never from numbers drawn before.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = Sequence[int] | npt.NDArray[np.integer[Any]]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """128 random bits for each counter: `[4, N]` words of 32 bits from counters `[4, N]` and keys `[2, N]`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: Numbers, choices: Numbers, positions: Numbers) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) for each (seed, choice, position), on a grid of 2^52.

    Seeds have up to 64 bits, choices and positions up to 32.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    zero = np.zeros_like(seed)
    counter = np.stack((np.asarray(positions, np.uint64), np.asarray(choices, np.uint64), zero, zero))
    high, low, _, _ = philox4x32(counter, np.stack((seed & _LOW, seed >> _SHIFT)))
    bits = ((high << _SHIFT) | low) >> np.uint64(12)
    numbers: npt.NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return numbers
