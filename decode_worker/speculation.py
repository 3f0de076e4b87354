"""Decides what is drafted: how many tokens of which sequences a step verifies beside those that it computes anyway.

A draft is verified by rows of the same step, one for each drafted token (Leviathan et al., arXiv:2211.17192; here the
token that the sampler draws at a position must equal the drafted one, so that answers are what they are without
drafts). A step with K drafted tokens yields a token of each sequence, and of each drafted token the chance that it and
those before it are right; it costs what so many rows do, and the passes of the draft model. The drafts that yield the
most tokens per second are taken, as by "TurboSpec" (arXiv:2406.14066), and none unless they beat a step without.

Pure state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from common.engine.batch import Drafted
from common.runtime.config import MAX_DRAFT_TOKENS
from common.scheduling.row_times import RowTimes
from decode_worker.draft_model import DraftModel, DraftWork, Proposer
from decode_worker.lookup import LEAST_CHANCE, CommonAcceptance, Lookup
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice, rows_of
from decode_worker.step import Step

_MOST_DRAFTING = 32
"""Most steps with drafts one after another. What the next one takes is what theirs are compared with."""
_OBSERVED = 8
"""One in so many steps without drafts is learnt from."""
_MOST_NEW = 4
"""Most sequences whose text is read for the first time in a step: that takes some 30 ns a token."""
_BATCH_OF_PATIENCE, _MOST_PATIENCE = 4, 4
"""Texts that expect nothing are read in every step; with this many sequences in a batch in one of two, with twice as
many in one of three, and so on up to the second number."""
_FEW = 64
"""Most tokens of which it is tried whether fewer passes of the draft model yield more tokens per second."""
_PASSES = (1, 2, 3, 5, 8, 12)
"""Numbers of passes that are tried."""
_MARGIN = 1.03
"""Ratio by which drafts must raise the tokens per second: estimates vary, and drafts cost some work beside steps."""


class _Chance(NamedTuple):
    """A token that may be drafted."""

    chance: float
    """That it and those before it are right."""
    place: int
    """From 1."""
    proposer: Proposer


class DraftPlan(NamedTuple):
    """What is to be drafted for a step."""

    tokens: dict[DecodeChoice, list[int]]
    """Tokens to be verified, in the order of the step; zeros of `by_model`."""
    by_model: frozenset[DecodeChoice]
    """The sequences of which the draft model is to tell them."""


class Drafts(NamedTuple):
    """How many tokens are to be drafted of which sequences."""

    nums: dict[DecodeChoice, int]
    """In the order of the step; no zeros."""
    by_model: frozenset[DecodeChoice]
    """The sequences of which the draft model drafts; the others' tokens are looked up."""
    expected: float
    """Tokens that the step is expected to yield."""
    step_s: float
    """What it is expected to take."""


_NO_PLAN = DraftPlan({}, frozenset())
_NOTHING = Drafts({}, frozenset(), 0.0, 1.0)
_chance = attrgetter("chance")


class Speculation:
    """Chooses the drafts of each step, and learns from what becomes of them."""

    def __init__(
        self, policy: Policy, times: RowTimes, model: DraftModel | None = None, *, looks_up: bool = True
    ) -> None:
        """`times` is what steps take without the draft model's passes. Without `looks_up`, the draft model is the only
        proposer."""
        self._policy = policy
        self._times = times
        self.model = model
        self._looks_up = looks_up
        self._of_texts, self._of_predictions = CommonAcceptance(0.5), CommonAcceptance(0.8)
        self._read_last: list[DecodeChoice] = []
        """The sequences of the last step in which all texts were read."""
        self._num_unread = 0
        """Steps of the same sequences since the first one of them."""
        self._busy: list[DecodeChoice] = []
        """Sequences whose texts are read in the next step even if not all are: they repeat themselves, or were not read
        yet."""
        self._num_drafting = 0
        """Steps with drafts since the last one without."""
        self._num_plain = _OBSERVED - 1
        """Steps without drafts since the last one with some, or more; the first one after it counts."""
        self._after_drafts = False
        """Whether the last step had drafts, or work for the draft model."""

    def plan(self, decodes: Sequence[DecodeChoice], most: int) -> DraftPlan:
        """Choose what to draft for the next step of `decodes`, at most `most` tokens. No step may be in flight."""
        if self._num_drafting == _MOST_DRAFTING and not self._policy.draft_tokens:
            self._num_drafting = 0
            return _NO_PLAN
        drafts = self._choose(decodes, min(most, most_drafted(self._policy.max_num_seqs)), num_ahead=0)
        tokens = {}
        for choice, num in drafts.nums.items():
            if choice not in drafts.by_model:
                tokens[choice] = self._lookup(choice).propose(num)
            elif self.model is not None and self.model.hold(choice, num):
                tokens[choice] = [0] * num
        self._num_drafting = self._num_drafting + 1 if tokens else 0
        return DraftPlan(tokens, drafts.by_model)

    def draft_work(self, step: Step, plan: DraftPlan, num_left: Callable[[DecodeChoice], int]) -> DraftWork | None:
        """What the draft model does for a step whose drafts were planned, and may have become fewer. `num_left` returns
        how many tokens a sequence is expected to get still."""
        if self.model is None:
            return None
        drafts = {choice: draft for choice, draft in step.drafts.items() if choice in plan.by_model}
        chunks: dict[DecodeChoice, tuple[int, int]] = {}
        if step.decodes and not step.chunks:
            self._judge(step.decodes, num_left)
            if self.model.wants(step.decodes):
                step_s = self._times.step_s(rows_of(step.decodes), _drafted_rows(step))
                step_s += self.model.passes_s(self.model.work(drafts, {}))
                chunks = self.model.chunks(step.decodes, drafts, step_s)
        return self.model.work(drafts, chunks) if drafts or chunks else None

    def would_draft(self, decodes: Sequence[DecodeChoice], num_left: Callable[[DecodeChoice], int]) -> bool:
        """Whether drafts would pay in the step after the one that computes the next token of `decodes`, if those are
        what is expected; or whether the draft model has sequences to compute. For `num_left` see `draft_work`."""
        self._judge(decodes, num_left)
        if self.model is not None and self.model.wants(decodes):
            return True
        most = min(self._policy.token_budget - len(decodes), most_drafted(self._policy.max_num_seqs))
        return bool(self._choose(decodes, most, num_ahead=1).nums)

    def drafted(self, step: Step, drafted: Drafted) -> None:
        """The draft model has done its work for a step: its tokens are known."""
        work = step.draft_work
        if self.model is None:
            return
        if work is None:
            self.model.forget_slowly()
            return
        for draft, token_ids in zip(work.drafts.values(), drafted.token_ids, strict=True):
            draft[:] = token_ids[: len(draft)]
        self.model.done(work, drafted.seconds)

    def observe(self, step: Step, seconds: float, plan_s: float | None = None) -> None:
        """Learn from what a step took, without the draft model, that did nothing but decode: with drafts from each,
        else from some. It began `plan_s` after the end of the step before, if that is known.

        If steps run ahead, one without drafts after one with some does not, and says nothing of those that do."""
        late = not step.drafts and (self._after_drafts or step.draft_work is not None)
        self._after_drafts = bool(step.drafts) or step.draft_work is not None
        self._num_plain = _OBSERVED - 1 if step.drafts else self._num_plain + 1
        if step.drafts or not self._num_plain % _OBSERVED:
            if late and self._policy.runs_ahead:
                plan_s = None
            self._times.observe(rows_of(step.decodes), _drafted_rows(step), seconds, plan_s)

    def _choose(self, decodes: Sequence[DecodeChoice], most: int, num_ahead: int) -> Drafts:
        """How many tokens are drafted of each sequence. The next `num_ahead` tokens are being computed already."""
        lookups = self._expecting(decodes) if self._looks_up else []
        knowing = [] if self.model is None else self.model.proposers(decodes)
        if not (lookups or knowing) or most <= 0:
            return _NOTHING  # the code behind this is cold in most steps, and takes ten times as long then
        plain = rows_of(decodes)
        found = self._best(plain, lookups, most, num_ahead)
        if knowing:
            better = {each.choice: each for each in knowing}
            better |= {
                each.choice: each
                for each in lookups
                if each.choice not in better or each.acceptance >= better[each.choice].acceptance
            }
            mixed = self._best(plain, list(better.values()), most, num_ahead)
            if self._policy.draft_tokens or mixed.expected / mixed.step_s > found.expected / found.step_s:
                found = mixed
        if found.nums:
            found = found._replace(nums={each: found.nums[each] for each in decodes if each in found.nums})
        return found

    def _expecting(self, decodes: Sequence[DecodeChoice]) -> list[Proposer]:
        """Sequences whose next tokens can be looked up, and are right now and then.

        A step of the model leaves nothing of other code and data in the processor's caches, so to read one token of one
        text takes as long as to read some of many. Of a large batch, texts that expect nothing are read in some steps
        only: they may begin to repeat themselves, but are noticed later."""
        same = decodes == self._read_last
        self._num_unread = self._num_unread + 1 if same else 0
        patience = 1 + min(len(decodes) // _BATCH_OF_PATIENCE, _MOST_PATIENCE - 1)
        if same and self._num_unread % patience and not self._policy.draft_tokens:
            candidates: Sequence[DecodeChoice] = self._busy
        else:
            candidates = self._read_last = list(decodes)
        least = 0.0 if self._policy.draft_tokens else LEAST_CHANCE
        self._busy, expecting, num_new = [], [], 0
        for choice in candidates:
            if choice.sequence.sampling.grammar is not None:
                continue
            num_new += choice.lookup is None
            if choice.lookup is None and num_new > _MOST_NEW:
                self._busy.append(choice)  # its turn comes in the next step
                continue
            lookup = self._lookup(choice)
            if lookup.hopeful:
                self._busy.append(choice)
            if lookup.expects and lookup.acceptance >= least:
                expecting.append(Proposer(choice, lookup.acceptance))
        return expecting

    def _best(self, plain: tuple[int, int], proposers: Sequence[Proposer], most: int, num_ahead: int) -> Drafts:
        """The numbers of drafted tokens by which the step yields the most tokens per second; nothing unless it pays."""
        plain_s = self._times.step_s(plain)
        # A token that is drafted must bring at least its share of the step's tokens.
        least_looked_up = least_of_model = 0.0
        if not self._policy.draft_tokens:
            least_looked_up = least_of_model = plain[0] * self._times.least_share(plain, most)
            num = sum(each.num_behind > 0 for each in proposers)
            if num and self.model is not None:
                least_of_model += plain[0] * self.model.times.step_s((num, 0)) / num / plain_s
        chances: list[_Chance] = []
        for each in proposers:
            chances += self._chances(each, least_of_model if each.num_behind else least_looked_up, num_ahead)
        if not chances:
            return Drafts({}, frozenset(), plain[0], plain_s)
        chances = sorted(chances, key=_chance, reverse=True)[:most]
        best, taken = Drafts({}, frozenset(), plain[0], plain_s), chances[:0]
        best_rate = _MARGIN * plain[0] / plain_s
        most_s = max(plain_s, self._policy.step_target_s or math.inf)
        for tokens in _by_passes(chances):
            yielded, costs = float(plain[0]), _Costs(plain, self._times, self.model)
            drafting: set[DecodeChoice] = set()
            for num, token in enumerate(tokens, start=1):
                yielded += token.chance
                step_s = costs.with_token(token)
                drafting.add(token.proposer.choice)
                if step_s > most_s and len(drafting) < plain[0]:
                    continue  # the others would get their one token too late
                if yielded / step_s > best_rate or self._policy.draft_tokens:
                    best, best_rate = best._replace(expected=yielded, step_s=step_s), yielded / step_s
                    taken = tokens[:num]
        return best._replace(
            nums=Counter(token.proposer.choice for token in taken),
            by_model=frozenset(token.proposer.choice for token in taken if token.proposer.num_behind),
        )

    def _chances(self, proposer: Proposer, least: float, num_ahead: int) -> list[_Chance]:
        """The chance of each of the next tokens; without those that hardly come, or bring less than `least`."""
        sequence, acceptance = proposer.choice.sequence, proposer.acceptance
        num_left = sequence.most_tokens(self._policy.max_sequence_tokens) - sequence.num_tokens
        num = min(self._policy.draft_tokens or MAX_DRAFT_TOKENS, num_left - 1 - num_ahead)
        if not self._policy.draft_tokens:
            if acceptance <= least:
                return []
            num = min(num, int(math.log(max(least, LEAST_CHANCE)) / min(math.log(max(acceptance, 1e-9)), -1e-9)))
        return [_Chance(acceptance**place, place, proposer) for place in range(1, num + 1)]

    def _judge(self, decodes: Sequence[DecodeChoice], num_left: Callable[[DecodeChoice], int]) -> None:
        """Decide for which sequences, of those that it does not know, the draft model is to compute all tokens: as if
        it knew them all, it would save so many seconds in a step, of which each sequence has its share."""
        asked = [] if self.model is None else self.model.to_judge(decodes)
        if self.model is None or not asked:
            return
        plain = rows_of(decodes)
        drafts = self._best(plain, self.model.proposers(decodes, asked), most_drafted(self._policy.max_num_seqs), 0)
        saved_s = drafts.expected * self._times.step_s(plain) / plain[0] - drafts.step_s
        for choice in asked:
            if self._policy.draft_tokens:
                self.model.judged(choice, math.inf)
                continue
            acceptance = self.model.table(choice).acceptance
            more = sum(acceptance**place for place in range(1, drafts.nums.get(choice, 0) + 1))
            if not more or self._served(choice, acceptance):
                self.model.judged(choice, 0.0)
                continue
            share = more / (drafts.expected - plain[0])
            self.model.judged(choice, saved_s * share * num_left(choice) / (1 + more))

    def _served(self, choice: DecodeChoice, acceptance: float) -> bool:
        """Whether looking up is as often right."""
        lookup = choice.lookup
        return lookup is not None and lookup.expects and lookup.acceptance >= acceptance

    def _lookup(self, choice: DecodeChoice) -> Lookup:
        """What is expected next in a sequence, of which every token was read."""
        if choice.lookup is None:
            sequence, prediction = choice.sequence, choice.request.work.prediction
            common = self._of_predictions if prediction else self._of_texts
            choice.lookup = Lookup(sequence.token_ids, common, sequence.prompt_len, prediction)
        else:
            choice.lookup.read()
        return choice.lookup


def _by_passes(chances: list[_Chance]) -> Iterator[list[_Chance]]:
    """The tokens with at most so many passes of the draft model, for some numbers, and all tokens. Only all, if one
    sequence alone has passes, or so many tokens may be drafted that a pass is mostly what its rows cost."""
    places = {token.proposer.choice: token.place for token in chances if token.proposer.num_behind}
    if len(places) > 1 and len(chances) <= _FEW:
        for most in _PASSES:
            if most < max(places.values()):
                yield [token for token in chances if token.place <= most or not token.proposer.num_behind]
    yield chances


class _Costs:
    """What a step takes, draft by draft."""

    def __init__(self, plain: tuple[int, int], times: RowTimes, model: DraftModel | None) -> None:
        self._plain = plain
        self._times = times
        self._model = model
        self._num = self._num_read = 0
        self._passes: list[tuple[int, int, float]] = []
        """(rows, tokens that they attend to, seconds) of each pass of the draft model."""

    def with_token(self, token: _Chance) -> float:
        """Seconds of the step with this token, too. The tokens of a draft come in their order."""
        num_tokens = token.proposer.choice.sequence.num_tokens
        self._num += 1
        self._num_read += num_tokens
        if token.proposer.num_behind and self._model is not None:
            if token.place > len(self._passes):
                self._passes.append((0, 0, 0.0))
            num_rows, num_read, _ = self._passes[token.place - 1]
            more = token.proposer.num_behind if token.place == 1 else 1
            rows = num_rows + more, num_read + more * num_tokens
            self._passes[token.place - 1] = (*rows, self._model.times.step_s(rows))
        drafts_s = sum(seconds for _, _, seconds in self._passes)
        return self._times.step_s(self._plain, (self._num, self._num_read)) + drafts_s


def most_drafted(max_num_seqs: int) -> int:
    """Most drafted tokens of a step: as many as a full batch has, or those of one sequence. Each has logits."""
    return max(max_num_seqs, MAX_DRAFT_TOKENS)


def _drafted_rows(step: Step) -> tuple[int, int]:
    """(rows, tokens that they attend to in all) of the drafted tokens of a step."""
    return (
        sum(map(len, step.drafts.values())),
        sum(choice.sequence.num_tokens * len(draft) for choice, draft in step.drafts.items()),
    )
