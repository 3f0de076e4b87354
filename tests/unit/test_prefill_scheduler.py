"""The prefill scheduler: who gets blocks, chunk by chunk progress, cached prefixes, tiers, and requests that end."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from next_times import next_deadline

from common.contract.block_hashes import BlockHash
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.gateway import Prefill
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from common.scheduling.turns import MAX_PASSED
from prefill_worker.request import PrefillRequest
from prefill_worker.scheduler import LONGEST_LOOK, LOOK_AHEAD, PrefillScheduler

BLOCK_SIZE = 4
GATEWAY = Incarnation("g")
INTERACTIVE, STANDARD, BATCH = Tier
TOKENS = itertools.count(10**6)
TARGETS_S = {INTERACTIVE: 0.5, STANDARD: 2.0, BATCH: 60.0}
EXPECTED_BY = 1.0
"""Monotonic seconds by which pulls are expected to end."""


def request(
    name: str,
    num_tokens: int,
    *,
    tier: Tier = STANDARD,
    tenant: str = "",
    arrived: float = 0.0,
    deadline: float = 1000.0,
    attempt: int = 1,
    token_ids: Sequence[int] | None = None,
    salt: str = "",
    num_choices: int = 1,
) -> PrefillRequest:
    """A request whose tokens no other one has, unless they are given."""
    token_ids = [next(TOKENS) for _ in range(num_tokens)] if token_ids is None else token_ids
    work = Prefill(
        request=RequestId(name),
        attempt=attempt,
        token_ids=tuple(token_ids),
        prompt_len=num_tokens,
        choices=tuple(range(num_choices)),
        sampling=SamplingParams(max_tokens=1),
        budget_s=1.0,
        tier=tier,
        tenant=tenant,
        cache_salt=salt,
    )
    return PrefillRequest(work, GATEWAY, arrived=arrived, deadline=deadline)


class Bench:
    """A scheduler and its pool; leases hold blocks only where a test says so."""

    def __init__(
        self,
        num_blocks: int = 16,
        chunk_size: int = 8,
        token_budget: int = 12,
        max_waiting: int = 100,
        seconds_per_token: float = 0.0,
        step_s: float = 0.0,
        prefix_cache: bool = True,
        expected_pull: Callable[[PrefillRequest, int, float], int] = lambda request, num_here, now: 0,
        **options: int,
    ) -> None:
        self.pool = BlockPool(num_blocks, prefix_cache=prefix_cache)
        self.scheduler = PrefillScheduler(
            self.pool,
            block_size=BLOCK_SIZE,
            chunk_size=chunk_size,
            token_budget=token_budget,
            max_waiting=max_waiting,
            ageing_s=30.0,
            ttft_target_s=TARGETS_S.__getitem__,
            costs=Costs(prefill_s_per_token=seconds_per_token, step_s=step_s, step_tokens=token_budget),
            expected_pull=expected_pull,
            **options,
        )

    def admit(self, *requests: PrefillRequest, now: float = 0.0) -> list[PrefillRequest]:
        for each in requests:
            self.scheduler.add(each)
        admitted = self.scheduler.admit(now)
        self.check()
        return admitted

    def step(self, now: float = 0.0, check: bool = True) -> list[tuple[str, int, int]]:
        """One step from beginning to end: (request, start, end) of its chunks."""
        self.scheduler.admit(now)
        chunks = self.scheduler.schedule(now)
        self.scheduler.step_done(chunks)
        if check:
            self.check()
        return [(chunk.prompt.key.request, chunk.start, chunk.end) for chunk in chunks]

    def lease(self, *requests: PrefillRequest) -> None:
        for each in requests:
            self.pool.share(each.block_table)

    def end_lease(self, of: PrefillRequest, blocks: Sequence[int]) -> None:
        self.pool.release(blocks)
        self.scheduler.holdings.end(of.key)
        self.check()

    def compute(self, prompt: PrefillRequest) -> None:
        """From arrival to the end, alone; nobody leases it."""
        self.admit(prompt)
        while prompt in self.scheduler.requests():
            self.step()
        self.scheduler.holdings.end(prompt.key)

    def check(self) -> None:
        self.scheduler.check_invariants()
        self.pool.check_invariants()


def half_of_it(prompt: PrefillRequest, num_here: int, now: float) -> int:
    """Another worker has the first half of every prompt that was not asked about before."""
    return 0 if prompt.prefix_tried else len(prompt.token_ids) // 2


def hold_all(bench: Bench) -> list[PrefillRequest]:
    """Put on hold whoever is admitted, until nobody is; who that was. A pull brings all but the last block."""
    held: list[PrefillRequest] = []
    while admitted := bench.scheduler.admit(0.0):
        for each in admitted:
            each.prefix_tried = True
            bench.scheduler.hold(each, len(each.token_ids) - BLOCK_SIZE, EXPECTED_BY)
        held += admitted
        bench.check()
    return held


# --- chunks ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_chunk_by_chunk() -> None:
    bench = Bench()
    prompt = request("a", 19)
    assert bench.admit(prompt) == [prompt]
    assert len(prompt.block_table) == 5
    assert bench.scheduler.num_uncomputed == 19
    assert bench.step() == [("a", 0, 8)]
    assert bench.scheduler.num_uncomputed == 11
    assert bench.step() == [("a", 8, 16)]
    assert bench.step() == [("a", 16, 19)]
    assert bench.step() == []
    assert (len(bench.scheduler.running), bench.scheduler.num_uncomputed, bench.pool.num_used) == (0, 0, 0)


def test_prompts_share_a_step_in_order_within_the_budget() -> None:
    bench = Bench()
    bench.admit(request("a", 10), request("b", 3), request("c", 9))
    assert bench.step() == [("a", 0, 8), ("b", 0, 3), ("c", 0, 1)]
    assert bench.step() == [("a", 8, 10), ("c", 1, 9)]


def test_a_step_samples_no_more_than_it_has_memory_for_but_at_least_one_prompt() -> None:
    """Short prompts with many choices: each choice has a row of logits."""
    bench = Bench(token_budget=100, most_samples=4)
    bench.admit(*(request(name, 3, num_choices=num) for name, num in (("a", 3), ("b", 3), ("c", 1), ("d", 9))))
    assert bench.step() == [("a", 0, 3), ("b", 0, 2), ("c", 0, 3), ("d", 0, 2)]
    assert bench.step() == [("b", 2, 3)]
    assert bench.step() == [("d", 2, 3)]
    assert bench.step() == []


def test_the_first_of_two_long_prompts_is_not_slowed_down() -> None:
    bench = Bench(num_blocks=64, chunk_size=8, token_budget=8)
    bench.admit(request("a", 16), request("b", 16))
    assert [bench.step() for _ in range(4)] == [[("a", 0, 8)], [("a", 8, 16)], [("b", 0, 8)], [("b", 8, 16)]]


@pytest.mark.parametrize("num_long", [1, 2, 5])
@pytest.mark.parametrize("tenants", [1, 3])
def test_a_short_prompt_behind_long_ones_is_in_the_very_next_step(num_long: int, tenants: int) -> None:
    bench = Bench(num_blocks=10_000 * num_long, chunk_size=512, token_budget=1024, seconds_per_token=1e-4)
    long = [request(f"long{n}", 32_000, tenant=f"t{n % tenants}", arrived=0.01 * n) for n in range(num_long)]
    bench.admit(*long)
    for _ in range(3):
        bench.step(now=0.1)
    short = request("short", 40, tenant="t0", arrived=0.2)
    bench.scheduler.add(short)
    assert ("short", 0, 40) in bench.step(now=0.2)
    assert short not in bench.scheduler.requests()


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    bench = Bench(num_blocks=512, chunk_size=8, token_budget=8, seconds_per_token=0.01)
    long = request("long", 100, arrived=0.0)
    bench.admit(long)
    for number in range(400):
        now = 0.1 * number
        bench.scheduler.add(request(f"short{number}", 8, arrived=now))
        bench.step(now)
        if long not in bench.scheduler.requests():
            break
    assert long.num_uncomputed == 0
    assert number < 40, "by the time its cost allows, it comes first"


def test_an_interactive_prompt_passes_a_standard_one() -> None:
    bench = Bench(num_blocks=64, token_budget=8)
    bench.admit(request("s", 32))
    assert bench.step() == [("s", 0, 8)]
    assert bench.admit(request("i", 12, tier=INTERACTIVE)) != []
    assert bench.step() == [("i", 0, 8)]
    assert bench.step() == [("i", 8, 12), ("s", 8, 12)]


def test_an_aged_batch_prompt_gets_its_share_under_an_interactive_flood() -> None:
    bench = Bench(num_blocks=10_000, chunk_size=512, token_budget=1024, max_waiting=10_000)
    batch = request("batch", 2000, tier=BATCH)
    bench.scheduler.add(batch)
    computed, now, number = 0, 0.0, 0
    while now < 40.0:
        while len(bench.scheduler.waiting) < 30:
            bench.scheduler.add(request(f"i{number}", 300, tier=INTERACTIVE, tenant=f"t{number % 7}", arrived=now))
            number += 1
        computed = sum(end - start for name, start, end in bench.step(now) if name == "batch")
        if now <= 30.0:
            assert computed == 0
        elif now > 32.5:
            assert computed in (128, 2000 % 128) or batch.num_uncomputed == 0
        now += 0.5
    assert batch.num_uncomputed <= 2000 - 12 * 128


def test_an_aged_prompt_does_not_wait_for_a_long_interactive_one_to_end() -> None:
    bench = Bench(num_blocks=50_000, chunk_size=512, token_budget=1024)
    bench.admit(*(request(f"i{number}", 32_000, tier=INTERACTIVE) for number in range(5)))
    bench.step()
    bench.scheduler.add(request("batch", 1000, tier=BATCH, arrived=1.0))
    assert bench.scheduler.admit(31.0) == []
    assert ("batch", 0, 128) in bench.step(now=31.5)


# --- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_prompt_gets_every_block_at_once(num_tokens: int, num_blocks: int) -> None:
    bench = Bench()
    prompt = request("a", num_tokens)
    bench.admit(prompt)
    assert len(prompt.block_table) == bench.scheduler.blocks_for(prompt) == num_blocks
    assert bench.pool.num_used == num_blocks


def test_a_prompt_that_does_not_fit_now_lets_a_later_one_pass() -> None:
    bench = Bench(num_blocks=4, token_budget=100, chunk_size=100)
    first, big, small = (request(name, n, tier=INTERACTIVE) for name, n in [("first", 8), ("big", 12), ("small", 1)])
    assert bench.admit(first, big, small) == [first, small]
    assert bench.scheduler.blocks_missing(0.0) == 2
    assert (len(bench.scheduler.waiting), big.num_passed) == (1, 1)
    bench.step()
    assert bench.scheduler.blocks_missing(0.0) == 0
    assert bench.scheduler.admit(0.0) == [big]
    assert bench.scheduler.blocks_missing(0.0) == 0


def test_a_prompt_that_does_not_fit_is_passed_only_so_often() -> None:
    bench = Bench(num_blocks=4, token_budget=100, chunk_size=100)
    held = request("held", 4, tier=INTERACTIVE)
    bench.admit(held)
    bench.lease(held)
    blocks = list(held.block_table)
    bench.step()
    big = request("big", 16, tier=INTERACTIVE)
    bench.admit(big)
    for number in range(MAX_PASSED):
        small = request(f"s{number}", 1, tier=INTERACTIVE)
        assert bench.admit(small) == [small]
        bench.step()
    assert bench.admit(request("one too many", 1, tier=INTERACTIVE)) == []
    bench.end_lease(held, blocks)
    assert bench.scheduler.admit(0.0)[0] is big


def test_only_the_next_few_are_tried() -> None:
    bench = Bench(num_blocks=4, token_budget=100, chunk_size=100)
    bench.admit(request("held", 4, tier=INTERACTIVE))
    big = [request(f"big{number}", 16, tier=INTERACTIVE) for number in range(LOOK_AHEAD)]
    small = request("small", 1, tier=INTERACTIVE)
    assert bench.admit(*big, small) == []
    bench.scheduler.remove(big[3])
    assert bench.scheduler.admit(0.0) == [small]


def test_blocks_in_limbo_are_not_handed_out() -> None:
    bench = Bench(num_blocks=2)
    first, second = request("first", 8), request("second", 8)
    bench.admit(first)
    step = bench.pool.step_started()
    bench.scheduler.schedule(0.0)
    bench.scheduler.remove(first)
    assert bench.admit(second) == []
    assert bench.scheduler.blocks_missing(0.0) == 0, "they come free with the step's end: nobody's offer is in the way"
    bench.pool.step_finished(step)
    assert bench.scheduler.admit(0.0) == [second]


def test_one_waiting_request_too_many_is_the_caller_s_to_refuse() -> None:
    bench = Bench(num_blocks=1, max_waiting=2)
    bench.admit(request("running", 1))
    assert not bench.scheduler.full()
    assert bench.scheduler.full(2), "so many are let in, and wait to be told what their grammars allow"
    bench.admit(request("a", 1), request("b", 1))
    assert bench.scheduler.full()
    elsewhere = request("elsewhere", 1)
    elsewhere.work = replace(elsewhere.work, admitted=True)
    bench.scheduler.add(elsewhere)
    assert len(bench.scheduler.waiting) == 3, "who was let in elsewhere comes in all the same"


def test_what_can_never_fit_is_the_caller_s_to_refuse() -> None:
    with pytest.raises(AssertionError):
        Bench(num_blocks=2).scheduler.add(request("a", 9))


# --- how far ahead -----------------------------------------------------------------------------------------------


def test_prompts_are_let_in_for_two_steps() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16)
    prompts = [request(f"p{number}", 100) for number in range(10)]
    assert bench.admit(*prompts) == prompts[:4], "4 chunks of 8 tokens fill two steps of 16"
    assert bench.admit() == []
    assert bench.scheduler.blocks_missing(0.0) == 0, "it is not for want of blocks that the fifth waits"
    bench.scheduler.remove(prompts[0])
    assert bench.scheduler.admit(0.0) == [prompts[4]]


def test_what_is_let_in_fills_every_step() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16)
    for number in range(20):
        bench.scheduler.add(request(f"p{number}", 1 + number * 7 % 23))
    left = bench.scheduler.num_uncomputed
    while left:
        most = sum(min(8, prompt.num_uncomputed) for prompt in bench.scheduler.requests())
        assert sum(end - start for _, start, end in bench.step()) == min(16, most)
        left = bench.scheduler.num_uncomputed


@pytest.mark.parametrize(
    ("seconds_per_token", "steps"),
    [
        (0.0, [[("a", 0, 8), ("b", 0, 8)], [("a", 8, 10), ("b", 8, 10)]]),
        (0.005, [[("a", 0, 8), ("b", 0, 8)], [("a", 8, 10), ("b", 8, 10)]]),
        (0.01, [[("a", 0, 8), ("b", 0, 2)], [("a", 8, 10), ("b", 2, 10)]]),
        (1.0, [[("a", 0, 8)], [("a", 8, 10)], [("b", 0, 8)], [("b", 8, 10)]]),
    ],
)
def test_others_share_a_prompt_s_step_only_while_it_stays_short(
    seconds_per_token: float, steps: list[list[tuple[str, int, int]]]
) -> None:
    """All that share a step wait for its end: 0.1 s is what a prompt is delayed for those behind it."""
    bench = Bench(token_budget=16, seconds_per_token=seconds_per_token)
    bench.admit(request("a", 10), request("b", 10))
    assert [bench.step() for _ in steps] == steps
    assert bench.step() == []


def test_a_more_urgent_prompt_is_let_in_at_once() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, seconds_per_token=0.01)
    bench.admit(*(request(f"p{number}", 100) for number in range(5)))
    alike, shorter = request("alike", 100), request("shorter", 20)
    interactive = request("interactive", 200, tier=INTERACTIVE)
    assert bench.admit(alike, shorter, interactive) == [interactive, shorter]


def test_a_long_prompt_under_a_flood_of_short_ones_takes_twice_its_time_at_most() -> None:
    bench = Bench(num_blocks=10_000, chunk_size=128, token_budget=128, seconds_per_token=0.001)
    long = request("long", 4000)
    bench.admit(long)
    now, number = 0.0, 0
    while long.num_uncomputed:
        while len(bench.scheduler.waiting) < 10:
            bench.scheduler.add(request(f"short{number}", 16, arrived=now))
            number += 1
        now += sum(end - start for _, start, end in bench.step(now)) * 0.001
    assert 4.0 < now < 8.1, "alone it would take 4 s"


def test_short_prompts_do_not_wait_for_any_of_many_long_ones() -> None:
    bench = Bench(num_blocks=200_000, chunk_size=512, token_budget=1024, seconds_per_token=1e-4)
    bench.admit(*(request(f"long{number}", 32_000) for number in range(20)))
    now = 0.0
    arrived: dict[str, float] = {}
    waits_s: list[float] = []
    while bench.scheduler.num_uncomputed > 32_000:
        if now >= 0.2 * len(arrived):
            name = f"short{len(arrived)}"
            arrived[name] = now
            bench.scheduler.add(request(name, 40, arrived=now))
        chunks = bench.step(now, check=False)
        waits_s += [now - arrived[name] for name, _, _ in chunks if name in arrived]
        now += sum(end - start for _, start, end in chunks) * 1e-4
    bench.check()
    assert now > 60.0
    assert len(waits_s) == len(arrived) > 300
    assert sum(wait_s == 0.0 for wait_s in waits_s) > 0.95 * len(waits_s), "the others find long ones that are late"
    assert max(waits_s) < 0.3, "which are about to end"


def test_a_flooding_tenant_s_prompts_do_not_stand_before_another_tenant_s() -> None:
    bench = Bench(num_blocks=10_000, chunk_size=8, token_budget=16, max_waiting=1000)
    bench.admit(*(request(f"flood{number}", 32, tenant="flood") for number in range(100)))
    for _ in range(5):
        bench.step(now=1.0)
    meek = [request(f"meek{number}", 32, tenant="meek", arrived=1.0) for number in range(5)]
    bench.admit(*meek)
    computed = {"flood": 0, "meek": 0}
    while any(each.num_uncomputed for each in meek):
        for name, start, end in bench.step(now=1.0):
            computed[name.rstrip("0123456789")] += end - start
    assert computed["meek"] == 160
    assert computed["flood"] <= 160 + 4 * 32, "what was let in before, and then every second prompt"


def test_a_flooding_tenant_s_prompts_on_hold_do_not_stand_before_another_tenant_s() -> None:
    """A prompt on hold has blocks, and its turn once it is there. So no more are held than two steps compute."""
    bench = Bench(num_blocks=10_000, chunk_size=8, token_budget=16, max_waiting=1000, expected_pull=half_of_it)
    for number in range(100):
        bench.scheduler.add(request(f"flood{number}", 32, tenant="flood"))
    held = hold_all(bench)
    assert len(held) == 4, "of each at most 8 tokens are in a step of 16, whatever a pull brings"
    assert bench.scheduler.blocks_missing(0.0) == 0
    for each in held:
        bench.scheduler.resume(each, 0, 0.0)
    meek = [request(f"meek{number}", 32, tenant="meek", arrived=1.0) for number in range(5)]
    bench.admit(*meek)
    computed = {"flood": 0, "meek": 0}
    while any(each.num_uncomputed for each in meek):
        for name, start, end in bench.step(now=1.0):
            computed[name.rstrip("0123456789")] += end - start
    assert computed["flood"] <= 160 + 4 * 32


def test_prompts_on_hold_keep_nobody_waiting_who_is_not_held_or_who_is_more_urgent() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, expected_pull=half_of_it)
    for number in range(10):
        bench.scheduler.add(request(f"held{number}", 32, tier=STANDARD))
    assert len(hold_all(bench)) == 4
    computed, urgent = request("computed", 32), request("urgent", 32, tier=INTERACTIVE)
    computed.prefix_tried = True
    assert bench.admit(computed, urgent) == [urgent, computed]
    bench.scheduler.hold(urgent, 16, EXPECTED_BY)
    assert bench.scheduler.admit(0.0) == [], "it counts, too"
    for each in [*bench.scheduler.on_hold]:
        bench.scheduler.remove(each)
    assert len(hold_all(bench)) == 4


def test_a_prompt_that_is_computed_comes_in_behind_as_many_as_may_be_put_on_hold() -> None:
    """Those are about to leave the step to it."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, expected_pull=half_of_it)
    pulled, computed = [request(f"pulled{number}", 32) for number in range(4)], request("computed", 32)
    computed.prefix_tried = True
    assert bench.admit(*pulled, computed) == [*pulled, computed]


def test_prompts_whose_pulls_hang_do_not_keep_others_from_being_put_on_hold() -> None:
    """As where a source has frozen. Others may be read from."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, expected_pull=half_of_it)
    late = [request(f"late{number}", 32) for number in range(5)]
    for each in [*(request(f"held{number}", 32) for number in range(4)), *late]:
        bench.scheduler.add(each)
    assert len(hold_all(bench)) == 4
    assert bench.admit(now=0.9 * EXPECTED_BY) == []
    assert bench.admit(now=EXPECTED_BY) == late[:4]


def test_many_that_would_be_put_on_hold_do_not_hide_one_that_would_not() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, expected_pull=half_of_it)
    for number in range(4 + 2 * LOOK_AHEAD):
        bench.scheduler.add(request(f"held{number}", 32, tenant="x"))
    assert len(hold_all(bench)) == 4
    other = request("other", 8, tenant="y")
    other.prefix_tried = True
    assert bench.admit(other) == [other]


@pytest.mark.parametrize("longest", [30, 300])
def test_two_tenants_that_always_wait_get_the_same_whatever_they_submit(longest: int) -> None:
    """Within 2·max(w_p·L_in, w_q·M) of each other (see `fair_queue`), where M is what is let in: two steps' prompts."""
    rng = random.Random(longest)
    bench = Bench(num_blocks=100_000, chunk_size=32, token_budget=64, max_waiting=10_000, seconds_per_token=1e-3)
    for number in range(2200):
        tenant = "meek" if number % 11 == 0 else "flood"
        bench.scheduler.add(request(f"{tenant}{number}", rng.randint(1, longest), tenant=tenant))
    served, num_waiting, now, most = {"meek": 0, "flood": 0}, {"meek": 200, "flood": 2000}, 0.0, 0
    while min(num_waiting.values()):
        for request_id, start, end in bench.step(now, check=False):
            tenant = request_id.rstrip("0123456789")
            served[tenant] += end - start
            num_waiting[tenant] -= start == 0
            now += (end - start) * 1e-3
        most = max(most, abs(served["meek"] - served["flood"]))
    assert most <= 2 * max(longest, 4 * longest), served
    assert served["meek"] > 10 * most


# --- the prefix cache --------------------------------------------------------------------------------------------


def test_a_prompt_that_begins_alike_computes_only_its_rest() -> None:
    bench = Bench()
    bench.compute(request("a", 20, token_ids=range(20)))
    again = request("b", 22, token_ids=[*range(14), *range(100, 108)])
    bench.scheduler.add(again)
    assert bench.scheduler.num_uncomputed == 10, "what is cached is not counted even while it waits"
    bench.admit()
    assert (again.num_cached, again.num_computed, again.num_uncomputed) == (12, 12, 10)
    assert bench.step() == [("b", 12, 20)]
    assert bench.step() == [("b", 20, 22)]
    assert again.times(1.0).num_cached == 12
    assert (bench.scheduler.num_prefix_queried, bench.scheduler.num_prefix_hit) == (42, 12)


def test_the_last_token_is_computed_whatever_is_cached() -> None:
    bench = Bench()
    bench.compute(request("a", 16, token_ids=range(16)))
    again = request("b", 16, token_ids=range(16))
    bench.admit(again)
    assert again.num_cached == 12
    assert bench.step() == [("b", 12, 16)]


def test_a_prompt_whose_tokens_are_scored_is_computed_whatever_is_cached() -> None:
    bench = Bench()
    bench.compute(request("a", 16, token_ids=range(16)))
    scored = request("b", 16, token_ids=range(16))
    scored.work = replace(scored.work, prompt_logprobs=0)
    bench.admit(scored)
    assert (scored.num_cached, bench.scheduler.num_uncomputed) == (0, 16)
    assert [*bench.step(), *bench.step()] == [("b", 0, 8), ("b", 8, 16)]
    assert bench.pool.num_used == 0
    again = request("c", 16, token_ids=range(16))
    bench.admit(again)
    assert again.num_cached == 12, "others find it"


def test_prompts_under_different_salts_share_nothing() -> None:
    bench = Bench()
    bench.compute(request("a", 16, token_ids=range(16), salt="x"))
    other, same = (request(name, 16, token_ids=range(16), salt=salt) for name, salt in [("b", "y"), ("c", "x")])
    bench.admit(other, same)
    assert (other.num_cached, same.num_cached) == (0, 12)


def test_running_prompts_share_the_blocks_of_their_beginning() -> None:
    bench = Bench(num_blocks=8, token_budget=16, chunk_size=16)
    first = request("a", 20, token_ids=range(20), tier=INTERACTIVE)
    bench.admit(first)
    bench.step()
    second = request("b", 24, token_ids=[*range(16), *range(50, 58)], tier=INTERACTIVE)
    assert bench.admit(second) == [second]
    assert second.block_table[:4] == first.block_table[:4]
    assert bench.pool.num_used == 7
    bench.scheduler.remove(first)
    assert bench.pool.num_used == 6
    bench.check()


def test_cached_blocks_that_are_needed_are_not_evicted_for_the_rest() -> None:
    bench = Bench(num_blocks=6, token_budget=100, chunk_size=100)
    bench.compute(request("a", 16, token_ids=range(16)))
    bench.compute(request("other", 8))
    longer = request("b", 24, token_ids=[*range(16), *range(50, 58)])
    assert bench.admit(longer) == [longer]
    assert longer.num_cached == 16
    assert len(set(longer.block_table)) == 6


def test_cached_blocks_count_as_free_but_once() -> None:
    bench = Bench(num_blocks=6, token_budget=100, chunk_size=100)
    bench.compute(request("a", 16, token_ids=range(16), tier=INTERACTIVE))
    bench.admit(request("running", 4, tier=INTERACTIVE))
    assert bench.pool.num_free == 5
    longer = request("b", 24, token_ids=[*range(16), *range(50, 58)], tier=INTERACTIVE)
    assert bench.admit(longer) == []
    assert bench.scheduler.blocks_missing(0.0) == 1


def test_what_a_waiting_prompt_matches_is_not_looked_up_again_in_every_step() -> None:
    bench = Bench(num_blocks=1200, token_budget=10**6, chunk_size=10**6)
    text = range(4000)
    bench.compute(request("cached", 4000, token_ids=text))
    running = request("running", 700, tier=INTERACTIVE)
    bench.admit(running)
    waiting = [request(f"w{i}", 4200, token_ids=[*text, *range(10_000 * i, 10_000 * i + 200)]) for i in range(1, 17)]
    for each in waiting:
        bench.scheduler.add(each)
    num_matched = 0
    match = bench.pool.match

    def counted(block_hashes: Iterable[BlockHash]) -> list[int]:
        nonlocal num_matched
        blocks = match(block_hashes)
        num_matched += len(blocks)
        return blocks

    bench.pool.match = counted  # type: ignore[method-assign]
    for now in range(10):
        assert bench.scheduler.blocks_missing(float(now)) > 0
        assert bench.scheduler.admit(float(now)) == []
    assert num_matched == 0, "nothing has come or gone since they were enqueued"
    bench.check()
    bench.pool.release(bench.pool.allocate(bench.pool.num_free))  # every name goes
    bench.scheduler.remove(running)
    [admitted] = bench.scheduler.admit(11.0)
    assert (admitted.num_cached, len(set(admitted.block_table))) == (0, 1050), "a match does not outlive an eviction"


# --- prompts that begin alike at the same time -------------------------------------------------------------------

DOCUMENT = range(80)


def question(name: str, num_own: int = 10, num_alike: int = 80, **options: Any) -> PrefillRequest:
    """A prompt of the document's first tokens, and some of its own."""
    token_ids = [*DOCUMENT[:num_alike], *(next(TOKENS) for _ in range(num_own))]
    return request(name, len(token_ids), token_ids=token_ids, **options)


def computed_in_all(bench: Bench, seconds_per_token: float = 0.0) -> int:
    """Compute everything; the number of tokens that it took."""
    total = 0
    while chunks := bench.step(now=total * seconds_per_token):
        total += sum(end - start for _, start, end in chunks)
    assert not bench.scheduler.requests()
    return total


@pytest.mark.parametrize("seconds_per_token", [0.0, 1e-3])
def test_what_prompts_have_in_common_is_computed_once(seconds_per_token: float) -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, seconds_per_token=seconds_per_token)
    questions = [question(f"q{number}") for number in range(4)]
    assert bench.admit(*questions) == questions[:1]
    assert bench.scheduler.blocks_missing(0.0) == 0
    assert computed_in_all(bench, seconds_per_token) == 80 + 4 * 10
    assert [each.num_cached for each in questions] == [0, 80, 80, 80]
    assert [each.num_passed for each in questions] == [0] * 4


def test_each_block_is_waited_for_that_another_prompt_fills() -> None:
    """One prompt goes on where the first has left the others, and the last where that one has."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=8)
    bench.admit(question("short", num_alike=20), question("long"), question("longer"), question("none", num_alike=0))
    assert sorted(each.key.request for each in bench.scheduler.running) == ["none", "short"]
    assert computed_in_all(bench) == 80 + 4 * 10


def test_others_are_admitted_while_a_prompt_waits_for_another_s_blocks() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16)
    first, second, other = question("first"), question("second"), request("other", 20)
    assert bench.admit(first, second, other) == [first, other]
    assert bench.step() == [("first", 0, 8), ("other", 0, 8)]
    assert second.num_passed == 0


@pytest.mark.parametrize("half_done", [False, True])
def test_a_prompt_waits_for_nobody_who_has_left(half_done: bool) -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16)
    first, second = question("first"), question("second")
    bench.admit(first, second)
    if half_done:
        bench.step()
    assert bench.admit() == []
    bench.scheduler.remove(first)
    assert bench.admit() == [second]
    assert second.num_cached == 8 * half_done
    assert computed_in_all(bench) == 90 - second.num_cached


def test_a_prompt_does_not_wait_for_a_pull() -> None:
    """It may take as long as the other prompt has patience. The rest is computed, and waited for."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, expected_pull=half_of_it)
    pulled = [question("first"), question("second")]
    assert bench.admit(*pulled) == pulled, "neither waits for the other, which is about to be put on hold"
    for each in pulled:
        each.prefix_tried = True
        bench.scheduler.hold(each, 44, EXPECTED_BY)
    computed, late = question("computed"), question("late", num_own=11)
    computed.prefix_tried = late.prefix_tried = True
    assert bench.admit(computed) == [computed]
    bench.scheduler.remove(computed)
    bench.scheduler.resume(pulled[0], 44, 0.0)
    assert bench.admit(late) == []


@pytest.mark.parametrize(("num_before", "comes_in"), [(2 * LOOK_AHEAD, True), (LONGEST_LOOK, False)])
def test_many_prompts_that_wait_for_one_do_not_hide_another(num_before: int, comes_in: bool) -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, max_waiting=1000)
    first, other = question("first"), request("other", 8, tenant="other")
    assert bench.admit(first, *(question(f"q{number}") for number in range(num_before))) == [first]
    assert bench.scheduler.blocks_missing(0.0) == 0
    assert bench.admit(other) == [other] * comes_in
    assert bench.step() == [("first", 0, 8), ("other", 0, 8)][: 1 + comes_in]


def test_a_prompt_that_has_waited_is_as_long_as_what_it_lacks_now() -> None:
    """In its urgency, and in the load that others are told."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=8, seconds_per_token=1e-3)
    first, second = question("first"), question("second")
    bench.admit(first, second)
    assert bench.scheduler.queued_tokens == (0, 90 + 10, 0)
    for num_done in range(8, 88, 8):
        bench.step(now=1e-3 * (num_done - 8))
        assert bench.admit(now=1e-3 * num_done) == ([second] if num_done == 80 else [])
        assert bench.scheduler.queued_tokens == (0, 90 - num_done + 10, 0)
    assert second.urgency[1] == pytest.approx(0.08 + TARGETS_S[STANDARD] + 0.01), "before what was longer than it is"


def test_what_several_prompts_wait_for_is_told_as_work_once() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16)
    first, *others = (question(f"q{number}") for number in range(10))
    bench.admit(first, *others, question("the document", num_own=0))
    assert bench.scheduler.queued_tokens == (0, 80 + 10 * 10 + BLOCK_SIZE, 0), "its last token is computed, at least"
    bench.scheduler.remove(first)
    assert bench.admit() == others[:1]
    assert bench.scheduler.queued_tokens == (0, 80 + 9 * 10 + BLOCK_SIZE, 0), "which is now the first of the others'"
    for each in others:
        bench.scheduler.remove(each)
    bench.admit()
    assert bench.scheduler.queued_tokens == (0, 80, 0)


def test_an_urgent_prompt_waits_for_nobody_of_a_lower_tier_or_who_is_due_much_later() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, seconds_per_token=1e-3)
    later = question("later", num_own=400)
    assert bench.admit(later) == [later]
    urgent, short = question("urgent", tier=INTERACTIVE), question("short")
    assert bench.admit(urgent, short) == [urgent, short], "due 0.39 s before the long one, which would save it 0.08 s"


def test_an_aged_prompt_waits_for_nobody_who_may_have_no_share_of_the_steps() -> None:
    """Neither for one of a higher tier, nor for a younger one of its own."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=80)
    above, young = question("above", tier=INTERACTIVE), question("young", tier=BATCH, arrived=20.0)
    bench.scheduler.add(above)
    assert bench.admit(young, now=20.0) == [above, young]
    aged = question("aged", tier=BATCH, arrived=5.0)
    assert bench.admit(aged, now=35.0) == []
    assert bench.scheduler.admit(36.0) == [aged]
    bench.scheduler.remove(above)
    bench.scheduler.remove(young)
    assert bench.admit(question("as old", tier=BATCH, arrived=5.0), now=36.0) == [], "the aged one has its share"


def test_a_prompt_waits_for_one_that_is_due_a_little_later() -> None:
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, seconds_per_token=1e-3)
    later = question("later", num_own=60)
    assert bench.admit(later, now=0.0) == [later]
    assert bench.admit(question("sooner"), now=0.0) == []


@pytest.mark.parametrize(("step_s", "num_computed"), [(0.05, 80 + 2 * 10), (0.15, 2 * 90)])
def test_what_saves_less_than_a_step_is_not_waited_for(step_s: float, num_computed: int) -> None:
    """Who waits takes part in a later step."""
    bench = Bench(num_blocks=1000, chunk_size=512, token_budget=1024, seconds_per_token=1e-3, step_s=step_s)
    bench.admit(question("first"), question("second"))
    assert computed_in_all(bench) == num_computed


def test_nobody_waits_for_what_would_not_be_found_or_used() -> None:
    scored = question("scored")
    scored.work = replace(scored.work, prompt_logprobs=0)
    salted = question("salted", salt="x")
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=100)
    first = question("first")
    assert bench.admit(first, scored, salted, question("same")) == [first, scored, salted]
    uncached = Bench(num_blocks=1000, chunk_size=8, token_budget=100, prefix_cache=False)
    assert len(uncached.admit(question("a"), question("b"))) == 2
    short = Bench(num_blocks=1000, chunk_size=8, token_budget=100)
    assert len(short.admit(*(request(name, 4, token_ids=range(4)) for name in "ab"))) == 2, "the last token is computed"


# --- on hold -----------------------------------------------------------------------------------------------------


def test_a_request_on_hold_is_not_computed_until_more_of_it_is_there() -> None:
    bench = Bench()
    prompt, other = request("a", 20, token_ids=range(20)), request("b", 4)
    bench.admit(prompt, other)
    bench.scheduler.hold(prompt, 12, EXPECTED_BY)
    scheduler = bench.scheduler
    assert (len(scheduler.running), len(scheduler.on_hold)) == (1, 1)
    assert scheduler.num_uncomputed == 8 + 4, "without what is expected to come"
    assert bench.step() == [("b", 0, 4)]
    bench.scheduler.resume(prompt, 16, 0.0)
    assert (prompt.num_cached, prompt.num_computed, bench.scheduler.num_uncomputed) == (16, 16, 4)
    bench.lease(prompt)
    assert bench.step() == [("a", 16, 20)]
    assert prompt.times(1.0).num_cached == 16, "what was pulled was not computed"
    again = request("c", 18, token_ids=range(18))
    bench.admit(again)
    assert again.num_cached == 16, "what came from elsewhere is cached too"


def test_a_request_on_hold_may_go_on_as_it_was() -> None:
    bench = Bench()
    prompt = request("a", 20)
    bench.admit(prompt)
    bench.scheduler.hold(prompt, 16, EXPECTED_BY)
    assert len(bench.scheduler.running) == 0, "an engine that does no step for it does not hang"
    assert bench.scheduler.queued_tokens == (0, 4, 0)
    bench.scheduler.resume(prompt, 0, 0.0)
    bench.check()
    assert bench.scheduler.queued_tokens == (0, 20, 0)
    assert bench.step() == [("a", 0, 8)]


def test_a_request_on_hold_may_start_again_with_other_blocks() -> None:
    bench = Bench(num_blocks=10)
    prompt = request("a", 20, arrived=3.0)
    bench.admit(prompt, now=3.0)
    prompt.prefix_tried = True
    bench.scheduler.hold(prompt, 16, EXPECTED_BY)
    written = list(prompt.block_table)
    bench.pool.share(written)
    bench.scheduler.requeue(prompt)
    bench.check()
    assert (len(bench.scheduler.waiting), len(bench.scheduler.running), prompt.block_table) == (1, 0, [])
    assert bench.scheduler.num_uncomputed == 20
    assert bench.admit(now=4.0) == [prompt]
    assert not set(prompt.block_table) & set(written)
    assert bench.scheduler.num_prefix_queried == 20, "it is one prompt"
    bench.pool.release(written)
    assert bench.step() == [("a", 0, 8)]


def test_nothing_is_put_on_hold_under_a_step() -> None:
    bench = Bench()
    prompt = request("a", 20)
    bench.admit(prompt)
    bench.scheduler.schedule(0.0)
    with pytest.raises(AssertionError):
        bench.scheduler.hold(prompt, 16, EXPECTED_BY)


def test_a_prompt_of_which_little_is_left_comes_before_shorter_ones_than_it_was() -> None:
    bench = Bench(num_blocks=10_000, chunk_size=512, token_budget=512, seconds_per_token=1e-3)
    pulled, shorter = request("pulled", 8000), request("shorter", 2000)
    bench.admit(pulled)
    bench.scheduler.hold(pulled, 7900, EXPECTED_BY)
    bench.admit(shorter)
    bench.scheduler.resume(pulled, 7900, 0.0)
    assert len({each.urgency for each in (pulled, shorter)}) == 2
    assert bench.step() == [("pulled", 7900, 8000)]


@pytest.mark.parametrize(("num_there", "delay_s"), [(0, 0.4), (300, 0.1), (400, 0.0), (500, 0.0)])
def test_a_prompt_does_not_lose_its_place_while_it_is_on_hold(num_there: int, delay_s: float) -> None:
    """It is due as if it had been known at admission what the pull brings."""
    bench = Bench(10_000, 512, 512, seconds_per_token=1e-3, expected_pull=half_of_it)
    prompt = request("prompt", 800)
    bench.admit(prompt)
    rank, due_at_s, number = prompt.urgency
    bench.scheduler.hold(prompt, 400, EXPECTED_BY)
    bench.scheduler.resume(prompt, num_there, 5.0)
    assert prompt.urgency[::2] == (rank, number)
    assert prompt.urgency[1] == pytest.approx(due_at_s + delay_s)


@pytest.mark.parametrize("num_there", [0, 4000])
def test_a_long_prompt_of_which_less_comes_than_expected_is_passed_by_a_short_one(num_there: int) -> None:
    there = {"long": 7900, "short": 0}
    bench = Bench(10_000, 512, 512, seconds_per_token=1e-3, expected_pull=lambda prompt, *_: there[prompt.key.request])
    long = request("long", 8000)
    bench.admit(long)
    long.prefix_tried = True
    bench.scheduler.hold(long, 7900, EXPECTED_BY)
    bench.scheduler.resume(long, num_there, 0.0)
    bench.scheduler.add(request("short", 100, arrived=0.01))
    assert bench.step(now=0.01) == [("short", 0, 100)]


def test_a_waiting_prompt_counts_as_long_as_it_is_after_its_pull() -> None:
    """In the load that others are told, and in its place in the queue."""
    bench = Bench(num_blocks=1000, chunk_size=8, token_budget=16, seconds_per_token=1e-3, expected_pull=half_of_it)
    other, pulled = request("other", 150), request("pulled", 200)
    other.prefix_tried = True
    bench.scheduler.add(other)
    bench.scheduler.add(pulled)
    assert bench.scheduler.queued_tokens == (0, 150 + 100, 0)
    assert bench.admit() == [pulled, other]
    assert pulled.urgency < other.urgency
    assert bench.scheduler.num_uncomputed == 200 + 150, "it is not known yet whether it is pulled"
    bench.scheduler.hold(pulled, 100, EXPECTED_BY)
    assert bench.scheduler.num_uncomputed == 100 + 150


# --- what a tier may hold ----------------------------------------------------------------------------------------


def offers(bench: Bench, tier: Tier, num: int) -> list[tuple[PrefillRequest, list[int]]]:
    """Computed prompts of two blocks that nobody fetches, as many of `num` as come in, and their blocks."""
    leased = []
    for number in range(num):
        prompt = request(f"{tier}{number}", 8, tier=tier)
        if bench.admit(prompt):
            bench.lease(prompt)
            leased.append((prompt, list(prompt.block_table)))
            bench.step()
        else:
            bench.scheduler.remove(prompt)
    return leased


def test_an_interactive_prompt_finds_room_on_a_worker_full_of_offers() -> None:
    bench = Bench(num_blocks=32, token_budget=100, chunk_size=100)
    assert len(offers(bench, BATCH, 100)) == 12, "3/4 of 32 blocks"
    assert len(offers(bench, STANDARD, 100)) == 2, "7/8 of them, with what is below"
    assert bench.pool.num_free == 4
    urgent = request("urgent", 16, tier=INTERACTIVE)
    assert bench.admit(urgent) == [urgent]


def test_a_tier_s_blocks_are_counted_until_its_leases_end() -> None:
    bench = Bench(num_blocks=8, token_budget=100, chunk_size=100)
    leased = offers(bench, BATCH, 100)
    assert len(leased) == 3
    waiting = request("b", 5, tier=BATCH)
    assert bench.admit(waiting) == []
    assert bench.scheduler.blocks_missing(0.0) == 0, "other tiers' offers would be dropped in vain"
    bench.end_lease(*leased[0])
    assert bench.scheduler.admit(0.0) == [waiting]


def test_blocks_that_several_share_count_once() -> None:
    bench = Bench(num_blocks=16, token_budget=100, chunk_size=100)
    prompts = [request(f"b{n}", 21, tier=BATCH, token_ids=[*range(20), 100 + n]) for n in range(5)]
    for prompt in prompts:
        assert bench.admit(prompt) == [prompt], "5 shared blocks and one of each"
        bench.lease(prompt)
        bench.step()
    assert bench.pool.num_used == 10
    assert len(bench.admit(request("more", 8, tier=BATCH), request("too much", 1, tier=BATCH))) == 1


def test_a_request_alone_may_have_the_whole_pool() -> None:
    bench = Bench(num_blocks=8, token_budget=100, chunk_size=100)
    whole = request("whole", 32, tier=BATCH)
    assert bench.admit(whole) == [whole]
    bench.lease(whole)
    blocks = list(whole.block_table)
    bench.step()
    second = request("second", 32, tier=BATCH)
    assert bench.admit(second) == []
    bench.end_lease(whole, blocks)
    assert bench.scheduler.admit(0.0) == [second]


def test_higher_tiers_pass_one_whose_tier_has_its_share_as_often_as_they_like() -> None:
    bench = Bench(num_blocks=8, token_budget=100, chunk_size=100)
    assert len(offers(bench, BATCH, 3)) == 3
    aged = request("aged", 4, tier=BATCH)
    bench.admit(aged)
    for number in range(5 * MAX_PASSED):
        small = request(f"s{number}", 1, tier=INTERACTIVE)
        assert bench.admit(small, now=100.0) == [small]
        bench.step()
        bench.scheduler.holdings.end(small.key)
    assert aged.num_passed == 0


# --- the end of a request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "running", "in a step", "half done", "on hold"])
def test_a_request_that_is_removed_gives_everything_back(when: str) -> None:
    bench = Bench(num_blocks=4)
    other = request("other", 8)
    prompt = request("a", 16)
    if when == "waiting":
        bench.admit(other)
    bench.admit(prompt)
    assert bool(prompt.block_table) == (when != "waiting")
    if when == "half done":
        bench.step()
    chunks = [] if when == "on hold" else bench.scheduler.schedule(0.0)
    if when == "on hold":
        bench.scheduler.hold(prompt, 8, EXPECTED_BY)
    bench.scheduler.remove(prompt)
    bench.scheduler.remove(prompt)
    if when != "waiting":
        assert bench.scheduler.step_done(chunks) == []
    assert prompt not in bench.scheduler.requests()
    assert bench.pool.num_used == (2 if when == "waiting" else 0)
    assert next_deadline(bench.scheduler) == (1000.0 if when == "waiting" else math.inf)
    bench.check()


def test_a_newer_attempt_is_not_taken_for_the_one_in_the_step() -> None:
    bench = Bench()
    old, new = request("a", 16, attempt=1), request("a", 16, attempt=2)
    bench.admit(old)
    chunks = bench.scheduler.schedule(0.0)
    bench.scheduler.remove(old)
    bench.admit(new)
    assert bench.scheduler.step_done(chunks) == []
    assert new.num_computed == 0
    assert bench.step() == [("a", 0, 8)]


def test_finished_chunks_are_told_apart_from_abandoned_ones() -> None:
    bench = Bench()
    gone, stays = request("gone", 4), request("stays", 4)
    bench.admit(gone, stays)
    chunks = bench.scheduler.schedule(0.0)
    bench.scheduler.remove(gone)
    assert [chunk.prompt for chunk in bench.scheduler.step_done(chunks)] == [stays]


def test_the_lease_keeps_the_blocks_of_a_prompt_that_is_done() -> None:
    bench = Bench()
    prompt = request("a", 8)
    bench.admit(prompt)
    leased = tuple(prompt.block_table)
    bench.pool.share(leased)
    bench.step()
    assert bench.pool.num_used == 2
    bench.end_lease(prompt, leased)
    assert bench.pool.num_used == 0
    bench.scheduler.holdings.end(prompt.key)
    bench.scheduler.holdings.end(RequestKey(RequestId("nobody"), 1))
    bench.check()


def test_a_computed_prompt_that_is_given_up_counts_no_more_in_its_tier() -> None:
    bench = Bench()
    prompt = request("a", 8)
    bench.admit(prompt)
    bench.step()
    assert list(bench.scheduler.holdings.keys()) == [prompt.key], "until its lease ends"
    bench.scheduler.remove(prompt)
    assert not bench.scheduler.holdings.keys()
    bench.check()


def test_what_a_waiting_prompt_found_is_not_used_once_it_has_proved_invalid() -> None:
    bench = Bench(num_blocks=16, chunk_size=16, token_budget=16)
    beginning = list(range(12))
    bench.compute(request("a", 13, token_ids=[*beginning, 100]))
    waiting = request("b", 13, token_ids=[*beginning, 101])
    bench.scheduler.add(waiting)
    found = bench.pool.match(waiting.block_hashes)
    assert waiting.matched == found != []
    bench.pool.share(found)
    bench.pool.forget(found)
    bench.pool.release(found)
    assert bench.admit() == [waiting]
    assert (waiting.num_computed, waiting.num_cached) == (0, 0)


def test_deadlines_are_named_in_order_and_once() -> None:
    bench = Bench(num_blocks=2)
    prompts = [request(name, 8, deadline=deadline) for name, deadline in [("a", 3.0), ("b", 1.0), ("c", 2.0)]]
    bench.admit(*prompts)
    a, b, c = prompts
    assert next_deadline(bench.scheduler) == 1.0
    bench.scheduler.remove(b)
    assert next_deadline(bench.scheduler) == 2.0
    assert bench.scheduler.expired(1.9) == []
    assert bench.scheduler.expired(3.0) == [c, a]
    assert bench.scheduler.expired(3.0) == []
    assert next_deadline(bench.scheduler) == math.inf


def test_it_is_known_what_is_here() -> None:
    bench = Bench(num_blocks=2)
    running, waiting = request("running", 8), request("waiting", 8)
    bench.admit(running, waiting)
    assert bench.scheduler.requests() == [running, waiting]
    assert (len(bench.scheduler.running), len(bench.scheduler.waiting)) == (1, 1)
