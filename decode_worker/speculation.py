"""Decides what is drafted: how many tokens of which sequences a step verifies beside those that it computes anyway.

A draft is verified by rows of the same step, one for each drafted token (Leviathan et al., arXiv:2211.17192; here the
token that the sampler draws at a position must equal the drafted one, so that answers are what they are without
drafts). A step with K drafted tokens yields a token of each sequence, and of each drafted token the chance that it and
those before it are right; it costs what so many rows do. The drafts that yield the most tokens per second are taken, as
by "TurboSpec" (arXiv:2406.14066), and none unless they beat a step without.

Pure state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from common.runtime.config import MAX_DRAFT_TOKENS
from common.scheduling.row_times import RowTimes
from decode_worker.lookup import CommonAcceptance, Lookup
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice
from decode_worker.step import Step

_LOG_LEAST_CHANCE = math.log(0.1)
"""Logarithm of the least chance of a token that is drafted."""
_MOST_DRAFTING = 32
"""Most steps with drafts one after another. What the next one takes is what theirs are compared with."""
_OBSERVED = 8
"""One in so many steps without drafts is learnt from."""
_MOST_NEW = 4
"""Most sequences whose text is read for the first time in a step: that takes some 100 ns a token."""
_MARGIN = 1.03
"""Ratio by which drafts must raise the tokens per second: estimates vary, and drafts cost some work beside steps."""


class Speculation:
    """Chooses the drafts of each step, and learns from what becomes of them."""

    def __init__(self, policy: Policy, times: RowTimes) -> None:
        self._policy = policy
        self._times = times
        self._of_texts, self._of_predictions = CommonAcceptance(0.5), CommonAcceptance(0.8)
        self._num_drafting = 0
        """Steps with drafts since the last one without."""
        self._num_plain = _OBSERVED - 1
        """Steps without drafts since the last one with some, or more; the first one after it counts."""

    def plan(self, decodes: Sequence[DecodeChoice], most: int) -> dict[DecodeChoice, list[int]]:
        """Tokens to be verified in the next step of `decodes`, at most `most` in all. No step may be in flight."""
        if self._num_drafting == _MOST_DRAFTING and not self._policy.draft_tokens:
            self._num_drafting = 0
            return {}
        nums = self._nums(decodes, min(most, most_drafted(self._policy.max_num_seqs)), num_ahead=0)
        self._num_drafting = self._num_drafting + 1 if nums else 0
        return {choice: self._lookup(choice).propose(num) for choice, num in nums.items()}

    def would_draft(self, decodes: Sequence[DecodeChoice]) -> bool:
        """Whether drafts would pay in the step after the one that computes the next token of `decodes`, if those are
        what is expected."""
        most = min(self._policy.token_budget - len(decodes), most_drafted(self._policy.max_num_seqs))
        return bool(self._nums(decodes, most, num_ahead=1))

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from what a step took that did nothing but decode: with drafts from each, else from some."""
        self._num_plain = _OBSERVED - 1 if step.drafts else self._num_plain + 1
        if not step.decodes or (not step.drafts and self._num_plain % _OBSERVED):
            return
        drafts = (
            sum(map(len, step.drafts.values())),
            sum(c.sequence.num_tokens * len(d) for c, d in step.drafts.items()),
        )
        self._times.observe(rows_of(step.decodes), drafts, seconds)

    def _nums(self, decodes: Sequence[DecodeChoice], most: int, num_ahead: int) -> dict[DecodeChoice, int]:
        """How many tokens are drafted of each sequence, in the order of `decodes`; no zeros. The next `num_ahead`
        tokens are being computed already."""
        expecting, num_new = [], 0
        for choice in decodes:
            if choice.sequence.sampling.grammar is not None:
                continue
            num_new += choice.lookup is None
            if choice.lookup is not None or num_new <= _MOST_NEW:
                lookup = self._lookup(choice)
                if lookup.expects:
                    expecting.append((choice, lookup.acceptance))
        if not expecting or most <= 0:  # the code behind this is cold in most steps, and takes ten times as long then
            return {}
        plain = rows_of(decodes)
        # A token that is drafted must bring at least its share of the step's tokens.
        least = 0.0 if self._policy.draft_tokens else len(decodes) * self._times.least_share(plain[0], most)
        chances = []
        for choice, acceptance in expecting:
            if acceptance > least:
                chances += self._chances(choice, acceptance, num_ahead)
        if not chances:
            return {}
        nums = self._best(plain, sorted(chances, key=_chance, reverse=True)[:most])
        return {choice: nums[choice] for choice in decodes if choice in nums} if nums else {}

    def _chances(self, choice: DecodeChoice, acceptance: float, num_ahead: int) -> list[tuple[float, DecodeChoice]]:
        """The chance of each of the next tokens that it comes as expected; without those that hardly will."""
        num = min(self._policy.draft_tokens or MAX_DRAFT_TOKENS, self._num_left(choice) - 1 - num_ahead)
        if not self._policy.draft_tokens:
            num = min(num, int(_LOG_LEAST_CHANCE / min(math.log(max(acceptance, 1e-9)), -1e-9)))
        return [(acceptance**place, choice) for place in range(1, num + 1)]

    def _best(self, plain: tuple[int, int], chances: Sequence[tuple[float, DecodeChoice]]) -> dict[DecodeChoice, int]:
        """The number of drafted tokens of each sequence by which the step yields the most tokens per second. `chances`
        are sorted: taking a token takes those before it in its draft."""
        if self._policy.draft_tokens:
            return Counter(choice for _, choice in chances)
        least_rate = _MARGIN * plain[0] / self._times.step_s(plain)
        expected, num_read, best = float(plain[0]), 0, 0
        for num, (chance, choice) in enumerate(chances, start=1):
            expected += chance
            num_read += choice.sequence.num_tokens
            rate = expected / self._times.step_s(plain, (num, num_read))
            if rate > least_rate:
                least_rate, best = rate, num
        return Counter(choice for _, choice in chances[:best])

    def _lookup(self, choice: DecodeChoice) -> Lookup:
        """What is expected next in a sequence, of which every token was read."""
        if choice.lookup is None:
            sequence, prediction = choice.sequence, choice.request.work.prediction
            common = self._of_predictions if prediction else self._of_texts
            choice.lookup = Lookup(sequence.token_ids, common, sequence.prompt_len, prediction)
        else:
            choice.lookup.read()
        return choice.lookup

    def _num_left(self, choice: DecodeChoice) -> int:
        """Number of tokens that the sequence may still get."""
        sequence = choice.sequence
        most = min(sequence.prompt_len + sequence.sampling.max_tokens, self._policy.max_sequence_tokens)
        return most - sequence.num_tokens


def most_drafted(max_num_seqs: int) -> int:
    """Most drafted tokens of a step: as many as a full batch has, or those of one sequence. Each has logits."""
    return max(max_num_seqs, MAX_DRAFT_TOKENS)


def rows_of(decodes: Sequence[DecodeChoice]) -> tuple[int, int]:
    """(rows of a step without drafts, tokens that they attend to in all)."""
    return len(decodes), sum(choice.sequence.num_tokens for choice in decodes)


def _chance(entry: tuple[float, DecodeChoice]) -> float:
    return entry[0]
