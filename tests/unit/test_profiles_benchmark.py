"""`benchmarks.profiles`: what it makes of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.profiles import break_even, ratios


def runs(gains: dict[float, float]) -> list[dict[str, Any]]:
    """Three rounds in which two profiles have `gains` more good requests per second than a packed pool, by rate."""
    return [
        {
            "system": system,
            "text": "novel",
            "mix": 0.5,
            "rate": rate,
            "turn": turn,
            "interactive": {"goodput": 4.0 + turn + gain * (system == "profiles") + 9.0 * (system == "drafting")},
            "standard": {"goodput": 4.0},
        }
        for rate, gain in gains.items()
        for turn in range(3)
        for system in ("packed", "drafting", "profiles")
    ]


def test_goodput_is_compared_by_tier_and_over_both() -> None:
    of = ratios(runs({6.0: 1.0}))
    assert [each["goodput"]["theirs"] for each in of if each["against"] == "drafting"] == [14.0, 4.0, 18.0]
    made = {each["tier"]: each["goodput"] for each in of if each["against"] == "packed"}
    assert made["interactive"]["ours"] == 6.0
    assert made["interactive"]["ratio"] == pytest.approx(6 / 5)
    assert made["standard"]["ratio"] == 1.0
    assert (made["interactive and standard"]["ours"], made["interactive and standard"]["theirs"]) == (10.0, 9.0)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({6.0: -1.0, 12.0: 1.0}, 9.0),
        ({6.0: -1.0, 12.0: 3.0, 18.0: 0.0}, 7.5),
        ({6.0: 1.0, 12.0: -1.0, 18.0: 1.0}, 15.0),
        ({6.0: 1.0, 12.0: 0.0}, 6.0),
        ({6.0: 1.0, 12.0: -1.0}, None),
    ],
)
def test_the_break_even_lies_where_the_gain_crosses_zero_for_good(
    gains: dict[float, float], expected: float | None
) -> None:
    made, drafting = break_even(ratios(runs(gains)))
    assert (made["text"], made["mix"], made["against"], made["rate"]) == ("novel", 0.5, "packed", expected)
    assert (drafting["against"], drafting["rate"]) == ("drafting", None)
