"""The forecast of blocks in use: examples worked out by hand, and what an answer costs."""

from __future__ import annotations

import pytest

from decode_worker.forecast import Forecast


def forecast(block_size: int, **sequences: tuple[int, int]) -> Forecast[str]:
    """At step 0; each sequence is (steps left, blocks that it alone holds)."""
    made: Forecast[str] = Forecast(block_size)
    for key, (num_steps, num_private) in sequences.items():
        made.put(key, step=0, end_step=num_steps, num_private=num_private)
    return made


def test_without_sequences_what_is_used_stays_used() -> None:
    assert forecast(4).peak(0, 5) == 5


@pytest.mark.parametrize(("num_steps", "peak"), [(1, 11), (4, 11), (5, 12), (8, 12), (40, 20)])
def test_one_sequence_grows_by_a_block_in_block_size_steps(num_steps: int, peak: int) -> None:
    assert forecast(4, a=(num_steps, 3)).peak(0, 10) == peak


def test_the_peak_is_before_the_first_end_when_that_gives_much_back() -> None:
    # Before the end of a: 10 + 2 * 8/4 = 14. Before that of b: 10 + 16/4 - 6 = 8.
    assert forecast(4, a=(8, 6), b=(16, 4)).peak(0, 10) == 14


def test_the_peak_is_before_the_last_end_when_the_others_give_little_back() -> None:
    # Before the end of a: 10 + 2 * 4/4 = 12. Before that of b: 10 + 40/4 - 1 = 19.
    assert forecast(4, a=(4, 1), b=(40, 9)).peak(0, 10) == 19


def test_who_ends_at_the_same_step_gives_nothing_back_before() -> None:
    assert forecast(4, a=(8, 5), b=(8, 5)).peak(0, 10) == 14


def test_what_several_hold_comes_back_with_none_of_them() -> None:
    """Ten blocks are in use, of which a and b hold one each alone."""
    assert forecast(4, a=(4, 1), b=(40, 1)).peak(0, 10) == 19


def test_a_sequence_has_grown_when_it_is_asked_later() -> None:
    made = forecast(4, a=(8, 1), b=(40, 1))
    # At step 4 each holds 2 of the 12 in use. Before the end of b, in 36 steps: 12 + 36/4 - 2 = 19.
    assert made.peak(4, 12) == 19


def test_who_has_outlived_its_end_ends_with_the_next_step() -> None:
    made = forecast(4, a=(2, 3))
    assert [made.peak(step, 10) for step in (0, 1, 2, 9)] == [11, 11, 11, 11]


def test_a_later_end_is_taken_into_account() -> None:
    made = forecast(4, a=(4, 1))
    assert made.peak(0, 10) == 11
    made.postpone("a", 20)
    assert made.peak(0, 10) == 15


def test_who_does_not_grow_yet_is_as_far_from_its_end_however_much_time_passes() -> None:
    made = forecast(4, a=(100, 1))
    made.hold("b", num_steps=8, num_private=4)
    assert made.held("b") == (8, 4)
    # Before the end of b: 10 + 2 * 8/4. Before that of a: 10 + 100/4 - 4; and of a 40 steps later, when it has grown.
    assert made.peak(1, 10) == 31
    assert made.peak(40, 20) == 31
    made.put("b", step=40, end_step=100, num_private=4)
    assert made.peak(40, 20) == 50
    assert sorted(made) == ["a", "b"]


@pytest.mark.parametrize(
    ("newcomer", "peak"),
    [
        pytest.param((4, 0), 13, id="it ends first"),
        pytest.param((8, 2), 14, id="with the first"),
        pytest.param((12, 0), 14, id="in between"),
        pytest.param((40, 2), 20 - 10 + 4, id="last"),
    ],
)
def test_a_newcomer_counts_as_if_it_were_here(newcomer: tuple[int, int], peak: int) -> None:
    made = forecast(4, a=(8, 6), b=(16, 4))
    beside = forecast(4, a=(8, 6), b=(16, 4), newcomer=newcomer)
    assert made.peak(0, 10, [newcomer]) == beside.peak(0, 10)
    assert made.peak(0, 10) == 14, "asking changes nothing"


def test_several_newcomers_come_together() -> None:
    made, beside = forecast(4, a=(8, 6)), forecast(4, a=(8, 6), x=(12, 1), y=(4, 0), z=(30, 3))
    assert made.peak(0, 10, [(12, 1), (4, 0), (30, 3)]) == beside.peak(0, 10)


def test_who_comes_in_the_step_of_the_last_question_is_not_forgotten() -> None:
    made = forecast(4, a=(8, 6))
    assert made.peak(0, 10) == 12
    made.hold("b", num_steps=16, num_private=4)
    # As if b never ended: 10 + 8/4 + 16/4.
    assert made.peak(0, 10) == 16
    assert made.peak(1, 10) == 14, "10 + 2 * 7/4: exact again with the next step"


def test_who_stops_growing_is_held_with_the_steps_that_it_has_left() -> None:
    made = forecast(4, a=(8, 6))
    made.stop("a", step=3, num_private=7)
    assert made.held("a") == (5, 7)
    assert [made.peak(step, 10) for step in (3, 4, 40)] == [12, 12, 12]


def test_what_is_removed_counts_no_more() -> None:
    made = forecast(4, a=(40, 9), b=(4, 1))
    made.remove("a")
    made.remove("a")
    assert made.peak(0, 10) == 11
    assert (list(made), len(made), "a" in made) == (["b"], 1, False)


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
