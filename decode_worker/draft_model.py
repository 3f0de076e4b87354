"""What a decode worker knows of its draft model: which tokens of each sequence it has computed, how often it is right,
and what it takes.

The draft model computes a sequence's tokens in passes before a step: what it does not know yet together with the last
token, then one drafted token after the other. Of a sequence that it does not know (its prompt was pulled, or it ran
long without drafts) it first computes all tokens, in chunks: an investment, which is made only if the drafts of the
tokens that the sequence still gets are expected to be worth more.

Pure state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.engine.batch import Drafting, Slice
from common.runtime.config import MAX_DRAFT_TOKENS
from common.scheduling.row_times import RowTimes
from decode_worker.draft_cache import DraftCache, DraftTable
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice

if TYPE_CHECKING:
    from common.engine.drafter import Drafter

MOST_BEHIND = 16
"""Most tokens that are computed in the first pass of a draft. Of a sequence with more, all are computed before."""
_ROOM_SHARE = 0.8
"""Part of the target between tokens that a step with chunks of the draft model may take."""
_LEAST_CHUNK = 16
_JUDGE_AGAIN = 64
"""Tokens of a sequence after which to ask again whether drafting pays, if it did not."""
_PRIOR = 0.6
"""How often drafted tokens are expected to be right before any was verified."""
_OWN_WEIGHT, _COMMON_WEIGHT = 0.15, 0.02
"""Weights of the last drafted token in how often those of a sequence, and those of all sequences, were right."""
_FORGETTING = 0.001
"""Part of what was learnt of all sequences that a step without drafts makes forgotten: nothing else would ever correct
the opinion that drafting does not pay."""


class Proposer(NamedTuple):
    """Who is to draft the next tokens of a sequence, and how often it is right."""

    choice: DecodeChoice
    acceptance: float
    num_behind: int = 0
    """Tokens in the draft model's first pass; 0: the tokens are looked up."""


@dataclass(slots=True)
class DraftWork:
    """What the draft model does for one step."""

    drafts: dict[DecodeChoice, list[int]] = field(default_factory=dict)
    """The sequences of which it drafts tokens, in the order of the step, and as many zeros as it is to draft."""
    chunks: dict[DecodeChoice, tuple[int, int]] = field(default_factory=dict)
    """Tokens `[start, end)` of sequences that it computes, without the last one of those of which it drafts."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """(rows, tokens that they attend to) of each of its passes."""

    def __bool__(self) -> bool:
        return bool(self.drafts or self.chunks)

    def drafting(self, row_of: Mapping[DecodeChoice, int]) -> Drafting:
        """The same as input of the engine; `row_of` has the row of each sequence's last token."""
        return Drafting(
            slices=[
                Slice(
                    token_ids=choice.sequence.token_ids[start:end], start=start, block_table=_table(choice).block_table
                )
                for choice, (start, end) in self.chunks.items()
                if start < end
            ],
            rows_S=np.array([row_of[choice] for choice in self.drafts], np.int64),
            nums_S=np.array([len(draft) for draft in self.drafts.values()], np.int64),
            tables=[_table(choice).block_table for choice in self.drafts],
        )


class DraftModel:
    """The draft model of one worker."""

    def __init__(self, policy: Policy, times: RowTimes, num_blocks: int, max_sequence_tokens: int) -> None:
        """`times` is what the draft model's steps take, and `max_sequence_tokens` its context."""
        self._policy = policy
        self._most_tokens = min(max_sequence_tokens, num_blocks * policy.block_size)
        self.times = times
        self.cache = DraftCache(num_blocks, policy.block_size)
        self.acceptance = _PRIOR
        """How often drafted tokens were right lately, over all sequences."""
        self.num_caught_up = 0
        """Tokens of sequences that were computed in chunks."""

    @classmethod
    def of(cls, policy: Policy, drafter: Drafter) -> DraftModel:
        """What is known of the draft model of an engine before it has drafted anything."""
        runner = drafter.runner
        return cls(policy, drafter.row_times, runner.cache.num_blocks, runner.config.max_sequence_tokens)

    def proposers(self, decodes: Iterable[DecodeChoice], others: Collection[DecodeChoice] = ()) -> list[Proposer]:
        """The sequences of which it can draft at once; and those of `others`, as if it could. Sequences that have
        outgrown its context give their blocks back."""
        found = []
        for choice in decodes:
            table = self.table(choice)
            if not self._has_context(choice):
                table.release()
                continue
            num_behind = choice.sequence.num_tokens - table.num_computed
            if (num_behind > MOST_BEHIND and not others) or choice.sequence.sampling.grammar is not None:
                continue
            if num_behind <= MOST_BEHIND:
                found.append(Proposer(choice, table.acceptance, num_behind))
            elif choice in others:
                found.append(Proposer(choice, table.acceptance, 1))
        return found

    def table(self, choice: DecodeChoice) -> DraftTable:
        """What it has of a sequence; nothing of one that it is first asked about."""
        if choice.draft is None:
            choice.draft = DraftTable(self.cache, self.acceptance)
        return choice.draft

    def to_judge(self, decodes: Iterable[DecodeChoice]) -> list[DecodeChoice]:
        """Sequences of which it is to be asked now whether computing them pays."""
        return [choice for choice in decodes if self._may_ask(choice, self.table(choice))]

    @staticmethod
    def wants(decodes: Iterable[DecodeChoice]) -> bool:
        """Whether there is a sequence to be computed in chunks."""
        return any(each.draft is not None and each.draft.wanted for each in decodes)

    def _may_ask(self, choice: DecodeChoice, table: DraftTable) -> bool:
        num_tokens = choice.sequence.num_tokens
        if num_tokens < table.judge_at or table.wanted or num_tokens - table.num_computed <= MOST_BEHIND:
            return False
        return choice.sequence.sampling.grammar is None and self._has_context(choice)

    def _has_context(self, choice: DecodeChoice) -> bool:
        return choice.sequence.num_tokens + MAX_DRAFT_TOKENS <= self._most_tokens

    def judged(self, choice: DecodeChoice, gain_s: float) -> None:
        """Its drafts are expected to be worth `gain_s` seconds over the rest of the sequence."""
        table, num_tokens = self.table(choice), choice.sequence.num_tokens
        num_behind = num_tokens - table.num_computed
        table.wanted = gain_s > self.times.step_s((num_behind, num_behind * num_tokens // 2))
        table.judge_at = num_tokens + _JUDGE_AGAIN

    def chunks(
        self, decodes: Sequence[DecodeChoice], drafts: Mapping[DecodeChoice, list[int]], step_s: float
    ) -> dict[DecodeChoice, tuple[int, int]]:
        """Tokens of sequences to be computed beside a step of `decodes` that takes `step_s`, without those of which it
        drafts as many tokens as `drafts` for this step: under the shortest target between tokens of those that
        decode. A sequence has blocks for all of its tokens, and a draft, before the first of them is computed."""
        wanted = [each for each in decodes if each.draft is not None and each.draft.wanted and each not in drafts]
        if not wanted:
            return {}
        target_s = _ROOM_SHARE * min(map(self._policy.itl_target_s, {each.request.work.tier for each in decodes}))
        room_s = max(target_s - step_s, target_s / 4)
        found: dict[DecodeChoice, tuple[int, int]] = {}
        num_rows = num_read = 0
        for choice in wanted:
            table, end = self.table(choice), choice.sequence.num_tokens - 1
            if not self._has_context(choice):  # it has grown since it was judged
                table.release()
                continue
            start = table.num_computed
            num = end - start
            while num > _LEAST_CHUNK and self.times.step_s((num_rows + num, num_read + num * end)) > room_s:
                num //= 2
            if found and self.times.step_s((num_rows + num, num_read + num * end)) > room_s:
                break
            if not table.hold(choice.sequence.num_tokens + MAX_DRAFT_TOKENS):
                continue
            found[choice] = start, start + num
            num_rows, num_read = num_rows + num, num_read + num * end
        return found

    def hold(self, choice: DecodeChoice, num_drafted: int) -> bool:
        """Whether there are blocks to draft so many tokens; they are the sequence's now. If there are not enough, it
        gives all of its blocks back."""
        return self.table(choice).hold(choice.sequence.num_tokens + num_drafted - 1)

    def work(self, drafts: dict[DecodeChoice, list[int]], chunks: dict[DecodeChoice, tuple[int, int]]) -> DraftWork:
        """What it does for a step with these drafts of its own, and these chunks of other sequences."""
        num_rows = sum(end - start for start, end in chunks.values())
        num_read = sum((end - start) * end for start, end in chunks.values())
        passes = [[num_rows, num_read]]
        made = dict(chunks)
        for choice, draft in drafts.items():
            start, num_tokens = self.table(choice).num_computed, choice.sequence.num_tokens
            made[choice] = start, num_tokens - 1
            passes += [[0, 0] for _ in range(len(draft) - len(passes))]
            for place in range(len(draft)):
                rows = num_tokens - start if place == 0 else 1
                passes[place][0] += rows
                passes[place][1] += rows * num_tokens
        return DraftWork(drafts, made, [(rows, read) for rows, read in passes if rows])

    def passes_s(self, work: DraftWork) -> float:
        """What it is expected to take."""
        return sum(map(self.times.step_s, work.passes))

    def done(self, work: DraftWork, seconds: float) -> None:
        """A step has ended for which it did `work`, which took `seconds`."""
        self.times.correct(self.passes_s(work), seconds)
        for choice, (start, end) in work.chunks.items():
            table = choice.draft
            if table is None or table.num_computed != start:
                continue  # the sequence is gone, or was preempted
            table.num_computed = end
            if choice not in work.drafts:
                self.num_caught_up += end - start
                table.wanted = choice.sequence.num_tokens - end > MOST_BEHIND

    def verified(self, choice: DecodeChoice, num_before: int, num_drafted: int, num_right: int) -> None:
        """The first `num_right` tokens were right of those that it had drafted of a sequence of `num_before` tokens."""
        table = choice.draft
        if table is None:
            return
        # It has not computed the last token that it drafted.
        table.num_computed = num_before + min(num_right, num_drafted - 1)
        for right in [1.0] * num_right + [0.0] * (num_right < num_drafted):
            table.acceptance += _OWN_WEIGHT * (right - table.acceptance)
            self.acceptance += _COMMON_WEIGHT * (right - self.acceptance)

    def forget_slowly(self) -> None:
        """A step had no drafts of it."""
        self.acceptance += _FORGETTING * (_PRIOR - self.acceptance)


def _table(choice: DecodeChoice) -> DraftTable:
    assert choice.draft is not None, choice.sequence
    return choice.draft
