from __future__ import annotations

import numpy as np
import pytest

from common.contract.sampling import MAX_SEED
from common.engine import philox
from common.engine.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    out = philox4x32(np.array([counter], dtype=np.uint64).T, np.array([key], dtype=np.uint64).T)
    assert tuple(out[:, 0].tolist()) == expected


def test_vectors_are_computed_element_by_element() -> None:
    counters, keys, expected = zip(*KNOWN_ANSWERS, strict=True)
    out = philox4x32(np.array(counters, dtype=np.uint64).T, np.array(keys, dtype=np.uint64).T)
    assert [tuple(column) for column in out.T.tolist()] == list(expected)


def test_every_part_of_the_name_counts() -> None:
    seeds = [0, 1, 2**32, MAX_SEED]
    names = [(seed, choice, position) for seed in seeds for choice in (0, 1, 15) for position in (0, 1, 2**20)]
    numbers = uniforms(*zip(*names, strict=True))
    assert len(set(numbers.tolist())) == len(names)
    for name, number in zip(names, numbers.tolist(), strict=True):
        assert uniforms(*([part] for part in name)).tolist() == [number]


@pytest.mark.parametrize(
    ("seed", "choice", "position", "number"),
    [
        (0, 0, 0, "0x1.989fa35785a72p-2"),
        (0, 0, 1, "0x1.f1c99948b9641p-1"),
        (0, 1, 0, "0x1.ab4317b3a88dap-2"),
        (1, 0, 0, "0x1.c7d00ce1ca141p-1"),
        (7, 3, 250, "0x1.3e9eaa6ee6d62p-2"),
        (7, 250, 3, "0x1.55be9cdb1b919p-1"),
        (2**32, 1, 2, "0x1.395bbfeed5bd4p-3"),
        (2**64 - 1, 15, 2**20, "0x1.8901713aa24c3p-1"),
    ],
)
def test_no_upgrade_changes_a_seed_s_numbers(seed: int, choice: int, position: int, number: str) -> None:
    """Whoever asks again with the same seed gets the same answer, to the last bit."""
    assert uniforms([seed], [choice], [position]).tolist() == [float.fromhex(number)]


@pytest.mark.parametrize(("word", "number"), [(0, 2.0**-53), (2**32 - 1, 1 - 2.0**-53)])
def test_neither_end_of_the_interval_is_ever_drawn(monkeypatch: pytest.MonkeyPatch, word: int, number: float) -> None:
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: np.full((4, 1), word, dtype=np.uint64))
    assert uniforms([1], [2], [3]).tolist() == [number]


def test_numbers_are_uniform_in_the_open_interval() -> None:
    numbers = uniforms([7] * 20_000, [0] * 20_000, range(20_000))
    assert 0 < numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_squared < 43.8, "beyond the 0.999 quantile of 19 degrees of freedom"
