"""How many are refused who could have been served in time, and how many of the others are late, on a modelled clock."""

from __future__ import annotations

import pytest
from admission_bench import Arrival, clairvoyant, measure

SEEDS = range(6)


def test_the_clairvoyant_refuses_who_would_be_late_and_nobody_else() -> None:
    together = [Arrival(0.0, 256, 0.2)] * 3
    assert clairvoyant(together) == 1, "two take 0.41 s"
    assert clairvoyant([*together, Arrival(0.42, 256, 0.2)]) == 1
    assert clairvoyant([Arrival(0.0, 1024, 0.8)]) == 0, "a long prompt is not refused for its own time"


@pytest.mark.parametrize(
    ("share", "tail", "most_false_refusals", "least_on_time"),
    [
        (0.5, 0.0, 0.03, 0.99),
        (0.75, 0.0, 0.055, 0.98),
        (1.0, 0.0, 0.08, 0.975),
        (1.5, 0.0, 0.08, 0.975),
        (2.0, 0.0, 0.065, 0.975),
        (0.5, 0.8, 0.05, 0.985),
        (0.75, 0.8, 0.06, 0.975),
    ],
)
def test_few_are_refused_in_vain_and_few_of_the_others_are_late(
    share: float, tail: float, most_false_refusals: float, least_on_time: float
) -> None:
    found = measure(share, SEEDS, tail=tail)
    assert found.false_refusals <= most_false_refusals, found
    assert found.accepted_on_time >= least_on_time, found
