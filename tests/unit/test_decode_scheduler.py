"""Continuous batching: who is let in, what is promised, how choices fork, and when blocks come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.contract.ids import Incarnation, RequestId
from common.contract.messages import Decode, FinishReason, Source, Tokens
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from decode_worker.request import DecodeRequest, Generation
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.sink import Pull

BLOCK_SIZE = 4
AT = Source(address="p:1", incarnation=Incarnation("p"))


def request(
    name: str, num_tokens: int, max_tokens: int, num_choices: int = 1, num_output: int = 0, choices: Sequence[int] = ()
) -> DecodeRequest:
    """With `num_tokens` to pull, `num_output` of which the client has already."""
    work = Decode(
        request=RequestId(name),
        attempt=1,
        token_ids=tuple(range(num_tokens)),
        prompt_len=num_tokens - num_output,
        choices=tuple(choices) or tuple(range(num_choices)),
        sampling=SamplingParams(max_tokens=max_tokens),
        budget_s=1.0,
        source=AT,
    )
    return DecodeRequest(work, Incarnation("g"), deadline=1.0, pull=Pull(work.key, AT))


def first_tokens(subject: DecodeRequest, *reasons: FinishReason | None) -> list[Tokens]:
    reasons = reasons or (None,) * len(subject.work.choices)
    return [
        Tokens(
            request=subject.work.request,
            attempt=1,
            choice=choice,
            position=len(subject.work.token_ids),
            token_ids=(99,),
            finish_reason=reason,
        )
        for choice, reason in zip(subject.work.choices, reasons, strict=True)
    ]


class Bench:
    """A scheduler and its pool, and an engine that samples zeros."""

    def __init__(self, num_blocks: int = 16, max_num_seqs: int = 8, max_sequence_tokens: int = 1000) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = DecodeScheduler(
            self.pool, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_sequence_tokens=max_sequence_tokens
        )
        self.pulled: dict[str, list[int]] = {}

    def reserve(self, *requests: DecodeRequest) -> list[DecodeRequest]:
        """The offers of `requests` open; those that are let in."""
        for each in requests:
            self.scheduler.want(each, -(-len(each.work.token_ids) // BLOCK_SIZE))
        admitted = self.scheduler.reserve()
        for each, blocks in admitted:
            self.pulled[each.work.request] = blocks
        self.check()
        return [each for each, _ in admitted]

    def admit(self, subject: DecodeRequest, *reasons: FinishReason | None) -> list[Generation]:
        self.scheduler.admit(subject, self.pulled.pop(subject.work.request), first_tokens(subject, *reasons))
        self.check()
        return subject.generations

    def enter(self, subject: DecodeRequest, *reasons: FinishReason | None) -> list[Generation]:
        assert self.reserve(subject) == [subject]
        return self.admit(subject, *reasons)

    def step(self, *, ends: Sequence[Generation] = ()) -> tuple[list[Generation], list[tuple[int, int]]]:
        """One step from beginning to end; `ends` produce their last token in it."""
        number = self.pool.step_started()
        batch, copies = self.scheduler.schedule()
        self.check()
        self.pool.step_finished(number)
        for generation in batch:
            if self.scheduler.is_running(generation):
                generation.append(0, None, "stop" if generation in ends else None)
                if generation in ends:
                    self.scheduler.remove(generation)
        self.check()
        return batch, copies

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.pool.check_invariants()

    @property
    def num_spoken_for(self) -> int:
        return self.pool.num_used + self.scheduler.num_promised


# --- how much a request needs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "num_choices", "num_output", "needed"),
    [
        pytest.param(4, 1, 1, 0, 1, id="the only token is never stored"),
        pytest.param(4, 2, 1, 0, 2, id="a second token stores the first"),
        pytest.param(4, 5, 1, 0, 2, id="the last token is never stored"),
        pytest.param(4, 6, 1, 0, 3, id="one token more"),
        pytest.param(1, 1, 1, 0, 1, id="a prompt of one token"),
        pytest.param(8, 5, 3, 0, 2 + 3, id="full blocks are shared, growth is not"),
        pytest.param(6, 3, 3, 0, 1 + 3, id="a partial block is copied for each choice"),
        pytest.param(6, 4, 3, 0, 1 + 3 * 2, id="a partial block and growth for each choice"),
        pytest.param(8, 6, 1, 4, 3, id="what the client has already is not generated again"),
    ],
)
def test_the_most_blocks_that_a_request_can_hold(
    num_tokens: int, max_tokens: int, num_choices: int, num_output: int, needed: int
) -> None:
    bench = Bench()
    subject = request("a", num_tokens, max_tokens, num_choices, num_output)
    assert bench.scheduler.blocks_needed(subject.work) == needed
    bench.enter(subject)
    assert bench.num_spoken_for == needed


def test_a_sequence_grows_no_longer_than_the_model_allows() -> None:
    bench = Bench(max_sequence_tokens=9)
    assert bench.scheduler.blocks_needed(request("a", 5, 500).work) == 2


def test_what_can_never_fit_is_known() -> None:
    bench = Bench(num_blocks=3)
    assert bench.scheduler.fits(request("a", 4, 9).work)
    assert not bench.scheduler.fits(request("a", 4, 10).work)


# --- the way in --------------------------------------------------------------------------------------------------


def test_a_request_is_let_in_only_when_all_it_can_need_is_free() -> None:
    bench = Bench(num_blocks=5)
    first, second = request("first", 4, 9), request("second", 4, 6)
    assert bench.reserve(first, second) == [first]
    assert bench.num_spoken_for == 3
    bench.scheduler.forget(first)
    bench.pool.release(bench.pulled.pop("first"))
    assert bench.reserve() == [second]


def test_nobody_overtakes() -> None:
    bench = Bench(num_blocks=4)
    first, big, small = request("first", 4, 5), request("big", 12, 5), request("small", 1, 1)
    assert bench.reserve(first, big, small) == [first]
    assert bench.scheduler.num_waiting == 2
    bench.scheduler.forget(big)
    assert bench.reserve() == [small]


def test_promised_blocks_are_not_given_away() -> None:
    bench = Bench(num_blocks=4)
    grows, other = request("grows", 4, 9), request("other", 8, 1)
    bench.enter(grows)
    assert bench.pool.num_free == 3
    assert bench.scheduler.num_promised == 2
    assert bench.reserve(other) == []


def test_a_settled_sequence_joins_at_the_next_step() -> None:
    bench = Bench()
    [a] = bench.enter(request("a", 4, 9))
    assert bench.step()[0] == [a]
    [b] = bench.enter(request("b", 4, 9))
    assert bench.step()[0] == [a, b]


def test_a_freed_place_is_taken_at_the_next_step() -> None:
    bench = Bench(max_num_seqs=2)
    generations = [bench.enter(request(name, 4, 3))[0] for name in "abcd"]
    a, b, c, d = generations
    assert bench.step(ends=[a])[0] == [a, b]
    assert bench.step(ends=[b, c])[0] == [b, c]
    assert bench.step()[0] == [d]
    assert bench.scheduler.num_waiting == 0


def test_a_sequence_never_lacks_a_block() -> None:
    bench = Bench(num_blocks=4)
    [generation] = bench.enter(request("a", 3, 14))
    for num_tokens in range(4, 17):
        assert generation.sequence.num_tokens == num_tokens
        bench.step(ends=[generation] if num_tokens == 16 else [])
        assert bench.pool.num_free >= bench.scheduler.num_promised
    assert bench.num_spoken_for == 0


# --- forks -------------------------------------------------------------------------------------------------------


def test_choices_share_full_blocks_and_copy_the_partial_one() -> None:
    bench = Bench()
    subject = request("a", 6, 9, num_choices=3)
    bench.reserve(subject)
    pulled = list(bench.pulled["a"])
    generations = bench.admit(subject)
    tables = [generation.sequence.block_table for generation in generations]
    assert tables[0] == pulled
    assert [table[0] for table in tables] == [pulled[0]] * 3
    assert len({table[1] for table in tables}) == 3
    assert bench.pool.ref_count(pulled[0]) == 3
    batch, copies = bench.step()
    assert batch == generations
    assert copies == [(pulled[1], tables[1][1]), (pulled[1], tables[2][1])]
    assert bench.step()[1] == [], "copies are made once"
    assert [generation.sequence.choice for generation in generations] == [0, 1, 2]


def test_a_full_last_block_is_not_copied() -> None:
    bench = Bench()
    generations = bench.enter(request("a", 8, 9, num_choices=2))
    _, copies = bench.step()
    assert copies == []
    tables = [generation.sequence.block_table for generation in generations]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]


def test_choices_keep_their_numbers() -> None:
    bench = Bench()
    generations = bench.enter(request("a", 6, 9, choices=(5, 2)))
    assert [generation.sequence.choice for generation in generations] == [5, 2]


@pytest.mark.parametrize(
    "reasons",
    [("stop", None), (None, "stop"), ("stop", None, "length"), (None, None, "stop"), ("stop", "stop", None)],
    ids=lambda reasons: " ".join(reason or "on" for reason in reasons),
)
def test_copies_outlive_the_choices_that_end_with_their_first_token(reasons: tuple[FinishReason | None, ...]) -> None:
    """What a pending copy reads and writes belongs to nobody else until the step that makes it is over."""
    bench = Bench()
    subject = request("a", 6, 5, num_choices=len(reasons))
    generations = bench.enter(subject, *reasons)
    going_on = [generation for generation in generations if generation.finish_reason is None]
    held = bench.pool.num_free
    number = bench.pool.step_started()
    batch, copies = bench.scheduler.schedule()
    assert batch == going_on
    copied = {block for copy in copies for block in copy}
    elsewhere = bench.pool.allocate(bench.pool.num_free - bench.scheduler.num_promised)
    assert not copied & set(elsewhere), "a block of a copy in flight is given away"
    assert held - bench.pool.num_free == len(elsewhere)
    bench.pool.step_finished(number)
    bench.pool.release(elsewhere)
    for generation in going_on:
        assert generation.sequence.block_table[1] in copied | set(generations[0].sequence.block_table)
        bench.scheduler.remove(generation)
    bench.check()
    assert bench.num_spoken_for == 0


def test_copies_of_a_request_that_is_given_up_are_let_go_at_the_next_step() -> None:
    bench = Bench()
    subject = request("a", 6, 5, num_choices=3)
    bench.enter(subject)
    bench.scheduler.forget(subject)
    bench.check()
    assert bench.step()[0] == []
    assert bench.num_spoken_for == 0


def test_all_choices_end_with_their_first_token() -> None:
    bench = Bench()
    bench.enter(request("a", 6, 1, num_choices=2), "length", "length")
    bench.step()
    assert bench.num_spoken_for == 0


# --- the way out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "pulling", "ready", "running", "in a step"])
def test_a_request_that_is_given_up_keeps_nothing(when: str) -> None:
    bench = Bench(num_blocks=6)
    blocker = request("blocker", 20, 1)
    if when == "waiting":
        bench.reserve(blocker)
    subject = request("a", 6, 5, num_choices=2)
    admitted = bench.reserve(subject)
    assert bool(admitted) == (when != "waiting")
    if when in ("ready", "running", "in a step"):
        bench.admit(subject)
    if when == "running":
        bench.step()
    if when == "in a step":
        number = bench.pool.step_started()
        batch, _ = bench.scheduler.schedule()
    bench.scheduler.forget(subject)
    bench.check()
    if when == "in a step":
        assert not any(bench.scheduler.is_running(generation) for generation in batch)
        assert bench.pool.num_free + bench.pool.num_limbo == bench.pool.num_blocks
        bench.pool.step_finished(number)
    if when == "pulling":
        bench.pool.release(bench.pulled.pop("a"))  # the pull's to release
    bench.step()
    assert bench.num_spoken_for == (5 if when == "waiting" else 0)
    assert bench.reserve() == []


def test_what_has_ended_can_be_removed_again() -> None:
    bench = Bench()
    [generation] = bench.enter(request("a", 6, 5))
    bench.step()
    bench.scheduler.remove(generation)
    bench.scheduler.remove(generation)
    bench.scheduler.forget(generation.request)
    bench.check()
    assert bench.num_spoken_for == 0


def test_blocks_of_a_sequence_that_ends_during_a_step_wait_for_it() -> None:
    bench = Bench(num_blocks=2)
    first, second = request("first", 4, 5), request("second", 4, 5)
    [generation] = bench.enter(first)
    number = bench.pool.step_started()
    bench.scheduler.schedule()
    bench.scheduler.remove(generation)
    assert bench.reserve(second) == [], "the step in flight still writes to them"
    bench.pool.step_finished(number)
    assert bench.reserve() == [second]


# --- tokens for the gateway --------------------------------------------------------------------------------------


def test_the_first_frame_repeats_the_first_token() -> None:
    bench = Bench()
    [generation] = bench.enter(request("a", 6, 5))
    bench.step()
    message = generation.tokens(generation.num_sent)
    assert (message.position, message.token_ids) == (6, (99, 0))


def test_tokens_are_sent_again_from_any_position_that_was_generated_here() -> None:
    bench = Bench()
    [generation] = bench.enter(request("a", 6, 9))
    for _ in range(3):
        bench.step()
    assert (generation.tokens(8).position, generation.tokens(8).token_ids) == (8, (0, 0))
    assert (generation.tokens(0).position, generation.tokens(0).token_ids) == (6, (99, 0, 0, 0))
