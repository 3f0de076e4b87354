"""The decode worker's core, driven by events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from migration_bench import BLOCK_SIZE, BUDGET_S, GATEWAY, Site, World
from step_tokens import handles

from common.contract.block_hashes import block_hashes
from common.contract.errors import Cause
from common.contract.ids import Incarnation, LeaseId, RequestId, RequestKey
from common.contract.messages.fields import Message
from common.contract.messages.gateway import Abort, Decode, Prefill, Source
from common.contract.messages.handoff import AttachPrefix, AttachSequence, BlocksReady, PrefillDone, Settled
from common.contract.messages.worker import Cancelled, Failed, Finished, StepTokens, Tokens, TokenScores
from common.contract.sampling import SamplingParams
from common.engine.batch import Chosen, InvalidLogitsError, SampledToken, StepResult
from common.engine.grammar import GaveUp
from common.scheduling.costs import Costs
from common.worker.events import (
    Action,
    AskMask,
    Event,
    ForgetMask,
    HelloReceived,
    MaskMade,
    PeerLost,
    PlannedStep,
    Received,
    StepEnded,
    StepWanted,
    Ticked,
)
from decode_worker.step import Step
from decode_worker.view import DecodeTotals, heartbeat
from kv_transfer.events import (
    DropSource,
    Poll,
    Polled,
    ReadEnded,
    Send,
    SourceLost,
    SourceOpened,
    SourceReceived,
    StartRead,
)

SINK = Incarnation("sink")
SOURCE = Source(address="p:1", incarnation=Incarnation("p"))


class Driven:
    """A core whose shell is the test."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        site: Site = World(["d"], num_blocks=num_blocks, **options).sites[Incarnation("d")]
        self.core, self.engine = site.core, site.engine
        self.now = 0.0

    def handle(self, event: Event) -> list[Action]:
        """What the core decides."""
        return self.core.handle(event, self.now)

    def hear(self, peer: Incarnation, message: Message) -> list[Action]:
        """A message arrives."""
        return self.handle(Received(peer, message))

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        grammar: str | None = None,
        max_tokens: int = 1,
        choices: tuple[int, ...] = (0,),
        source: Source | None = None,
        num_output: int = 0,
        masked: bool = True,
        attempt: int = 1,
    ) -> list[Action]:
        """A request of one token, or of some if it has a grammar. Its mask is known at once, unless `masked` is False.
        With a source the prompt is pulled from there. Its client has the last `num_output` tokens already."""
        work = Decode(
            request=RequestId(name),
            attempt=attempt,
            token_ids=tuple(prompt),
            prompt_len=len(prompt) - num_output,
            choices=choices,
            handles=handles(len(choices)),
            sampling=SamplingParams(max_tokens=max_tokens if grammar is None else 4, grammar=grammar),
            budget_s=BUDGET_S,
            source=source,
            offered=None if source is None else RequestKey(RequestId(name), 1),
        )
        actions = self.hear(GATEWAY, work)
        for action in actions:
            if isinstance(action, AskMask) and masked:
                self.handle(MaskMade(action.state, None))
        return actions

    def plan(self) -> PlannedStep | None:
        """The next step, if there is one."""
        return next((each for each in self.handle(StepWanted(None)) if isinstance(each, PlannedStep)), None)

    def step(self, took_s: float = 0.0) -> list[Action]:
        """Plan a step, and compute it; time goes on by `took_s`, of which the engine's part is 0.01, at the end."""
        work = self.plan()
        assert work is not None
        self.now += took_s
        return self.end(work, max(0.0, took_s - 0.01))

    def end(self, work: PlannedStep, between_s: float = 0.0) -> list[Action]:
        """Compute a step, after a pause; what follows from its end."""
        swaps = work.swap_outs, work.swap_ins
        result = self.engine.execute(work.slices, work.copies, *swaps, work.decodes, None, work.plan)
        return self.handle(StepEnded(work, replace(result, between_s=between_s), ()))


def test_what_follows_from_a_cut_is_settled_before_the_next_plan() -> None:
    """A faulty sink lets a sequence stand still under the name of a prefix that it has borrowed. When the sequence is
    to be cut, the loan ends. Only with its block is there room for a request that waits."""
    driven = Driven(num_blocks=4)
    driven.ask("cached", range(BLOCK_SIZE + 1))
    driven.step()
    driven.ask("idle", [7], grammar="start: /x/")
    driven.step()
    assert driven.plan() is None, "the sequence runs, and waits for its next mask"
    name, sequence = RequestId("borrowed"), RequestKey(RequestId("idle"), 1)
    hashes = tuple(block_hashes(range(BLOCK_SIZE), BLOCK_SIZE))
    driven.hear(SINK, AttachPrefix(request=name, attempt=1, block_hashes=hashes))
    driven.hear(SINK, AttachSequence(request=name, attempt=1, sequence=sequence, choice=0, position=1))
    assert driven.core.lender.num_leases == 1
    driven.core.check_invariants()
    driven.ask("waiting", range(20, 20 + 2 * BLOCK_SIZE + 1))
    assert driven.core.scheduler.num_waiting == 1
    assert driven.plan() is not None, "it has room now, and nobody asks again"
    assert driven.core.lender.num_leases == 0


def sent(actions: Sequence[Action], kind: type[Message]) -> list[Any]:
    """Messages of a kind among what the core has decided."""
    return [each.message for each in actions if isinstance(each, Send) and isinstance(each.message, kind)]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_choice_that_is_given_up_frees_what_it_holds_and_the_other_goes_on(in_flight: bool) -> None:
    driven = Driven(num_blocks=16)
    driven.ask("r", range(2 * BLOCK_SIZE + 1), max_tokens=6, choices=(0, 1))
    driven.step()
    driven.step()
    used = driven.core.pool.num_used
    work = driven.plan() if in_flight else None
    gone = Abort(request=RequestId("r"), attempt=1, choice=0)
    assert sent(driven.hear(GATEWAY, gone), Message) == [], "nothing is said of it"
    driven.core.check_invariants()
    if work is not None:
        driven.end(work)
    assert driven.core.pool.num_used < used
    assert driven.core.scheduler.batch.num_running == 1
    assert sent(driven.hear(GATEWAY, gone), Message) == [], "it comes again"
    told: list[Finished] = []
    for _ in range(6):
        told += sent(driven.step(), Finished) if not told else []
        driven.core.check_invariants()
    assert len(told) == 1
    (request,) = driven.core.book.finished.values()
    assert [each.finish_reason for each in request.choices] == [None, "length"]
    driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1))
    assert not driven.core.book.finished
    assert driven.core.pool.num_used == 0
    driven.core.check_invariants()


def test_the_last_choice_that_is_given_up_finishes_the_request() -> None:
    driven = Driven(num_blocks=16)
    driven.ask("r", range(5), max_tokens=6, choices=(0, 1))
    driven.step()
    driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1, choice=1))
    told = driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1, choice=0))
    assert len(sent(told, Finished)) == 1
    driven.step()  # of the block that the second choice was to have, nothing else
    assert driven.core.pool.num_used == 0
    driven.core.check_invariants()


def test_the_grammar_of_a_choice_that_is_given_up_fails_nobody() -> None:
    driven = Driven(num_blocks=16)
    asked = driven.ask("r", [7], grammar="start: /x+/", choices=(0, 1))
    asked += driven.step()
    masks = [each for each in asked if isinstance(each, AskMask)][-2:]
    driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1, choice=0))
    told = driven.handle(MaskMade(masks[0].state, GaveUp(Cause.INVALID, "too long")))
    assert sent(told, Failed) == []
    assert RequestId("r") in driven.core.book.requests
    driven.core.check_invariants()


@pytest.mark.parametrize("decoding", [False, True])
def test_kv_after_which_logits_are_no_numbers_is_not_found_again(decoding: bool) -> None:
    """Whoever found it would fail in the same way, and would be sent where it is."""
    driven = Driven(num_blocks=16)
    prompt = range(2 * BLOCK_SIZE)
    driven.ask("first", prompt, max_tokens=9)
    if decoding:
        driven.step()
        assert driven.core.pool.num_cached == 2
    work = driven.plan()
    assert work is not None
    bad = InvalidLogitsError("NaN")
    result = StepResult(
        outcomes=[(bad,) for _ in work.slices],
        scores=[TokenScores() for _ in work.slices],
        chosen=Chosen([0, 99], {0: bad}) if decoding else Chosen([], {}),
        duration_s=0.01,
        between_s=0.0,
    )
    sent = driven.handle(StepEnded(work, result, ()))
    assert [each.message.cause for each in sent if isinstance(each, Send) and isinstance(each.message, Failed)] == [
        Cause.INTERNAL
    ]
    assert driven.core.pool.num_cached == 0
    assert driven.core.pool.match(block_hashes(prompt, BLOCK_SIZE)) == []
    driven.core.check_invariants()


def test_the_time_between_steps_counts_as_time_between_tokens_unless_nothing_was_to_be_computed() -> None:
    """So heartbeats say what clients see, and the bound of prompts beside decodes has room for it."""
    driven = Driven(num_blocks=64)
    driven.ask("first", range(BLOCK_SIZE + 1), max_tokens=9)
    driven.step(0.015)
    for _ in range(8):
        driven.step(0.015)
    assert driven.core.totals.itl_s == pytest.approx(0.015)
    assert driven.core.engine.costs.decode_s > 0.01
    driven.core.totals.itl_s = 0.015
    driven.ask("stopped", range(BLOCK_SIZE + 1), max_tokens=3)
    driven.step(0.015)
    driven.step(60.0)
    driven.step(0.015)
    assert driven.core.totals.itl_s < 0.02, "a process that was stopped counts as four steps more, once"
    driven.core.totals.itl_s = 0.015
    assert driven.plan() is None
    driven.now += 60.0
    driven.ask("second", range(BLOCK_SIZE + 1), max_tokens=9)
    driven.step(0.01)
    for _ in range(8):
        driven.step(0.015)
    assert driven.core.totals.itl_s == pytest.approx(0.015), "nobody has waited for the minute without requests"


def test_a_step_in_which_drafts_came_true_has_shorter_gaps() -> None:
    driven = Driven(num_blocks=64)
    driven.ask("first", range(BLOCK_SIZE + 1), max_tokens=9)
    driven.step(0.01)
    driven.step(0.01)
    work = driven.plan()
    assert work is not None
    before = driven.core.totals.itl_s
    drafted = StepResult(outcomes=[], scores=[], chosen=Chosen([], {}), duration_s=0.02, between_s=0.0)
    driven.core.steps._learn(work.plan, 4, drafted)
    assert driven.core.totals.itl_s == pytest.approx(0.9 * before + 0.1 * 0.02 / 4)


@pytest.mark.parametrize(
    ("draft", "outcomes", "right", "by_length"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3, True),  # the last token of the answer is sampled after the drafted ones
        ([5, 6, 7], [5, 9], 1, False),
        ([5, 66], [5, 66], 2, False),  # it ends with a drafted one
        ([5, 66, 7], [5, 66], 2, False),
    ],
)
def test_the_end_of_an_answer_tells_what_became_of_its_last_draft(
    draft: list[int], outcomes: list[int], right: int, by_length: bool
) -> None:
    driven = Driven(num_blocks=64)
    driven.ask("first", range(BLOCK_SIZE + 1), max_tokens=1 + len(outcomes) if by_length else 99)
    driven.step()
    work = driven.plan()
    assert work is not None
    [choice] = work.plan.decodes
    steps: Any = driven.core.steps
    steps._config.eos_token_ids = frozenset({outcomes[-1]} if not by_length else ())
    steps._advance(choice, map(SampledToken, outcomes), Step(decodes=[choice], drafts={choice: draft}))
    assert choice.finish_reason == ("length" if by_length else "stop")
    assert choice.timings is not None
    assert choice.timings.decode is not None
    assert (choice.timings.decode.num_drafted, choice.timings.decode.num_accepted) == (len(draft), right)


def load_of(driven: Driven) -> tuple[int, float]:
    """(sequences that heartbeats tell of, the load that metrics tell of in sequences)."""
    [metric] = [each for each in driven.core.metrics() if each.name == "baton_decode_load"]
    [sample] = metric.samples
    return sum(heartbeat(driven.core, 0).sequences), round(sample.value * driven.core.scheduler.num_places, 6)


@pytest.mark.parametrize("how", ["given up", "ended"])
def test_choices_that_have_ended_are_no_load(how: str) -> None:
    driven = Driven(num_blocks=64)
    driven.ask("r", range(5), max_tokens=6, choices=(0, 1))
    assert load_of(driven) == (2, 2.0)
    driven.step()
    assert load_of(driven) == (2, 2.0)
    if how == "given up":
        driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1, choice=0))
    else:
        choice = driven.core.book.requests[RequestId("r")].choices[0]
        choice.sequence.sampling = SamplingParams(max_tokens=2)
        driven.step()
        assert choice.finish_reason == "length"
    assert load_of(driven) == (1, 1.0)


def test_a_request_is_no_load_and_does_not_wait_here_while_its_prompt_waits_at_its_source() -> None:
    driven = linked(num_blocks=32)
    driven.ask("r", range(9), source=SOURCE)
    assert load_of(driven) == (1, 0.0)
    assert heartbeat(driven.core, 0).waiting == 0
    offer(driven, "r", 3)
    assert load_of(driven) == (1, 1.0)


def test_sequences_that_wait_for_a_place_in_the_batch_wait() -> None:
    driven = Driven(num_blocks=32, max_num_seqs=1)
    for name in "ab":
        driven.ask(name, range(5), max_tokens=9)
    for _ in range(3):
        driven.step()
    told = heartbeat(driven.core, 0)
    assert (told.running, told.waiting) == (1, 1)


@pytest.mark.parametrize("grammar", [None, "start: /x/"])
def test_what_is_cached_of_a_prompt_that_has_no_blocks_yet_is_not_to_be_computed(grammar: str | None) -> None:
    driven = Driven(num_blocks=8)
    prompt = range(4 * BLOCK_SIZE)
    driven.ask("first", prompt)
    driven.step()
    driven.ask("blocker", range(100, 100 + 4 * BLOCK_SIZE), max_tokens=9)
    driven.ask("second", [*prompt, 50, 51], grammar, masked=False)
    assert driven.core.scheduler.num_waiting == (grammar is None), "the others wait for a mask"
    assert sum(heartbeat(driven.core, 0).queued_tokens) == 4 * BLOCK_SIZE + 2


def test_the_end_of_its_time_names_the_state_of_a_request_that_is_computed_here() -> None:
    driven = Driven(num_blocks=4)
    driven.ask("computed", range(2 * BLOCK_SIZE + 1))
    driven.ask("without room", range(20, 20 + 2 * BLOCK_SIZE + 1))
    driven.ask("without a mask", [7], grammar="start: /x/", masked=False)
    driven.now = BUDGET_S
    told = sent(driven.handle(Ticked()), Failed)
    assert [each.cause for each in told] == [Cause.DEADLINE] * 3
    states = {each.request: each.message.rpartition("decode worker, ")[2] for each in told}
    assert states == {"computed": "computing", "without room": "waiting", "without a mask": "masking"}


# --- prompts that begin alike ------------------------------------------------------------------------------------


def begin_alike(driven: Driven, num_requests: int, num_own: int = 8) -> list[list[int]]:
    """Requests come at once, whose prompts begin with the same 20 blocks, and have `num_own` tokens more."""
    own = [range(100 + num_own * index, 100 + num_own * (index + 1)) for index in range(num_requests)]
    prompts = [[*range(20 * BLOCK_SIZE), *each] for each in own]
    for index, prompt in enumerate(prompts):
        driven.ask(f"r{index}", prompt, max_tokens=4, choices=(0, 1) if index == 2 else (0,))
    return prompts


@pytest.mark.parametrize(("num_own", "num_copies"), [(2 * BLOCK_SIZE, 0), (2 * BLOCK_SIZE - 1, 1)])
def test_a_beginning_that_prompts_have_in_common_is_computed_once(num_own: int, num_copies: int) -> None:
    driven = Driven(num_blocks=256)
    prompts = begin_alike(driven, 6, num_own)
    assert driven.core.pool.num_used == 6 * 22 + num_copies
    work = driven.plan()
    assert work is not None
    assert [len(each.token_ids) for each in work.slices] == [len(prompts[0])], "one of them is enough for a step"
    driven.end(work)
    driven.core.check_invariants()
    assert driven.core.pool.num_used == 22 + 5 * 2 + num_copies
    told: list[Finished] = []
    while driven.core.book.requests:
        told += sent(driven.step(), Finished)
        driven.core.check_invariants()
    assert len(told) == 6
    assert driven.core.totals.prompt == len(prompts[0]) + 5 * num_own
    assert driven.core.pool.num_used == 0


def test_kv_after_which_logits_are_no_numbers_is_not_shared_with_prompts_that_begin_alike() -> None:
    driven = Driven(num_blocks=256)
    begin_alike(driven, 2)
    work = driven.plan()
    assert work is not None
    result = StepResult(
        outcomes=[(InvalidLogitsError("NaN"),)],
        scores=[TokenScores()],
        chosen=Chosen([], {}),
        duration_s=0.01,
        between_s=0.0,
    )
    [failed] = sent(driven.handle(StepEnded(work, result, ())), Failed)
    assert (failed.request, failed.cause) == ("r0", Cause.INTERNAL)
    assert sum(heartbeat(driven.core, 0).queued_tokens) == 20 * BLOCK_SIZE + 8
    driven.core.check_invariants()


@pytest.mark.parametrize("choices", [(0,), (0, 1)])
def test_the_duration_of_an_answer_that_its_client_ends_is_learnt(choices: tuple[int, ...]) -> None:
    """As its length is: if most answers end by a stop string, the others say nothing of them."""
    driven = Driven(num_blocks=64)
    driven.ask("r", range(5), max_tokens=60, choices=choices)
    driven.step()
    for _ in range(4):
        driven.step(0.5)
    assert heartbeat(driven.core, 0).sequence_s == 0.0
    one_of_two = 0 if len(choices) > 1 else None
    driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1, choice=one_of_two))
    assert heartbeat(driven.core, 0).sequence_s == pytest.approx(2.0)


def test_a_choice_that_has_ended_is_not_counted_again_when_its_request_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[float] = []
    monkeypatch.setattr(DecodeTotals, "sequence_ended", lambda _, took_s: learnt.append(took_s))
    driven = Driven(num_blocks=64)
    driven.ask("r", range(5), max_tokens=60, choices=(0, 1))
    driven.step()
    driven.step(0.5)
    driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1, choice=0))
    driven.step(0.5)
    driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1))
    assert learnt == [pytest.approx(0.5), pytest.approx(1.0)]


def test_an_answer_that_is_cut_off_or_has_not_begun_has_no_duration() -> None:
    driven = Driven(num_blocks=64)
    driven.ask("not begun", range(5), max_tokens=60)
    driven.now += 1.0
    driven.hear(GATEWAY, Abort(request=RequestId("not begun"), attempt=1))
    driven.ask("cut off", range(5), max_tokens=60)
    driven.step()
    driven.step(1.0)
    driven.handle(PeerLost(GATEWAY))
    assert not driven.core.book.requests
    assert heartbeat(driven.core, 0).sequence_s == 0.0


def test_open_requests_that_end_with_their_gateway_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """And those that it has lost. One that has finished was counted before."""
    caplog.set_level("INFO")
    driven = Driven(num_blocks=64)
    driven.ask("finished", range(5))
    driven.step()
    for name in "abc":
        driven.ask(name, range(5), max_tokens=60)
    for event, num_cancelled in (
        (HelloReceived(GATEWAY, frozenset(RequestKey(RequestId(name), 1) for name in "ab")), 1),
        (PeerLost(GATEWAY), 3),
    ):
        driven.handle(event)
        (ended,) = (each for each in driven.core.front.metrics() if each.name == "baton_requests_ended")
        assert {each.labels["end"]: each.value for each in ended.samples} == {
            "finished": 1,
            "cancelled": num_cancelled,
        }
    assert [line.partition(":")[0] for line in caplog.messages if "end here" in line] == [
        "1 open requests end here",
        "2 open requests end here",
    ]


def test_an_attempt_that_a_newer_one_supersedes_is_counted() -> None:
    """One that has finished was counted before."""
    driven = Driven(num_blocks=64)
    driven.ask("finished", range(5))
    driven.step()
    driven.ask("open", range(5), max_tokens=60)
    for name in ("finished", "open"):
        driven.ask(name, range(5), attempt=2)
    (ended,) = (each for each in driven.core.front.metrics() if each.name == "baton_requests_ended")
    assert {each.labels["end"]: each.value for each in ended.samples} == {"finished": 1, "superseded": 1}


def test_what_is_told_of_a_prompt_token_includes_its_part_of_a_step() -> None:
    driven = Driven(num_blocks=4)
    driven.core.engine.costs = Costs(prefill_s_per_token=1e-4, step_s=1e-2, step_tokens=100)
    assert heartbeat(driven.core, 0).token_s == pytest.approx(2e-4)


def test_a_step_tells_how_deep_its_prompt_tokens_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, ...]] = []
    monkeypatch.setattr(Costs, "observe_step", lambda _, *observed: seen.append(observed))
    driven = Driven(num_blocks=128)
    driven.engine.costs.prefill_s_per_token = 1.0  # a step has as few tokens as it may have, which are 128
    driven.ask("r", range(300))
    for _ in range(3):
        driven.step()
    assert seen == [(128, 0, 0.01, 0), (128, 0, 0.01, 128 * 128), (44, 0, 0.01, 44 * 256)]


def test_a_message_for_the_other_role_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    driven = Driven(num_blocks=4)
    work = Prefill(
        request=RequestId("r"),
        attempt=1,
        token_ids=(1, 2),
        prompt_len=2,
        choices=(0,),
        sampling=SamplingParams(max_tokens=1),
        budget_s=BUDGET_S,
    )
    assert driven.hear(GATEWAY, work) == []
    assert "Prefill is not for a worker of this role" in caplog.text


# --- a transport that hangs --------------------------------------------------------------------------------------


def linked(num_blocks: int) -> Driven:
    """A core with a link to a source."""
    driven = Driven(num_blocks)
    welcome: Any = SimpleNamespace(transport="zmq", transport_metadata=b"")
    driven.handle(SourceOpened(SOURCE.address, SOURCE.incarnation, welcome))
    return driven


def pulling(driven: Driven, name: str) -> StartRead:
    """A request pulls a prompt of two blocks; the read that has begun."""
    driven.ask(name, range(100, 100 + 2 * BLOCK_SIZE), max_tokens=9, source=SOURCE)
    [read] = [each for each in offer(driven, name, 2, 2) if isinstance(each, StartRead)]
    return read


def offer(driven: Driven, name: str, num_blocks: int, num_ready: int = 0) -> list[Action]:
    """The source opens its offer of so many blocks; the first `num_ready` can be read."""
    request, lease, blocks = RequestId(name), LeaseId(name), tuple(range(num_ready))
    ready = BlocksReady(
        request=request, attempt=1, lease=lease, epoch=1, start=0, block_ids=blocks, num_blocks=num_blocks
    )
    return driven.handle(SourceReceived(SOURCE.incarnation, ready))


def settle(driven: Driven, name: str, num_tokens: int, choices: Sequence[int]) -> list[Action]:
    """The source has computed a prompt of so many tokens; it is read and valid. What follows at the end."""
    request, lease = RequestId(name), LeaseId(name)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    [read] = [each for each in offer(driven, name, num_blocks, num_blocks) if isinstance(each, StartRead)]
    first = tuple(
        Tokens(request=request, attempt=1, choice=choice, position=num_tokens, token_ids=(5,)) for choice in choices
    )
    done = PrefillDone(request=request, attempt=1, lease=lease, epoch=1, first_tokens=first)
    assert sent(driven.handle(SourceReceived(SOURCE.incarnation, done)), Failed) == []
    driven.handle(ReadEnded(read.read_id, None))
    settled = Settled(request=request, attempt=1, lease=lease, epoch=1, valid=True)
    return driven.handle(SourceReceived(SOURCE.incarnation, settled))


def masks(actions: Sequence[Action]) -> list[AskMask]:
    """The masks that the core asks for."""
    return [each for each in actions if isinstance(each, AskMask)]


@pytest.mark.parametrize("quickly", [True, False])
@pytest.mark.parametrize("choices", [(0,), (0, 1)])
@pytest.mark.parametrize("num_output", [0, 2])
def test_a_grammar_is_read_before_the_prompt_is_here(quickly: bool, choices: tuple[int, ...], num_output: int) -> None:
    """The first choice goes on from where it was read to, unless its source brings the first token sooner. Grammars are
    compiled one after another, so nobody asks before its source has room for its prompt."""
    driven = linked(num_blocks=32)
    grammar, text = "start: /x+/", list(range(9))
    asked = driven.ask("r", text, grammar, choices=choices, source=SOURCE, num_output=num_output, masked=False)
    assert masks(asked) == []
    [before] = masks(offer(driven, "r", 3))
    assert (list(before.token_ids), before.prompt_len) == (text, 9 - num_output)
    driven.core.check_invariants()
    if quickly:
        assert driven.handle(MaskMade(before.state, None)) == []
    told = settle(driven, "r", 9, choices)
    assert (ForgetMask(before.state) in told) == (not quickly)
    asked_of, request = masks(told), driven.core.book.requests[RequestId("r")]
    assert [each.state for each in asked_of] == [each.sequence.grammar_state for each in request.choices]
    assert [list(each.token_ids) for each in asked_of] == [[*text, 5]] * len(choices)
    assert [each.state is before.state for each in asked_of] == [choice == 0 for choice in choices]
    driven.core.check_invariants()
    for each in asked_of:
        driven.handle(MaskMade(each.state, None))
    work = driven.plan()
    assert work is not None
    assert work.plan.decodes == request.choices


@pytest.mark.parametrize("end", ["an abort", "a deadline", "its source", "its grammar"])
def test_a_pull_that_ends_before_its_first_mask_is_known_waits_for_none(end: str) -> None:
    driven = linked(num_blocks=32)
    driven.ask("r", range(9), "start: /x+/", source=SOURCE)
    [asked] = masks(offer(driven, "r", 3))
    match end:
        case "an abort":
            told = driven.hear(GATEWAY, Abort(request=RequestId("r"), attempt=1))
        case "a deadline":
            driven.now = BUDGET_S
            told = driven.handle(Ticked())
        case "its source":
            lost = SourceLost(SOURCE.address, SOURCE.incarnation, Cause.WORKER_LOST, "killed")
            told = driven.handle(lost)
        case _:
            told = driven.handle(MaskMade(asked.state, GaveUp("items", "too many")))
    assert (ForgetMask(asked.state) in told) == (end != "its grammar")
    ends = {"a deadline": Cause.DEADLINE, "its source": Cause.WORKER_LOST, "its grammar": Cause.INVALID}
    assert [each.cause for each in sent(told, Failed)] == ([ends[end]] if end in ends else [])
    assert (driven.core.book.requests, driven.core.pulls.num_pulls, len(driven.core._masks)) == ({}, 0, 0)
    assert driven.handle(MaskMade(asked.state, None)) == [], "it was on its way"
    driven.core.check_invariants()


def test_while_the_own_transport_hangs_all_but_pulls_goes_on_and_these_end_by_abort_or_deadline() -> None:
    """No read ends and no poll is answered, so nothing is judged and no block that is read into is free
    (docs/faults.md)."""
    driven = linked(num_blocks=32)
    reads = {name: pulling(driven, name) for name in ("aborted", "overdue")}
    driven.now = 1.0
    driven.ask("running", range(5), max_tokens=99)
    driven.ask("computed", range(20, 29))
    happened: list[Action] = []
    for _ in range(50):
        happened += [*driven.handle(Ticked()), *driven.step(10.0)]
    reads["new"] = pulling(driven, "new")
    happened += driven.handle(Ticked())
    assert len(sent(happened, StepTokens)) >= 49
    assert [each.request for each in sent(happened, Finished)] == ["computed"]
    assert sent(happened, Failed) == []
    assert [each for each in happened if isinstance(each, Poll | DropSource)] == [Poll()]
    assert set(driven.core.book.requests) == {*reads, "running"}

    told = driven.hear(GATEWAY, Abort(request=RequestId("aborted"), attempt=1))
    assert [each.request for each in sent(told, Cancelled)] == ["aborted"]
    driven.now = BUDGET_S
    [failed] = sent(driven.handle(Ticked()), Failed)
    assert (failed.request, failed.cause) == ("overdue", Cause.DEADLINE)
    assert driven.core.pulls.num_quarantined == 4
    assert all(driven.core.pool.ref_count(block) == 1 for read in reads.values() for block in read.sink_blocks)
    assert len(sent(driven.step(), StepTokens)) == 1
    driven.core.check_invariants()

    for read in reads.values():
        happened += driven.handle(ReadEnded(read.read_id, "closed"))
    assert [(each.request, each.cause) for each in sent(happened, Failed)] == [("new", Cause.TRANSFER)]
    assert driven.core.pulls.num_quarantined == 0
    assert not any(driven.core.pool.ref_count(block) for read in reads.values() for block in read.sink_blocks)
    driven.core.check_invariants()


def test_a_request_goes_on_elsewhere_if_the_transport_of_its_source_hangs() -> None:
    """This worker's transport polls, and the read gets no progress."""
    driven = linked(num_blocks=32)
    read = pulling(driven, "r")
    bound_s = driven.core.settings.read_bound_s
    dropped: list[Action] = []
    while not dropped:
        assert driven.now <= bound_s + 1.0
        driven.now += 1.0
        assert Poll() in driven.handle(Ticked())
        decided = driven.handle(Polled(frozenset()))
        assert sent(decided, Failed) == []
        dropped = [each for each in decided if isinstance(each, DropSource)]
    assert driven.now > bound_s
    [failed] = sent(driven.handle(ReadEnded(read.read_id, "dropped")), Failed)
    assert (failed.request, failed.cause) == ("r", Cause.TRANSFER)
    assert driven.core.pool.num_used == 0
