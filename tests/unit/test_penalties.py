"""Penalties from counts that are kept from step to step, against their definition; and whose counts they are."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.ids import RequestId, RequestKey
from common.contract.messages.gateway import Prefill
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, SampledToken, Samples, Slice
from common.engine.penalties import penalise
from common.engine.prompt import prompt_slice
from common.engine.runner import ModelRunner, load_runner
from common.engine.sequence import TokenSequence
from common.engine.token_counts import TokenCounts, token_counts

torch.set_num_threads(1)

VOCAB = 12
BLOCK_SIZE = 4
KEY = RequestKey(RequestId("r"), 1)
PROMPT = [5, 80, 17, 5, 43, 9, 17, 21, 77]
PENALISED = SamplingParams(
    max_tokens=40, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, logprobs=5
)

Floats = np.ndarray[Any, np.dtype[np.float32]]


def by_definition(logits_V: Floats, tokens: list[int], prompt_len: int, params: SamplingParams) -> Floats:
    """One row, token by token, in float32."""
    f = np.float32
    expected = logits_V.copy()
    output = Counter(tokens[prompt_len:])
    for token in set(tokens):
        x, repetition = expected[token], f(params.repetition_penalty)
        x = x / repetition if x > 0 else x * repetition
        presence = f(params.presence_penalty) * f(output[token] > 0)
        expected[token] = x - (presence + f(params.frequency_penalty) * f(output[token]))
    return expected


any_params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3, 1.8]),
    presence_penalty=st.sampled_from([0.0, 0.1, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1, 2.0]),
)
some_tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), rows=st.lists(st.tuples(any_params, some_tokens), min_size=1, max_size=5))
def test_penalties_are_those_of_the_definition_to_the_last_bit(
    data: st.DataObject, rows: list[tuple[SamplingParams, list[int]]]
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 3
    before = logits.clone()
    lens = [data.draw(st.integers(1, len(tokens))) for _, tokens in rows]
    samples = [
        Sample(params=params, choice=0, position=len(tokens), token_ids=tokens, prompt_len=prompt_len)
        for (params, tokens), prompt_len in zip(rows, lens, strict=True)
    ]
    changed = penalise(logits, Samples.of(samples), lambda: torch.tensor([tokens[-1] for _, tokens in rows]))
    assert changed == any(params.penalised for params, _ in rows)
    for row, (params, tokens) in enumerate(rows):
        assert logits[row].numpy().tolist() == by_definition(before[row].numpy(), tokens, lens[row], params).tolist()


# --- any schedule ----------------------------------------------------------------------------------------------------


@dataclass
class Player:
    """A sequence, and the token that a step in flight has chosen for it, if one is."""

    sequence: TokenSequence
    unknown: int | None = None


@dataclass
class Schedule:
    """Sequences join, leave, are preempted and moved; each step gives some of them a token, before or after the one
    before it is known."""

    data: st.DataObject
    players: list[Player] = field(default_factory=list)

    def pick(self, options: list[Any]) -> Any:
        return self.data.draw(st.sampled_from(options))

    def token(self) -> int:
        return self.data.draw(st.integers(0, VOCAB - 1))

    def join(self) -> None:
        params, tokens = self.data.draw(any_params), self.data.draw(some_tokens)
        prompt_len = self.data.draw(st.integers(1, len(tokens)))  # the rest was generated before a failover
        if not self.pick([True, False]):
            self.players.append(Player(TokenSequence(KEY, 0, tokens, prompt_len, params)))
            return
        shared = token_counts(params, tokens, prompt_len)
        for choice in range(self.pick([1, 3])):
            text = [*tokens, self.token()]
            self.players.append(Player(TokenSequence(KEY, choice, text, prompt_len, params, shared_counts=shared)))

    def leave(self) -> None:
        if self.players:
            self.players.remove(self.pick(self.players))

    def preempt(self) -> None:
        """The token on its way is dropped. Sampled again, it may be another: a GPU does not promise the same bits."""
        if self.players:
            self.pick(self.players).unknown = None

    def hear(self) -> None:
        for player in self.players:
            if player.unknown is not None:
                player.sequence.token_ids.append(player.unknown)
                player.unknown = None

    def move(self) -> None:
        """To another worker, with what is known of it."""
        if self.players:
            player = self.pick(self.players)
            old = player.sequence
            player.sequence = TokenSequence(KEY, old.choice, list(old.token_ids), old.prompt_len, old.sampling)
            player.unknown = None

    def step(self) -> None:
        """Of some of them, in any order. The host knows no token of the step before that was not heard."""
        chosen = [player for player in self.data.draw(st.permutations(self.players)) if self.pick([True, True, False])]
        texts, samples = [], []
        for player in chosen:
            sequence = player.sequence
            texts.append([*sequence.token_ids, *(() if player.unknown is None else (player.unknown,))])
            samples.append(
                Sample(
                    params=sequence.sampling,
                    choice=sequence.choice,
                    position=len(texts[-1]),
                    token_ids=sequence.token_ids,
                    prompt_len=sequence.prompt_len,
                    counts=sequence.counts,
                )
            )
        self.hear()  # a step is computed while the tokens of the one before it are told, or after that
        logits_V = torch.linspace(-3, 3, VOCAB)
        got = logits_V.repeat(len(chosen), 1)
        last = torch.tensor([text[-1] for text in texts], dtype=torch.int64)
        penalise(got, Samples.of(samples), lambda: last)
        for row, (player, text) in enumerate(zip(chosen, texts, strict=True)):
            sequence = player.sequence
            expected = by_definition(logits_V.numpy(), text, sequence.prompt_len, sequence.sampling)
            assert got[row].numpy().tolist() == expected.tolist()
            self.check(sequence, text)
            player.unknown = self.token()

    def check(self, sequence: TokenSequence, text: list[int]) -> None:
        """What is kept is what counting from scratch gives."""
        assert (sequence.counts is not None) == sequence.sampling.penalised
        if sequence.counts is not None:
            scratch = TokenCounts(text, sequence.prompt_len, sequence.sampling)
            scratch.count(len(text) - 1)
            assert as_dict(sequence.counts) == as_dict(scratch)


def as_dict(counts: TokenCounts) -> dict[int, int]:
    assert len(set(counts.tokens)) == len(counts.tokens), "a token twice"
    return dict(zip(counts.tokens, counts.nums, strict=True))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_counts_are_those_from_scratch_whatever_the_schedule(data: st.DataObject) -> None:
    schedule = Schedule(data)
    schedule.join()
    events = [schedule.join, schedule.leave, schedule.preempt, schedule.hear, schedule.move]
    for _ in range(data.draw(st.integers(1, 12))):
        schedule.pick([*events, *[schedule.step] * len(events)])()


def test_counts_concern_what_the_penalties_concern() -> None:
    tokens = [4, 5, 4, 9, 9, 5]
    everything = token_counts(SamplingParams(max_tokens=9, repetition_penalty=2.0), tokens, 3)
    output = token_counts(SamplingParams(max_tokens=9, presence_penalty=1.0), tokens, 3)
    assert everything is not None
    assert output is not None
    for counts in (everything, output):
        counts.count(2)
        counts.count(6)
    assert as_dict(everything) == {4: 0, 5: 1, 9: 2}
    assert as_dict(output) == {9: 2, 5: 1}
    assert token_counts(SamplingParams(max_tokens=9), tokens, 3) is None
    with pytest.raises(AssertionError, match="6 tokens are counted, 5 are asked for"):
        output.count(5)


class Watched(list[int]):
    """Tokens, and how many of them were read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        self.num_read += len(part)
        return part


def test_a_token_is_counted_once_and_not_looked_at_again() -> None:
    tokens = Watched(range(1000))
    counts = token_counts(SamplingParams(max_tokens=9, repetition_penalty=2.0), tokens, 1000)
    assert counts is not None
    counts.count(1000)
    assert tokens.num_read == 1000
    tokens += [7, 7]
    counts.count(1002)
    assert tokens.num_read <= 1000 + 2 * 2, "a step reads what is new"
    assert as_dict(counts)[7] == 2


def test_a_draft_is_counted_without_reading_the_text_again() -> None:
    tokens = Watched(range(1000))
    counts = token_counts(SamplingParams(max_tokens=9, repetition_penalty=2.0, presence_penalty=1.0), tokens, 990)
    assert counts is not None
    counts.count(999)
    before = as_dict(counts)
    tokens.num_read = 0
    drafted = [counts.with_draft(1000, draft) for draft in ([], [1000], [1000, 3])]
    assert tokens.num_read == len(drafted), "the last token, each time"
    assert [as_dict(each) for each in drafted] == [
        before | {999: 1},
        before | {999: 1, 1000: 1},
        before | {999: 1, 1000: 1, 3: 1},
    ]
    assert as_dict(counts) == before


def test_what_choices_begin_with_is_counted_once() -> None:
    begin = Watched([*range(990), *range(10)])  # of which the last ten are output
    shared = token_counts(PENALISED, begin, 990)
    texts = [Watched([*begin, 980 + choice]) for choice in range(16)]
    sequences = [
        TokenSequence(KEY, choice, text, 990, PENALISED, shared_counts=shared) for choice, text in enumerate(texts)
    ]
    for num_more in range(3):
        for choice, each in enumerate(sequences):
            assert each.counts is not None
            each.counts.count(each.num_tokens - 1)
            scratch = TokenCounts(list(each.token_ids), 990, PENALISED)
            scratch.count(each.num_tokens - 1)
            assert as_dict(each.counts) == as_dict(scratch)
            each.token_ids.append(1000 + choice)
        assert begin.num_read == len(begin)
        assert [text.num_read for text in texts] == [num_more] * len(texts)


def test_choices_of_a_prompt_share_what_is_counted() -> None:
    work = Prefill(
        request=KEY.request,
        attempt=1,
        token_ids=(3, 4, 3),
        prompt_len=2,
        choices=(0, 1),
        sampling=PENALISED,
        budget_s=1.0,
    )
    first, second = prompt_slice(work, 0, 3, [0]).samples
    assert first.counts is second.counts is not None


# --- with a model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return load_runner(folder, kv_cache_bytes=2**17, block_size=BLOCK_SIZE, dtype="float32", swap_bytes=2**15)


def generation(table: list[int], choice: int = 0, tokens: list[int] | None = None) -> TokenSequence:
    return TokenSequence(KEY, choice, list(PROMPT if tokens is None else tokens), len(PROMPT), PENALISED, 0, table)


def step(runner: ModelRunner, *sequences: TokenSequence) -> list[SampledToken]:
    """What each has that is not computed yet, and its next token."""
    slices = [
        Slice(
            token_ids=each.token_ids[each.num_computed :],
            start=each.num_computed,
            block_table=each.block_table,
            samples=(
                Sample(
                    params=each.sampling,
                    choice=each.choice,
                    position=each.num_tokens,
                    token_ids=each.token_ids,
                    prompt_len=each.prompt_len,
                    counts=each.counts,
                ),
            ),
        )
        for each in sequences
    ]
    outcomes = []
    for each, (outcome,) in zip(sequences, runner.step(slices), strict=True):
        assert isinstance(outcome, SampledToken)
        each.num_computed = each.num_tokens
        each.token_ids.append(outcome.token_id)
        outcomes.append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def undisturbed(runner: ModelRunner) -> list[int]:
    """20 tokens, the penalties of each counted from its text alone."""
    tokens = list(PROMPT)
    for _ in range(20):
        fresh = generation(list(range(8)), tokens=tokens)
        step(runner, fresh)
        tokens = fresh.token_ids
    plain = SamplingParams(max_tokens=40, temperature=0.0)
    without = TokenSequence(KEY, 0, list(PROMPT), len(PROMPT), plain, 0, range(8))
    run(runner, 20, without)
    assert without.token_ids != tokens, "the penalties change nothing"
    return tokens


def run(runner: ModelRunner, num: int, *sequences: TokenSequence) -> None:
    for _ in range(num):
        step(runner, *sequences)


def test_a_sequence_goes_on_alike_when_its_blocks_were_taken(runner: ModelRunner, undisturbed: list[int]) -> None:
    """Swapped out and in, then forgotten and computed again, while others have its place in the batch."""
    tested, other = generation(list(range(8))), generation([20, 21, 22, 23, 24, 25, 26, 27], tokens=[*PROMPT, 99, 99])
    run(runner, 4, other, tested)
    blocks = list(tested.block_table)
    runner.swap_out([(block, block) for block in blocks])
    runner.cache.blocks[blocks] = math.nan  # they are others' now
    run(runner, 3, other)
    tested.block_table = type(tested.block_table)("q", [block + 8 for block in blocks])
    runner.swap_in([(block, block + 8) for block in blocks])
    run(runner, 4, tested, other)
    tested.num_computed = 0
    run(runner, 5, tested, other)
    run(runner, 7, tested)
    assert tested.token_ids == undisturbed


def test_a_sequence_goes_on_alike_elsewhere(runner: ModelRunner, undisturbed: list[int]) -> None:
    """What was delivered before a move, or a failover, counts as output, since the length of the prompt goes along."""
    first = generation(list(range(8)))
    run(runner, 7, first)
    moved = generation(list(range(8, 16)), tokens=first.token_ids)
    run(runner, 13, moved)
    assert moved.token_ids == undisturbed


def test_choices_of_a_request_do_not_share_their_counts(runner: ModelRunner, undisturbed: list[int]) -> None:
    """They begin alike and get other tokens; who comes last has the place, and the blocks, of one that has ended."""
    one, other = generation(list(range(8))), generation(list(range(8, 16)), choice=1)
    other.token_ids.append(undisturbed[-1])
    run(runner, 9, other, one)
    late = generation(list(range(8, 16)), choice=2)
    run(runner, 11, late, one)
    run(runner, 9, late)
    assert one.token_ids == late.token_ids == undisturbed
    assert other.token_ids[: len(undisturbed)] != undisturbed


@given(some_tokens, st.lists(some_tokens, min_size=1, max_size=4), st.integers(0, 3), any_params)
def test_drafted_tokens_count_as_if_they_had_come(
    prompt: list[int], rounds: list[list[int]], num_read: int, params: SamplingParams
) -> None:
    """Each position of a draft is penalised as with a sequence that has these tokens, and leaves the counts of the
    sequence as they were."""
    generator = np.random.default_rng(len(prompt))
    tokens = list(prompt)
    counts = TokenCounts(tokens, len(prompt), params)
    for draft in rounds:
        for place in range(len(draft) + 1):
            logits_V = generator.standard_normal(VOCAB).astype(np.float32)
            sample = Sample(
                params=params,
                choice=0,
                position=len(tokens) + place,
                token_ids=tokens,
                prompt_len=len(prompt),
                counts=counts,
                draft=draft[:place],
            )
            known = [*tokens, *draft[:place]]
            last = torch.tensor(known[-1:])
            found = torch.tensor(logits_V)[None]
            penalise(found, Samples.of([sample]), lambda last=last: last)  # type: ignore[misc]
            assert np.array_equal(found[0].numpy(), by_definition(logits_V, known, len(prompt), params))
        tokens += draft[: 1 + num_read]
