"""A decode scheduler with its pool, pulls that end when a test says so, and an engine that answers at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from prompt_pulls import pull_of_prompt
from step_tokens import handles

from common.contract.block_hashes import BlockChain
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages.fields import FinishReason
from common.contract.messages.gateway import Decode, Source
from common.contract.messages.worker import Tokens
from common.contract.sampling import SamplingParams
from common.contract.tiers import Tier
from common.engine.block_pool import BlockPool
from common.scheduling.costs import Costs
from decode_worker.entrance import Reservation
from decode_worker.policy import Policy
from decode_worker.request import ChoiceStage, DecodeChoice, DecodeRequest
from decode_worker.scheduler import DecodeScheduler
from decode_worker.step import Step

BLOCK_SIZE = 4
ENDLESS = 100_000
"""More tokens than any test generates."""
EAGER = -1e9
"""A reserve with which whatever fits at this moment is let in."""
AT = Source(address="p:1", incarnation=Incarnation("p"))
_names: dict[str, int] = {}


def tokens(name: str, num_tokens: int) -> list[int]:
    """A text of its own for each name: the beginnings of one text are equal, those of two texts differ."""
    number = _names.setdefault(name, len(_names) + 1)
    return [number * 1_000_000 + position for position in range(num_tokens)]


def request(
    name: str,
    text: int | Sequence[int],
    max_tokens: int = ENDLESS,
    *,
    num_choices: int = 1,
    choices: Sequence[int] = (),
    num_output: int = 0,
    tier: Tier = Tier.STANDARD,
    tenant: str = "",
    salt: str = "",
    local: bool = False,
    moving: bool = False,
    arrived: float = 0.0,
) -> DecodeRequest:
    """Of `text`, or so many tokens of its own; the last `num_output` of them the client has got already."""
    token_ids = tuple(tokens(name, text) if isinstance(text, int) else text)
    choices = tuple(choices) or tuple(range(num_choices))
    work = Decode(
        request=RequestId(name),
        attempt=1,
        token_ids=token_ids,
        prompt_len=len(token_ids) - num_output,
        choices=choices,
        handles=handles(len(choices)),
        sampling=SamplingParams(max_tokens=max_tokens),
        budget_s=1.0,
        tier=tier,
        tenant=tenant,
        cache_salt=salt,
        source=None if local else AT,
        offered=None if local else RequestKey(RequestId(name), 1),
        moving=moving,
    )
    pull = None if local else pull_of_prompt(work.key, AT)
    return DecodeRequest(work, Incarnation("g"), 1e9, arrived, BlockChain(BLOCK_SIZE, salt), pull)


def first_tokens(subject: DecodeRequest, *reasons: FinishReason | None) -> list[Tokens]:
    """Token 99 for each choice: the last one, where one is all that is wanted."""
    only: FinishReason | None = "length" if subject.work.sampling.max_tokens == 1 else None
    reasons = reasons or (only,) * len(subject.work.choices)
    return [
        Tokens(
            request=subject.work.request,
            attempt=1,
            choice=choice,
            position=len(subject.work.token_ids),
            token_ids=(99,),
            finish_reason=reason,
        )
        for choice, reason in zip(subject.work.choices, reasons, strict=True)
    ]


class Bench:
    """Invariants are checked after every event."""

    def __init__(
        self, num_blocks: int = 16, *, costs: Costs | None = None, prefix_cache: bool = True, **policy: Any
    ) -> None:
        self.pool = BlockPool(num_blocks, prefix_cache=prefix_cache)
        decided = {"max_num_seqs": 8, "max_sequence_tokens": 1_000_000, "memory_reserve": 0.0, **policy}
        self.policy = Policy(block_size=BLOCK_SIZE, **decided)
        self.scheduler = DecodeScheduler(self.pool, self.policy, costs or Costs())
        self.now = 0.0
        self.pulling: dict[str, Reservation] = {}
        self.requests: list[DecodeRequest] = []
        """All that have wanted anything."""
        self._number = 0

    # --- the way in ----------------------------------------------------------------------------------------------

    def want(self, *requests: DecodeRequest) -> None:
        """Their offers open, or they are to be computed here."""
        for each in requests:
            self.scheduler.want(each, self.now)
        self.requests += requests
        self.check()

    def reserve(self, *requests: DecodeRequest) -> list[str]:
        """`requests` want room; the names of those, old and new, that may pull now."""
        self.want(*requests)
        granted = self.scheduler.reserve(self.now)
        self.pulling.update((each.request.work.request, each) for each in granted)
        self.check()
        return [each.request.work.request for each in granted]

    def settle(self, subject: DecodeRequest, *reasons: FinishReason | None) -> list[DecodeChoice]:
        """The pull is over, and valid."""
        blocks = self.pulling.pop(subject.work.request).block_ids
        self.scheduler.settled(subject, blocks, first_tokens(subject, *reasons), self.now)
        self.check()
        return subject.choices

    def enter(self, subject: DecodeRequest, *reasons: FinishReason | None) -> list[DecodeChoice]:
        """From the offer to the batch's door."""
        assert self.reserve(subject) == [subject.work.request]
        return self.settle(subject, *reasons)

    def run(self, subject: DecodeRequest) -> DecodeChoice:
        """From the offer into the batch."""
        [choice] = self.enter(subject)
        assert choice in self.step().decodes
        return choice

    def profile(self, num_output: int, tier: Tier = Tier.STANDARD) -> None:
        """Answers of this length have been seen lately, and no others."""
        for _ in range(32):
            seen = request("profile", num_output, num_output=num_output - 1, tier=tier, salt="profile")
            self.enter(seen, "stop")

    # --- a step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> Step:
        """The next step is handed to the engine."""
        self._number = self.pool.step_started()
        step = self.scheduler.schedule(self.now)
        self.check()
        return step

    def end_step(self, step: Step, ends: Collection[DecodeChoice] = ()) -> None:
        """It is done: everybody in it has a token more; `ends` their last one."""
        self.pool.step_finished(self._number)
        for choice in step.decodes:
            if choice.stage is ChoiceStage.RUNNING:
                self._decoded(choice, step, ends)
        for chunk in self.scheduler.chunks_done(step.chunks):
            if chunk.last and chunk.prompt.choice is not None:
                self.scheduler.sequences.recomputed(chunk.prompt.choice, self.now)
                self._advance(chunk.prompt.choice, ends)
            elif chunk.last:
                self.scheduler.computed(chunk.prompt.request, first_tokens(chunk.prompt.request), self.now)
        if step.chunks:
            self.scheduler.entrance.match_again()
        self.check()

    def step(self, *, ends: Collection[DecodeChoice] = ()) -> Step:
        """One step from beginning to end; then whoever fits comes in."""
        step = self.begin_step()
        self.end_step(step, ends)
        self.reserve()
        return step

    def steps(self, num_steps: int) -> list[Step]:
        """So many steps."""
        return [self.step() for _ in range(num_steps)]

    def preempting_step(self) -> Step:
        """Steps until somebody is preempted; that step is begun, and not ended."""
        for _ in range(100):
            num_preempted = self.num_preemptions
            step = self.begin_step()
            if self.num_preemptions > num_preempted:
                return step
            self.end_step(step)
            self.reserve()
        raise AssertionError("nobody is preempted")

    def preempt(self) -> None:
        """Steps until somebody has been preempted."""
        self.end_step(self.preempting_step())
        self.reserve()

    @property
    def num_preemptions(self) -> int:
        """Of either kind."""
        return self.scheduler.swap.num_swapped + self.scheduler.preemption.num_recomputed

    def _decoded(self, choice: DecodeChoice, step: Step, ends: Collection[DecodeChoice]) -> None:
        self._advance(choice, ends)

    def _advance(self, choice: DecodeChoice, ends: Collection[DecodeChoice]) -> None:
        sequence = choice.sequence
        sequence.num_computed = sequence.num_tokens
        last = choice in ends or sequence.num_output + 1 >= sequence.sampling.max_tokens
        choice.append(sequence.num_tokens, None, "stop" if last else None)
        if last:
            self.scheduler.sequences.remove(choice)

    # --- the way out ---------------------------------------------------------------------------------------------

    def forget(self, subject: DecodeRequest) -> None:
        """It is given up, wherever it is."""
        self.scheduler.forget(subject)
        if (reservation := self.pulling.pop(subject.work.request, None)) is not None:
            self.pool.release(reservation.block_ids)
        self.check()

    def evict(self) -> None:
        """Of what nobody uses nothing is cached any more."""
        self.pool.release(self.pool.allocate(self.pool.num_free))

    # --- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants."""
        self.scheduler.check_invariants()
        self.pool.check_invariants()
