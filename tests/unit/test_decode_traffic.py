"""The decode scheduler under traffic, in simulated time: nobody starves, and a step costs what changed."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import pytest

from benchmarks.driver import Arrival, Driver, Modelled, Story, Timing
from common.contract.block_hashes import BlockChain
from common.contract.ids import Incarnation, RequestId
from common.contract.messages import Decode, Source, Tokens
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.engine.costs import Costs
from decode_worker.policy import Policy
from decode_worker.request import DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step
from kv_transfer.sink import Pull

INTERACTIVE, STANDARD, BATCH = Tier
BLOCK_SIZE = 4
STEP_S = 0.01
PLACES = 16
BLOCKS = 420
PROMPT_TOKENS = 32


def play(arrivals: list[Arrival], *, share: float = 1.0, until_s: float = float("inf")) -> tuple[list[Story], list[float]]:
    """On a worker, or on one with a share of the places and of the tokens for prompts: every request's story, and when each
    step ended."""
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
    quick = [
        arrival(0.5 + index * 0.07, 1 + index, 40, 30, tier=INTERACTIVE, handoff=handoff) for index in range(60)
    ]
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
    # VTC, theorem 4.4: 2 * max(weight of a prompt token * longest prompt, weight of an output token * tokens in memory).
    assert min(served.values()) > 1000
    assert 2 * abs(served["flood"] - served["modest"]) <= 2 * max(16, 2 * PLACES * (16 + 20))


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


def num_calls(function: Callable[[], object]) -> int:
    """How many Python functions `function` calls, and those call, and so on."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


class Worker:
    """A scheduler whose engine and gateways cost nothing."""

    def __init__(self, num_running: int, num_blocks: int, block_size: int = 16, memory_reserve: float = 0.05) -> None:
        self.pool = BlockPool(num_blocks)
        policy = Policy(
            block_size=block_size,
            max_num_seqs=num_running,
            max_sequence_tokens=2**21,
            token_budget=2 * num_running,
            memory_reserve=memory_reserve,
        )
        self.scheduler = DecodeScheduler(self.pool, policy, Costs())
        self.block_size = block_size
        self.num_requests = 0

    def want(self, num_prompt: int, max_tokens: int, tenant: str = "") -> None:
        """A request asks to come in."""
        self.num_requests += 1
        work = Decode(
            request=RequestId(f"r{self.num_requests}"),
            attempt=1,
            token_ids=tuple(range(self.num_requests, self.num_requests + num_prompt)),
            prompt_len=num_prompt,
            choices=(0,),
            sampling=SamplingParams(max_tokens=max_tokens),
            budget_s=1.0,
            tenant=tenant,
            source=Source(address="p:1", incarnation=Incarnation("p")),
        )
        chain = BlockChain(self.block_size)
        subject = DecodeRequest(work, Incarnation("g"), 1e9, float(self.num_requests), chain, Pull(work.key, work.source))
        self.scheduler.want(subject, 0.0)

    def come_in(self) -> int:
        """Who fits comes in, and is pulled at once; how many."""
        reservations = self.scheduler.reserve(0.0)
        for reservation in reservations:
            subject = reservation.request
            first = Tokens(
                request=subject.work.request,
                attempt=1,
                choice=0,
                position=len(subject.work.token_ids),
                token_ids=(1,),
            )
            self.scheduler.settled(subject, reservation.block_ids, [first])
        return len(reservations)

    def step(self, num_ends: int = 0) -> int:
        """A step in which the first so many end; the calls that scheduling and bookkeeping take."""
        steps: list[Step] = []
        number = self.pool.step_started()
        calls = num_calls(lambda: steps.append(self.scheduler.schedule(0.0)))
        [step] = steps
        calls += num_calls(lambda: self.pool.step_finished(number))
        for generation in step.decodes:
            generation.sequence.num_computed = generation.sequence.num_tokens
            generation.sequence.token_ids.append(1)
        for generation in step.decodes[:num_ends]:
            generation.finish_reason = "stop"
            calls += num_calls(lambda: self.scheduler.remove(generation))  # noqa: B023
        calls += num_calls(lambda: self.scheduler.chunks_done(step.chunks))
        calls += num_calls(self.come_in)
        return calls


def steady(num_running: int) -> Worker:
    """So many sequences run, of lengths such that in each step as many need a block."""
    worker = Worker(num_running, 40 * num_running)
    for index in range(num_running):
        worker.want(1 + index % 16, 300)
    worker.come_in()
    worker.step()
    assert worker.scheduler.num_running == num_running
    return worker


def test_a_step_costs_what_changes_and_not_what_runs() -> None:
    cost: dict[int, float] = {}
    for num_running in (256, 1024, 4096):
        worker = steady(num_running)
        cost[num_running] = sum(worker.step() for _ in range(16)) / 16
    # In each step one of 16 sequences gets a block.
    for_each_due = (cost[4096] - cost[256]) * 16 / (4096 - 256)
    assert cost[1024] <= cost[256] + for_each_due * (1024 - 256) / 16 * 1.25
    assert for_each_due <= 40, cost
    assert cost[256] - for_each_due * 256 / 16 <= 60, "beside those who are due"


def test_a_step_in_which_nobody_is_due_costs_the_same_however_many_run() -> None:
    cost = {}
    for num_running in (256, 4096):
        worker = Worker(num_running, 40 * num_running, memory_reserve=-1e9)
        for _ in range(num_running):
            worker.want(1, 2**20)
        worker.come_in()
        cost[num_running] = [worker.step() for _ in range(16)][3:14]
    assert cost[256] == cost[4096]


@pytest.mark.parametrize("num_tenants", [1, 10_000])
def test_a_hundred_thousand_requests_that_wait_make_no_step_dearer(num_tenants: int) -> None:
    cost = {}
    for num_waiting in (100, 100_000):
        worker = Worker(16, 16 * 40)
        for _ in range(16):
            worker.want(20, 300)
        assert worker.come_in() == 16
        for index in range(num_waiting):
            worker.want(300, 300, tenant=f"t{index % num_tenants}")
        worker.come_in()
        worker.step()
        cost[num_waiting] = max(worker.step(num_ends=index % 2) for index in range(20))
    assert cost[100_000] <= 2 * cost[100] + 100
