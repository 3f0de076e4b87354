"""Sampling kernels against the sampler in torch, which sorts, and against what the words mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_samples import golden_logits, golden_samples, golden_tokens
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.contract.sampling import SamplingParams
from common.engine.batch import MIN_TEMPERATURE, Sample, Samples
from common.engine.draw import column, draw, random_numbers
from common.engine.kernels import sampler
from common.engine.kernels.backend import TritonBackend

VOCABULARY = 128_256
"""Tokens of Llama 3: sixteen chunks."""
SIZES = st.one_of(st.integers(2, 60), st.sampled_from([1023, 1024, 1025, 8191, 8192, 8193, 9000]))


def sample_of(seed: int, **parameters: Any) -> Sample:
    """A sample with these parameters."""
    params = SamplingParams(max_tokens=10, seed=seed, **parameters)
    return Sample(params=params, choice=seed % 3, position=seed % 1000, token_ids=(), prompt_len=0)


def drawn(logits: torch.Tensor, best: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """By the kernels."""
    device = logits.device
    params = [each.params for each in samples]
    return sampler.draw(
        logits,
        best,
        column(Samples.of(samples), "temperature").to(device),
        torch.tensor([each.top_k for each in params], dtype=torch.int32, device=device),
        torch.tensor([each.top_p for each in params], device=device),
        torch.tensor([each.min_p for each in params], device=device),
        torch.from_numpy(random_numbers(Samples.of(samples))).to(device),
        hiding=any(each.top_k or each.top_p < 1 or each.min_p for each in params),
    )


def kept_by(logits: torch.Tensor, sample: Sample) -> tuple[torch.Tensor, bool]:
    """Which tokens top-k, top-p and min-p keep, in float64; whether float32 could see a threshold otherwise."""
    params = sample.params
    x = (logits.double() - logits.double().max()) / max(params.temperature, MIN_TEMPERATURE)
    order = x.sort(descending=True).values
    kept, doubtful = torch.ones_like(x, dtype=torch.bool), False
    if params.top_k:
        kept &= x >= order[min(params.top_k, len(x)) - 1]
    if params.top_p < 1:
        mass = torch.where(kept, x, -math.inf).sort(descending=True).values.softmax(-1).cumsum(-1)
        doubtful |= bool(((mass - params.top_p).abs() < 1e-5).any())
        kept &= x >= order[int((mass < params.top_p).sum().clamp(max=len(x) - 1))]
    if params.min_p:
        doubtful |= bool(((x - math.log(params.min_p)).abs() < 1e-5).logical_and(x < 0).any())
        kept &= x >= math.log(params.min_p)
    return kept & (x > -math.inf), doubtful


def compare(logits: torch.Tensor, samples: list[Sample]) -> list[int]:
    """The tokens that the kernels draw. Raises `AssertionError` for one that is hidden, and for one that the sampler in
    torch does not draw, unless it is within rounding."""
    best = logits.max(-1).values
    ours, theirs = drawn(logits, best, samples).tolist(), draw(logits, best, Samples.of(samples)).tolist()
    for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        kept, doubtful = kept_by(logits[row], samples[row])
        if not doubtful:
            assert bool(kept[one]), "a token that is hidden"
            assert one == other or near_tie(logits[row], samples[row], one, other), (row, one, other)
    return list(ours)


def near_tie(logits: torch.Tensor, sample: Sample, one: int, other: int) -> bool:
    """Whether the number is within rounding of the border between two tokens that are kept."""
    kept, _ = kept_by(logits, sample)
    x = (logits.double() - logits.double().max()) / max(sample.params.temperature, MIN_TEMPERATURE)
    cumulative = (x.exp() * kept).cumsum(-1)
    cumulative /= cumulative[-1].clone()
    first = min(one, other)
    between = not bool(kept[first + 1 : max(one, other)].any())
    return between and abs(float(cumulative[first]) - float(random_numbers(Samples.of([sample]))[0])) < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    size=SIZES, rows=st.integers(1, 3), seed=st.integers(0, 2**31), spoil=st.sampled_from(["", "nan", "inf", "ties"])
)
@example(size=VOCABULARY, rows=3, seed=100_000, spoil="nan")
@example(size=VOCABULARY, rows=3, seed=100_000, spoil="ties")
def test_best(device: torch.device, size: int, rows: int, seed: int, spoil: str) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, size)
    place = seed % size
    if spoil == "ties":
        logits = logits.round()
    elif spoil:
        logits[-1, place] = float(spoil)
    logits = logits.to(device)
    values, tokens = sampler.best(logits)
    expected, _ = logits.max(-1)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    for row in range(rows):
        if not expected[row].isnan():
            first = int((logits[row] == expected[row]).nonzero()[0])
            assert int(tokens[row]) == first
        assert 0 <= int(tokens[row]) < size


def test_of_nothing_the_best_is_minus_infinity(device: torch.device) -> None:
    values, tokens = sampler.best(torch.full((1, 20), -math.inf, device=device))
    assert values.tolist() == [-math.inf]
    assert 0 <= int(tokens) < 20


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-20, 0.3, 1.0, 4.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 50, 10**6]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)
"""What a row asks for; each for something else, so that few batches show many combinations."""


@pytest.mark.parametrize("sizes", [(2, 60), (1023, 1025), (8191, 8192), (10000, 16384)], ids=str)
@settings(max_examples=10, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    rows=st.tuples(ROW, ROW, ROW),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    ties=st.booleans(),
    hidden=st.booleans(),
)
def test_draw_as_the_sampler_in_torch_does(
    device: torch.device,
    sizes: tuple[int, int],
    data: st.DataObject,
    seed: int,
    rows: tuple[dict[str, float], ...],
    spread: float,
    ties: bool,
    hidden: bool,
) -> None:
    """Within a tile, at its border, at that of a chunk, and beyond."""
    torch.manual_seed(seed)
    logits = torch.randn(4, data.draw(st.integers(*sizes))) * spread
    if ties:
        logits = logits.round()
    if hidden:
        logits[:, 1::3] = -math.inf
    logits = logits.to(device)
    plain = sample_of(seed + 1, temperature=rows[0]["temperature"])
    compare(logits, [*(sample_of(seed + row, **parameters) for row, parameters in enumerate(rows)), plain])


def test_draw_from_rows_of_sixteen_chunks(device: torch.device) -> None:
    """The programs of the chunks fill one window: with the most likely tokens, by number or by weight; or not at all,
    when there are more likely tokens than it holds. A GPU runs them at the same time, so it draws for many rows, and
    twice."""
    asked: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 1000, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
        {"top_p": 0.7},
        {},
    ]
    copies = 32 if device.type == "cuda" else 1
    torch.manual_seed(1)
    logits = torch.randn(copies, len(asked), VOCABULARY)
    logits[:, 0] *= 4
    logits[:, 2] = torch.where(torch.rand(copies, VOCABULARY) < 0.04, logits[:, 2] / 100, -20.0)
    assert ((logits[:, 2] > -1).sum(-1) > sampler._WINDOW).all()
    logits = logits.flatten(0, 1).to(device)
    samples = [sample_of(seed, **parameters) for seed, parameters in enumerate(asked * copies)]
    tokens = compare(logits, samples)
    if device.type == "cuda":
        assert drawn(logits, logits.max(-1).values, samples).tolist() == tokens, "not the same twice"


@pytest.mark.parametrize("parameters", [{"top_k": 1}, {"temperature": 4.0}], ids=str)
def test_a_wrong_token_is_found(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    logits, right = torch.linspace(1, 0, 60, device=device)[None], sampler.draw
    compare(logits, [sample_of(5, **parameters)])
    monkeypatch.setattr(sampler, "draw", lambda *tensors, hiding: (right(*tensors, hiding=hiding) + 1) % 60)
    with pytest.raises(AssertionError):
        compare(logits, [sample_of(5, **parameters)])


@pytest.mark.parametrize("top_k", [64, 2**31, 2**32 + 1, 2**63 - 1])
def test_a_top_k_of_more_tokens_than_there_are_hides_none(device: torch.device, top_k: int) -> None:
    logits = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(device)
    best = logits.max(-1).values
    samples = [[sample_of(seed, top_k=each) for seed in range(8)] for each in (0, top_k)]
    everything, tokens = (TritonBackend(device).draw(logits, best, Samples.of(each)).tolist() for each in samples)
    assert tokens == everything
    assert len(set(tokens)) > 3


def test_no_upgrade_changes_seeded_output(device: torch.device) -> None:
    logits = golden_logits().to(device)
    assert drawn(logits, logits.max(-1).values, golden_samples()).tolist() == golden_tokens()


def test_what_is_beyond_a_top_p_that_is_just_reached_is_hidden(device: torch.device) -> None:
    """Of weights 1, 1/64 and 252 times 1/256 the first two are 65 of 128 parts; all others are about as far from the
    best as the second. A GPU's exponentials are not exact enough for that."""
    logits = torch.tensor([0.0, -6.0] + [-8.0] * 252)[None] * math.log(2)
    logits = logits.to(device).expand(32, -1)

    def last(top_p: float) -> int:
        return int(drawn(logits, logits.max(-1).values, [sample_of(seed, top_p=top_p) for seed in range(32)]).max())

    assert last(66 / 128) > 1
    if device.type == "cpu":
        assert last(65 / 128) <= 1


def test_a_min_p_of_one_keeps_the_most_likely_token(device: torch.device) -> None:
    logits = torch.linspace(-1, 1, 60, device=device)[None].expand(5, -1)
    samples = [sample_of(seed, temperature=1.0, min_p=1.0) for seed in range(5)]
    assert drawn(logits, logits.max(-1).values, samples).tolist() == [59] * 5


def test_a_number_at_a_border_finds_a_token_that_is_kept(device: torch.device) -> None:
    """Between tiles of tokens that are hidden, wherever the number is."""
    logits = torch.full((1, 5000), -math.inf)
    places = [3, 1023, 1024, 1500, 2047, 3000, 4999]
    logits[0, places] = torch.linspace(-1.0, 1.0, len(places))
    weights = logits.double().exp()[0, places]
    borders = (weights.cumsum(0) / weights.sum()).tolist()
    numbers = [border + shift for border in borders for shift in (-1e-7, -1e-9, 0.0, 1e-9, 1e-7)]
    numbers = [number for number in numbers if 0 < number < 1]
    rows = len(numbers)
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    tokens = sampler.draw(
        logits.to(device).expand(rows, -1),
        ones * logits.max(),
        ones,
        torch.zeros(rows, dtype=torch.int32, device=device),
        ones,
        zeros,
        torch.tensor(numbers, dtype=torch.float64, device=device),
        hiding=False,
    ).tolist()
    for number, token in zip(numbers, tokens, strict=True):
        low = next(place for place, border in zip(places, borders, strict=True) if border >= number - 1e-6)
        assert (
            low
            <= token
            <= next(
                (place for place, border in zip(places, borders, strict=True) if border >= number + 1e-6), places[-1]
            )
        )
        assert token in places


@pytest.mark.parametrize("number", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_every_number_finds_a_token_that_is_kept(device: torch.device, number: float) -> None:
    logits = torch.full((1, 9000), -50.0, device=device)
    logits[0, 17] = 0.0
    logits[0, 8500] = -0.5
    token = sampler.draw(
        logits,
        torch.zeros(1, device=device),
        torch.ones(1, device=device),
        torch.tensor([2], dtype=torch.int32, device=device),
        torch.ones(1, device=device),
        torch.zeros(1, device=device),
        torch.tensor([number], dtype=torch.float64, device=device),
        hiding=True,
    )
    assert token.tolist() == [17 if number <= 0.5 else 8500]
