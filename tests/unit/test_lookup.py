"""What is expected next in a text, by what followed its last tokens before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.lookup import CommonAcceptance, Lookup

some_text = st.lists(st.sampled_from([0, 3, 256, 2**31 - 1]), min_size=1, max_size=60)


def occurred(text: list[int]) -> int | None:
    """By definition: where the token is that followed the last three ones when they occurred before."""
    return next((at for at in range(len(text) - 1, 2, -1) if text[at - 3 : at] == text[-3:]), None)


@given(some_text, some_text, st.lists(st.integers(0, 9), min_size=1))
def test_it_expects_what_followed_the_last_three_tokens(first: list[int], rest: list[int], stops: list[int]) -> None:
    """However many tokens are read at once: those that were expected are compared, up to the first wrong one."""
    text, common = list(first), CommonAcceptance(0.5)
    lookup = Lookup(text, common)
    own, shared, place = 0.5, 0.5, occurred(first)
    for index, token in enumerate(rest):
        if place is not None:
            right = text[place] == token
            own, shared = own + 0.15 * (right - own), shared + 0.02 * (right - shared)
            place = place + 1 if right else None
        text.append(token)
        if stops[index % len(stops)] < 5 or index == len(rest) - 1:
            lookup.read()
            place = occurred(text) if place is None else place
            assert lookup.expects == (place is not None)
            extended = list(text)
            for ahead in range(7 if place is not None else 0):
                assert place is not None
                extended.append(extended[place + ahead])
            assert lookup.propose(7) == extended[len(text) :], "it goes on as after the place, for as long as asked"
            assert (lookup.acceptance, common.acceptance) == (own, shared)


@given(some_text, some_text, st.lists(st.sampled_from([0, 3]), max_size=20), st.lists(st.sampled_from([0, 3])))
def test_what_a_client_expects_is_expected_until_the_output_departs(
    prompt: list[int], prediction: list[int], first: list[int], rest: list[int]
) -> None:
    """And from then on as if it had been said once, between prompt and output. `first` is known when it is asked."""
    text = [*prompt, *first]
    lookup = Lookup(text, CommonAcceptance(0.8), len(prompt), prediction)
    assert lookup.acceptance == 0.8
    combined = [*prompt, *prediction, *first, *rest]
    follows = len(first) < len(prediction) and prediction[: len(first)] == first
    end = len(combined) - len(rest)
    place = len(prompt) + len(first) if follows else occurred(combined[:end])
    for token in [*rest, None]:
        lookup.read()
        assert lookup.propose(1) == ([] if place is None else [combined[place]])
        assert not follows or len(text) > len(prompt) + len(first) or lookup.propose(1) == [prediction[len(first)]]
        if token is not None:
            text.append(token)
            end += 1
            place = place + 1 if place is not None and combined[place] == token else occurred(combined[:end])
    assert text == [*prompt, *first, *rest], "it is the sequence's own, which nothing else changes"


def test_a_prediction_is_followed_to_its_end() -> None:
    prediction = list(range(100, 140))
    text = [1, 2]
    lookup = Lookup(text, CommonAcceptance(0.5), 2, prediction)
    for at in range(0, 40, 5):
        assert lookup.propose(5) == prediction[at : at + 5]
        text += prediction[at : at + 5]
        lookup.read()
    assert lookup.acceptance > 0.9


@pytest.mark.parametrize("num_predicted", [40, 40_000])
def test_a_prediction_is_followed_again_after_what_differs(num_predicted: int) -> None:
    prediction = list(range(100, 100 + num_predicted))
    text = [1, 2, *prediction[:7], 7, 8, 9, *prediction[9:11]]
    lookup = Lookup(text, CommonAcceptance(0.5), 2, prediction)
    assert lookup.propose(3) == []
    text.append(prediction[11])
    lookup.read()
    assert lookup.propose(3) == prediction[12:15]


@pytest.mark.parametrize(
    ("place", "found"),
    [
        (15_000, True),  # near what the output follows
        (60_000, False),
        (100_000 - 15_000, True),  # near the end
    ],
)
def test_not_all_of_a_long_prediction_is_searched(place: int, found: bool) -> None:
    """That would take longer than a row of the step."""
    prediction = list(range(100, 100_100))
    text = [1, 2, *prediction[place - 3 : place]]
    lookup = Lookup(text, CommonAcceptance(0.5), 2, prediction)
    assert lookup.propose(2) == (prediction[place : place + 2] if found else [])


def test_a_new_text_starts_from_what_others_have_shown() -> None:
    common = CommonAcceptance(0.9)
    wrong = [1, 2, 3, 1, 2, 3]
    lookup = Lookup(wrong, common)
    assert lookup.propose(2) == [1, 2]
    wrong.append(7)
    lookup.read()
    assert 0.8 < common.acceptance < 0.9
    assert Lookup([1], common).acceptance == common.acceptance
    assert not Lookup([1], common).expects
    assert Lookup([1], common).propose(3) == []
