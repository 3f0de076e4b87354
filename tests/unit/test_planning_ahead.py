"""A step that is planned while the one before it runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from decode_bench import EAGER, Bench, request, tokens
from migration_bench import Pause, World

from common.contract.messages.gateway import Suspicion
from common.contract.messages.worker import Cancelled
from common.contract.tiers import Tier
from common.engine.batch import NO_SAMPLE
from decode_worker.columns import DecodeColumns
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest
from decode_worker.step import Step

INTERACTIVE, STANDARD, BATCH = Tier


class Ahead(Bench):
    """Begins steps before others have ended."""

    def begin(self, before: Step | None) -> tuple[int, Step]:
        """Hand the engine a step."""
        number = self.pool.step_started()
        step = self.scheduler.schedule(self.now, before)
        self.check()
        return number, step

    def end(self, begun: tuple[int, Step], *ends: DecodeChoice) -> None:
        """It is done; `ends` have got their last token."""
        self._number, step = begun
        self.end_step(step, ends)


def test_what_ends_next_is_not_in_the_step_after() -> None:
    bench = Ahead(num_blocks=16, memory_reserve=EAGER)
    [short], [long] = bench.enter(request("short", 5, max_tokens=2)), bench.enter(request("long", 5))
    first = bench.begin(None)
    assert first[1].decodes == [short, long]
    assert bench.begin(first[1])[1].decodes == [long], "the last token of the short one is on its way"


def test_a_sequence_without_a_block_waits_for_one_that_is_about_to_be_free() -> None:
    """The blocks of one that has ended are not free while a step is in flight that was planned before; nobody has to
    give way for that."""
    bench = Ahead(num_blocks=8, memory_reserve=EAGER)
    [ending] = bench.enter(request("ending", 5))
    [growing] = bench.enter(request("growing", 6))
    bench.pool.allocate(bench.pool.num_free)  # others have the rest
    first = bench.begin(None)
    second = bench.begin(first[1])
    bench.end(first, ending)
    assert (bench.pool.num_free, bench.pool.num_limbo) == (0, 2)
    third = bench.begin(second[1])
    assert third[1].decodes == [], "it has no block"
    bench.end(second)
    bench.end(third)
    assert bench.begin(None)[1].decodes == [growing]
    assert bench.num_preemptions == 0


def ahead_without_blocks(*texts: int, max_tokens: int) -> tuple[Ahead, list[DecodeChoice], tuple[int, Step]]:
    """Sequences of so many tokens run in a step, at whose end all but the last need another block and there is none.
    The last one may have `max_tokens`."""
    bench = Ahead(num_blocks=32, memory_reserve=EAGER)
    growing = [bench.enter(request(f"growing {index}", num))[0] for index, num in enumerate(texts[:-1])]
    [last] = bench.enter(request("last", texts[-1], max_tokens=max_tokens))
    bench.pool.allocate(bench.pool.num_free)  # others have the rest
    return bench, [*growing, last], bench.begin(None)


def test_the_blocks_of_one_that_ends_with_the_step_before_are_waited_for() -> None:
    """It is known by its length to end: what it alone holds comes back, so nobody has to give way."""
    bench, [growing, ending], first = ahead_without_blocks(7, 5, max_tokens=2)
    assert first[1].decodes == [growing, ending]
    second = bench.begin(first[1])
    assert second[1].decodes == []
    bench.end(first, ending)
    bench.end(second)
    assert bench.begin(None)[1].decodes == [growing]
    assert bench.num_preemptions == 0


def test_who_goes_on_gives_way_while_a_step_is_ahead() -> None:
    """Nothing comes back by itself: the newest makes room, and loses nothing of what it has said."""
    bench, [growing, newest], first = ahead_without_blocks(7, 5, max_tokens=50)
    second = bench.begin(first[1])
    assert (newest.stage, bench.num_preemptions) == (ChoiceStage.PREEMPTED, 1)
    assert second[1].decodes == []
    bench.end(first)
    bench.end(second)
    assert newest.sequence.num_output == 1, "the token of the step that ran is computed again"
    assert bench.begin(None)[1].decodes == [growing]


def test_shared_blocks_of_one_that_ends_do_not_come_back() -> None:
    """Two choices hold the prompt's block together: with the end of one of them it is not free."""
    bench = Ahead(num_blocks=32, memory_reserve=EAGER)
    one, other = (bench.enter(request(name, 6))[0] for name in ("one", "other"))
    ending, sibling = bench.enter(request("choices", 5, max_tokens=3, num_choices=2))
    sibling.sequence.sampling = replace(sibling.sequence.sampling, max_tokens=50)
    bench.step()
    bench.pool.allocate(bench.pool.num_free)
    first = bench.begin(None)
    assert first[1].decodes == [one, other, ending, sibling]
    bench.begin(first[1])
    assert [each.stage for each in (ending, sibling)] == [ChoiceStage.RUNNING, ChoiceStage.PREEMPTED], (
        "one block is not enough"
    )
    assert [each.stage for each in (one, other)] == [ChoiceStage.RUNNING, ChoiceStage.RUNNING]


def test_who_ends_with_the_step_before_does_not_give_way() -> None:
    """Its blocks come back anyway, once; preempted, it would have to come back for one token."""
    bench, [one, other, third, ending], first = ahead_without_blocks(7, 7, 7, 5, max_tokens=2)
    bench.begin(first[1])
    assert ending.stage is ChoiceStage.RUNNING
    assert [each.stage for each in (one, other, third)] == [
        ChoiceStage.RUNNING,
        ChoiceStage.RUNNING,
        ChoiceStage.PREEMPTED,
    ]
    bench.end(first, ending)
    assert ending.sequence.num_output == 2


def test_who_ends_with_the_step_before_keeps_its_place_in_the_batch() -> None:
    """A senior sequence has the place one step later anyway; sent back to wait, the other one would lose its last
    token."""
    bench = Ahead(max_num_seqs=1, memory_reserve=EAGER)
    [ending] = bench.enter(request("ending", 5, max_tokens=2, tier=BATCH))
    first = bench.begin(None)
    [senior] = bench.enter(request("senior", 5, tier=INTERACTIVE))
    second = bench.begin(first[1])
    assert (ending.stage, senior.stage, second[1].decodes) == (ChoiceStage.RUNNING, ChoiceStage.READY, [])
    bench.end(first, ending)
    bench.end(second)
    assert ending.sequence.num_output == 2
    assert bench.begin(None)[1].decodes == [senior]


def test_the_newest_that_goes_on_makes_place_while_another_one_ends() -> None:
    bench = Ahead(max_num_seqs=2, memory_reserve=EAGER)
    [going_on] = bench.enter(request("going on", 5, tier=BATCH))
    [ending] = bench.enter(request("ending", 5, max_tokens=2, tier=BATCH))
    first = bench.begin(None)
    [senior] = bench.enter(request("senior", 5, tier=INTERACTIVE))
    assert bench.begin(first[1])[1].decodes == [senior]
    assert (going_on.stage, ending.stage) == (ChoiceStage.READY, ChoiceStage.RUNNING)


@pytest.mark.parametrize(("num_tokens", "gives_way"), [(8, False), (12, True)])
def test_blocks_that_come_back_are_not_taken_from_lower_tiers(num_tokens: int, gives_way: bool) -> None:
    """A request of a higher tier lacks two blocks, which one that ends gives back, or three."""
    bench = Ahead(num_blocks=8, memory_reserve=EAGER)
    [going_on] = bench.enter(request("going on", 5, tier=BATCH))
    [ending] = bench.enter(request("ending", 5, max_tokens=2, tier=BATCH))
    first = bench.begin(None)
    bench.pool.allocate(bench.pool.num_free)  # others have the rest
    assert bench.reserve(request("senior", num_tokens, tier=INTERACTIVE)) == []
    bench.begin(first[1])
    assert ending.stage is ChoiceStage.RUNNING
    assert going_on.stage is (ChoiceStage.PREEMPTED if gives_way else ChoiceStage.RUNNING)
    bench.end(first, ending)
    assert ending.sequence.num_output == 2


def test_no_step_is_planned_while_a_suspect_or_a_grammar_needs_to_know() -> None:
    bench = Ahead(num_blocks=16, memory_reserve=EAGER)
    bench.run(request("plain", 5))
    begun = bench.begin(None)
    assert bench.scheduler.may_run_ahead(begun[1])
    bench.end(begun)
    suspect = request("suspect", 5)
    suspect.work = replace(suspect.work, suspicion=Suspicion.GROUP)
    bench.enter(suspect)
    begun = bench.begin(None)
    assert not bench.scheduler.may_run_ahead(begun[1])
    bench.end(begun)
    bench.forget(suspect)
    begun = bench.begin(None)
    assert bench.scheduler.may_run_ahead(begun[1])
    bench.end(begun)
    [within_grammar] = bench.enter(request("within a grammar", 5))
    within_grammar.sequence.sampling = replace(within_grammar.sequence.sampling, grammar="start: /a*/")
    assert not bench.scheduler.may_run_ahead(bench.begin(None)[1])


def test_penalties_do_not_need_to_know() -> None:
    """The device has the token that the host does not know yet."""
    bench = Ahead(num_blocks=16, memory_reserve=EAGER)
    penalised = request("penalised", 5)
    sampling = replace(penalised.work.sampling, presence_penalty=1.0, repetition_penalty=1.2)
    penalised.work = replace(penalised.work, sampling=sampling)
    [choice] = bench.enter(penalised)
    first = bench.begin(None)
    assert bench.scheduler.may_run_ahead(first[1])
    second = bench.begin(first[1])
    decodes = DecodeColumns(1000, ()).decoding(second[1].decodes, first[1].decodes).decodes
    assert (decodes.follows_D.tolist(), decodes.samples.positions_N.tolist()) == (
        [0],
        [choice.sequence.num_tokens + 1],
    )
    assert decodes.samples.special[0].counts is choice.sequence.counts is not None


def test_choices_of_a_request_count_once_what_they_begin_with() -> None:
    bench = Bench(num_blocks=16, memory_reserve=EAGER)
    penalised = request("penalised", 5, num_choices=3)
    sampling = replace(penalised.work.sampling, repetition_penalty=1.2)
    penalised.work = replace(penalised.work, sampling=sampling)
    counts = [each.sequence.counts for each in bench.enter(penalised)]
    shared = [each._shared for each in counts if each is not None]
    assert shared[0] is not None
    assert all(each is shared[0] for each in shared)
    assert len(shared) == 3


# --- behind the end of a prompt ----------------------------------------------------------------------------------


def behind_a_prompt(
    *, num_choices: int = 1, tier: Tier = STANDARD, **policy: Any
) -> tuple[Ahead, DecodeChoice, DecodeRequest, tuple[int, Step]]:
    """One sequence decodes in a step that computes a whole prompt."""
    bench = Ahead(memory_reserve=EAGER, **policy)
    decoding = bench.run(request("decoding", 5))
    prompt = request("prompt", 6, num_choices=num_choices, tier=tier, local=True)
    bench.reserve(prompt)
    begun = bench.begin(None)
    assert [chunk.last for chunk in begun[1].chunks] == [True]
    return bench, decoding, prompt, begun


def test_sequences_begin_while_the_step_after_their_prompt_runs() -> None:
    """It was planned before their first tokens were known. The copies for forks are in the step that they join."""
    bench, decoding, prompt, first = behind_a_prompt(num_choices=2)
    assert bench.scheduler.may_run_ahead(first[1])
    second = bench.begin(first[1])
    assert (second[1].decodes, second[1].chunks) == ([decoding], [])
    bench.end(first)
    assert [each.stage for each in prompt.choices] == [ChoiceStage.READY] * 2
    third = bench.begin(second[1])
    assert third[1].decodes == [decoding, *prompt.choices]
    [(source, copy)] = third[1].copies
    assert [each.sequence.block_table[-1] for each in prompt.choices] == [source, copy]
    decodes = DecodeColumns(1000, ()).decoding(third[1].decodes, second[1].decodes).decodes
    assert decodes.follows_D.tolist() == [0, NO_SAMPLE, NO_SAMPLE]
    bench.end(second)
    bench.end(third)
    assert [each.sequence.num_output for each in (decoding, *prompt.choices)] == [5, 2, 2]


def test_a_prompt_with_more_to_compute_is_waited_for() -> None:
    """With it the next step is long, and who arrives meanwhile is to be in it."""
    bench = Ahead(num_blocks=32, memory_reserve=EAGER, prefill_tokens=8)
    bench.run(request("decoding", 5))
    bench.reserve(request("long", 12, local=True))
    begun = bench.begin(None)
    assert not bench.scheduler.may_run_ahead(begun[1])
    bench.end(begun)
    begun = bench.begin(None)
    assert [(chunk.start, chunk.end) for chunk in begun[1].chunks] == [(8, 12)]
    assert bench.scheduler.may_run_ahead(begun[1])
    late = request("late", 5, local=True)
    bench.reserve(late)
    assert not bench.scheduler.may_run_ahead(begun[1])
    bench.forget(late)
    assert bench.scheduler.may_run_ahead(begun[1])


def test_a_prompt_that_is_all_but_done_does_not_lose_its_blocks() -> None:
    """The next step, planned now, would take them for who lacks one."""
    bench, *_, begun = behind_a_prompt()
    bench.pool.allocate(bench.pool.num_free - 1)
    assert bench.scheduler.may_run_ahead(begun[1])
    bench.pool.allocate(1)
    assert not bench.scheduler.may_run_ahead(begun[1])


def test_a_prompt_that_is_all_but_done_gives_way_to_a_higher_tier_with_its_first_token() -> None:
    bench, decoding, prompt, begun = behind_a_prompt(tier=BATCH)
    bench.pool.allocate(bench.pool.num_free - 2)
    assert bench.scheduler.may_run_ahead(begun[1])
    assert bench.reserve(request("senior", 12, tier=INTERACTIVE)) == []
    assert not bench.scheduler.may_run_ahead(begun[1])
    bench.end(begun)
    assert bench.begin(None)[1].decodes == [decoding]
    [choice] = prompt.choices
    assert (choice.stage, choice.sequence.num_output) == (ChoiceStage.PREEMPTED, 1)


def test_a_prompt_may_be_given_up_while_the_step_after_its_last_one_is_planned() -> None:
    """Its blocks are not free before both have ended, and nothing comes of what was sampled."""
    bench, decoding, prompt, first = behind_a_prompt()
    second = bench.begin(first[1])
    bench.forget(prompt)
    assert bench.pool.num_limbo == 2
    bench.end(first)
    assert (bench.pool.num_limbo, prompt.choices) == (2, [])
    third = bench.begin(second[1])
    bench.end(second)
    bench.end(third)
    assert (third[1].decodes, bench.pool.num_limbo) == ([decoding], 0)


def test_a_prompt_that_begins_alike_takes_blocks_over_while_a_step_runs() -> None:
    bench = Ahead(num_blocks=32, memory_reserve=EAGER)
    decoding = bench.run(request("decoding", 5))
    first_one, other = (request(name, [*tokens("alike", 8), *tokens(name, 2)], local=True) for name in ("one", "other"))
    bench.reserve(first_one)
    first = bench.begin(None)
    second = bench.begin(first[1])
    bench.reserve(other)
    bench.end(first)
    assert (bench.scheduler.num_uncomputed_of(other), bench.pool.num_limbo) == (2, 2)
    third = bench.begin(second[1])
    assert third[1].decodes == [decoding, *first_one.choices]
    assert [(chunk.start, chunk.end) for chunk in third[1].chunks] == [(8, 10)]
    bench.end(second)
    assert bench.pool.num_limbo == 0
    bench.end(third)


def test_decodes_that_wait_for_prompts_are_planned_behind_the_last_one() -> None:
    bench, decoding, _, first = behind_a_prompt(prefill_priority=True)
    assert first[1].decodes == []
    assert bench.scheduler.may_run_ahead(first[1])
    second = bench.begin(first[1])
    assert second[1].decodes == [decoding]
    bench.end(first)
    bench.end(second)
    assert decoding.sequence.num_output == 3


def test_a_worker_plans_every_step_ahead_but_a_first_prompt_and_what_follows_it() -> None:
    world = World(("d0",), run_ahead="on")
    [site] = world.sites.values()
    legs = []
    for start in (11, 21, 31):
        legs.append(world.gateway.ask(site, [start, 12, 13, 14, 15], 20))
        world.deliver()
        site.step(3)
    world.run()
    world.check_end()
    assert [len(choice.token_ids) for leg in legs for choice in leg.ask.choices] == [25] * 3
    assert site.engine.num_steps - site.worker._steps_ahead == 2


def test_an_abort_before_the_engine_has_the_step_that_was_planned_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways are told of a trial before the step that may be the last one, and that takes a moment."""
    world = World(("d0",))
    [site] = world.sites.values()
    given_up, other = (world.gateway.ask(site, [start, 12, 13, 14, 15], 20) for start in (11, 21))
    world.deliver()
    site.step(3)
    world.deliver()
    telling = Pause(None)
    with monkeypatch.context() as patch:
        patch.setattr(site.core.front, "tell_turn", lambda: True)
        patch.setattr(asyncio, "sleep", lambda seconds: telling)
        assert site.pause.step is not None
        site.pause = site.loop.send(site.engine.execute(*site.pause.step))
    assert site.pause is telling
    world.gateway.abort(given_up)
    world.deliver()
    assert site.in_step
    world.run()
    world.check_end()
    assert [type(end) for end in given_up.ends] == [Cancelled]
    assert len(other.ask.choices[0].token_ids) == 25
