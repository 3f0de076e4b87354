"""Continuous batching under random traffic, on a memory that says which token each slot of each block holds.

After every step, every sequence of the batch finds each of its tokens where its block table says; forks, copies, blocks
that change hands during a step and requests given up at any moment included. Nobody waits for ever, and in the end
every block is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from random import Random
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from common.contract.ids import Incarnation, RequestId
from common.contract.messages import Decode, Source, Tokens
from common.contract.sampling import SamplingParams
from common.engine.block_pool import BlockPool
from decode_worker.request import DecodeRequest, Generation
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.sink import Pull

BLOCK_SIZE = 2
NUM_BLOCKS = 12
MAX_SEQUENCE_TOKENS = 9
Choose = Callable[[Seq[Any]], Any]
AT = Source(address="p:1", incarnation=Incarnation("p"))


class Step:
    """A step on the device: what it was told when it began, done at some moment until it ends."""

    def __init__(self, number: int, batch: list[Generation], copies: list[tuple[int, int]]) -> None:
        self.number = number
        self.batch = batch
        self.copies = copies
        self.writes = [
            (
                list(generation.sequence.block_table),
                generation.sequence.num_tokens - 1,
                generation.sequence.token_ids[-1],
            )
            for generation in batch
        ]
        self.done = False


class Traffic:
    """A decode worker's scheduler, pulls that take their time, and an engine that does, too."""

    def __init__(self, choose: Choose) -> None:
        self.pick = choose
        self.max_num_seqs = self.pick([1, 2, 4])
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = DecodeScheduler(
            self.pool, block_size=BLOCK_SIZE, max_num_seqs=self.max_num_seqs, max_sequence_tokens=MAX_SEQUENCE_TOKENS
        )
        self.memory: dict[tuple[int, int], int] = {}
        """(block, slot) → token."""
        self.num_requests = 0
        self.waiting: list[DecodeRequest] = []
        self.pulling: dict[DecodeRequest, list[int]] = {}
        self.decoding: list[DecodeRequest] = []
        self.step: Step | None = None
        self.num_finished = 0

    # --- what may happen -----------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.arrive] * 2 + [self.reserve]
        steps += [self.begin_step] * 5 if self.step is None else [self.run_step, *[self.end_step] * 4]
        steps += [self.settle] * 4 if self.pulling else []
        steps += [self.give_up] if self.waiting or self.pulling or self.decoding else []
        return steps

    def arrive(self) -> None:
        num_tokens = self.pick(range(1, MAX_SEQUENCE_TOKENS))
        num_output = self.pick([0, 0, min(2, num_tokens - 1)])
        self.num_requests += 1
        work = Decode(
            request=RequestId(f"r{self.num_requests}"),
            attempt=1,
            token_ids=tuple(1000 * self.num_requests + position for position in range(num_tokens)),
            prompt_len=num_tokens - num_output,
            choices=tuple(range(self.pick([1, 1, 2, 3] if num_output == 0 else [1]))),
            sampling=SamplingParams(max_tokens=num_output + self.pick(range(1, 7))),
            budget_s=1.0,
            source=AT,
        )
        request = DecodeRequest(work, Incarnation("g"), deadline=1.0, pull=Pull(work.key, AT))
        if self.scheduler.fits(work):
            self.waiting.append(request)
            self.scheduler.want(request, -(-num_tokens // BLOCK_SIZE))

    def reserve(self) -> None:
        admitted = self.scheduler.reserve()
        assert [request for request, _ in admitted] == self.waiting[: len(admitted)], "not first come, first served"
        for request, blocks in admitted:
            self.waiting.remove(request)
            self.pulling[request] = blocks
            self.read(request, blocks)

    def read(self, request: DecodeRequest, blocks: list[int]) -> None:
        """The pull writes at once: a block that somebody still uses would show."""
        for position, token in enumerate(request.work.token_ids):
            self.memory[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = token

    def settle(self) -> None:
        request = self.pick(list(self.pulling))
        work = request.work
        first_tokens = []
        for choice in work.choices:
            remaining = work.sampling.max_tokens - (len(work.token_ids) - work.prompt_len)
            over = remaining == 1 or len(work.token_ids) + 1 == MAX_SEQUENCE_TOKENS
            reason = "length" if over else self.pick([None, None, None, "stop"])
            token = self.token(request, choice, len(work.token_ids))
            first_tokens.append(
                Tokens(
                    request=work.request,
                    attempt=1,
                    choice=choice,
                    position=len(work.token_ids),
                    token_ids=(token,),
                    finish_reason=reason,
                )
            )
        if all(token.finish_reason is not None for token in first_tokens):
            self.give_up_pull(request)
            return
        self.scheduler.admit(request, self.pulling.pop(request), first_tokens)
        self.decoding.append(request)

    def token(self, request: DecodeRequest, choice: int, position: int) -> int:
        """Every token is unmistakable."""
        return request.work.token_ids[0] + 100 * (choice + 1) + position

    def begin_step(self) -> None:
        number = self.pool.step_started()
        before = [g for r in self.decoding for g in r.generations if g.finish_reason is None]
        batch, copies = self.scheduler.schedule()
        assert len(batch) == min(self.max_num_seqs, len(before)), "a place is left empty, or there are too many"
        assert all(generation in before for generation in batch)
        self.step = Step(number, batch, copies)

    def run_step(self) -> None:
        """The device does the copies, then writes the KV of each sequence's last token."""
        step = self.step
        if step is None or step.done:
            return
        step.done = True
        for source, destination in step.copies:
            for slot in range(BLOCK_SIZE):
                self.memory[destination, slot] = self.memory.get((source, slot), -1)
        for table, position, token in step.writes:
            self.memory[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = token

    def end_step(self) -> None:
        self.run_step()
        assert self.step is not None
        step, self.step = self.step, None
        self.pool.step_finished(step.number)
        for generation in step.batch:
            if self.scheduler.is_running(generation):
                self.check_content(generation)
                self.sample(generation)

    def sample(self, generation: Generation) -> None:
        sequence, request = generation.sequence, generation.request
        num_tokens = sequence.num_tokens + 1
        last = num_tokens - sequence.prompt_len >= sequence.sampling.max_tokens or num_tokens >= MAX_SEQUENCE_TOKENS
        reason = "length" if last else self.pick([None, None, None, None, "stop"])
        generation.append(self.token(request, sequence.choice, sequence.num_tokens), None, reason)
        if reason is not None:
            self.scheduler.remove(generation)
            if request.finished:
                self.scheduler.forget(request)
                self.decoding.remove(request)
                self.num_finished += 1

    def give_up(self) -> None:
        request = self.pick([*self.waiting, *self.pulling, *self.decoding])
        if request in self.pulling:
            self.give_up_pull(request)
            return
        self.scheduler.forget(request)
        (self.waiting if request in self.waiting else self.decoding).remove(request)

    def give_up_pull(self, request: DecodeRequest) -> None:
        self.scheduler.forget(request)
        self.pool.release(self.pulling.pop(request))

    # --- what must hold ------------------------------------------------------------------------------------------

    def check_content(self, generation: Generation) -> None:
        sequence = generation.sequence
        table = sequence.block_table
        held = [self.memory.get((table[at // BLOCK_SIZE], at % BLOCK_SIZE)) for at in range(sequence.num_tokens)]
        assert held == sequence.token_ids, f"{sequence} finds {held} instead of {sequence.token_ids}"

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.pool.check_invariants()
        alive = [g for request in self.decoding for g in request.generations if g.finish_reason is None]
        assert self.scheduler.num_running <= self.max_num_seqs
        in_batch = [generation for generation in alive if self.scheduler.is_running(generation)]
        assert self.scheduler.num_running == len(in_batch)
        assert self.scheduler.num_waiting == len(self.waiting) + len(alive) - len(in_batch)
        assert self.scheduler.num_pulling == len(self.pulling)
        references = Counter(block for blocks in self.pulling.values() for block in blocks)
        references.update(block for generation in alive for block in generation.sequence.block_table)
        extra = [block for block in range(NUM_BLOCKS) if self.pool.ref_count(block) != references[block]]
        pending = {block for copy in self.scheduler._copies for block in copy}
        assert set(extra) <= pending, "a block is held by nobody, or not held by who names it"

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.pick(self.steps())()
            self.check()

    def drain(self) -> None:
        """Nobody gives up any more: whoever is here gets to the end in a bounded number of steps."""
        for _ in range(40 * (self.num_requests + 1)):
            if self.step is not None:
                self.end_step()
            self.reserve()
            while self.pulling:
                self.settle()
            self.check()
            if not self.waiting and not self.decoding:
                break
            self.begin_step()
        assert not self.waiting, "a request starves"
        assert not self.decoding, "a sequence starves"
        if self.step is not None:
            self.end_step()
        self.begin_step()  # lets go of copies that nobody needs any more
        self.end_step()
        assert (self.pool.num_free, self.scheduler.num_promised) == (NUM_BLOCKS, 0), "a block was lost"


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(5, 60))
def test_every_token_is_where_the_block_table_says(data: st.DataObject, num_events: int) -> None:
    traffic = Traffic(lambda options: data.draw(st.sampled_from(options)))
    traffic.run(num_events)
    event(f"{min(3, traffic.num_finished)} or more finished before the drain")
    traffic.drain()


def test_many_long_runs() -> None:
    """Deeper than the runs that can be shrunk; a failure names the seed."""
    num_finished = 0
    for seed in range(500):
        traffic = Traffic(Random(seed).choice)
        try:
            traffic.run(100)
            traffic.drain()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_finished += traffic.num_finished
    assert num_finished > 1000, f"only {num_finished} requests came to their end: the runs show nothing"
