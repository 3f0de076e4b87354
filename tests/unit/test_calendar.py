"""Which items are to be looked at before which step."""

from __future__ import annotations

from decode_worker.calendar import Calendar


def test_items_are_taken_with_their_step_in_the_order_in_which_they_were_entered() -> None:
    calendar: Calendar[str] = Calendar()
    calendar.put(3, ["b", "a"])
    calendar.put(4, ["c"])
    calendar.put(3, ["d"])
    assert (calendar.num_at(3), calendar.num_at(4), calendar.num_at(5)) == (3, 1, 0)
    assert calendar.take(3) == ["b", "a", "d"]
    assert calendar.take(3) == []
    calendar.check_invariants()
    assert (list(calendar), calendar["c"]) == (["c"], 4)


def test_who_is_discarded_is_not_taken_and_may_be_entered_again() -> None:
    calendar: Calendar[str] = Calendar()
    calendar.put(3, ["a", "b"])
    calendar.discard("a")
    calendar.discard("nobody")
    calendar.put(5, ["a"])
    calendar.check_invariants()
    assert (calendar.take(3), calendar.take(5)) == (["b"], ["a"])
