"""The sampler against straightforward references, and rows against themselves in other company."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from golden_samples import golden_logits, golden_samples, golden_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import require
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.contract.errors import Cause
from common.contract.sampling import SamplingParams
from common.engine import native, sampler
from common.engine.backend import Backend, TorchBackend
from common.engine.batch import InvalidLogitsError, Sample, Sampled, SampledToken, Samples
from common.engine.host_copy import HostCopy
from common.engine.native.backend import NativeBackend
from common.engine.philox import uniforms
from common.engine.sampler import ChosenOnDevice, Likeliest

torch.set_num_threads(1)

VOCAB = 50
EOS = frozenset((2, 3))


def ask(token_ids: list[int] | None = None, prompt_len: int = 1, choice: int = 0, **params: Any) -> Sample:
    tokens = [7] if token_ids is None else token_ids
    return Sample(
        params=SamplingParams(max_tokens=100, **params),
        choice=choice,
        position=len(tokens),
        token_ids=tokens,
        prompt_len=prompt_len,
    )


backend: Backend = TorchBackend()


@pytest.fixture(scope="module", autouse=True, params=["torch", "c"])
def choose_backend(request: pytest.FixtureRequest) -> None:
    """Everything here is so for either."""
    global backend
    backend = TorchBackend()
    if request.param == "c":
        require("compiler")
        kernels = native.kernels()
        assert kernels is not None
        backend = NativeBackend(kernels)


def choose(
    logits_NV: torch.Tensor, samples: list[Sample], backend: Backend, likeliest: Likeliest | None = None
) -> ChosenOnDevice:
    """Leaves the logits as they are."""
    return choose_in_place(logits_NV.clone(), samples, backend, likeliest)


def choose_in_place(
    logits_NV: torch.Tensor, samples: list[Sample], backend: Backend, likeliest: Likeliest | None = None
) -> ChosenOnDevice:
    def last_tokens() -> torch.Tensor:
        return torch.tensor([each.token_ids[-1] for each in samples])

    return sampler.choose(logits_NV, Samples.of(samples), EOS, backend, last_tokens, likeliest)


def sample(logits_NV: torch.Tensor, samples: list[Sample]) -> list[Sampled]:
    return choose(logits_NV, samples, backend).chosen().outcomes()


def tokens_of(logits_NV: torch.Tensor, samples: list[Sample]) -> list[int]:
    outcome = sample(logits_NV, samples)
    assert all(isinstance(each, SampledToken) for each in outcome)
    return [each.token_id for each in outcome if isinstance(each, SampledToken)]


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def support(logits_V: torch.Tensor, num: int = 3000, **params: Any) -> set[int]:
    """Tokens that come up for some of `num` seeds."""
    drawn = tokens_of(logits_V.expand(num, -1), [ask(seed=seed, **params) for seed in range(num)])
    return set(drawn)


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("name", ["top_p", "min_p", "temperature"])
@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-46, 1e-30])
def test_a_number_that_float32_cannot_hold_leaves_the_most_likely_token(name: str, tiny: float) -> None:
    logits = random_logits(3)
    params: dict[str, Any] = {name: tiny}
    drawn = tokens_of(logits, [ask(**params), ask(), ask(temperature=0.0)])
    if name != "min_p":
        assert drawn[0] == logits[0].argmax().item()


def test_greedy_takes_the_most_likely_token() -> None:
    logits = random_logits(4)
    assert tokens_of(logits, [ask(temperature=0.0)] * 4) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(params: dict[str, Any]) -> None:
    """Chi-squared over tokens that are expected at least five times; transformers' own warpers give the expectation."""
    num = 10_000
    (logits,) = random_logits(1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.get("temperature", 1.0))])
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    expected = warpers(None, logits[None].clone())[0].softmax(dim=-1).double() * num
    drawn = tokens_of(logits.expand(num, -1), [ask(seed=seed, **params) for seed in range(num)])
    observed = torch.bincount(torch.tensor(drawn), minlength=VOCAB).double()
    assert not observed[expected == 0].any(), "a token was drawn that the filters exclude"
    likely = expected >= 5
    chi_squared = ((observed - expected)[likely] ** 2 / expected[likely]).sum().item()
    freedom = max(int(likely.sum()) - 1, 1)
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.2, 3.0),
    coarse=st.booleans(),
)
def test_filters_keep_what_a_plain_reference_keeps(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float, coarse: bool
) -> None:
    """Whatever is drawn lies in the set kept, and is where the cumulative distribution reaches the random number.

    Coarse logits have many ties, and ties with the last token kept are kept.
    """
    (logits,) = random_logits(1, seed)
    if coarse:
        logits = logits.round()
    kept = logits.double() / temperature
    if 0 < top_k < VOCAB:
        kept[kept < kept.sort(descending=True).values[top_k - 1]] = float("-inf")
    if top_p < 1.0:
        ordered = kept.sort(descending=True).values
        before = ordered.softmax(dim=-1).cumsum(dim=-1) - ordered.softmax(dim=-1)
        near = ((before - top_p).abs() < 1e-5).any()
        kept[kept < ordered[before < top_p].min()] = float("-inf")
    else:
        near = torch.tensor(False)
    probabilities = kept.softmax(dim=-1)
    near |= ((probabilities / probabilities.max() - min_p).abs() < 1e-5).any()
    kept[probabilities < min_p * probabilities.max()] = float("-inf")
    cumulative = kept.softmax(dim=-1).cumsum(dim=-1)
    each = ask(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    number = uniforms([seed], [0], [1])[0]
    near |= ((cumulative - number).abs() < 1e-5).any()
    if not near:
        assert tokens_of(logits[None], [each]) == [int(torch.searchsorted(cumulative, number))]


def test_top_k_top_p_and_min_p_keep_at_least_the_most_likely_token() -> None:
    (logits,) = random_logits(1)
    best = {int(logits.argmax())}
    assert support(logits, top_k=1) == best
    assert support(logits, top_p=1e-9) == best
    assert support(logits, min_p=1.0) == best
    assert support(logits, temperature=1e-300) == best


def test_what_is_beyond_a_top_p_that_is_just_reached_is_hidden() -> None:
    """The most likely token has exactly a half of all."""
    logits = torch.tensor([0.0, -1.0, -2.0, -2.0]) * math.log(2)
    assert support(logits, top_p=0.5) == {0}
    assert support(logits, top_p=0.51) == {0, 1}


def test_top_p_of_a_flat_distribution_over_many_tokens() -> None:
    """More tokens are kept than the sampler looks at first."""
    logits = torch.linspace(0, 0.01, 2000)
    kept = support(logits, num=4000, top_p=0.5)
    assert min(kept) >= 1000 - 5
    assert len(kept) > 900


def test_a_random_number_is_named_by_seed_choice_and_position() -> None:
    (logits,) = random_logits(1)
    rows = [
        ask(seed=seed, choice=choice, token_ids=[7] * position)
        for seed in range(6)
        for choice in range(3)
        for position in range(1, 6)
    ]
    drawn = tokens_of(logits.expand(len(rows), -1), rows)
    numbers = uniforms([r.params.seed for r in rows], [r.choice for r in rows], [r.position for r in rows])
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    assert drawn == torch.searchsorted(cumulative, torch.from_numpy(numbers)).tolist()


def test_no_upgrade_changes_seeded_output() -> None:
    outcomes = sample(golden_logits(), golden_samples())
    assert outcomes == [SampledToken(token) for token in golden_tokens()]


any_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 10]),
        "top_p": st.sampled_from([0.3, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.3]),
        "min_tokens": st.sampled_from([0, 4]),
        "stop_token_ids": st.sampled_from([(), (9,)]),
        "logit_bias": st.sampled_from([(), ((7, 4.0), (11, -100.0), (400, 1.0))]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 2**40),
    }
)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), wanted=st.lists(any_params, min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_company(data: st.DataObject, wanted: list[dict[str, Any]], seed: int) -> None:
    logits = random_logits(len(wanted), seed, vocab=400)
    histories = [data.draw(st.lists(st.integers(0, 399), min_size=2, max_size=8)) for _ in wanted]
    rows = [ask(tokens, prompt_len=2, **params) for tokens, params in zip(histories, wanted, strict=True)]
    together = sample(logits, rows)
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert together == alone
    backwards = sample(logits.flip(0), rows[::-1])
    assert backwards == together[::-1]


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits(3, vocab=20)
    tokens = [5, 9, 9, 13, 14]
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([tokens] * 3), logits.clone())
    row = ask(tokens, prompt_len=2, temperature=0.0, repetition_penalty=1.8, logprobs=20)
    for outcome, wanted in zip(sample(logits, [row] * 3), expected, strict=True):
        assert_top(outcome, wanted)


def test_presence_and_frequency_penalties_concern_the_output() -> None:
    logits = random_logits(1, vocab=20)
    tokens = [4, 5, 9, 9, 9, 5, 13]
    expected = logits[0].clone()
    for token, count in {9: 3, 5: 1, 13: 1}.items():
        expected[token] -= 0.7 + 0.4 * count
    row = ask(tokens, prompt_len=2, temperature=0.0, presence_penalty=0.7, frequency_penalty=0.4, logprobs=20)
    assert_top(sample(logits, [row])[0], expected)


def test_biases_are_added_to_logits_of_tokens_that_there_are() -> None:
    logits = random_logits(2, vocab=20)
    banned = int(logits[0].argmax())
    assert banned != 3
    expected = logits[0].clone()
    expected[3] += 1.5
    expected[banned] -= 100
    bias = ((3, 1.5), (banned, -100.0), (20, 100.0))
    rows = [ask(temperature=0.0, logit_bias=bias, logprobs=20), ask(temperature=0.0, logprobs=20)]
    biased, plain = sample(logits, rows)
    assert_top(biased, expected)
    assert_top(plain, logits[1])


def test_each_row_gets_its_own_biases() -> None:
    biases = [((3, 1.5), (25, 9.0)), (), ((19, 50.0), (0, -2.0), (3, 0.5)), ((20, 1.0),)]
    logits = random_logits(len(biases), vocab=20)
    expected = logits.clone()
    for row, pairs in enumerate(biases):
        for token, bias in pairs:
            if token < 20:
                expected[row, token] += bias
    choose_in_place(logits, [ask(temperature=0.0, logit_bias=pairs) for pairs in biases], backend)
    assert torch.equal(logits, expected)


def test_the_biases_of_a_request_are_read_once_for_all_its_choices_and_steps() -> None:
    class Watched(tuple[tuple[int, float], ...]):
        num_read = 0

        def __iter__(self) -> Iterator[tuple[int, float]]:
            self.num_read += 1
            return super().__iter__()

    pairs = Watched((token, token / 7) for token in range(40))
    params = SamplingParams(max_tokens=9, logit_bias=pairs)
    num_read = pairs.num_read
    for position in range(3, 6):
        rows = [
            Sample(params=params, choice=choice, position=position, token_ids=[7], prompt_len=1) for choice in range(16)
        ]
        sample(random_logits(16), rows)
    assert pairs.num_read <= num_read + 1


def bits(*tokens: int) -> bytes:
    """A mask of 64 tokens."""
    mask = np.zeros(64, np.uint8)
    mask[list(tokens)] = 1
    return np.packbits(mask, bitorder="little").tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_leaves_the_tokens_that_it_allows(temperature: float) -> None:
    logits = random_logits(4)
    rows = [
        ask([7, 9], temperature=temperature, grammar="any", logprobs=20, seed=1, prompt_len=1),
        ask(temperature=temperature, seed=2),
        ask(temperature=temperature, grammar="any", seed=3, logit_bias=((5, -100.0),)),
        ask(temperature=temperature, grammar="any", seed=4),
    ]
    for row, allowed in ((0, bits(3, 17, 49)), (2, bits(5)), (3, bits(63))):
        rows[row].allowed = allowed
    first, plain, only, none = choose(logits, rows, backend).chosen().outcomes()
    assert isinstance(first, SampledToken)
    assert first.token_id in (3, 17, 49)
    assert first.logprobs is not None
    assert {token for token, _ in first.logprobs.top} == {3, 17, 49}
    assert sum(math.exp(logprob) for _, logprob in first.logprobs.top) == pytest.approx(1)
    assert [plain] == sample(logits[1:2], [rows[1]])
    assert only == SampledToken(5)
    assert isinstance(none, InvalidLogitsError), "bits beyond the vocabulary mean nothing"
    assert none.cause is Cause.INVALID, "it would be so everywhere"


def test_no_bias_brings_an_ending_back_before_min_tokens() -> None:
    row = ask([7], temperature=0.0, min_tokens=2, logit_bias=((2, 100.0),))
    assert tokens_of(random_logits(1), [row]) != [2]
    assert tokens_of(random_logits(1), [ask([7], temperature=0.0, logit_bias=((2, 100.0),))]) == [2]


def assert_top(outcome: object, penalised_V: torch.Tensor) -> None:
    """The outcome is the most likely of the 20 tokens of `penalised_V`, with the log probabilities of all."""
    assert isinstance(outcome, SampledToken)
    assert outcome.logprobs is not None
    expected = penalised_V.log_softmax(dim=-1).sort(descending=True)
    assert outcome.token_id == expected.indices[0]
    assert outcome.logprobs.logprob == pytest.approx(expected.values[0].item(), abs=1e-5)
    assert [token for token, _ in outcome.logprobs.top] == expected.indices.tolist()
    assert [value for _, value in outcome.logprobs.top] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_no_ending_token_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 3, 9]] = torch.tensor([9.0, 8.0, 7.0])
    logits[0, 20] = 5.0

    def taken(num_output: int, **params: Any) -> int:
        row = ask([7] * (2 + num_output), prompt_len=2, temperature=0.0, stop_token_ids=(9, 10**6), **params)
        return tokens_of(logits, [row])[0]

    assert taken(0, min_tokens=2) == 20
    assert taken(1, min_tokens=2) == 20
    assert taken(2, min_tokens=2) == 2
    assert taken(0) == 2
    assert taken(0, min_tokens=2, ignore_eos=True) == 20


def test_an_ending_outside_the_vocabulary_hides_no_token() -> None:
    """Some configurations say -1 for none."""
    logits = torch.zeros(1, VOCAB)
    logits[0, VOCAB - 1] = 5.0
    samples = Samples.of([ask([7, 7], prompt_len=2, temperature=0.0, min_tokens=2)])
    assert not sampler._hide_endings(logits, samples, {-1, -VOCAB - 1, VOCAB})
    assert logits.argmax().item() == VOCAB - 1


def test_logprobs_come_before_temperature_and_filters() -> None:
    logits = random_logits(1)
    expected = logits[0].log_softmax(dim=-1)
    (outcome,) = sample(logits, [ask(temperature=0.3, top_k=2, seed=5, logprobs=4)])
    assert isinstance(outcome, SampledToken)
    assert outcome.logprobs is not None
    assert outcome.logprobs.logprob == pytest.approx(expected[outcome.token_id].item(), abs=1e-5)
    assert [token for token, _ in outcome.logprobs.top] == expected.topk(4).indices.tolist()


def test_logprobs_without_alternatives_and_without_hidden_tokens() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, :3] = torch.tensor([1.0, 2.0, 3.0])
    none, few = sample(logits, [ask(temperature=0.0, logprobs=0), ask(temperature=0.0, logprobs=5, min_tokens=9)])
    assert isinstance(none, SampledToken)
    assert none.logprobs is not None
    assert none.logprobs.top == ()
    assert isinstance(few, SampledToken)
    assert few.logprobs is not None
    assert [token for token, _ in few.logprobs.top] == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_invalid_row_is_an_error_and_the_others_are_sampled(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    row = ask(temperature=temperature, seed=3, top_p=0.9, logprobs=2)
    expected = sample(logits, [row] * 3)
    logits[1, 17] = bad
    first, invalid, last = sample(logits, [row] * 3)
    assert (first, last) == (expected[0], expected[2])
    assert isinstance(invalid, InvalidLogitsError)
    assert "position 1" in str(invalid)


def test_a_row_without_any_token_left_is_an_error() -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 2] = 0.0
    (outcome,) = sample(logits, [ask(min_tokens=1)])
    assert isinstance(outcome, InvalidLogitsError)


def test_bfloat16_logits() -> None:
    logits = random_logits(2).bfloat16()
    assert tokens_of(logits, [ask(temperature=0.0)] * 2) == logits.float().argmax(dim=-1).tolist()


class Counting(TorchBackend):
    """Counts the searches for the most likely tokens."""

    num_searches = 0
    address = 0
    """Where the logits of the last search lie."""

    def best(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_searches += 1
        self.address = logits_RV.data_ptr()
        return super().best(logits_RV)


def known(logits_NV: torch.Tensor, room: int) -> Likeliest:
    """What a graph with places for so many rows has found in the first of them; the others are nobody's."""
    likeliest = Likeliest.empty(room, logits_NV.device)
    likeliest.buffer.fill_(0xAB)
    first = likeliest.first(len(logits_NV))
    first.fill(logits_NV, backend)
    return first


WAYS: dict[str, tuple[bool, list[dict[str, Any]]]] = {
    "greedy": (True, [{"temperature": 0.0}] * 3),
    "greedy, reported": (True, [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 3}, {"temperature": 0.0}]),
    "drawn": (True, [{"seed": 1}, {"seed": 2, "top_k": 5}, {"seed": 3, "top_p": 0.5}]),
    "mixed": (True, [{"temperature": 0.0}, {"seed": 2}, {"temperature": 0.0, "logprobs": 0}]),
    "biased": (False, [{"temperature": 0.0}, {"temperature": 0.0, "logit_bias": ((4, 90.0),)}, {"seed": 3}]),
    "biased beyond the vocabulary": (True, [{"temperature": 0.0}, {"logit_bias": ((VOCAB, 90.0),)}, {"seed": 3}]),
    "penalised": (False, [{"temperature": 0.0, "repetition_penalty": 5.0}, {"seed": 2}, {"temperature": 0.0}]),
    "no ending": (False, [{"temperature": 0.0, "min_tokens": 5}, {"seed": 2}, {"temperature": 0.0}]),
}
"""Whether what is known of the logits counts, and the parameters of three rows."""


@pytest.mark.parametrize("room", [3, 8])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_known_of_the_logits_changes_no_outcome(way: str, room: int) -> None:
    counts, params = WAYS[way]
    logits = random_logits(3, seed=5)
    logits[2, 9] = logits[2].max() + 1
    rows = [ask(**each) for each in params]
    counting = Counting()
    expected = choose(logits, rows, counting)
    assert counting.num_searches == 1
    chosen = choose(logits, rows, counting, likeliest=known(logits, room))
    assert counting.num_searches == (1 if counts else 2)
    assert torch.equal(chosen.tokens_N, expected.tokens_N)
    assert chosen.chosen() == expected.chosen()


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 2.0}, {"logit_bias": ((4, 1.5),)}, {"grammar": "any"}, {"min_tokens": 9}],
    ids=lambda params: next(iter(params)),
)
def test_a_row_changes_its_own_logits_and_no_row_is_copied(params: dict[str, Any]) -> None:
    logits = random_logits(3)
    before = logits.clone()
    rows = [ask(temperature=0.0), ask([7, 9], temperature=0.0, **params), ask(seed=1)]
    if "grammar" in params:
        rows[1].allowed = bits(3, 17, 49)
    counting = Counting()
    choose_in_place(logits, rows, counting, known(logits, 3))
    assert (counting.num_searches, counting.address) == (1, logits.data_ptr())
    assert [torch.equal(*each) for each in zip(logits, before, strict=True)] == [True, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_known_to_be_invalid_says_so(bad: float) -> None:
    logits = random_logits(2)
    logits[1] = bad
    rows = [ask(temperature=0.0)] * 2
    good, wrong = choose(logits, rows, backend, likeliest=known(logits, 4)).chosen().outcomes()
    assert [good] == sample(logits[:1], rows[:1])
    assert isinstance(wrong, InvalidLogitsError)
    assert str(wrong) == str(sample(logits[1:], rows[1:])[0])


def test_the_outcome_of_a_greedy_batch_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []

    class Copy(HostCopy):
        def __init__(self, *tensors: torch.Tensor, device: torch.device) -> None:
            copied.extend(tensors)
            super().__init__(*tensors, device=device)

    monkeypatch.setattr("common.engine.sampler.HostCopy", Copy)
    logits = random_logits(3)
    choose(logits, [ask(temperature=0.0)] * 3, backend, likeliest=known(logits, 4))
    assert [each.nbytes for each in copied] == [4 * 12]
