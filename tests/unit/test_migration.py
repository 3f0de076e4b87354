"""Running sequences that move between decode workers: what goes over, what is told to whom, and what is left behind."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
from migration_bench import BLOCK_SIZE, BUDGET_S, GATEWAY, MAX_TOKENS, CountedMasks, Gateway, Leg, Site, World, chain
from step_tokens import handles

from common.contract.errors import Cause
from common.contract.ids import RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Decode, Drain, Resend, Resume
from common.contract.messages.handoff import AttachSequence, Detach, OfferWithdrawn, PrefillDone, Settle, Settled
from common.contract.messages.session import Phase
from common.contract.messages.worker import Cancelled, Cut, Failed, Finished, Moved, TokenLogprobs, Tokens
from common.contract.sampling import SamplingParams
from common.engine.grammar import GaveUp
from decode_worker import answers as answers_module
from decode_worker import migration as migration_module
from decode_worker import request as request_module
from decode_worker.columns import DecodeColumns
from decode_worker.migration import MAX_PUT_OFF, MAX_TAIL_BLOCKS, first_tokens_fit, goes_on
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage
from decode_worker.step import Step
from kv_transfer import lender as lender_module
from kv_transfer.lender import LENT_TTL_S

PROMPT = range(10)


def running(
    world: World, num_steps: int = 5, max_tokens: int = 30, num_choices: int = 1, *, drain: bool = True, **asked: Any
) -> Leg:
    """A request that the first worker, which is drained, has generated some tokens of; the next step is in flight."""
    site = first(world)
    leg = world.gateway.ask(site, PROMPT, max_tokens, num_choices, **asked)
    world.deliver()
    site.step(num_steps)
    world.deliver()
    if drain:
        site.drain()
    return leg


def first(world: World) -> Site:
    return next(iter(world.sites.values()))


def second(world: World) -> Site:
    return list(world.sites.values())[1]


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("end", ["acknowledged", "aborted", "expired", "gateway lost"])
def test_requests_that_have_ended_are_not_left_to_the_garbage_collector(num_choices: int, end: str) -> None:
    """It would come once in thousands of them. What is left are stale entries of heaps, of which there may be a few."""
    world = World(["d0"])
    site = first(world)
    gc.collect()  # what other tests have left
    gc.disable()
    try:
        names: list[str] = []
        for _ in range(100):
            leg = world.gateway.ask(site, PROMPT, 3, num_choices)
            world.deliver()
            names += site.core.book.requests
            if end != "acknowledged":
                site.step(2)  # each choice has two of its three tokens
                assert site.core.book.requests[leg.key.request].choices
            if end == "aborted":
                world.gateway.abort(leg)
            elif end == "expired":
                site.core.book.requests[leg.key.request].deadline = -math.inf
                site.tick()
            elif end == "gateway lost":
                site.worker.on_peer_lost(site.core.book.requests[leg.key.request].gateway)
            world.run()
        assert len(set(names)) == 100
        requests = [each for each in gc.get_objects() if type(each) is request_module.DecodeRequest]
        assert sum(each.work.request in names for each in requests) < 33
    finally:
        gc.enable()


def end_step(world: World, site: Site, *, reads: bool = True) -> None:
    """The step in flight is done; what it leads to."""
    site.end_step()
    world.deliver(reads=reads)


def failed(leg: Leg) -> Cause:
    """Why it has failed."""
    [end] = leg.ends
    assert isinstance(end, Failed), end
    return end.cause


def kinds(leg: Leg) -> list[type[Message]]:
    return [type(end) for end in leg.ends]


def num_computed(world: World) -> int:
    """Tokens whose KV was computed, by whomever."""
    return sum(sum(site.engine.computed.values()) for site in world.sites.values())


def finish(world: World) -> None:
    world.run()
    world.check_end()


def no_token_was_computed_twice(world: World) -> bool:
    counts = sum((site.engine.computed for site in world.sites.values()), start=type(first(world).engine.computed)())
    return max(counts.values()) == 1


# --- the way over ------------------------------------------------------------------------------------------------


def test_a_running_sequence_goes_on_elsewhere_with_the_same_tokens() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver()
    assert new.key == RequestKey(old.key.request, 2)
    assert d0.in_step, "it goes on generating while the beginning is read"
    assert d1.reads.num_blocks_read == 3, "14 tokens have their KV"
    end_step(world, d0)
    assert (old.cut, old.moved, old.ends) == ({0}, {0}, [])
    assert d0.left() == {}, "everything it held is free"
    assert not d0.in_step
    assert d1.in_step, "the very next step has it"
    assert d1.reads.num_blocks_read == 4, "the second stage reads the last block alone"
    finish(world)
    assert kinds(new) == [Finished]
    choice = old.ask.choices[0]
    assert len(choice.token_ids) == len(PROMPT) + 30
    assert num_computed(world) == len(choice.token_ids) - 1
    assert set(d0.engine.computed) | set(d1.engine.computed) == set(chain(choice.token_ids[:-1]))
    assert (d0.core.departures.num_moved, world.gateway.num_begun_again) == (1, 0)


def test_tokens_that_come_while_the_first_stage_reads_go_with_the_second() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    world.gateway.move(old, d1)
    world.deliver(reads=False)
    [read] = d1.reads.open
    d1.reads.copy(read)
    d0.step(9)  # two more blocks are full by now, and the read goes on
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.choice(RequestKey(old.key.request, 2)).first_position == 14, "nine were generated meanwhile"
    finish(world)
    assert no_token_was_computed_twice(world)
    assert len(old.ask.choices[0].token_ids) == 40


def test_a_sequence_that_has_run_ahead_is_not_cut_but_read_ahead_again() -> None:
    """What is read while a stream stands still is bounded: not by how long the first stage took."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, max_tokens=100)
    late = world.gateway.move(old, d1)
    world.deliver(reads=False)
    d0.step(40)  # the first stage takes as long as ten blocks
    world.deliver()
    end_step(world, d0)
    assert (old.cut, failed(late)) == (set(), Cause.LEASE_LOST)
    assert d0.in_step, "it goes on"
    num_read = d1.reads.num_blocks_read
    world.gateway.move(old, d1)
    world.deliver()
    assert d1.reads.num_blocks_read == num_read + 10, "what was read ahead before is cached"
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.core.arrivals.num_tail_blocks == 1
    finish(world)
    assert no_token_was_computed_twice(world)


def test_a_sequence_that_always_runs_ahead_is_cut_nevertheless() -> None:
    world = World(num_blocks=64)
    d0, d1 = first(world), second(world)
    old = running(world, max_tokens=200)
    for _ in range(MAX_PUT_OFF):
        leg = world.gateway.move(old, d1)
        world.deliver(reads=False)
        d0.step(30)
        world.deliver()
        assert failed(leg) is Cause.LEASE_LOST
    world.gateway.move(old, d1)
    world.deliver(reads=False)
    d0.step(30)
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    finish(world)
    assert no_token_was_computed_twice(world)


@pytest.mark.parametrize("why", ["no cache", "not draining"])
def test_without_names_everything_is_read_in_the_second_stage(why: str) -> None:
    world = World(prefix_cache=why != "no cache")
    d0, d1 = first(world), second(world)
    old = running(world, 6, drain=why != "not draining")
    world.gateway.move(old, d1)
    if why == "not draining":
        d0.core.pool.release(d0.core.pool.allocate(d0.core.pool.num_free))
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.reads.num_blocks_read >= 4
    finish(world)
    assert no_token_was_computed_twice(world)


def test_the_first_stage_names_no_more_blocks_than_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_module, "MAX_PREFIX_BLOCKS", 2)
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, 6)
    world.gateway.move(old, d1)
    world.deliver()
    assert d1.reads.num_blocks_read == 2
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.core.arrivals.num_tail_blocks > 1
    finish(world)
    assert no_token_was_computed_twice(world)


def test_a_sequence_of_less_than_a_block_moves_in_one_stage() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = world.gateway.ask(d0, (7,), 12)
    world.deliver()
    d0.step(2)
    world.deliver()
    d0.worker.drain()
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0)
    assert (old.moved, d1.reads.num_blocks_read) == ({0}, 1)
    finish(world)
    assert no_token_was_computed_twice(world)


def test_what_the_sink_has_cached_is_not_read() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    world.gateway.ask(d1, PROMPT, 2)
    world.run()
    old = running(world, 2)
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0)
    assert (old.moved, d1.reads.num_blocks_read) == ({0}, 1), "two blocks of the prompt were here"
    finish(world)


def test_a_sequence_may_move_on_and_come_back() -> None:
    world = World(("d0", "d1", "d2"))
    sites = list(world.sites.values())
    leg = running(world)
    for number in (1, 2, 0, 1):
        sites[number].resume()
        leg = world.gateway.move(leg, sites[number])
        world.deliver()
        assert leg.moving is not None
        leg.moving.site.step()
        world.deliver()
        assert leg.moving.moved == {0}
        sites[number].step(2)
        world.deliver()
        sites[number].drain()
    finish(world)
    assert leg.key == RequestKey(RequestId("r1"), 5)
    assert no_token_was_computed_twice(world)
    assert [leg.ends for leg in world.gateway.legs[:-1]] == [[]] * 4


def test_log_probabilities_travel() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, logprobs=True)
    world.gateway.move(old, d1)
    world.deliver(reads=False)
    d0.step(3)
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    [choice] = d1.core.book.requests[old.key.request].choices
    assert len(choice.logprobs) == choice.sequence.num_tokens - choice.first_position
    finish(world)
    whole = old.ask.choices[0]
    assert len(whole.logprobs) == len(whole.token_ids) - len(PROMPT) == 30


def within_a_grammar(world: World) -> tuple[Leg, CountedMasks, CountedMasks]:
    """A sequence with 7 tokens of its own that waits for its next mask; the masks of both workers."""
    d0 = first(world)
    theirs, ours = CountedMasks(d0), CountedMasks(second(world))
    old = world.gateway.ask(d0, PROMPT, 30, grammar="start: /x*/")
    world.deliver()
    for _ in range(7):
        theirs.give()
        end_step(world, d0)
    assert len(old.ask.choices[0].token_ids) == 17
    d0.drain()
    return old, theirs, ours


@pytest.mark.parametrize("quickly", [True, False])
def test_a_sequence_is_read_within_its_grammar_while_it_runs(quickly: bool) -> None:
    """After the cut only the newest tokens are left to read, unless reading takes longer than everything else."""
    world = World()
    d0, d1 = first(world), second(world)
    old, theirs, ours = within_a_grammar(world)
    world.gateway.move(old, d1)
    world.deliver(reads=False)
    assert len(ours.awaited) == 1, "it is asked for during the first stage"
    if quickly:
        ours.give()
    theirs.give()
    d0.end_step()
    world.deliver()
    assert (old.moved, d1.in_step) == ({0}, False)
    ours.give()
    assert d1.in_step
    assert ours.num_read == ([6, 2] if quickly else [8])
    ours.at_once = True
    finish(world)
    assert no_token_was_computed_twice(world)
    assert len(old.ask.choices[0].token_ids) == 40


def test_a_grammar_that_gives_up_at_the_sink_leaves_the_sequence_where_it_is() -> None:
    world = World()
    d1 = second(world)
    old, theirs, ours = within_a_grammar(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    ours.give(GaveUp("items", "too many"))
    world.deliver()
    assert (failed(new), old.cut) == (Cause.INVALID, set())
    theirs.at_once = True
    theirs.give()
    finish(world)
    assert kinds(old) == [Finished]


@pytest.mark.parametrize("end", ["an abort", "a deadline", "the loss of the gateway", "a failed second stage"])
def test_a_move_that_ends_before_its_first_mask_is_known_waits_for_none(end: str) -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, theirs, ours = within_a_grammar(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    (awaited,) = ours.awaited
    match end:
        case "an abort":
            world.gateway.abort(new)
        case "a deadline":
            world.now += BUDGET_S
            d1.tick()
        case "the loss of the gateway":
            old.ask.ended = True
            for site in (d0, d1):
                site.worker.on_peer_lost(GATEWAY)
        case _:
            theirs.give()
            d0.end_step()
            while d1.reads.open:
                world.go_on_reading(d1, d1.reads.open[0])
            world.deliver(reads=False)
            assert old.cut == {0}
            d1.reads.end(d1.reads.open[0], "the connection broke")
    world.deliver()
    assert awaited not in ours.awaited, "it is computed for nobody"
    if end == "the loss of the gateway":
        assert [site.left() for site in (d0, d1)] == [{}, {}]
        return
    assert kinds(new) == [Cancelled if end == "an abort" else Failed]
    for masks in (theirs, ours):
        masks.at_once = True
        masks.give()
    finish(world)


# --- several choices ---------------------------------------------------------------------------------------------


def test_one_of_three_choices_moves_and_the_others_end_where_they_are() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, num_choices=3)
    new = world.gateway.move(old, d1, 1)
    assert new.key.request != old.key.request, "a choice that parts from others has a name of its own"
    world.deliver()
    end_step(world, d0)
    assert old.moved == {1}
    assert d0.core.book.requests[old.key.request].choices[1].moved
    finish(world)
    assert (kinds(old), kinds(new)) == ([Finished], [Finished])
    assert no_token_was_computed_twice(world)


def test_a_choice_that_moves_after_the_others_have_ended_is_the_end_of_the_request() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, num_choices=2, max_tokens=8)
    world.gateway.move(old, d1, 0)
    world.deliver(reads=False)
    [read] = d1.reads.open
    world.deliver()
    end_step(world, d0, reads=False)  # cut, and not settled
    d0.step(2)
    world.deliver(reads=False)
    assert read.copied
    assert old.ask.choices[1].ended
    assert old.ends == [], "one of its choices is on its way"
    world.deliver()
    assert old.moved == {0}
    assert kinds(old) == [Finished]
    finish(world)


def test_choices_that_all_move_leave_nothing_to_say() -> None:
    world = World(("d0", "d1", "d2"))
    d0, d1, d2 = world.sites.values()
    old = running(world, num_choices=3)
    for choice, site in enumerate((d1, d2, d1)):
        world.gateway.move(old, site, choice)
    world.deliver()
    end_step(world, d0)
    assert (old.moved, old.ends) == ({0, 1, 2}, [])
    assert d0.left() == {}
    finish(world)
    assert no_token_was_computed_twice(world)


# --- it does not come to the cut ---------------------------------------------------------------------------------


def wanted(world: World, **running_as: Any) -> tuple[Leg, Leg]:
    """A sequence that is to be cut when its step has ended; the legs at the source and at the sink."""
    old = running(world, **running_as)
    new = world.gateway.move(old, second(world))
    world.deliver()
    assert "wanted" in first(world).left()
    return old, new


def test_a_sequence_that_ends_before_the_cut_is_not_offered() -> None:
    world = World()
    old, new = wanted(world, num_steps=5, max_tokens=6)
    end_step(world, first(world))
    assert kinds(old) == [Finished]
    assert (old.cut, old.moved) == (set(), set())
    assert kinds(new) != [Finished]
    finish(world)


def test_a_choice_that_ends_before_the_cut_is_not_offered() -> None:
    world = World()
    d0 = first(world)
    old = running(world, num_choices=2)
    choice = d0.choice(old.key, 0)
    choice.sequence.sampling = SamplingParams(max_tokens=choice.sequence.num_output + 2)
    d0.core.steps._columns = DecodeColumns(MAX_TOKENS, frozenset())  # the old ones have read the old parameters
    end_step(world, d0)
    new = world.gateway.move(old, second(world))
    world.deliver()
    end_step(world, d0)
    assert failed(new) is Cause.LEASE_LOST
    assert old.cut == set()
    finish(world)


def test_a_request_that_is_aborted_before_the_cut_is_not_offered() -> None:
    world = World()
    old, new = wanted(world)
    world.gateway.end(old.ask)
    first(world).hear_gateway()
    world.deliver()
    assert first(world).left().keys() == {"limbo"}, "a step in flight still names its blocks"
    end_step(world, first(world))
    assert old.cut == set()
    assert len(old.ends) == len(new.ends) == 1
    finish(world)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_choice_that_is_given_up_while_it_moves_leaves_nothing_and_the_other_ends(is_cut: bool) -> None:
    world = World()
    d0 = first(world)
    old = running(world, num_choices=2)
    new = world.gateway.move(old, second(world))
    world.deliver()
    assert "wanted" in d0.left()
    if is_cut:
        end_step(world, d0, reads=False)
        assert old.cut == {0}
    world.gateway.give_up(old.ask, 0)
    world.deliver()
    assert not d0.left().get("leases") or not is_cut, "what was cut is not kept for another sink"
    if not is_cut:
        end_step(world, d0)
        assert old.cut == set()
    d0.resume()
    world.run()
    assert kinds(old) == [Finished]
    assert old.ask.choices[1].ended
    assert new.over
    assert world.gateway.num_begun_again == 0
    assert [site.left() for site in world.sites.values()] == [{}, {}]


def test_a_sequence_that_is_preempted_before_the_cut_is_not_offered() -> None:
    world = World()
    d0 = first(world)
    old, new = wanted(world)
    scheduler = d0.core.scheduler
    scheduler.preemption.preempt(d0.choice(old.key), Step(), world.now)
    end_step(world, d0)
    assert failed(new) is Cause.LEASE_LOST
    assert old.cut == set()
    finish(world)
    assert kinds(old) == [Finished]


@pytest.mark.parametrize("swap", [False, True])
def test_a_preempted_sequence_is_refused(swap: bool) -> None:
    world = World(num_blocks=14, num_host_blocks=16 * swap, preempt_by="swap" if swap else "recompute")
    d0, d1 = first(world), second(world)
    legs = [world.gateway.ask(d0, range(100 * number, 100 * number + 10), 30) for number in range(3)]
    world.deliver()
    while not len(d0.core.scheduler.entrance.preempted):
        d0.step()
    world.deliver()
    d0.worker.drain()
    [preempted] = [leg for leg in legs if d0.choice(leg.key).stage == "preempted"]
    new = world.gateway.move(preempted, d1)
    world.deliver()
    assert failed(new) is Cause.LEASE_LOST
    finish(world)
    assert [kinds(leg) for leg in legs] == [[Finished]] * 3


def test_a_sink_that_gives_up_before_the_cut_leaves_the_sequence_where_it_is() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, new = wanted(world)
    world.gateway.abort(new)
    d1.hear_gateway()
    world.deliver()
    assert d0.left()["wanted"]
    end_step(world, d0)
    assert (old.cut, d0.in_step) == (set(), True)
    finish(world)
    assert kinds(old) == [Finished]


def test_a_sink_that_dies_before_the_cut_leaves_the_sequence_where_it_is() -> None:
    world = World()
    old, _ = wanted(world)
    world.kill(second(world))
    finish(world)
    assert (old.cut, kinds(old)) == (set(), [Finished])


def test_a_sequence_that_is_not_here_is_refused() -> None:
    world = World()
    old = running(world)
    old.key = RequestKey(old.key.request, 9)
    new = world.gateway.move(old, second(world))
    old.key = RequestKey(old.key.request, 1)
    world.deliver()
    assert failed(new) is Cause.LEASE_LOST
    finish(world)


@pytest.mark.parametrize("position", [1, 9, 15, 99])
def test_tokens_that_this_attempt_has_not_generated_are_refused(position: int) -> None:
    """Of the prompt it has no log probabilities; from the next token on there is nothing to go on from."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    d1.links.need(d0.address)
    world.deliver()
    message = AttachSequence(request=RequestId("x"), attempt=1, sequence=old.key, choice=0, position=position)
    d0.worker.on_message(d1.name, message)
    link = d1.links.links[d0.address]
    [answer] = link.to_sink
    assert isinstance(answer, OfferWithdrawn)
    link.to_sink.clear()
    finish(world)


def test_without_a_source_there_is_no_move() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    d1.hear_gateway()
    d1.links.lose(d0.address, "no answer")
    assert d1.left()["arrivals"] == [new.key], "the second stage may still be tried"
    d1.links.lose(d0.address, "no answer")
    world.deliver()
    assert failed(new) is Cause.WORKER_LOST
    assert d1.left() == {}
    finish(world)
    assert kinds(old) == [Finished]


def test_a_long_sequence_whose_source_is_lost_is_not_tried_without_reading_ahead() -> None:
    """And its sink is not blamed for it."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, 25, max_tokens=60)
    new = world.gateway.move(old, d1)
    d1.hear_gateway()
    d1.links.lose(d0.address, "no answer")
    world.deliver()
    assert failed(new) is Cause.WORKER_LOST
    assert d1.left() == {}
    finish(world)
    assert kinds(old) == [Finished]


def test_a_source_that_is_lost_while_it_is_read_from_keeps_its_sequence() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    d1.links.lose(d0.address, "silent")
    d0.lose_sink(d1.name)
    world.deliver()
    assert failed(new) is Cause.WORKER_LOST, "which is not this worker's fault"
    assert d1.left() == {}
    finish(world)
    assert (old.cut, kinds(old)) == (set(), [Finished])


# --- the first stage fails ---------------------------------------------------------------------------------------


def test_when_the_first_stage_of_a_short_sequence_fails_the_second_reads_everything() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    world.gateway.move(old, d1)
    world.deliver(reads=False)
    [read] = d1.reads.open
    d1.reads.copy(read)
    d1.reads.end(read, "the connection broke")
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.reads.num_blocks_read == 1 + 4
    finish(world)
    assert no_token_was_computed_twice(world)


def test_when_reading_ahead_fails_a_long_sequence_stays() -> None:
    """What was not read before the cut would be read after it."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, 25, max_tokens=60)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    [read] = d1.reads.open
    d1.reads.copy(read)
    d1.reads.end(read, "the connection broke")
    world.deliver()
    end_step(world, d0)
    assert (failed(new), old.cut, d0.in_step) == (Cause.TRANSFER, set(), True)
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.core.arrivals.num_tail_blocks == 1
    finish(world)
    assert no_token_was_computed_twice(world)


def test_while_the_source_has_lent_too_much_a_long_sequence_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not cut for a sink that has read none of it: the pause would grow with its length."""
    monkeypatch.setattr(lender_module, "MAX_LENT", 1)
    world = World(num_blocks=64)
    d0, d1 = first(world), second(world)
    olds = [world.gateway.ask(d0, range(100 * number, 100 * number + 10), 60) for number in range(2)]
    world.deliver()
    d0.step(25)
    world.deliver()
    d0.drain()
    _, refused = [world.gateway.move(old, d1) for old in olds]
    world.deliver(reads=False)
    assert failed(refused) is Cause.LEASE_LOST
    world.deliver()
    end_step(world, d0)
    assert [old.moved for old in olds] == [{0}, set()]
    assert (olds[1].cut, d0.in_step) == (set(), True), "it goes on"
    world.gateway.move(olds[1], d1)
    world.deliver()
    end_step(world, d0)
    assert olds[1].moved == {0}
    assert d1.core.arrivals.num_tail_blocks <= 2 * MAX_TAIL_BLOCKS
    finish(world)
    assert no_token_was_computed_twice(world)


def test_what_is_little_is_read_after_the_cut_if_the_source_has_lent_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender_module, "MAX_LENT", 0)
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0)
    assert (old.moved, d1.core.arrivals.num_tail_blocks) == ({0}, MAX_TAIL_BLOCKS)
    finish(world)
    assert no_token_was_computed_twice(world)


@pytest.mark.parametrize("copies", ["evicted", "evicted but for a beginning", "not to be spared"])
def test_a_sequence_whose_names_another_one_had_is_read_ahead(copies: str) -> None:
    """Two requests with one prompt have computed it in one step; the other one's blocks bear the names, and it ends."""
    world = World(num_blocks=64)
    d0, d1 = first(world), second(world)
    world.gateway.ask(d0, range(900, 904), 1)
    world.deliver()  # they come while its step runs
    other, old = world.gateway.ask(d0, range(40), 4), world.gateway.ask(d0, range(40), 60)
    world.deliver()
    while not kinds(other):
        d0.step()
        world.deliver()
    d0.step()  # what the other one has released is out of limbo
    while not d0.core.scheduler.batch.num_due_next:
        d0.step()  # until the next free block is needed for a step
    world.deliver()
    num_copies = {"evicted": 0, "evicted but for a beginning": 3, "not to be spared": 10}[copies]
    taken = d0.pool.allocate(d0.pool.num_free - num_copies)
    choice = d0.choice(old.key)
    named = d0.pool.match(choice.chain.hashes)
    assert len(named) == num_copies
    assert not set(named) & set(choice.sequence.block_table), "its own blocks have no names"
    if copies != "not to be spared":
        d0.pool.release(taken)
        taken = []
        d0.step()
        world.deliver()
    d0.drain()
    world.gateway.move(old, d1)
    world.deliver()
    d0.pool.release(taken)
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.core.arrivals.num_tail_blocks <= MAX_TAIL_BLOCKS
    finish(world)


def test_a_long_sequence_of_which_only_a_beginning_is_lent_stays() -> None:
    """Its source names what is generated only while it drains."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, 25, max_tokens=60, drain=False)
    for why in ("read ahead", "held by the sink"):
        new = world.gateway.move(old, d1)
        world.deliver()
        end_step(world, d0)
        assert (failed(new), old.cut, d0.in_step) == (Cause.LEASE_LOST, set(), True), why
        assert d1.reads.num_blocks_read == 2, "the prompt's"
        assert d1.left() == {}
    d0.drain()
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.core.arrivals.num_tail_blocks == 1
    finish(world)
    assert no_token_was_computed_twice(world)


def test_a_first_stage_that_is_withdrawn_while_it_reads_is_the_end_of_the_move() -> None:
    """A late read may still write to these blocks: they are nobody's until it has ended."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    world.now += LENT_TTL_S + 1.0
    d0.tick()
    world.deliver(reads=False)
    assert failed(new) is Cause.TRANSFER
    assert d1.left() == {"used": 3, "reads": 2, "quarantined": 3}
    assert old.cut == set()
    world.deliver()
    assert d1.left() == {}
    finish(world)
    assert kinds(old) == [Finished]


def test_a_move_that_is_aborted_in_its_first_stage_leaves_nothing() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    world.gateway.abort(new)
    d1.hear_gateway()
    assert d1.left() == {"used": 3, "reads": 2, "quarantined": 3}, "what nothing writes to is free"
    world.deliver()
    assert d1.left() == {}
    assert "leases" not in d0.left()
    finish(world)


# --- after the cut -----------------------------------------------------------------------------------------------


def cut(world: World, **running_as: int) -> tuple[Leg, Leg]:
    """A sequence that is cut, and not settled; the legs at the source and at the sink."""
    old, new = wanted(world, **running_as)
    end_step(world, first(world), reads=False)
    assert old.cut == set(old.choices)
    assert old.moved == set()
    assert first(world).left()["cut"] == [new.key]
    return old, new


def test_the_source_says_where_it_has_stopped() -> None:
    world = World()
    old, new = wanted(world)
    first(world).end_step()
    *_, tokens, stop = first(world).to_gateway
    assert stop == Cut(request=old.key.request, attempt=1, choice=0, position=16)
    assert isinstance(tokens, Tokens)
    assert tokens.position + len(tokens.token_ids) == stop.position, "everything before the cut is told before it"
    world.deliver()
    assert old.moved == {0}
    assert second(world).choice(new.key).sequence.num_tokens == 16
    finish(world)


def test_a_gateway_that_has_lost_messages_is_told_again_where_a_choice_stands() -> None:
    """Without its Cut it would wait for a sequence that stands still, should the sink then fail."""
    world = World()
    old, _ = wanted(world, num_choices=2)
    site = first(world)
    end_step(world, site, reads=False)
    again = Resend(request=old.key.request, attempt=1, choice=0, position=16)
    site.worker.on_message(GATEWAY, again)
    assert list(site.to_gateway) == [Cut(request=old.key.request, attempt=1, choice=0, position=16)]
    site.to_gateway.clear()
    world.deliver()
    assert old.moved == {0}
    assert "cut" not in site.left()
    site.worker.on_message(GATEWAY, again)
    assert list(site.to_gateway) == [Moved(request=old.key.request, attempt=1, choice=0)]
    site.to_gateway.clear()
    finish(world)


def test_a_gateway_that_has_lost_many_tokens_is_sent_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_TOLD_TOKENS", 2)
    monkeypatch.setattr(answers_module, "MAX_TOLD_TOKENS", 2)
    world = World()
    old = running(world)
    site = first(world)
    site.to_gateway.clear()
    site.worker.on_message(GATEWAY, Resend(request=old.key.request, attempt=1, choice=0, position=0))
    told = [message for message in site.to_gateway if isinstance(message, Tokens)]
    assert len(told) > 1
    position = len(PROMPT)
    for tokens in told:
        assert (tokens.position, 1 <= len(tokens.token_ids) <= 2) == (position, True)
        position += len(tokens.token_ids)
    choice = site.choice(old.key)
    assert position == choice.sequence.num_tokens
    finish(world)


def test_what_a_moved_sequence_begins_with_may_take_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that its source has told of, and its own first one: the gateway would find a gap."""
    for module in (request_module, answers_module, migration_module):
        monkeypatch.setattr(module, "MAX_TOLD_TOKENS", 2)
    world = World()
    old = running(world)
    new = world.gateway.move(old, second(world))
    world.deliver()
    end_step(world, first(world))
    assert old.moved == {0}
    finish(world)
    assert kinds(new) == [Finished]
    assert no_token_was_computed_twice(world)


def test_a_sequence_that_has_run_too_far_for_one_message_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration_module, "MAX_TOLD_TOKENS", 8)
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    [read] = d1.reads.open
    d1.reads.copy(read)
    d0.step(9)
    world.deliver()
    end_step(world, d0)
    assert (old.cut, old.moved) == (set(), set())
    assert failed(new) is Cause.LEASE_LOST
    finish(world)
    assert kinds(old) == [Finished], "the source goes on"


def test_when_the_sink_dies_the_source_does_not_go_on() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, _ = cut(world)
    num_tokens = len(old.ask.choices[0].token_ids)
    world.kill(d1)
    world.run()
    assert (len(old.ask.choices[0].token_ids), d0.in_step) == (num_tokens, False)
    assert d0.left()["leases"] == 1
    world.now += LENT_TTL_S
    d0.tick()
    d0.tick()
    d0.resume()
    world.deliver()
    assert failed(old) is Cause.LEASE_LOST
    assert world.gateway.num_begun_again == 1, "the gateway begins again, from the tokens that the client has"
    finish(world)
    assert old.moved == set()


def test_a_cut_sequence_that_nobody_takes_over_fails_once() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, new = cut(world)
    world.gateway.abort(new)
    world.deliver()
    assert "leases" in d0.left(), "another sink might come"
    assert not d0.in_step
    world.now += LENT_TTL_S
    d0.tick()
    d0.tick()
    d0.resume()
    world.deliver()
    assert failed(old) is Cause.LEASE_LOST
    assert (d0.left().get("leases"), d1.left().get("quarantined")) == (None, None)
    finish(world)
    assert world.gateway.num_begun_again == 1


def test_a_choice_that_nobody_takes_over_leaves_the_others_where_they_are() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, num_choices=2)
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0, reads=False)
    assert old.cut == {0}
    world.kill(d1)
    world.now += LENT_TTL_S
    d0.tick()
    d0.tick()
    world.deliver()
    assert (old.moved, old.ends) == ({0}, [])
    assert (d0.core.departures.num_moved, d0.left().get("leases")) == (0, None)
    d0.resume()
    finish(world)
    assert kinds(old) == [Finished], "the other one ends there"
    assert world.gateway.num_begun_again == 1


def test_an_abort_after_the_cut_frees_both_sides() -> None:
    world = World()
    old, new = cut(world)
    world.gateway.end(old.ask)
    world.deliver()
    assert len(old.ends) == len(new.ends) == 1
    assert old.moved == set()
    finish(world)


def test_the_loss_of_the_gateway_after_the_cut_frees_both_sides() -> None:
    world = World()
    old, _ = cut(world)
    old.ask.ended = True
    for site in world.sites.values():
        site.worker.on_peer_lost(site.core.book.requests[old.key.request].gateway)
    world.deliver()
    assert [site.left() for site in world.sites.values()] == [{}, {}]


def test_a_verdict_that_was_lost_is_told_again() -> None:
    """The source has let go: were the sequence given up now, everything would be computed again."""
    world = World()
    d0, d1 = first(world), second(world)
    old, new = cut(world)
    link = d1.links.links[d0.address]
    while not any(isinstance(message, Settled) for message in link.to_sink):
        if d1.reads.open:
            world.go_on_reading(d1, d1.reads.open[0])
        if link.to_source:
            d0.hear(d1.name)
    link.to_sink.clear()
    d1.links.greet(d0.address)
    world.deliver()
    assert (old.moved, new.ends) == ({0}, [])
    finish(world)
    assert kinds(new) == [Finished]
    assert no_token_was_computed_twice(world)


@pytest.mark.parametrize("when", ["before the cut", "after the cut", "after lost messages"])
def test_a_sink_may_repeat_itself(when: str) -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, new = wanted(world)
    if when != "before the cut":
        end_step(world, d0, reads=False)
        if when == "after lost messages":
            d1.links.links[d0.address].to_sink.clear()
    for _ in range(3):
        d1.links.greet(d0.address)
        world.deliver(reads=False)
    if when == "before the cut":
        end_step(world, d0)
    world.deliver()
    assert (old.cut, old.moved) == ({0}, {0})
    finish(world)
    assert kinds(new) == [Finished]
    assert no_token_was_computed_twice(world)


def test_a_source_that_takes_the_sink_for_lost_after_the_cut_takes_it_back() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, _ = cut(world)
    d0.lose_sink(d1.name)
    assert "leases" in d0.left()
    d1.links.greet(d0.address)
    world.deliver()
    assert old.moved == {0}
    finish(world)
    assert no_token_was_computed_twice(world)


def test_an_older_attempt_does_not_take_the_place_of_a_newer_one() -> None:
    """Its AttachSequence was on its way for long; the gateway has given it up."""
    world = World()
    d0, d1 = first(world), second(world)
    old, new = wanted(world)
    link = d1.links.links[d0.address]
    wants = next(iter(d0.core.departures._wanted.values()))
    d0.core.departures._wanted = dict.fromkeys(
        d0.core.departures._wanted, newer := replace(wants, attempt=wants.attempt)
    )
    late = replace(newer, attempt=1)
    d0.worker.on_message(d1.name, late)
    [answer] = link.to_sink
    assert isinstance(answer, OfferWithdrawn)
    assert (answer.attempt, answer.cause) == (1, Cause.SUPERSEDED)
    link.to_sink.clear()
    end_step(world, d0)
    assert old.moved == {0}
    finish(world)
    assert kinds(new) == [Finished]


def test_a_newer_attempt_takes_the_place_of_an_older_one() -> None:
    world = World(("d0", "d1", "d2"))
    d0, d1, d2 = world.sites.values()
    old, gone = wanted(world)
    newer = world.gateway.move(old, d2)
    world.deliver()
    assert failed(gone) is Cause.SUPERSEDED
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.left() == {}
    finish(world)
    assert kinds(newer) == [Finished]


def test_a_choice_that_moves_elsewhere_before_it_is_cut_leaves_nothing_of_the_first_move() -> None:
    """Each move of one choice among several has a request of its own."""
    world = World(("d0", "d1", "d2"))
    d0, d1, d2 = world.sites.values()
    old = running(world, num_choices=2)
    gone = world.gateway.move(old, d1)
    world.deliver()
    assert d0.left()["wanted"] == [gone.key]
    newer = world.gateway.move(old, d2)
    world.deliver()
    assert failed(gone) is Cause.SUPERSEDED
    assert d0.left()["wanted"] == [newer.key]
    assert "expected" not in d0.left() or d0.left()["expected"] == [newer.key.request]
    end_step(world, d0)
    assert old.moved == {0}
    finish(world)
    assert "expected" not in d0.left()
    assert kinds(newer) == [Finished]


def test_a_sink_that_bears_the_name_of_another_move_is_refused() -> None:
    """There is one lease under each request: a second one would end the worker."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, num_choices=2)
    new = world.gateway.move(old, d1, 0)
    world.deliver()
    stray = AttachSequence(request=new.key.request, attempt=7, sequence=old.key, choice=1, position=14)
    link = d1.links.links[d0.address]
    d0.worker.on_message(d1.name, stray)
    assert [type(message) for message in link.to_sink] == [OfferWithdrawn]
    link.to_sink.clear()
    end_step(world, d0, reads=False)
    d0.worker.on_message(d1.name, stray)
    d0.end_step()
    assert old.cut <= {0}
    link.to_sink = type(link.to_sink)(m for m in link.to_sink if not isinstance(m, OfferWithdrawn))
    finish(world)
    assert old.moved == {0}


# --- room at the sink --------------------------------------------------------------------------------------------


def test_without_room_at_once_the_sequence_stays() -> None:
    world = World(num_blocks=8)
    d1 = second(world)
    other = world.gateway.ask(d1, range(200, 228), 4)
    world.deliver()
    d1.step()
    old = running(world, 6, max_tokens=18)
    new = world.gateway.move(old, d1)
    world.deliver()
    assert failed(new) is Cause.CAPACITY
    assert old.cut == set()
    finish(world)
    assert (kinds(old), kinds(other)) == ([Finished], [Finished])


def test_without_a_place_in_the_batch_the_sequence_stays() -> None:
    """It would stand still there, until another sequence has ended."""
    world = World(max_num_seqs=1)
    d1 = second(world)
    long = world.gateway.ask(d1, range(200, 205), 60)
    world.deliver()
    d1.step(2)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver()
    assert failed(new) is Cause.CAPACITY
    assert (old.cut, d1.reads.num_blocks_read) == (set(), 0)
    finish(world)
    assert (kinds(old), kinds(long)) == ([Finished], [Finished])


def test_when_the_last_place_goes_during_the_first_stage_the_sequence_stays() -> None:
    world = World(max_num_seqs=1)
    d0, d1 = first(world), second(world)
    old = running(world)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    other = world.gateway.ask(d1, range(200, 205), 8)
    world.deliver(reads=False)
    d1.step(2)
    world.deliver()
    end_step(world, d0)
    assert (failed(new), old.cut, d0.in_step) == (Cause.CAPACITY, set(), True)
    assert d1.left().keys() <= {"used", "requests", "limbo"}
    while d1.in_step:
        end_step(world, d1)
    assert kinds(other) == [Finished]
    num_read = d1.reads.num_blocks_read
    world.gateway.move(old, d1)
    world.deliver()
    assert d1.reads.num_blocks_read == num_read, "what was read ahead before is cached"
    end_step(world, d0)
    assert old.moved == {0}
    finish(world)
    assert no_token_was_computed_twice(world)


def test_a_place_in_the_batch_is_kept_for_a_sequence_that_is_about_to_be_cut() -> None:
    world = World(max_num_seqs=1)
    d0, d1 = first(world), second(world)
    old, new = wanted(world)
    other = world.gateway.ask(d1, range(200, 205), 8)
    world.deliver()
    assert not d1.in_step, "it waits"
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.choice(new.key).stage is ChoiceStage.RUNNING, "the very next step has it"
    finish(world)
    assert (kinds(new), kinds(other)) == ([Finished], [Finished])


def test_a_source_without_free_blocks_is_read_ahead_from() -> None:
    """A loan of blocks that are in use takes none from the sequence that is about to join there."""
    world = World(max_num_seqs=1)
    d0, d1 = first(world), second(world)
    old = world.gateway.ask(d0, PROMPT, 60)
    world.deliver()
    d0.step(20)
    ready = world.gateway.ask(d0, range(200, 205), 5)
    world.deliver()
    d0.step(2)
    world.deliver()
    taken = d0.pool.allocate(d0.pool.num_free)
    assert (d0.pool.num_free, d0.core.scheduler.batch.num_ready) == (0, 1)
    d0.drain()
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0)
    assert old.moved == {0}
    assert d1.core.arrivals.num_tail_blocks <= 2 < d1.reads.num_blocks_read
    d0.pool.release(taken)
    finish(world)
    assert kinds(ready) == [Finished]
    assert no_token_was_computed_twice(world)


def test_a_sequence_that_has_outgrown_its_room_is_given_up_and_leaves_nothing() -> None:
    world = World(num_blocks=12)
    d0, d1 = first(world), second(world)
    old = running(world, 5, max_tokens=32)
    new = world.gateway.move(old, d1)
    world.deliver(reads=False)
    taken = d1.pool.allocate(d1.pool.num_free)
    d0.step(8)
    world.deliver()
    end_step(world, d0)
    assert failed(new) is Cause.CAPACITY
    d1.pool.release(taken)
    d1.tick()
    d0.resume()
    world.now += LENT_TTL_S
    d0.tick()
    finish(world)
    assert failed(old) is Cause.LEASE_LOST


def test_a_move_of_what_does_not_run_is_invalid() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old = world.gateway.ask(d0, PROMPT, 5)
    new = world.gateway.move(old, d1)
    world.deliver()
    assert failed(new) is Cause.INVALID
    finish(world)


# --- what is said by the source ----------------------------------------------------------------------------------


WORK = Decode(
    request=RequestId("r"),
    attempt=2,
    token_ids=(1, 2, 3),
    prompt_len=2,
    choices=(1,),
    handles=handles(),
    sampling=SamplingParams(max_tokens=9),
    budget_s=1.0,
    source=None,
)
TOKENS = Tokens(request=RequestId("r"), attempt=1, choice=1, position=3, token_ids=(7, 8))
LOGPROB = TokenLogprobs(logprob=-1.0, top=())
POLICY = Policy(block_size=BLOCK_SIZE, max_num_seqs=8, max_sequence_tokens=MAX_TOKENS)


def more(num: int) -> list[Tokens]:
    """A sequence that has `num` tokens beyond those of `WORK`."""
    return [replace(TOKENS, token_ids=(7,) * num)]


def test_a_sequence_goes_on_from_what_was_asked_for() -> None:
    assert goes_on([TOKENS], WORK, POLICY, 1000, 1)
    asked = replace(WORK, sampling=SamplingParams(max_tokens=9, logprobs=0))
    assert goes_on([replace(TOKENS, logprobs=(LOGPROB, LOGPROB))], asked, POLICY, 1000, 1)
    assert not goes_on([TOKENS], asked, POLICY, 1000, 1)


@pytest.mark.parametrize(("num", "num_blocks"), [(1, 1), (2, 1), (3, 2), (6, 2), (7, 3)])
def test_the_kv_of_a_sequence_takes_the_blocks_that_are_offered(num: int, num_blocks: int) -> None:
    """The last token has no KV. If messages were lost, the tokens may be told before the blocks."""
    assert goes_on(more(num), WORK, POLICY, 1000, num_blocks)
    assert goes_on(more(num), WORK, POLICY, 1000, None)
    assert not goes_on(more(num), WORK, POLICY, 1000, num_blocks - 1)
    assert not goes_on(more(num), WORK, POLICY, 1000, num_blocks + 1)


def test_a_sequence_that_would_have_ended_does_not_go_on() -> None:
    assert goes_on(more(7), WORK, POLICY, 1000, None)
    assert not goes_on(more(8), WORK, POLICY, 1000, None), "the prompt of 2 tokens may get 9"
    assert goes_on([TOKENS], WORK, replace(POLICY, max_sequence_tokens=6), 1000, None)
    assert not goes_on([TOKENS], WORK, replace(POLICY, max_sequence_tokens=5), 1000, None)


@pytest.mark.parametrize(
    "said",
    [
        [],
        [TOKENS, TOKENS],
        [replace(TOKENS, choice=0)],
        [replace(TOKENS, position=2)],
        [replace(TOKENS, position=4)],
        [replace(TOKENS, finish_reason="stop")],
        [replace(TOKENS, token_ids=(7, 1000))],
        [replace(TOKENS, logprobs=(LOGPROB, LOGPROB))],
        more(8),
    ],
    ids=[
        "nothing",
        "two choices",
        "another choice",
        "too early",
        "too late",
        "ended",
        "of no model",
        "reports unasked",
        "at its limit",
    ],
)
def test_anything_else_is_no_continuation(said: list[Tokens]) -> None:
    assert not goes_on(said, WORK, POLICY, 1000, None)


def test_first_tokens_are_those_that_were_asked_for_and_of_the_model() -> None:
    first = replace(TOKENS, token_ids=(7,))
    assert first_tokens_fit([first], WORK, 8)
    assert not first_tokens_fit([first], WORK, 7)
    assert not first_tokens_fit([TOKENS], WORK, 1000), "two tokens"
    assert not first_tokens_fit([replace(first, position=4)], WORK, 8)
    assert not first_tokens_fit([first, replace(first, choice=0)], WORK, 8)


@pytest.mark.parametrize("changes", [{"position": 3}, {"token_ids": (7,) * 8}, {"token_ids": (7,) * 28}])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_source_that_says_something_else_is_not_believed(changes: dict[str, Any], prefix_cache: bool) -> None:
    """Neither other tokens, nor more than it offers blocks for, or than the sequence may have."""
    world = World(prefix_cache=prefix_cache)
    d0, d1 = first(world), second(world)
    old, new = wanted(world)
    d0.end_step()
    link = d1.links.links[d0.address]
    [index] = [index for index, message in enumerate(link.to_sink) if isinstance(message, PrefillDone)]
    said = link.to_sink[index]
    assert isinstance(said, PrefillDone)
    link.to_sink[index] = replace(said, first_tokens=(replace(said.first_tokens[0], **changes),))
    world.deliver()
    assert failed(new) is Cause.TRANSFER
    assert old.moved == set()
    world.now += LENT_TTL_S
    d0.tick()
    d0.resume()
    finish(world)


# --- leaving -----------------------------------------------------------------------------------------------------


def phase_of(site: Site) -> Phase:
    """The phase as it is now: a type checker would keep what an earlier assertion has found."""
    return site.worker.phase


def test_a_worker_is_drained_when_it_holds_nothing() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    assert phase_of(d0) is Phase.SERVING
    old = running(world, drain=False)
    d0.worker.on_message(world.gateway.legs[0].site.name, Drain())
    assert (d0.worker.phase, d0.worker.heartbeat(1).phase) == (Phase.DRAINING, Phase.DRAINING)
    ready, details = d0.worker.ready()
    assert (ready, details["phase"], details["safe_to_delete"]) == (False, "draining", False)
    refused = world.gateway.ask(d0, range(50, 55), 3)
    d0.hear_gateway()
    assert isinstance(d0.to_gateway[-1], Failed)
    assert d0.to_gateway[-1].cause is Cause.DRAINING
    world.gateway.move(old, d1)
    world.deliver()
    assert phase_of(d0) is Phase.DRAINING
    end_step(world, d0)
    assert phase_of(d0) is Phase.DRAINED
    assert d0.worker.ready()[1]["safe_to_delete"]
    d0.worker.on_message(d1.name, Resume())
    assert phase_of(d0) is Phase.SERVING
    finish(world)
    assert failed(refused) is Cause.DRAINING


@pytest.mark.parametrize("drained_before", [False, True])
def test_a_worker_that_is_leaving_does_not_take_work_again(drained_before: bool) -> None:
    """Its process ends when it is drained, or when its time is over: what it took then would fail."""
    world = World()
    d0 = first(world)
    if drained_before:
        d0.worker.on_message(GATEWAY, Drain())
    d0.worker.drain()
    d0.wake()
    d0.resume()
    assert phase_of(d0) is Phase.DRAINED
    refused = world.gateway.ask(d0, range(50, 55), 3)
    finish(world)
    assert failed(refused) is Cause.DRAINING


@pytest.mark.parametrize("stage", ["running", "wanted", "cut", "moving here", "pulling here"])
def test_when_its_time_is_over_everything_fails_once(stage: str) -> None:
    world = World(("d0", "d1", "d2"))
    d0, d1, _ = world.sites.values()
    if stage == "running":
        old = running(world)
        leaving = d0
    elif stage in ("wanted", "moving here"):
        old, _ = wanted(world)
        leaving = d0 if stage == "wanted" else d1
    else:
        old, _ = cut(world)
        leaving = d0 if stage == "cut" else d1
    leaving.worker.drain()
    leaving.worker.give_up("the worker has left")
    leaving.wake()
    assert not leaving.core.book.requests
    world.deliver()
    d0.resume()
    world.now += LENT_TTL_S
    d0.tick()
    finish(world)
    causes = [failed(leg) for leg in old.ask.legs if leg.site is leaving and leg.ends and kinds(leg) == [Failed]]
    assert Cause.DRAINING in causes


def test_a_detach_from_a_cut_sequence_keeps_it_for_another() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    _, new = cut(world)
    d0.worker.on_message(d1.name, Detach(request=new.key.request, attempt=new.key.attempt))
    assert d0.left()["leases"] == 1
    assert "readers" not in d0.left()
    d1.links.greet(d0.address)
    finish(world)


def test_only_what_was_settled_has_moved() -> None:
    world = World()
    d0, d1 = first(world), second(world)
    old, new = cut(world)
    wrong = Settle(request=new.key.request, attempt=new.key.attempt, lease="another", epoch=1)  # type: ignore[arg-type]
    d0.worker.on_message(d1.name, wrong)
    assert not [message for message in d0.to_gateway if isinstance(message, Moved)]
    link = d1.links.links[d0.address]
    verdict = link.to_sink.pop()
    assert isinstance(verdict, Settled)
    assert not verdict.valid
    world.deliver()
    assert old.moved == {0}
    finish(world)


def test_the_gateway_of_these_tests_finds_a_wrong_token() -> None:
    """Else everything above shows nothing."""
    world = World()
    d0 = first(world)
    leg = running(world)
    message = Tokens(request=leg.key.request, attempt=1, choice=0, position=15, token_ids=(12345,))
    d0.to_gateway.append(message)
    with pytest.raises(AssertionError, match="another token at 15"):
        Gateway.hear(world.gateway, d0)


@pytest.mark.parametrize("order", ["while the other runs", "after the other's end"])
def test_a_choice_that_was_cut_for_a_sink_that_died_is_free_as_soon_as_it_is_aborted(order: str) -> None:
    """Not only when its lease expires."""
    world = World()
    d0, d1 = first(world), second(world)
    old = running(world, num_choices=2, max_tokens=8)
    world.gateway.move(old, d1)
    world.deliver()
    end_step(world, d0, reads=False)
    assert old.cut == {0}
    world.kill(d1)
    if order == "after the other's end":
        d0.step(2)
        world.deliver()
        assert old.ask.choices[1].ended
    assert (old.ends, d0.left()["leases"]) == ([], 1)
    d0.resume()
    d0.from_gateway.append(Abort(request=old.key.request, attempt=old.key.attempt, choice=0))
    world.deliver()
    assert (old.moved, d0.left().get("leases")) == ({0}, None)
    finish(world)
    assert kinds(old) == [Finished]
    assert (d0.core.departures.num_moved, world.gateway.num_begun_again) == (0, 1)
