"""The decode scheduler under traffic, in simulated time: nobody starves, and a step costs what changed."""

from __future__ import annotations

import contextlib
import gc
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from prompt_pulls import pull_of_prompt
from step_tokens import handles

from benchmarks.driver import Arrival, Driver, Modelled, Story, Timing
from common.contract.block_hashes import BlockChain
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.gateway import Decode, Source
from common.contract.messages.worker import Tokens
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice, DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step

INTERACTIVE, STANDARD, BATCH = Tier
BLOCK_SIZE = 4
STEP_S = 0.01
PLACES = 16
BLOCKS = 420
PROMPT_TOKENS = 32


def play(
    arrivals: list[Arrival], *, share: float = 1.0, until_s: float = float("inf")
) -> tuple[list[Story], list[float]]:
    """Every request's story, and when each step ended, on a worker that may have but a share of the places and of the
    tokens for prompts."""
    policy = Policy(
        block_size=BLOCK_SIZE,
        max_num_seqs=round(PLACES * share),
        max_sequence_tokens=4096,
        token_budget=round((PLACES + PROMPT_TOKENS) * share),
        prefill_tokens=round(PROMPT_TOKENS * share),
        num_host_blocks=BLOCKS,
    )
    pool = BlockPool(BLOCKS)
    scheduler = DecodeScheduler(pool, policy, Costs(prefill_s_per_token=STEP_S / PROMPT_TOKENS))
    ended: list[float] = []

    def note(driver: Driver, step: Step) -> None:
        ended.append(driver.now)
        if len(ended) % 16 == 0:
            scheduler.check_invariants()

    driver = Driver(
        pool,
        scheduler,
        Modelled(Timing(step_s=STEP_S, decode_s=0.0, prompt_token_s=0.0, swap_block_s=0.0)),
        block_size=BLOCK_SIZE,
        max_sequence_tokens=4096,
        after_step=note,
    )
    return driver.run(arrivals, until_s=until_s), ended


def arrival(
    time_s: float,
    number: int,
    num_prompt: int,
    num_output: int,
    *,
    tier: Tier = STANDARD,
    tenant: str = "",
    handoff: bool = True,
) -> Arrival:
    prompt = tuple(number * 10_000 + position for position in range(num_prompt))
    return Arrival(
        time_s=time_s,
        prompt=prompt,
        num_output=num_output,
        max_tokens=2 * num_output,
        tier=tier,
        tenant=tenant,
        handoff=handoff,
    )


def num_steps_to_the_end(stories: list[Story], tenant: str) -> int:
    """Steps from the beginning until the tenant's last token."""
    ours = [story for story in stories if story.arrival.tenant == tenant]
    assert ours
    assert all(len(story.token_ids) == story.arrival.num_output for story in ours), "it has not ended"
    return max(story.steps[-1] for story in ours)


# --- nobody starves ----------------------------------------------------------------------------------------------

JOBS = {
    "a long answer": [arrival(0.0, 1, 20, 300, tenant="long")],
    "a long prompt, computed here": [arrival(0.0, 1, 1500, 10, tenant="long", handoff=False)],
    "a long prompt, pulled": [arrival(0.0, 1, 1500, 50, tenant="long")],
    "many requests": [arrival(0.0, number, 20, 30, tenant="long") for number in range(1, 61)],
    "many prompts": [arrival(0.0, number, 60, 10, tenant="long", handoff=False) for number in range(1, 61)],
}


@pytest.mark.parametrize("handoff", [True, False], ids=["pulled", "computed here"])
@pytest.mark.parametrize("job", JOBS)
def test_a_long_job_is_done_within_twice_the_time_of_its_fair_share(job: str, handoff: bool) -> None:
    """A flood of short ones of another tenant was there first, and never ends: twice what the worker can do."""
    alone, _ = play(JOBS[job], share=0.5)
    num_alone = num_steps_to_the_end(alone, "long")
    num_short, num_prompt = (4, 80) if handoff else (2, 32)
    flood = [
        arrival(max(0, index // num_short - 30) * STEP_S, 1000 + index, num_prompt, 8, tenant="flood", handoff=handoff)
        for index in range(num_short * (2 * num_alone + 60))
    ]
    stories, ended = play(flood + JOBS[job], until_s=(2 * num_alone + 20) * STEP_S)
    assert num_steps_to_the_end(stories, "long") <= 2 * num_alone
    served = sum(len(story.token_ids) for story in stories if story.arrival.tenant == "flood")
    assert served > len(ended), "the flood has had its share too"


@pytest.mark.parametrize("handoff", [True, False], ids=["pulled", "computed here"])
def test_a_flood_of_a_lower_tier_delays_no_interactive_request_by_more_than_a_few_steps(handoff: bool) -> None:
    """Neither places nor blocks nor prompt tokens are free when one arrives: the flood asks for ten times of each."""
    quick = [arrival(0.5 + index * 0.07, 1 + index, 40, 30, tier=INTERACTIVE, handoff=handoff) for index in range(60)]
    flood = [
        arrival(0.0 if index < 200 else index * STEP_S / 3, 1000 + index, 120, 60, tier=BATCH, handoff=handoff)
        for index in range(1600)
    ]
    alone, alone_ended = play(quick)
    stories, ended = play(quick + flood, until_s=8.0)
    among = [story for story in stories if story.arrival.tier is INTERACTIVE]
    assert len(among) == len(alone) == 60
    for before, after in zip(alone, among, strict=True):
        assert before.arrival is after.arrival
        assert len(after.token_ids) == 30
        num_alone = before.steps[0] - bisect_left(alone_ended, before.arrival.time_s)
        num_among = after.steps[0] - bisect_left(ended, after.arrival.time_s)
        assert num_among <= num_alone + 4, after.arrival
        gaps = [later - earlier for earlier, later in pairwise(after.steps)]
        assert max(gaps) <= 2, "between two tokens"
        assert sum(gaps) <= len(gaps) + 2, "over the whole answer"
    assert sum(len(story.token_ids) for story in stories if story.arrival.tier is BATCH) > 2000


def test_two_tenants_get_as_much_as_each_other_when_one_asks_for_ten_times_as_much() -> None:
    flood = [arrival(0.0, 1000 + index, 16, 20, tenant="flood") for index in range(1000)]
    modest = [arrival(0.0, 1 + index, 16, 20, tenant="modest") for index in range(100)]
    stories, _ = play(flood + modest, until_s=2.0)
    served = dict.fromkeys(("flood", "modest"), 0)
    for story in stories:
        served[story.arrival.tenant] += len(story.token_ids)
    # VTC, theorem 4.4: 2 * max(longest prompt, weight of an output token * tokens that fit into memory).
    assert min(served.values()) > 1000
    assert 2 * abs(served["flood"] - served["modest"]) <= 2 * max(16, 2 * PLACES * (16 + 20))


@pytest.mark.parametrize("handoff", [True, False], ids=["pulled", "computed here"])
def test_answers_of_two_tokens_are_not_cheaper_than_others(handoff: bool) -> None:
    """Each step of a sequence counts, its last one too; prompts count where they are computed here."""
    flood = [arrival(0.0, 10_000 + index, 4, 3, tenant="flood", handoff=handoff) for index in range(6000)]
    modest = [arrival(0.0, 1 + index, 4, 40, tenant="modest", handoff=handoff) for index in range(600)]
    stories, _ = play(flood + modest, until_s=5.0)
    served = dict.fromkeys(("flood", "modest"), 0)
    for story in stories:
        # The first token comes with the prompt, which counts 4 where it is computed here.
        if story.token_ids:
            served[story.arrival.tenant] += 2 * (len(story.token_ids) - 1) + (0 if handoff else 4)
    assert min(served.values()) > 2000
    assert abs(served["flood"] - served["modest"]) <= 2 * max(4, 2 * PLACES * (4 + 40))


def test_a_returning_tenant_gets_no_credit_for_its_absence() -> None:
    always = [arrival(0.0, 1000 + index, 16, 20, tenant="always") for index in range(1000)]
    before = [arrival(0.0, 1, 16, 20, tenant="returns")]
    back = [arrival(3.0, 10 + index, 16, 20, tenant="returns") for index in range(300)]
    stories, _ = play(before + always + back, until_s=5.0)
    served = dict.fromkeys(("always", "returns"), 0)
    for story in stories:
        served[story.arrival.tenant] += sum(time_s > 3.0 for time_s in story.times_s)
    assert min(served.values()) > 1000
    assert 2 * abs(served["always"] - served["returns"]) <= 2 * max(16, 2 * PLACES * (16 + 20))


# --- what a step costs -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection: it would call functions of Python that have nothing to do with what is counted."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def work(function: Callable[[], object]) -> int:
    """How many instructions of Python `function` executes, and those that it calls: a count that no machine changes."""
    num = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num += event == "opcode"
        return trace

    before = sys.gettrace()
    with collector_off():
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
    return num


class Worker:
    """A scheduler whose engine and gateways cost nothing."""

    def __init__(self, num_running: int, num_blocks: int, memory_reserve: float = -1e9) -> None:
        self.pool = BlockPool(num_blocks)
        policy = Policy(
            block_size=16,
            max_num_seqs=num_running,
            max_sequence_tokens=2**21,
            token_budget=2 * num_running,
            memory_reserve=memory_reserve,
        )
        self.scheduler = DecodeScheduler(self.pool, policy, Costs())
        self.num_requests = 0
        self.num_let_in = 0

    def want(self, num_prompt: int, max_tokens: int, tenant: str = "") -> None:
        """A request asks to come in."""
        self.num_requests += 1
        source = Source(address="p:1", incarnation=Incarnation("p"))
        work = Decode(
            request=RequestId(f"r{self.num_requests}"),
            attempt=1,
            token_ids=tuple(range(self.num_requests, self.num_requests + num_prompt)),
            prompt_len=num_prompt,
            choices=(0,),
            handles=handles(),
            sampling=SamplingParams(max_tokens=max_tokens),
            budget_s=1.0,
            tenant=tenant,
            source=source,
            offered=RequestKey(RequestId(f"r{self.num_requests}"), 1),
        )
        chain = BlockChain(16)
        pull = pull_of_prompt(work.key, source)
        subject = DecodeRequest(work, Incarnation("g"), 1e9, float(self.num_requests), chain, pull)
        self.scheduler.want(subject, 0.0)

    def come_in(self) -> None:
        """Who fits comes in, and is pulled at once."""
        for reservation in self.scheduler.reserve(0.0):
            self.num_let_in += 1
            subject = reservation.request
            first = Tokens(
                request=subject.work.request,
                attempt=1,
                choice=0,
                position=len(subject.work.token_ids),
                token_ids=(1,),
            )
            self.scheduler.settled(subject, reservation.block_ids, [first], 0.0)

    def step(self, num_ends: int = 0) -> int:
        """A step in which the first so many end; the work of scheduling and bookkeeping."""
        steps: list[Step] = []
        number = self.pool.step_started()
        num = work(lambda: steps.append(self.scheduler.schedule(0.0)))
        [step] = steps
        num += work(lambda: self.pool.step_finished(number))
        for choice in step.decodes:
            choice.sequence.num_computed = choice.sequence.num_tokens
            choice.sequence.token_ids.append(1)
        for choice in step.decodes[:num_ends]:
            choice.finish_reason = "stop"
            num += work(partial(self.scheduler.sequences.remove, choice))
        num += work(lambda: self.scheduler.chunks_done(step.chunks))
        if step.chunks:
            num += work(self.scheduler.entrance.match_again)
        return num + work(self.come_in)


def steady(num_running: int, *num_prompt: int) -> Worker:
    """So many sequences run, with prompts of these lengths in turn, and end in a million steps or so."""
    worker = Worker(num_running, 40 * num_running)
    for index in range(num_running):
        worker.want(num_prompt[index % len(num_prompt)], 2**20)
    worker.come_in()
    worker.step()
    assert worker.scheduler.batch.num_running == num_running
    return worker


def test_a_step_costs_what_changes_and_not_what_runs() -> None:
    cost: dict[int, float] = {}
    for num_running in (256, 1024, 4096):
        worker = steady(num_running, *range(1, 17))  # in each step one of 16 sequences gets a block
        cost[num_running] = sum(worker.step() for _ in range(16)) / 16
    for_each_due = (cost[4096] - cost[256]) / ((4096 - 256) / 16)
    assert for_each_due <= 250, cost
    assert cost[256] <= for_each_due * 256 / 16 + 1500, "beside what is due"
    assert cost[1024] <= 1.25 * (cost[256] + for_each_due * (1024 - 256) / 16), "more than linear"


def test_work_does_not_count_what_the_garbage_collector_calls() -> None:
    def callback(phase: str, info: object) -> None:
        pass

    def function() -> list[list[int]]:
        return [[] for _ in range(10_000)]  # far more objects than the collector lets pass

    alone = work(function)
    gc.callbacks.append(callback)
    try:
        assert work(function) == alone
    finally:
        gc.callbacks.remove(callback)


def test_a_step_in_which_nobody_is_due_costs_the_same_however_many_run() -> None:
    costs = []
    for num_running in (256, 4096):
        worker = steady(num_running, 1)
        costs.append([worker.step() for _ in range(12)])
    assert costs[0] == costs[1]


@pytest.mark.parametrize("num_tenants", [1, 10_000])
def test_twenty_thousand_requests_that_wait_make_no_step_dearer(num_tenants: int) -> None:
    """Nor one in which somebody ends, and whoever fits comes in."""
    costs: dict[int, list[int]] = {}
    for num_waiting in (1000, 20_000):
        worker = Worker(16, 16 * 40, memory_reserve=0.05)
        with collector_off():
            for index in range(16 + num_waiting):
                worker.want(8, 300, tenant=f"t{index % num_tenants}")
        worker.come_in()
        costs[num_waiting] = [worker.step(num_ends=index % 2) for index in range(20)]
        assert worker.num_let_in == 20 + 10
    assert max(costs[20_000]) <= 1.1 * max(costs[1000])


def test_who_has_left_is_not_kept_for_as_long_as_it_was_expected_to_last() -> None:
    def num_alive() -> int:
        gc.collect()
        return sum(type(each) is DecodeChoice for each in gc.get_objects())

    before = num_alive()
    worker = Worker(8, 16 * 40)
    for _ in range(300):
        worker.want(8, 2**20)
        worker.come_in()
        worker.step()
        [choice] = worker.scheduler.batch.running()
        worker.scheduler.forget(choice.request)
    del choice
    for _ in range(17):  # the calendar of who needs a block has them for so long
        worker.step()
    assert num_alive() - before <= 3 * 16, "beside what heaps keep until it comes to the top"
