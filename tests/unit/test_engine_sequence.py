from __future__ import annotations

import pytest

from common.contract.ids import RequestId, RequestKey
from common.contract.sampling import SamplingParams
from common.engine.sequence import TokenSequence, finish_reason

EOS = frozenset((2, 3))


def reason(
    token_id: int,
    num_output: int,
    num_tokens: int = 100,
    max_sequence_tokens: int = 1000,
    max_tokens: int = 10,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> str | None:
    sampling = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
    )
    return finish_reason(token_id, num_output, sampling, EOS, num_tokens, max_sequence_tokens)


def test_counts() -> None:
    sampling = SamplingParams(max_tokens=4)
    sequence = TokenSequence(RequestKey(RequestId("r"), 1), 0, [5, 6, 7, 8], 3, sampling)
    assert (sequence.num_tokens, sequence.num_output, sequence.num_computed, len(sequence.block_table)) == (4, 1, 0, 0)
    sequence.token_ids.append(9)
    assert (sequence.num_tokens, sequence.num_output) == (5, 2)
    assert "3 prompt + 2 output" in repr(sequence)


@pytest.mark.parametrize("prompt_len", [0, 5])
def test_a_prompt_has_at_least_one_token_and_at_most_all(prompt_len: int) -> None:
    with pytest.raises(AssertionError):
        TokenSequence(RequestKey(RequestId("r"), 1), 0, [5, 6, 7, 8], prompt_len, SamplingParams(max_tokens=4))


def test_goes_on_with_an_ordinary_token() -> None:
    assert reason(7, 1) is None


def test_stops_at_any_end_of_sequence_token_and_at_any_stop_token() -> None:
    assert reason(2, 1) == "stop"
    assert reason(3, 1) == "stop"
    assert reason(7, 1, stop_token_ids=(6, 7)) == "stop"


def test_ignore_eos_ignores_the_models_own_tokens_only() -> None:
    assert reason(2, 1, ignore_eos=True) is None
    assert reason(7, 1, ignore_eos=True, stop_token_ids=(7,)) == "stop"
    assert reason(2, 1, ignore_eos=True, stop_token_ids=(2,)) == "stop"


def test_no_stop_within_min_tokens() -> None:
    assert reason(2, 3, min_tokens=3) is None
    assert reason(7, 3, min_tokens=3, stop_token_ids=(7,)) is None
    assert reason(2, 4, min_tokens=3) == "stop"


def test_length_at_max_tokens_and_at_the_end_of_the_context() -> None:
    assert reason(7, 9) is None
    assert reason(7, 10) == "length"
    assert reason(7, 1, num_tokens=999) is None
    assert reason(7, 1, num_tokens=1000) == "length"


def test_the_last_token_allowed_may_still_stop() -> None:
    assert reason(2, 10) == "stop"
    assert reason(2, 10, min_tokens=10) == "length"
