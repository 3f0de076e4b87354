"""Who gives way when memory or places run out, how, and when it comes back."""

from __future__ import annotations

import pytest
from decode_bench import EAGER, Bench, request, tokens

from common.contract.ids import LeaseId
from common.contract.messages.handoff import BlocksReady
from common.contract.tiers import Tier
from common.scheduling.costs import Costs
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest, RequestState
from kv_transfer.pull import PullState

INTERACTIVE, STANDARD, BATCH = Tier
CHEAP_SWAP = Costs(prefill_s_per_token=1.0, swap_s_per_block=1e-6)
CHEAP_RECOMPUTE = Costs(prefill_s_per_token=1e-6, swap_s_per_block=1.0)


def crowded(*tiers: Tier, **policy: object) -> tuple[Bench, list[DecodeChoice]]:
    """Sequences of 8 tokens and two blocks each, which all run and all want a fourth block when there is no other."""
    options = {"memory_reserve": EAGER, "num_host_blocks": 32, "costs": CHEAP_SWAP, **policy}
    bench = Bench(3 * len(tiers), **options)  # type: ignore[arg-type]
    choices = [bench.enter(request(f"r{index}", 8, tier=tier))[0] for index, tier in enumerate(tiers)]
    bench.step()
    assert bench.pool.num_free == 0
    return bench, choices


def preempted(choices: list[DecodeChoice]) -> list[int]:
    return [index for index, choice in enumerate(choices) if choice.stage is ChoiceStage.PREEMPTED]


# --- who ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiers", "victim"),
    [
        pytest.param((STANDARD, STANDARD, STANDARD), 2, id="the newest of equals"),
        pytest.param((BATCH, STANDARD, STANDARD), 0, id="the lowest tier, though it is the oldest"),
        pytest.param((STANDARD, BATCH, BATCH), 2, id="the newest of the lowest tier"),
        pytest.param((BATCH, BATCH, INTERACTIVE), 1, id="no higher one, though it is newer"),
        pytest.param((INTERACTIVE, STANDARD, INTERACTIVE), 1, id="the lowest of those who are here"),
    ],
)
def test_the_newest_of_the_lowest_tier_gives_way(tiers: tuple[Tier, ...], victim: int) -> None:
    bench, choices = crowded(*tiers)
    bench.preempting_step()
    assert preempted(choices) == [victim]


def test_those_who_lack_a_block_sit_out_one_step_and_go_on_in_the_next() -> None:
    bench, [a, b, c] = crowded(STANDARD, STANDARD, STANDARD)
    step = bench.preempting_step()
    assert step.decodes == [], "all were due, and the blocks of the third are there with the end of the step"
    bench.end_step(step)
    bench.reserve()
    assert bench.step().decodes == [a, b]
    assert c.stage is ChoiceStage.PREEMPTED


def test_the_only_free_block_goes_to_the_most_senior_of_those_who_are_due() -> None:
    bench = Bench(10, memory_reserve=EAGER)
    tiers = {"old": STANDARD, "vip": INTERACTIVE, "new": STANDARD}
    old, vip, new = [bench.enter(request(name, 8, tier=tier))[0] for name, tier in tiers.items()]
    bench.step()
    assert bench.pool.num_free == 1
    assert bench.preempting_step().decodes == [vip]
    assert (old.stage, new.stage) == (ChoiceStage.RUNNING, ChoiceStage.PREEMPTED)


def test_no_more_give_way_than_need_be() -> None:
    """One is due while three blocks are needed by nobody else: one other gives way."""
    bench = Bench(7, memory_reserve=EAGER)
    a, b, c = [bench.run(request(name, num_tokens)) for name, num_tokens in (("a", 9), ("b", 4), ("c", 4))]
    assert bench.pool.num_free == 0
    bench.preempt()
    assert [each.stage is ChoiceStage.PREEMPTED for each in (a, b, c)] == [False, False, True]


def unread(name: str, num_tokens: int, tier: Tier = STANDARD) -> DecodeRequest:
    """A request whose source has opened its offer, and computed nothing yet."""
    subject = request(name, num_tokens, tier=tier)
    assert subject.pull is not None
    subject.pull.attach()
    subject.pull.blocks_ready(offer(subject, 0))
    return subject


def offer(subject: DecodeRequest, num_ready: int) -> BlocksReady:
    return BlocksReady(
        request=subject.work.request,
        attempt=1,
        lease=LeaseId("lease"),
        epoch=1,
        start=0,
        block_ids=tuple(range(num_ready)),
        num_blocks=-(-len(subject.work.token_ids) // 4),
    )


def reserve(bench: Bench, subject: DecodeRequest) -> None:
    """There is room for it: its pull has blocks."""
    assert bench.reserve(subject) == [subject.work.request]
    assert subject.pull is not None
    subject.pull.reserve(bench.pulling[subject.work.request].block_ids)


def test_a_reservation_that_nothing_was_read_into_gives_way_to_older_sequences() -> None:
    bench = Bench(6, memory_reserve=EAGER)
    older = bench.run(request("older", 8))
    newer = unread("newer", 12)
    reserve(bench, newer)
    while not bench.scheduler.preemption.num_revoked:
        bench.end_step(bench.begin_step())
    assert newer.pull is not None
    assert (newer.state, newer.pull.state) == (RequestState.WAITING, PullState.OFFERED)
    del bench.pulling["newer"]
    assert (older.stage, bench.num_preemptions) == (ChoiceStage.RUNNING, 0)
    assert (bench.scheduler.num_waiting, len(bench.scheduler.entrance.reserved)) == (1, 0)
    bench.step(ends=[older])
    assert list(bench.pulling) == ["newer"], "it gets room again"
    bench.settle(newer)


def test_a_reservation_of_a_lower_tier_gives_way_to_a_request_that_waits() -> None:
    bench = Bench(6, memory_reserve=EAGER)
    low = unread("low", 16, BATCH)
    reserve(bench, low)
    assert not bench.scheduler.has_work
    assert bench.reserve(request("high", 12, tier=INTERACTIVE)) == []
    assert bench.scheduler.has_work, "though nothing is computed: the worker must not go to sleep"
    step = bench.begin_step()
    assert low.pull is not None
    assert (low.state, low.pull.state) == (RequestState.WAITING, PullState.OFFERED)
    del bench.pulling["low"]
    bench.end_step(step)
    assert bench.reserve() == ["high"]
    assert not bench.scheduler.has_work


@pytest.mark.parametrize(("num_tokens", "victims"), [(4, [2]), (8, [1, 2]), (12, [1, 2])])
def test_what_lower_tiers_give_to_a_request_is_enough_for_those_who_are_due(
    num_tokens: int, victims: list[int]
) -> None:
    """It counts the block that a running sequence needs next, which need not give way, nor take from others, for it."""
    bench = Bench(6, memory_reserve=EAGER)
    texts = (("a", 7, STANDARD), ("v", 4, BATCH), ("w", 4, BATCH))
    choices = [bench.enter(request(name, text, tier=tier))[0] for name, text, tier in texts]
    bench.step()
    assert bench.pool.num_free == 0, "and the first one is due"
    assert bench.reserve(request("high", num_tokens, tier=INTERACTIVE)) == []
    bench.end_step(bench.begin_step())
    assert preempted(choices) == victims
    assert bench.reserve() == ["high"]
    assert choices[0] in bench.step().decodes


def test_a_pull_that_has_begun_to_read_keeps_its_blocks() -> None:
    bench = Bench(6, memory_reserve=EAGER)
    older = bench.run(request("older", 8))
    newer = unread("newer", 12)
    reserve(bench, newer)
    assert newer.pull is not None
    newer.pull.blocks_ready(offer(newer, 1))
    bench.preempt()
    assert (older.stage, bench.scheduler.preemption.num_revoked) == (ChoiceStage.PREEMPTED, 0)


def test_a_prompt_that_is_computed_here_gives_way_to_older_sequences() -> None:
    bench = Bench(6, memory_reserve=EAGER, prefill_tokens=1)
    older = bench.run(request("older", 8))
    newer = request("newer", 12, local=True)
    bench.reserve(newer)
    bench.preempt()
    assert older.stage is ChoiceStage.RUNNING
    assert (len(bench.scheduler.prompts), bench.scheduler.num_waiting, len(bench.scheduler.entrance.preempted)) == (
        0,
        1,
        0,
    )


def test_a_prompt_of_a_higher_tier_does_not_give_way() -> None:
    bench = Bench(6, memory_reserve=EAGER, prefill_tokens=1)
    lower = bench.run(request("lower", 8))
    bench.reserve(request("higher", 12, local=True, tier=INTERACTIVE))
    bench.preempting_step()
    assert lower.stage is ChoiceStage.PREEMPTED
    assert len(bench.scheduler.prompts) == 1


def test_who_is_about_to_join_gives_way_before_older_ones_that_run() -> None:
    """It has blocks, and waits for a place: it is the newest."""
    bench = Bench(5, memory_reserve=EAGER, max_num_seqs=1)
    runs = bench.run(request("runs", 8))
    [ready] = bench.enter(request("ready", 5))
    bench.preempt()
    assert (runs.stage, ready.stage) == (ChoiceStage.RUNNING, ChoiceStage.PREEMPTED)


def test_who_came_back_is_as_old_as_it_was() -> None:
    bench, [a, b, c] = crowded(STANDARD, STANDARD, STANDARD)
    bench.preempt()
    assert c.stage is ChoiceStage.PREEMPTED
    bench.forget(b.request)
    bench.reserve()
    bench.step()
    assert (b.stage, c.stage) == (ChoiceStage.ENDED, ChoiceStage.RUNNING)
    [d] = bench.enter(request("d", 3))
    bench.preempt()
    assert (a.stage, c.stage, d.stage) == (ChoiceStage.RUNNING, ChoiceStage.RUNNING, ChoiceStage.PREEMPTED)


def test_one_that_gave_way_to_a_loan_comes_back_when_enough_of_it_is_back() -> None:
    bench = Bench(8, memory_reserve=EAGER, num_host_blocks=8)
    old = request("old", 12)
    bench.enter(old)
    bench.forget(old)
    runs = bench.run(request("runs", 8))
    lent = bench.scheduler.lend(old.chain.hashes)
    assert len(lent) == 3
    bench.preempt()
    assert (runs.stage, bench.pool.num_free) == (ChoiceStage.PREEMPTED, 5)
    bench.pool.release(lent[2:])
    bench.reserve()
    assert runs.stage is ChoiceStage.READY, "it is alone, and needs 6 blocks"


# --- how ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        # Of 13 tokens 12 are computed: 3 blocks, out and in again, against 13 tokens.
        pytest.param({"costs": Costs(prefill_s_per_token=1.0, swap_s_per_block=2.1)}, "swap", id="swap is cheaper"),
        pytest.param({"costs": Costs(prefill_s_per_token=1.0, swap_s_per_block=2.2)}, "recompute", id="it is not"),
        pytest.param({"num_host_blocks": 3}, "swap", id="just enough host memory"),
        pytest.param({"num_host_blocks": 2}, "recompute", id="too little host memory"),
        pytest.param({"num_host_blocks": 0}, "recompute", id="no host memory"),
        pytest.param({"preempt_by": "swap", "costs": CHEAP_RECOMPUTE}, "swap", id="swap as told"),
        pytest.param({"preempt_by": "swap", "num_host_blocks": 2}, "recompute", id="told what cannot be"),
        pytest.param({"preempt_by": "recompute", "costs": CHEAP_SWAP}, "recompute", id="recompute as told"),
    ],
)
def test_blocks_are_given_up_the_cheaper_way(policy: dict[str, object], how: str) -> None:
    bench, _ = crowded(STANDARD, STANDARD, **policy)
    step = bench.preempting_step()
    swapped = how == "swap"
    assert (bench.scheduler.swap.num_swapped, bench.scheduler.preemption.num_recomputed) == (
        int(swapped),
        int(not swapped),
    )
    assert (len(step.swap_outs), bench.scheduler.swap.num_used) == ((3, 3) if swapped else (0, 0))


@pytest.mark.parametrize(
    ("depth_s", "swap_s_per_block", "how"),
    [(0.0, 0.66, "swap"), (0.0, 0.67, "recompute"), (0.1, 1.29, "swap"), (0.1, 1.31, "recompute")],
)
def test_what_others_hold_too_is_not_computed_again(depth_s: float, swap_s_per_block: float, how: str) -> None:
    """Of 12 tokens 8 are shared: 3 blocks, out and in again, against 4 tokens of depths that add up to 38."""
    costs = Costs(prefill_s_per_token=1.0, depth_s=depth_s, swap_s_per_block=swap_s_per_block)
    bench = Bench(4, memory_reserve=EAGER, num_host_blocks=8, costs=costs)
    bench.run(request("a", 8))
    bench.run(request("b", tokens("a", 8)))
    bench.preempt()
    assert (bench.scheduler.swap.num_swapped == 1) == (how == "swap")


def test_without_a_prefix_cache_what_others_hold_too_is_computed_again() -> None:
    """The other choice goes on with the blocks, and nobody finds them."""
    costs = Costs(prefill_s_per_token=1.0, swap_s_per_block=1.0)  # with the cache, 4 tokens or so were cheaper
    bench = Bench(5, memory_reserve=EAGER, num_host_blocks=8, costs=costs, prefix_cache=False)
    bench.enter(request("choices", 8, num_choices=2))
    bench.preempt()
    assert bench.scheduler.swap.num_swapped == 1


def test_blocks_of_a_swapped_sequence_are_cached_as_long_as_they_are_here() -> None:
    """Also those that it has filled itself."""
    bench = Bench(8, memory_reserve=EAGER, num_host_blocks=8)
    bench.enter(request("a", 8))
    [b] = bench.enter(request("b", 5))
    table: list[int] = []
    while not bench.num_preemptions:
        table = list(b.sequence.block_table)
        step = bench.begin_step()
        if bench.num_preemptions:
            break
        bench.end_step(step)
        bench.reserve()
    assert step.swap_outs
    num_full = b.sequence.num_computed // 4
    assert num_full > 1, "its prompt fills one"
    assert bench.pool.match(b.chain.hashes[:num_full]) == table[:num_full]
    bench.end_step(step)


def test_what_is_swapped_out_comes_back_in_the_same_order() -> None:
    bench, [a, b] = crowded(STANDARD, STANDARD)
    table = list(b.sequence.block_table)
    step = bench.preempting_step()
    blocks, slots = zip(*step.swap_outs, strict=True)
    assert list(blocks) == table
    assert len(set(slots)) == 3
    bench.end_step(step)
    bench.forget(a.request)
    bench.evict()
    bench.reserve()
    assert b.stage is ChoiceStage.READY
    step = bench.begin_step()
    assert step.swap_ins == list(zip(slots, b.sequence.block_table, strict=False))
    assert len(b.sequence.block_table) == 4, "and one for its next token"
    assert step.decodes == [b]
    assert bench.scheduler.swap.num_used == 0
    bench.end_step(step)
    assert b.sequence.token_ids == [*b.request.work.token_ids, 99, *range(9, 14)]


def test_what_is_still_cached_is_not_swapped_in() -> None:
    """The one that goes on has taken the last of the three blocks: the last of a table is the first to be evicted."""
    bench, [a, b] = crowded(STANDARD, STANDARD)
    table = list(b.sequence.block_table)
    step = bench.preempting_step()
    slots = [slot for _, slot in step.swap_outs]
    bench.end_step(step)
    bench.step()
    assert bench.pool.match(b.chain.hashes) == table[:2]
    assert a.sequence.block_table[-1] == table[2]
    bench.forget(a.request)
    bench.reserve()
    step = bench.begin_step()
    assert list(b.sequence.block_table[:2]) == table[:2]
    assert step.swap_ins == [(slots[2], b.sequence.block_table[2])]


def test_recomputing_begins_after_what_is_still_cached() -> None:
    bench, [a, b] = crowded(STANDARD, STANDARD, preempt_by="recompute")
    bench.preempt()
    bench.step()
    assert len(bench.pool.match(b.chain.hashes)) == 2, "the third is in use for other contents"
    bench.forget(a.request)
    bench.reserve()
    assert b.stage is ChoiceStage.RECOMPUTING
    [chunk] = bench.step().chunks
    assert (chunk.start, chunk.end) == (8, 13)


def test_recomputing_takes_no_more_tokens_of_a_step_than_prompts_may() -> None:
    bench, [a, b, c] = crowded(STANDARD, STANDARD, STANDARD, preempt_by="recompute", prefill_tokens=2)
    bench.preempt()
    bench.forget(b.request)
    bench.evict()
    bench.reserve()
    assert c.stage is ChoiceStage.RECOMPUTING
    sizes = []
    while c.stage is ChoiceStage.RECOMPUTING:
        step = bench.step()
        assert step.decodes == [a]
        sizes += [chunk.end - chunk.start for chunk in step.chunks]
    assert sizes == [2] * 6 + [1]


def test_a_recomputed_sequence_goes_on_with_its_next_token() -> None:
    bench, [a, b] = crowded(STANDARD, STANDARD, preempt_by="recompute")
    bench.preempt()
    before = list(b.sequence.token_ids)
    bench.forget(a.request)
    bench.reserve()
    step = bench.step()
    assert [chunk.prompt.choice for chunk in step.chunks] == [b]
    assert b.sequence.token_ids == [*before, len(before)]
    assert bench.step().decodes == [b]
    assert b.sequence.token_ids == [*before, len(before), len(before) + 1]


def test_what_is_preempted_before_it_is_swapped_in_stays_where_it_is() -> None:
    bench, [a, b] = crowded(BATCH, BATCH)
    bench.preempt()
    bench.forget(a.request)
    bench.reserve()
    assert b.stage is ChoiceStage.READY
    slots = list(b.host_slots)
    assert len(slots) == 3
    bench.want(request("vip", 24, tier=INTERACTIVE))
    bench.reserve()
    step = bench.begin_step()
    assert (step.swap_outs, step.swap_ins) == ([], [])
    assert b.host_slots == slots
    assert bench.scheduler.swap.num_swapped == 2, "it has given way twice"
    bench.end_step(step)


@pytest.mark.parametrize("given_up", [True, False])
def test_what_is_being_swapped_in_is_named_when_it_is_there(given_up: bool) -> None:
    bench, [a, b] = crowded(STANDARD, STANDARD)
    bench.preempt()
    bench.forget(a.request)
    bench.evict()
    bench.reserve()
    step = bench.begin_step()
    assert len(step.swap_ins) == 3
    if given_up:
        bench.forget(b.request)
        assert bench.pool.match(b.chain.hashes) == [], "named before its contents are there"
    bench.end_step(step)
    if not given_up:
        bench.steps(8)
        bench.forget(b.request)
        assert len(bench.pool.match(b.chain.hashes)) >= 5


# --- the way back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "waits"), [(BATCH, True), (STANDARD, True), (INTERACTIVE, False)])
def test_who_was_preempted_comes_back_before_those_of_its_tier_and_lower_come_in(tier: Tier, waits: bool) -> None:
    bench, [a, b] = crowded(STANDARD, STANDARD)
    bench.preempt()
    bench.step()
    assert bench.pool.num_free == 2
    small = request("small", 1, tier=tier)
    assert bench.reserve(small) == ([] if waits else ["small"])
    bench.forget(a.request)
    bench.reserve()
    assert b.stage is ChoiceStage.READY
    assert "small" in bench.pulling, "there is room for both"


def test_of_those_who_were_preempted_the_oldest_of_the_highest_tier_comes_back_first() -> None:
    bench, [vip, *others] = crowded(INTERACTIVE, BATCH, STANDARD, STANDARD)
    big = request("big", 30, tier=INTERACTIVE)
    bench.reserve(big)
    bench.step()
    assert preempted([vip, *others]) == [1, 2, 3]
    for each in (big, vip.request):
        bench.forget(each)
    elsewhere = bench.pool.allocate(bench.pool.num_free)
    back: list[DecodeChoice] = []
    while elsewhere:
        bench.pool.release([elsewhere.pop()])
        bench.reserve()
        back += [each for each in others if each.stage is not ChoiceStage.PREEMPTED and each not in back]
    assert back == [others[1], others[2], others[0]]


def test_who_was_preempted_is_not_kept_out_by_an_endless_stream_of_a_higher_tier() -> None:
    """For a while it is; then what it needs is not given away any more."""
    bench, [a, b] = crowded(INTERACTIVE, BATCH, ageing_s=5.0)
    bench.preempt()
    bench.forget(a.request)
    for number in range(120):
        bench.now += 1.0
        bench.want(request(f"vip {number}", 20, max_tokens=4, tier=INTERACTIVE, arrived=bench.now))
        bench.reserve()
        for name in list(bench.pulling):
            bench.settle(next(each for each in bench.requests if each.work.request == name))
        bench.step()
    assert b.sequence.num_tokens > 13, "it has not had a single step"


# --- a higher tier needs room ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "comes", "gives_way"),
    [
        (BATCH, INTERACTIVE, True),
        (BATCH, STANDARD, True),
        (STANDARD, INTERACTIVE, True),
        (BATCH, BATCH, False),
        (STANDARD, BATCH, False),
        (INTERACTIVE, INTERACTIVE, False),
    ],
)
def test_lower_tiers_give_way_to_a_request_for_which_there_is_no_room(here: Tier, comes: Tier, gives_way: bool) -> None:
    bench, [a, b] = crowded(here, here)
    assert bench.reserve(request("new", 4, tier=comes)) == []
    bench.step()
    assert [a.stage is ChoiceStage.PREEMPTED, b.stage is ChoiceStage.PREEMPTED] == [False, gives_way]
    assert list(bench.pulling) == (["new"] if gives_way else [])


@pytest.mark.parametrize(("num_tokens", "num_giving_way"), [(4, 1), (12, 1), (13, 2), (24, 2), (25, 3)])
def test_as_many_give_way_as_it_takes(num_tokens: int, num_giving_way: int) -> None:
    """With each three blocks come back."""
    bench, choices = crowded(BATCH, BATCH, BATCH)
    bench.reserve(request("vip", num_tokens, tier=INTERACTIVE))
    bench.step()
    assert preempted(choices) == [2, 1, 0][:num_giving_way][::-1]
    assert list(bench.pulling) == ["vip"]


def test_no_more_give_way_than_the_forecast_lacks_with_all_that_they_would_have_grown_by() -> None:
    """Six sequences hold two blocks each and are expected to have nine in the end: 54 of 60. The request has ten blocks
    and is expected to have eighteen. Two who do not grow make room for it, although they hold four blocks now."""
    bench = Bench(60)
    for tier in (BATCH, INTERACTIVE):
        bench.profile(32, tier)
    choices = [bench.enter(request(f"r{index}", 4, tier=BATCH))[0] for index in range(6)]
    bench.step()
    assert bench.pool.num_used == 12
    assert bench.reserve(request("vip", 40, tier=INTERACTIVE)) == [], "the forecast lacks blocks, and most are free"
    bench.step()
    assert (preempted(choices), bench.num_preemptions) == ([4, 5], 2), "the others neither left nor came back at once"
    assert list(bench.pulling) == ["vip"]


def test_nobody_of_its_own_tier_gives_way_when_lower_ones_have_not_enough() -> None:
    bench, [vip, batch] = crowded(INTERACTIVE, BATCH)
    assert bench.reserve(request("big", 24, tier=INTERACTIVE)) == []
    step = bench.begin_step()
    assert [vip.stage, batch.stage] == [ChoiceStage.RUNNING, ChoiceStage.PREEMPTED]
    bench.end_step(step)
    assert bench.reserve() == []


def test_a_prompt_of_a_lower_tier_gives_way_too() -> None:
    bench = Bench(4, memory_reserve=EAGER, token_budget=1)
    bench.reserve(request("batch", 16, local=True, tier=BATCH))
    bench.steps(3)
    assert bench.reserve(request("vip", 4, tier=INTERACTIVE)) == []
    bench.step()
    assert list(bench.pulling) == ["vip"]


def test_pressure_ends_when_the_request_has_come_in() -> None:
    """It asks in the middle of a step, and there is room at its end without anybody's giving way."""
    bench, [a, b] = crowded(BATCH, BATCH)
    step = bench.begin_step()
    assert bench.reserve(request("vip", 8, tier=INTERACTIVE)) == []
    bench.end_step(step, ends=[b])
    assert bench.reserve() == ["vip"]
    bench.begin_step()
    assert a.stage is ChoiceStage.RUNNING
    assert bench.num_preemptions == 0


def test_pressure_ends_when_the_request_is_given_up() -> None:
    bench, [_, b] = crowded(BATCH, BATCH)
    vip = request("vip", 8, tier=INTERACTIVE)
    assert bench.reserve(vip) == []
    bench.forget(vip)
    bench.reserve()
    bench.begin_step()
    assert b.stage is ChoiceStage.RUNNING
    assert bench.num_preemptions == 0


def test_pressure_is_met_once() -> None:
    """What was taken is there at the end of the step; asking again meanwhile takes nothing from anybody else."""
    bench, choices = crowded(BATCH, BATCH, BATCH)
    bench.reserve(request("vip", 4, tier=INTERACTIVE))
    step = bench.begin_step()
    assert preempted(choices) == [2]
    bench.want(request("who asks", 4, tier=BATCH))
    assert bench.reserve() == []
    bench.end_step(step)
    assert bench.reserve() == ["vip"]
    bench.begin_step()
    assert preempted(choices) == [2]


def test_who_holds_nothing_alone_does_not_end_the_search_for_room() -> None:
    bench = Bench(8, memory_reserve=EAGER)
    a = bench.run(request("a", 13, tier=BATCH))
    [b] = bench.enter(request("b", 8, tier=BATCH))
    [c] = bench.enter(request("c", tokens("b", 8), tier=BATCH))
    assert c.sequence.block_table == b.sequence.block_table
    bench.reserve(request("vip", 12, tier=INTERACTIVE))
    bench.step()
    assert list(bench.pulling) == ["vip"]
    assert a.stage is not ChoiceStage.ENDED


def test_room_that_does_not_do_yet_is_kept_for_whom_it_is_made() -> None:
    """One of a lower tier, preempted before, would fit into it; it would only have to give way again."""
    bench = Bench(10, memory_reserve=EAGER, num_host_blocks=20)
    a, c = bench.run(request("a", 17, tier=BATCH)), bench.run(request("c", 5, tier=BATCH))
    b = bench.run(request("b", 9, tier=BATCH))
    bench.preempt()
    assert b.stage is ChoiceStage.PREEMPTED
    bench.want(request("vip", 21, tier=INTERACTIVE))
    bench.forget(c.request)
    bench.reserve()
    num_free = bench.pool.num_free
    assert -(-b.sequence.num_tokens // 4) <= num_free < 6
    assert b.stage is ChoiceStage.PREEMPTED
    bench.step()
    assert list(bench.pulling) == ["vip"]
    assert a.stage is ChoiceStage.PREEMPTED
    assert bench.num_preemptions == 2


@pytest.mark.parametrize("meanwhile", ["somebody asks", "nothing happens"])
def test_room_is_kept_for_a_higher_tier_for_a_while_and_no_longer(meanwhile: str) -> None:
    bench = Bench(12, memory_reserve=EAGER, ageing_s=5.0)
    bench.run(request("a", 4, tier=INTERACTIVE))
    b = bench.run(request("b", 8, tier=BATCH))
    first = request("first", 32, tier=INTERACTIVE)
    bench.reserve(first)
    bench.step()
    assert (list(bench.pulling), b.stage) == (["first"], ChoiceStage.PREEMPTED)
    bench.want(request("too big beside a", 44, tier=INTERACTIVE))
    bench.forget(first)
    bench.reserve()
    assert (list(bench.pulling), b.stage) == ([], ChoiceStage.PREEMPTED)
    bench.now = 6.0
    if meanwhile == "somebody asks":
        bench.want(request("somebody else", 4, tier=BATCH))
    bench.reserve()
    assert b.stage is ChoiceStage.RECOMPUTING


def test_one_after_the_other_may_have_to_give_way() -> None:
    """Who gave way before is spared; somebody else of its tier is not."""
    bench, [a, b, c] = crowded(BATCH, BATCH, BATCH)
    first = request("first", 4, tier=INTERACTIVE)
    bench.reserve(first)
    bench.step()
    assert (list(bench.pulling), c.stage) == (["first"], ChoiceStage.PREEMPTED)
    bench.forget(first)
    bench.forget(a.request)
    bench.reserve()
    bench.steps(2)
    assert (b.stage, c.stage) == (ChoiceStage.RUNNING, ChoiceStage.RUNNING)
    bench.reserve(request("second", 8, tier=INTERACTIVE))
    bench.steps(2)
    assert list(bench.pulling) == ["second"]


# --- a higher tier needs a place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [STANDARD, BATCH])
def test_in_a_full_batch_an_interactive_request_takes_the_place_of_a_lower_one_which_keeps_its_blocks(
    tier: Tier,
) -> None:
    bench = Bench(64, memory_reserve=EAGER, max_num_seqs=2, num_host_blocks=64)
    a, b = [bench.enter(request(name, 4, tier=tier))[0] for name in "ab"]
    bench.step()
    table = list(b.sequence.block_table)
    vip_request = request("vip", 4, tier=INTERACTIVE)
    [vip] = bench.enter(vip_request)
    step = bench.step()
    assert step.decodes == [a, vip]
    assert (b.stage, list(b.sequence.block_table)) == (ChoiceStage.READY, table)
    assert bench.num_preemptions == 0
    num_tokens = b.sequence.num_tokens
    bench.steps(3)
    assert b.sequence.num_tokens == num_tokens, "it does not advance meanwhile"
    bench.forget(vip_request)
    assert bench.step().decodes == [a, b]
    assert b.sequence.num_tokens == num_tokens + 1


@pytest.mark.parametrize("tier", [INTERACTIVE, STANDARD])
def test_in_a_full_batch_nobody_takes_the_place_of_its_own_tier_or_a_higher(tier: Tier) -> None:
    bench = Bench(64, memory_reserve=EAGER, max_num_seqs=2)
    a, b = [bench.enter(request(name, 4, tier=tier))[0] for name in "ab"]
    bench.step()
    bench.enter(request("new", 4, tier=STANDARD))
    for step in bench.steps(3):
        assert step.decodes == [a, b]


def test_lower_tiers_that_hold_all_places_keep_no_higher_one_out() -> None:
    bench = Bench(64, memory_reserve=EAGER, max_num_seqs=2)
    waiting = [request(f"batch {number}", 4, tier=BATCH) for number in range(9)]
    assert len(bench.reserve(*waiting)) == 4
    assert bench.reserve(request("vip", 4, tier=INTERACTIVE)) == ["vip"]
