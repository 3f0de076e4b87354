"""Continuous batching under random traffic and too little memory, on a cache that says what each slot holds.

A slot holds the whole beginning of a sequence up to its token, as KV does: whatever is read into, computed, copied,
swapped, cached or shared wrongly is found where a sequence looks for its own tokens. After every event no block is
owned twice or lost, no budget is exceeded, and in the end everyone who did not give up has got every token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from prompt_pulls import pull_of_prompt
from slow_slices import decode_slices, slices_of
from step_tokens import handles

from common.contract.block_hashes import BlockChain
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages.fields import FinishReason
from common.contract.messages.gateway import Decode, Source
from common.contract.messages.handoff import BlocksReady
from common.contract.messages.worker import Tokens
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.batch import Slice
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from decode_worker.columns import DecodeColumns
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, RequestState
from decode_worker.scheduler import DecodeScheduler
from decode_worker.speculation import DraftPlan
from decode_worker.step import Step
from kv_transfer.pull import Pull

BLOCK_SIZE = 2
NUM_BLOCKS = 12
FEWEST_BLOCKS = 6
"""Those of one sequence: several choices of a long prompt have room one after another."""
MAX_SEQUENCE_TOKENS = 13
Choose = Callable[[Sequence[Any]], Any]
AT = Source(address="p:1", incarnation=Incarnation("p"))
Content = tuple[Any, ...]
"""A salt and the tokens up to this one."""


def offered(work: Decode, computed: bool) -> Pull:
    """A pull whose source has opened its offer, and may have computed the prompt already."""
    pull = pull_of_prompt(work.key, AT)
    pull.attach()
    num_blocks = -(-len(work.token_ids) // BLOCK_SIZE)
    pull.blocks_ready(ready(work, num_blocks, num_ready=num_blocks if computed else 0))
    return pull


def announce(request: DecodeRequest) -> None:
    """The source has computed the prompt."""
    assert request.pull is not None
    num_blocks = request.pull.num_blocks
    assert num_blocks is not None
    request.pull.blocks_ready(ready(request.work, num_blocks, num_ready=num_blocks))


def ready(work: Decode, num_blocks: int, *, num_ready: int) -> BlocksReady:
    """What the source says of its offer."""
    request, attempt = work.key
    return BlocksReady(
        request=request,
        attempt=attempt,
        lease=LeaseId("lease"),
        epoch=1,
        start=0,
        block_ids=tuple(range(num_ready)),
        num_blocks=num_blocks,
    )


class Write:
    """What a step does to one slot, as it was told when it began."""

    def __init__(self, table: Sequence[int], salt: str, tokens: Sequence[int], position: int) -> None:
        self.block, self.slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        self.before = [(table[at // BLOCK_SIZE], at % BLOCK_SIZE) for at in range(position)]
        self.expected = [(salt, *tokens[: at + 1]) for at in range(position)]
        self.content: Content = (salt, *tokens[: position + 1])


@dataclass
class InFlight:
    """A step that has begun, and not ended."""

    number: int
    step: Step
    writes: list[Write]
    done: bool = False
    """Whether the device has done its work."""


class Drafts:
    """Drafts of any length of any sequences, of which some tokens are right."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.num_right = 0

    def plan(self, decodes: Sequence[DecodeChoice], most: int) -> DraftPlan:
        drafts, pick = {}, self.traffic.pick
        for choice in decodes:
            sequence = choice.sequence
            left = min(sequence.prompt_len + sequence.sampling.max_tokens, MAX_SEQUENCE_TOKENS) - sequence.num_tokens
            num = min(pick([0, 1, 2, 5]), left - 1, most)
            most -= max(0, num)
            true = [self.traffic.token(choice.request, sequence.choice, sequence.num_tokens + i) for i in range(num)]
            draft = [token if pick([True, True, False]) else 7 for token in true]
            if draft and sequence.sampling.grammar is None:
                drafts[choice] = draft
        return DraftPlan(drafts, frozenset())

    def draft_work(self, *planned: object) -> None:
        """There is no draft model."""

    def would_draft(self, decodes: Sequence[DecodeChoice], num_left: Callable[[DecodeChoice], int]) -> bool:
        return bool(self.traffic.pick([False, True]))


class Traffic:
    """A decode worker's scheduler, pulls that take their time, and an engine that does, too."""

    def __init__(self, choose: Choose) -> None:
        self.pick = choose
        self.columns = DecodeColumns(MAX_SEQUENCE_TOKENS, ())
        self.policy = Policy(
            block_size=BLOCK_SIZE,
            max_num_seqs=self.pick([1, 2, 4]),
            max_sequence_tokens=MAX_SEQUENCE_TOKENS,
            token_budget=self.pick([4, 6, 9]),
            prefill_tokens=self.pick([None, 1, 2, 5]),
            prefill_priority=self.pick([False, False, True]),
            memory_reserve=self.pick([-1.0, -0.3, 0.0, 0.3]),
            num_host_blocks=self.pick([0, 3, 12]),
            preempt_by=self.pick(["cost", "swap", "recompute"]),
            ageing_s=5.0,
        )
        self.pool = BlockPool(self.pick([FEWEST_BLOCKS, NUM_BLOCKS, NUM_BLOCKS]))
        self.drafts = Drafts(self) if self.pick([False, True]) else None
        self.scheduler = DecodeScheduler(
            self.pool,
            self.policy,
            Costs(prefill_s_per_token=self.pick([0.1, 1.0]), swap_s_per_block=0.5),
            self.drafts,  # type: ignore[arg-type]
        )
        self.memory: dict[tuple[int, int], Content] = {}
        self.host: dict[tuple[int, int], Content | None] = {}
        self.now = 0.0
        self.num_requests = 0
        self.waiting: list[DecodeRequest] = []
        self.pulling: dict[DecodeRequest, tuple[list[int], int]] = {}
        self.computing: list[DecodeRequest] = []
        self.decoding: list[DecodeRequest] = []
        self.lent: list[list[int]] = []
        self.awaited: list[DecodeChoice] = []
        """Sequences whose masks are late."""
        self.runs_ahead = self.pick([False, True, True])
        self.in_flight: list[InFlight] = []
        """The first one runs; of two, the second was scheduled meanwhile."""
        self.num_finished = 0
        self.num_found = 0
        """Tokens that prompts found computed after their computation had begun, or while they waited for it."""
        self.num_given_up = 0
        """Choices that were given up alone."""
        self.num_steps = 0
        self.num_in_vain = 0
        """Empty steps, one after the other, though there was work."""
        self.num_ahead = 0
        self.num_behind_prompts = 0
        """Steps that were planned while one with the ends of prompts ran."""

    # --- what may happen -----------------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        steps = [self.arrive] * 2 + [self.reserve] * 2 + [self.arrive_alike]
        steps += [self.begin_step] * (10 if self.in_flight else 5) if self.may_begin() else []
        steps += [self.run_step, *[self.end_step] * 4] if self.in_flight else []
        steps += [self.settle] * 4 if self.pulling else []
        steps += [self.tell_mask] * 2 if self.awaited else []
        steps += [self.begin_read] if any(map(self.unread, self.pulling)) else []
        steps += [self.give_up] if self.waiting or self.pulling or self.computing or self.decoding else []
        steps += [self.give_up_choice] if self.needless() else []
        steps += [self.lend] + ([self.take_back] * 3 if self.lent else [])
        return steps

    def arrive_alike(self) -> None:
        """Prompts come at once that are computed here, and begin with the same tokens, which are not cached."""
        family = 3000 + 10 * self.num_requests
        for _ in range(2):
            self.arrive(family)
        self.reserve()

    def arrive(self, alike: int | None = None) -> None:
        self.now += self.pick([0.0, 0.1, 3.0])
        num_tokens = self.pick(range(1, MAX_SEQUENCE_TOKENS - 1))
        num_output = self.pick([0, 0, min(2, num_tokens - 1)])
        self.num_requests += 1
        shared = self.pick([0, 3, 4, 8])
        local = self.pick([False, True])
        family = self.pick([1000, 2000])
        if alike is not None:
            num_tokens, num_output, shared, local, family = self.pick([9, 10, 11]), 0, 8, True, alike
        choices = tuple(range(self.pick([1, 1, 2, 3] if num_output == 0 else [1])))
        work = Decode(
            request=RequestId(f"r{self.num_requests}"),
            attempt=1,
            token_ids=tuple(
                family + position if position < shared else 10_000 * self.num_requests + position
                for position in range(num_tokens)
            ),
            prompt_len=num_tokens - num_output,
            choices=choices,
            handles=handles(len(choices)),
            sampling=SamplingParams(
                max_tokens=num_output + self.pick(range(1, 10)),
                presence_penalty=self.pick([0.0] * 5 + [1.0]),
                grammar=self.pick([None] * 5 + ["start: /a*/"]),
            ),
            budget_s=1.0,
            tier=self.pick(list(Tier)),
            tenant=self.pick(["", "a", "b"]),
            cache_salt="" if alike is not None else self.pick(["", "", "salt"]),
            source=None if local else AT,
            offered=None if local else RequestKey(RequestId(f"r{self.num_requests}"), 1),
        )
        pull = None if local else offered(work, self.read_at_once())
        chain = BlockChain(BLOCK_SIZE, work.cache_salt)
        request = DecodeRequest(work, Incarnation("g"), 1.0, self.now, chain, pull)
        if self.scheduler.fits(work):
            self.waiting.append(request)
            self.scheduler.want(request, self.now)

    def reserve(self) -> None:
        for reservation in self.scheduler.reserve(self.now):
            request = reservation.request
            assert request.pull is not None
            self.waiting.remove(request)
            self.pulling[request] = reservation.block_ids, reservation.num_held
            request.pull.reserve(reservation.block_ids, reservation.num_held)
            if not request.pull.revocable:
                self.read(request)
        self.sort_out_local()

    def read_at_once(self) -> bool:
        """Whether a source has computed the prompt when its offer opens."""
        return bool(self.pick([False] * 5 + [True]))

    def begin_read(self) -> None:
        """A source announces the blocks of a prompt."""
        request = self.pick([each for each in self.pulling if self.unread(each)])
        announce(request)
        self.read(request)

    def unread(self, request: DecodeRequest) -> bool:
        return request.pull is not None and request.pull.revocable

    def take_revoked(self) -> None:
        """Their blocks are others' now: should one of them be read into, that would show."""
        for request in [each for each in self.pulling if each.state is RequestState.WAITING]:
            del self.pulling[request]
            self.waiting.append(request)

    def sort_out_local(self) -> None:
        """Prompts computed here come and (when they are preempted) go by themselves."""
        for request in [r for r in self.waiting if r in self.scheduler.prompts.of_requests]:
            self.waiting.remove(request)
            self.computing.append(request)
        for request in [r for r in self.computing if r not in self.scheduler.prompts.of_requests]:
            self.computing.remove(request)
            self.waiting.append(request)

    def read(self, request: DecodeRequest) -> None:
        """The read writes at once: a block that somebody still uses would show; and so would a wrong one held."""
        work = request.work
        blocks, num_held = self.pulling[request]
        for position in range(len(work.token_ids)):
            at = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            content = (work.cache_salt, *work.token_ids[: position + 1])
            if position // BLOCK_SIZE < num_held:
                assert self.memory.get(at) == content, "a block is held that is not what its name says"
            else:
                self.memory[at] = content

    def settle(self) -> None:
        request = self.pick(list(self.pulling))
        if self.unread(request):
            announce(request)
            self.read(request)
        first_tokens = self.first_tokens(request)
        if all(token.finish_reason is not None for token in first_tokens):
            self.give_up_pull(request)
            return
        self.scheduler.settled(request, self.pulling.pop(request)[0], first_tokens, self.now)
        self.decoding.append(request)
        self.ask_masks(request.choices)

    def first_tokens(self, request: DecodeRequest) -> list[Tokens]:
        work = request.work
        first_tokens = []
        for choice in work.choices:
            remaining = work.sampling.max_tokens - (len(work.token_ids) - work.prompt_len)
            over = remaining == 1 or len(work.token_ids) + 1 == MAX_SEQUENCE_TOKENS
            reason: FinishReason | None = "length" if over else self.pick([None, None, None, "stop"])
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
        return first_tokens

    def token(self, request: DecodeRequest, choice: int, position: int) -> int:
        """Every generated token is unmistakable."""
        return 10_000 * int(request.work.request[1:]) + 1000 * (choice + 1) + position

    def may_begin(self) -> bool:
        if not self.in_flight:
            return True
        return self.runs_ahead and len(self.in_flight) == 1 and self.scheduler.may_run_ahead(self.in_flight[0].step)

    def begin_step(self) -> None:
        self.now += 1.0
        number = self.pool.step_started()
        before = self.in_flight[0].step if self.in_flight else None
        may_draft = self.pick([True, True, False])
        step = self.scheduler.schedule(self.now, before, may_draft=may_draft)
        self.take_revoked()
        self.sort_out_local()
        if step.drafts:
            assert may_draft
            assert before is None, "it is not known after which token they come"
            assert list(step.drafts) == [choice for choice in step.decodes if choice in step.drafts]
        num_drafted = sum(map(len, step.drafts.values()))
        num_tokens = len(step.decodes) + num_drafted + sum(chunk.end - chunk.start for chunk in step.chunks)
        assert num_tokens <= max(self.policy.token_budget, self.policy.max_num_seqs), "the budget is exceeded"
        if step.decodes:
            prompt_tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
            assert prompt_tokens <= (self.policy.prefill_tokens or self.policy.token_budget)
        computed = [*step.decodes, *(chunk.prompt.choice for chunk in step.chunks)]
        assert not set(computed) & set(self.awaited), "nobody knows what it may go on with"
        if step.empty:
            self.pool.step_finished(number)
            self.num_in_vain = self.num_in_vain + 1 if self.scheduler.has_work and not self.in_flight else 0
            assert self.num_in_vain < 3, "it says that there is work, and has none"
            return
        self.num_in_vain = 0
        self.num_ahead += len(self.in_flight)
        if before is not None and before.chunks:
            self.num_behind_prompts += 1
            assert not step.chunks, "who arrives meanwhile waits for two steps with prompts"
        slices = iter(self.decode_slices(step, before))
        writes = []
        for g in step.decodes:
            each = next(slices)
            tokens = list(g.sequence.token_ids)
            if each.follows is not None:
                assert before is not None
                assert before.decodes[each.follows] is g, "follows the token of another"
                assert g.sequence.sampling.grammar is None, "it needs a token that nobody knows"
                tokens.append(self.token(g.request, g.sequence.choice, len(tokens)))
            assert (each.start, each.samples[0].position) == (len(tokens) - 1, len(tokens))
            assert len(tokens) - g.sequence.prompt_len < g.sequence.sampling.max_tokens, "goes on beyond its end"
            assert len(tokens) < MAX_SEQUENCE_TOKENS, "goes on beyond its end"
            writes.append(Write(g.sequence.block_table, g.request.work.cache_salt, tokens, len(tokens) - 1))
            for token in step.drafts.get(g, ()):
                tokens.append(token)
                row = next(slices)
                assert (list(row.token_ids), row.start) == ([token], len(tokens) - 1)
                assert len(tokens) - g.sequence.prompt_len < g.sequence.sampling.max_tokens, "drafted beyond its end"
                writes.append(Write(g.sequence.block_table, g.request.work.cache_salt, tokens, len(tokens) - 1))
        for chunk in step.chunks:
            prompt = chunk.prompt
            writes += [
                Write(prompt.block_table, prompt.request.work.cache_salt, prompt.token_ids, position)
                for position in range(chunk.start, chunk.end)
            ]
        for write in writes:
            assert self.pool.ref_count(write.block) == 1, "a step writes to a block that others read"
        self.in_flight.append(InFlight(number, step, writes))

    def decode_slices(self, step: Step, before: Step | None) -> list[Slice]:
        """The decodes as the engine gets them."""
        if not step.decodes:
            return []
        decodes = [] if before is None else before.decodes
        slices = slices_of(self.columns.decoding(step.decodes, decodes, step.drafts).decodes, step)
        self.columns.check_invariants()
        for each, expected in zip(slices, decode_slices(step.decodes, decodes, step.drafts), strict=True):
            assert list(each.block_table[: len(expected.block_table)]) == list(expected.block_table)
            assert not any(each.block_table[len(expected.block_table) :])
            assert (each.start, each.follows, each.samples[0].position) == (
                expected.start,
                expected.follows,
                expected.samples[0].position,
            )
            assert each.follows is not None or list(each.token_ids) == list(expected.token_ids)
        return slices

    def run_step(self) -> None:
        """The device does the copies, the swaps, then computes each token from those before it."""
        running = next((each for each in self.in_flight if not each.done), None)
        if running is None:
            return
        running.done = True
        step = running.step
        for source, destination in step.copies:
            for slot in range(BLOCK_SIZE):
                self.move((source, slot), (destination, slot))
        for block, host in step.swap_outs:
            for slot in range(BLOCK_SIZE):
                self.host[host, slot] = self.memory.get((block, slot))
        for host, block in step.swap_ins:
            for slot in range(BLOCK_SIZE):
                content = self.host[host, slot]
                self.memory.pop((block, slot), None)
                if content is not None:
                    self.memory[block, slot] = content
        for write in running.writes:
            found = [self.memory.get(at) for at in write.before]
            assert found == write.expected, f"{write.content} is computed from {found}"
            self.memory[write.block, write.slot] = write.content

    def move(self, source: tuple[int, int], destination: tuple[int, int]) -> None:
        self.memory.pop(destination, None)
        if source in self.memory:
            self.memory[destination] = self.memory[source]

    def end_step(self) -> None:
        if not self.in_flight[0].done:
            self.run_step()
        ended = self.in_flight.pop(0)
        step = ended.step
        self.num_steps += 1
        self.pool.step_finished(ended.number)
        for choice in step.decodes:
            if choice.stage is ChoiceStage.RUNNING:
                self.sample(choice)
            num_right = 0
            for token in step.drafts.get(choice, ()):
                if choice.stage is not ChoiceStage.RUNNING or choice.sequence.token_ids[-1] != token:
                    break
                self.sample(choice)
                num_right += 1
            if choice in step.drafts:
                assert self.drafts is not None
                self.drafts.num_right += num_right
                self.scheduler.sequences.drafted(choice, num_right)
                assert len(choice.sequence.block_table) <= self.policy.blocks_for(choice.sequence.num_tokens)
        for chunk in self.scheduler.chunks_done(step.chunks):
            if chunk.last:
                self.computed(chunk.prompt)
        if step.chunks:
            self.match_again()

    def match_again(self) -> None:
        """What the step has computed, other prompts that begin alike need not compute."""
        prompts = self.scheduler.prompts.of_requests.values()
        num_before = sum(prompt.num_computed for prompt in prompts)
        self.scheduler.entrance.match_again()
        self.num_found += sum(prompt.num_computed for prompt in prompts) - num_before

    def computed(self, prompt: Any) -> None:
        request, choice = prompt.request, prompt.choice
        if choice is not None:
            self.scheduler.sequences.recomputed(choice, self.now)
            self.sample(choice)
            return
        self.computing.remove(request)
        self.scheduler.computed(request, self.first_tokens(request), self.now)
        self.decoding.append(request)
        self.ask_masks(request.choices)
        self.close_if_finished(request)

    def ask_masks(self, choices: Sequence[DecodeChoice]) -> None:
        """Those that have a grammar, and a token more, are in no step for a while; or for none, if it is known at once
        what they may go on with."""
        for choice in choices:
            wanted = choice.sequence.sampling.grammar is not None and choice.finish_reason is None
            if wanted and self.pick([False, True]):
                self.scheduler.entrance.mask_awaited(choice)
                self.awaited.append(choice)

    def tell_mask(self) -> None:
        """One of them may go on, unless it has ended meanwhile."""
        choice = self.pick(self.awaited)
        self.awaited.remove(choice)
        self.scheduler.entrance.mask_known(choice)

    def sample(self, choice: DecodeChoice) -> None:
        sequence, request = choice.sequence, choice.request
        sequence.num_computed = sequence.num_tokens
        num_tokens = sequence.num_tokens + 1
        last = num_tokens - sequence.prompt_len >= sequence.sampling.max_tokens or num_tokens >= MAX_SEQUENCE_TOKENS
        reason: FinishReason | None = "length" if last else self.pick([None, None, None, None, None, None, "stop"])
        choice.append(self.token(request, sequence.choice, sequence.num_tokens), None, reason)
        if reason is not None:
            self.scheduler.sequences.remove(choice)
            self.close_if_finished(request)
        self.ask_masks([choice])

    def close_if_finished(self, request: DecodeRequest) -> None:
        if request.finished:
            self.scheduler.forget(request)
            self.decoding.remove(request)
            self.num_finished += 1
            for choice in request.choices:
                sequence = choice.sequence
                wanted = [self.token(request, sequence.choice, at) for at in range(len(request.work.token_ids), 99)]
                output = sequence.token_ids[len(request.work.token_ids) :]
                assert output == wanted[: len(output)], "a token is missing, or comes twice"

    def give_up(self) -> None:
        request = self.pick([*self.waiting, *self.pulling, *self.computing, *self.decoding])
        if request in self.pulling:
            self.give_up_pull(request)
            return
        self.scheduler.forget(request)
        for group in (self.waiting, self.computing, self.decoding):
            if request in group:
                group.remove(request)

    def needless(self) -> list[DecodeChoice]:
        """Choices that their clients may give up alone."""
        going_on = [[choice for choice in request.choices if choice.goes_on] for request in self.decoding]
        return [choice for choices in going_on if len(choices) > 1 for choice in choices]

    def give_up_choice(self) -> None:
        choice = self.pick(self.needless())
        choice.given_up = True
        self.scheduler.sequences.remove(choice, by_client=True)
        self.num_given_up += 1

    def give_up_pull(self, request: DecodeRequest) -> None:
        self.scheduler.forget(request)
        self.pool.release(self.pulling.pop(request)[0])

    def lend(self) -> None:
        """Another worker borrows a cached prefix: what it finds there is what it asked for."""
        family, num_tokens = self.pick([1000, 2000]), self.pick([4, 8])
        chain = BlockChain(BLOCK_SIZE)
        tokens = [family + position for position in range(num_tokens)]
        chain.extend(tokens, num_tokens)
        blocks = self.scheduler.lend(chain.hashes)
        for position in range(len(blocks) * BLOCK_SIZE):
            found = self.memory.get((blocks[position // BLOCK_SIZE], position % BLOCK_SIZE))
            assert found == ("", *tokens[: position + 1]), "a block is lent that is not what its name says"
        if blocks:
            self.lent.append(blocks)

    def take_back(self) -> None:
        self.pool.release(self.lent.pop())

    # --- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.pool.check_invariants()
        alive = [g for request in self.decoding for g in request.choices if g.goes_on]
        by_stage = Counter(choice.stage for choice in alive)
        assert self.scheduler.batch.num_running == by_stage[ChoiceStage.RUNNING] <= self.policy.max_num_seqs
        assert self.scheduler.num_waiting == len(self.waiting) + by_stage[ChoiceStage.READY]
        assert len(self.scheduler.entrance.reserved) == len(self.pulling)
        assert len(self.scheduler.entrance.preempted) == by_stage[ChoiceStage.PREEMPTED]
        assert len(self.scheduler.prompts) == len(self.computing) + by_stage[ChoiceStage.RECOMPUTING]
        references = Counter(block for blocks, _ in self.pulling.values() for block in blocks)
        references.update(block for blocks in self.lent for block in blocks)
        references.update(block for choice in alive for block in choice.sequence.block_table)
        references.update(block for request in (*self.pulling, *self.computing) for block in request.fork_blocks)
        references.update(block for p in self.scheduler.prompts.of_requests.values() for block in p.block_table)
        references.update(block for copy in self.scheduler.sequences._copies for block in copy)
        counted = {block: self.pool.ref_count(block) for block in range(self.pool.num_blocks)}
        assert counted == {block: references[block] for block in range(self.pool.num_blocks)}, (
            "a reference is lost, or too many"
        )

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.pick(self.steps())()
            self.check()

    def drain(self) -> None:
        """Nobody gives up any more: whoever is here gets to the end in a bounded number of steps."""
        while self.lent:
            self.take_back()
        for _ in range(60 * (self.num_requests + 1)):
            while self.in_flight:
                self.end_step()
            self.reserve()
            while self.pulling:
                self.settle()
            while self.awaited:
                self.tell_mask()
            self.check()
            if not self.waiting and not self.decoding and not self.computing:
                break
            self.begin_step()
            if self.may_begin():
                self.begin_step()
        assert not self.waiting, "a request starves"
        assert not self.computing, "a prompt starves"
        assert not self.decoding, "a sequence starves"
        while self.in_flight:
            self.end_step()
        self.begin_step()  # lets go of copies that nobody needs any more
        while self.in_flight:
            self.end_step()
        assert self.pool.num_free == self.pool.num_blocks, "a block was lost"
        assert self.scheduler.swap.num_used == 0, "host memory was lost"


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.integers(5, 60))
def test_every_token_is_where_the_block_table_says(data: st.DataObject, num_events: int) -> None:
    traffic = Traffic(lambda options: data.draw(st.sampled_from(options)))
    traffic.run(num_events)
    event(f"{min(3, traffic.num_finished)} or more finished before the drain")
    traffic.drain()


@pytest.mark.long
def test_many_long_runs() -> None:
    """Deeper than the runs that can be shrunk; a failure names the seed."""
    num_finished = num_given_up = num_swapped = num_recomputed = num_revoked = num_hit = num_steps = num_ahead = (
        num_right
    ) = num_found = num_behind_prompts = 0
    for seed in range(250):
        traffic = Traffic(Random(seed).choice)
        try:
            traffic.run(100)
            traffic.drain()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_finished += traffic.num_finished
        num_given_up += traffic.num_given_up
        num_swapped += traffic.scheduler.swap.num_swapped
        num_recomputed += traffic.scheduler.preemption.num_recomputed
        num_revoked += traffic.scheduler.preemption.num_revoked
        num_hit += traffic.scheduler.entrance.num_prefix_hit
        num_steps += traffic.num_steps
        num_ahead += traffic.num_ahead
        num_behind_prompts += traffic.num_behind_prompts
        num_found += traffic.num_found
        num_right += 0 if traffic.drafts is None else traffic.drafts.num_right
    print(f"{num_steps} steps, {num_ahead} of them planned ahead, {num_finished} finished")
    print(f"{num_behind_prompts} planned behind the ends of prompts")
    print(f"{num_swapped} swapped, {num_recomputed} recomputed, {num_revoked} revoked")
    assert num_steps > 5000
    assert num_ahead > 500, "the runs show nothing of planning ahead"
    assert num_behind_prompts > 50, "the runs show nothing of planning behind the ends of prompts"
    assert min(num_finished, num_hit) > 500, "the runs show nothing"
    assert min(num_swapped, num_recomputed) > 50, "the runs show nothing of preemption"
    assert num_given_up > 50, "the runs show nothing of choices that are given up"
    assert num_right > 250, "the runs show nothing of drafts"
    assert num_found > 50, "the runs show nothing of prompts that begin alike"
    assert num_revoked > 10, "the runs show nothing of reservations that are taken back"
