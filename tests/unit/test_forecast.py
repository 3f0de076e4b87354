"""The forecast of blocks in use: the peak by hand, what the model leaves open, and what an answer costs."""

from __future__ import annotations

import pytest

from decode_worker.forecast import Forecast


def forecast(block_size: int, **sequences: tuple[int, int]) -> Forecast[str]:
    """At step 0; each sequence is (steps left, blocks that it alone holds)."""
    made: Forecast[str] = Forecast(block_size)
    for key, (num_steps, num_private) in sequences.items():
        made.put(key, step=0, end_step=num_steps, num_private=num_private)
    return made


def test_the_peak_is_before_the_first_end_when_that_gives_much_back() -> None:
    # Before the end of a: 10 + 2 * 8/4 = 14. Before that of b: 10 + 16/4 - 6 = 8.
    assert forecast(4, a=(8, 6), b=(16, 4)).peak(0, 10) == 14


def test_the_peak_is_before_the_last_end_when_the_others_give_little_back() -> None:
    # Before the end of a: 10 + 2 * 4/4 = 12. Before that of b: 10 + 40/4 - 1 = 19.
    assert forecast(4, a=(4, 1), b=(40, 9)).peak(0, 10) == 19


def test_who_comes_in_the_step_of_the_last_question_is_not_forgotten() -> None:
    made = forecast(4, a=(8, 6))
    assert made.peak(0, 10) == 12
    made.hold("b", num_steps=16, num_private=4)
    # As if b never ended: 10 + 8/4 + 16/4.
    assert made.peak(0, 10) == 16
    assert made.peak(1, 10) == 14, "10 + 2 * 7/4: exact again with the next step"


def test_nobody_is_entered_twice() -> None:
    with pytest.raises(AssertionError):
        forecast(4, a=(40, 9)).put("a", step=0, end_step=4, num_private=1)


@pytest.mark.parametrize(("step", "bound"), [(0, 17), (4, 15)])
def test_the_bound_takes_everybody_to_grow_and_nobody_to_end(step: int, bound: int) -> None:
    # 10 and (8 + 16 steps, and one for each) / 4, and less by what has been grown.
    made = forecast(4, a=(8, 6), b=(16, 4))
    assert made.most(step, 10) == bound
    made.hold("c", num_steps=20, num_private=1)
    assert made.most(step, 10) == bound + 5
    made.remove("c")
    assert made.most(step, 10) == bound


class Counted:
    """A key that counts the comparisons with it."""

    num_compared = 0

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return self is other


def test_it_costs_nothing_more_that_many_are_expected_to_end_together() -> None:
    """As they are when a batch of equal `max_tokens` comes in at once."""
    made: Forecast[Counted] = Forecast(16)
    keys = [Counted() for _ in range(1024)]
    for key in keys:
        made.put(key, step=0, end_step=128, num_private=4)
    Counted.num_compared = 0
    for key in reversed(keys):
        made.remove(key)
    assert Counted.num_compared <= 20 * len(keys)
