"""The running batch: who joins, who makes place for whom, and the calendar of who needs a block when."""

from __future__ import annotations

import math
from random import Random

import pytest
from decode_bench import BLOCK_SIZE, ENDLESS, request

from common.contract.tiers import Tier
from common.engine.sequence import TokenSequence
from decode_worker.batch_bound import BatchBound
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice
from decode_worker.running_batch import RunningBatch, seniority

INTERACTIVE, STANDARD, BATCH = Tier


def choice(
    order: int, tier: Tier = STANDARD, num_tokens: int = 1, num_blocks: int | None = None, max_tokens: int = ENDLESS
) -> DecodeChoice:
    """With the blocks that its tokens need, unless told otherwise, and a prompt of one token."""
    subject = request(f"r{order}", max(1, num_tokens), max_tokens, tier=tier)
    num_blocks = -(-num_tokens // BLOCK_SIZE) if num_blocks is None else num_blocks
    token_ids = list(range(num_tokens))
    table = list(range(num_blocks))
    sequence = TokenSequence(subject.key, 0, token_ids, 1, subject.work.sampling, num_tokens - 1, table)
    (handle,) = subject.work.handles
    return DecodeChoice(subject, sequence, subject.chain, order, 0.5, handle)


class Bench:
    """A batch whose sequences get a token with each step."""

    def __init__(self, max_num_seqs: int = 4, ageing_s: float = math.inf) -> None:
        policy = Policy(
            block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_sequence_tokens=1_000_000, ageing_s=ageing_s
        )
        self.batch = RunningBatch(policy, BatchBound(policy))
        self.now = 0.0

    def add(self, *choices: DecodeChoice) -> None:
        for each in choices:
            self.batch.add(each, self.now)
        self.batch.check_invariants()

    def step(self) -> tuple[list[DecodeChoice], list[DecodeChoice]]:
        """Those that have joined, those that were due and got their block."""
        joined, _ = self.batch.next_step(self.now)
        due = self.batch.due()
        for each in due:
            each.sequence.block_table.append(0)
        self.batch.fed(due)
        self.batch.check_invariants()
        for each in self.batch.running():
            each.sequence.token_ids.append(0)
        return joined, due


def test_seniority_is_tier_then_order() -> None:
    batch, standard, vip = choice(0, BATCH), choice(1), choice(2, INTERACTIVE)
    newer = choice(3)
    assert sorted([newer, batch, vip, standard], key=seniority) == [vip, standard, newer, batch]


def test_who_is_ready_joins_at_the_next_step_senior_ones_first() -> None:
    bench = Bench(max_num_seqs=2)
    a, b, vip = choice(0), choice(1), choice(2, INTERACTIVE)
    bench.add(b, a, vip)
    assert bench.batch.num_running == 0
    assert bench.step()[0] == [vip, a]
    assert (bench.batch.num_running, bench.batch.num_ready) == (2, 1)
    assert [each.stage for each in (vip, a, b)] == [ChoiceStage.RUNNING, ChoiceStage.RUNNING, ChoiceStage.READY]
    bench.batch.discard(vip)
    assert bench.step()[0] == [b]
    assert bench.batch.running() == [a, b], "in the order of joining"


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_a_sequence_is_due_at_the_step_for_which_it_lacks_a_slot(num_tokens: int) -> None:
    bench = Bench()
    subject = choice(0, num_tokens=num_tokens)
    bench.add(subject)
    for _ in range(20):
        num_before, num_slots = subject.sequence.num_tokens, len(subject.sequence.block_table) * BLOCK_SIZE
        _, due = bench.step()
        assert due == ([subject] if num_before > num_slots else [])


def test_who_joins_without_a_slot_for_its_last_token_is_due_at_once() -> None:
    bench = Bench()
    subject = choice(0, num_tokens=5, num_blocks=1)
    bench.add(subject)
    assert bench.step() == ([subject], [subject])


def test_who_is_due_at_the_next_step_is_known_beforehand() -> None:
    bench = Bench()
    bench.add(choice(0, num_tokens=3), choice(1, num_tokens=3), choice(2, num_tokens=4))
    foreseen = []
    due = []
    for _ in range(12):
        foreseen.append(bench.batch.num_due_next)
        due.append(len(bench.step()[1]))
    assert due[1:6] == [1, 2, 0, 0, 1]
    assert foreseen[1:] == due[1:], "all of them were running already"


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_who_gets_its_last_token_from_the_step_before_is_known(max_tokens: int) -> None:
    batch = Bench().batch
    subject = choice(0, max_tokens=max_tokens)
    batch.add(subject, 0.0)
    ahead: list[DecodeChoice] = []
    for num_steps in range(max_tokens + 1):
        batch.next_step(0.0, ahead)
        assert batch.ending == ({subject} if num_steps == max_tokens else set())
        batch.fed(batch.due())
        subject.sequence.token_ids += [0] * len(ahead)  # the step before has ended
        ahead = [subject]


def test_who_has_sat_out_steps_gets_its_last_token_later() -> None:
    batch = Bench().batch
    subject = choice(0, max_tokens=1)
    batch.add(subject, 0.0)
    for _ in range(3):
        batch.next_step(0.0)
        assert batch.ending == set(), "it is in no step"
    batch.next_step(0.0, [subject])
    assert batch.ending == {subject}


def test_who_has_left_is_not_due() -> None:
    bench = Bench()
    a, b = choice(0, num_tokens=4), choice(1, num_tokens=4)
    bench.add(a, b)
    bench.step()
    bench.batch.discard(a)
    assert bench.step()[1] == [b]


def test_who_sits_out_is_due_again_at_the_next_step() -> None:
    bench = Bench()
    subject = choice(0, num_tokens=4)
    bench.add(subject)
    bench.step()
    for _ in range(3):
        bench.batch.next_step(bench.now)
        assert bench.batch.due() == [subject]
        bench.batch.sit_out([subject])
        bench.batch.check_invariants()
    assert bench.step()[1] == [subject]


def test_the_newest_of_the_lowest_tier_is_found_among_those_who_run_and_those_who_wait() -> None:
    bench = Bench(max_num_seqs=3)
    old, new, vip = choice(0, BATCH), choice(3, BATCH), choice(4, INTERACTIVE)
    assert bench.batch.newest() is None
    bench.add(old, new, vip)
    assert bench.batch.newest() is new
    bench.step()
    assert bench.batch.newest() is new
    newer, standard = choice(5, BATCH), choice(6)
    bench.add(newer, standard)
    assert bench.batch.newest() is newer
    for expected in (newer, new, old, standard, vip):
        assert bench.batch.newest() is expected
        bench.batch.discard(expected)
    assert bench.batch.newest() is None


def test_in_a_full_batch_a_higher_tier_takes_the_place_of_the_newest_of_the_lowest() -> None:
    bench = Bench(max_num_seqs=3)
    batch, newer_batch, standard = choice(0, BATCH), choice(1, BATCH), choice(2)
    bench.add(batch, newer_batch, standard)
    bench.step()
    vip = choice(3, INTERACTIVE)
    bench.add(vip)
    assert bench.batch.next_step(bench.now) == ([vip], [newer_batch])
    assert bench.batch.running() == [standard, batch, vip]
    assert newer_batch.stage is ChoiceStage.READY
    assert bench.batch.ready() == [newer_batch]


@pytest.mark.parametrize("tier", [STANDARD, BATCH])
def test_in_a_full_batch_an_equal_or_lower_tier_takes_no_place(tier: Tier) -> None:
    bench = Bench(max_num_seqs=1)
    runs = choice(5)
    bench.add(runs)
    bench.step()
    bench.add(choice(0, tier))
    assert bench.step()[0] == []
    assert bench.batch.running() == [runs]


def test_who_stepped_aside_is_due_as_many_steps_later() -> None:
    bench = Bench(max_num_seqs=1)
    subject, vip = choice(0, BATCH, num_tokens=2), choice(1, INTERACTIVE)
    bench.add(subject)
    bench.step()
    bench.add(vip)
    for _ in range(7):
        assert bench.step()[1] in ([], [vip])
    bench.batch.discard(vip)
    assert bench.step() == ([subject], []), "it has 3 tokens and 4 slots"
    assert bench.step() == ([], [])
    assert bench.step() == ([], [subject])


def test_who_has_waited_long_gets_a_place_before_a_higher_tier() -> None:
    bench = Bench(max_num_seqs=8, ageing_s=5.0)
    first = [choice(order, INTERACTIVE) for order in range(8)]
    more = [choice(order, INTERACTIVE) for order in range(10, 14)]
    waits = choice(9, BATCH)
    bench.add(*first)
    bench.step()
    bench.add(waits, *more)
    bench.now = 5.0
    bench.batch.discard(first[0])
    assert bench.step()[0] == [more[0]], "it has not waited long enough"
    bench.now = 5.1
    bench.batch.discard(first[1])
    assert bench.step()[0] == [waits]


def test_those_who_have_waited_long_get_one_place_in_eight() -> None:
    bench = Bench(max_num_seqs=16, ageing_s=5.0)
    aged = [choice(order, BATCH) for order in range(5)]
    bench.add(*aged)
    bench.now = 9.0
    bench.add(*(choice(order, INTERACTIVE) for order in range(10, 40)))
    joined, _ = bench.step()
    assert sum(each in aged for each in joined) == 2
    assert len(joined) == 16
    bench.batch.discard(aged[0])
    assert bench.step()[0] == [aged[2]], "as soon as one of them has ended"


def test_who_got_its_place_by_waiting_does_not_step_aside() -> None:
    bench = Bench(max_num_seqs=2, ageing_s=5.0)
    aged, other = choice(0, BATCH), choice(1)
    bench.add(aged)
    bench.now = 9.0
    bench.add(other)
    bench.step()
    vip, another = choice(2, INTERACTIVE), choice(3, INTERACTIVE)
    bench.add(vip, another)
    assert bench.step()[0] == [vip]
    assert bench.batch.running() == [aged, vip]
    assert set(bench.batch.ready()) == {another, other}


def test_discarding_what_is_not_here_does_nothing() -> None:
    bench = Bench()
    bench.batch.discard(choice(0))
    bench.batch.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_the_calendar_agrees_with_looking_at_everybody(seed: int) -> None:
    random = Random(seed)
    bench = Bench(max_num_seqs=random.choice([1, 3, 8]))
    here: list[DecodeChoice] = []
    for order in range(300):
        if random.random() < 0.4:
            here.append(choice(order, random.choice(list(Tier)), num_tokens=random.randint(1, 9)))
            bench.add(here[-1])
        if here and random.random() < 0.3:
            bench.batch.discard(here.pop(random.randrange(len(here))))
        bench.batch.next_step(bench.now)
        lacking = [g for g in bench.batch.running() if g.sequence.num_tokens > len(g.sequence.block_table) * BLOCK_SIZE]
        due = bench.batch.due()
        assert sorted(due, key=seniority) == sorted(lacking, key=seniority), f"seed {seed}"
        sitting_out = [each for each in due if random.random() < 0.3]
        bench.batch.sit_out(sitting_out)
        fed = [each for each in due if each not in sitting_out]
        for each in fed:
            each.sequence.block_table.append(0)
        bench.batch.fed(fed)
        bench.batch.check_invariants()
        for each in bench.batch.running():
            if each not in sitting_out:
                each.sequence.token_ids.append(0)
