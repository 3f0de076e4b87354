"""Prompts, and tokens of preempted sequences, whose KV a decode worker computes itself, in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Final

from common.contract.tiers import Tier
from common.scheduling.chunked_prefill import Chunk, ChunkQueue
from common.scheduling.costs import Costs
from common.scheduling.lazy_heap import LazyHeap
from decode_worker.policy import Policy
from decode_worker.request import DecodeChoice, DecodeRequest, LocalPrompt

_SHARE: Final = 0.8
"""Part of a target that a step may take while prompts wait: of the target between tokens, or of that of first tokens if
nobody decodes. Steps vary, so the rest is left."""
_LATE_STEPS: Final = (7, 12)
"""Where prompts are late, a step may take as long as a newcomer can wait, whatever the target between tokens, but at
least and at most so many times as long as a step of a single decode. With less, prompts come so slowly that few
sequences decode together, and reading the weights for these few is most of the work; with more, little is gained."""
_LEAST_TOKENS: Final = 16
"""Fewest tokens of prompts in a step, if any wait: with fewer, its fixed costs outweigh them."""
_LEAST_ALONE: Final = 128
"""Fewest tokens to which measured costs shorten a step without decodes. With so many, prompts of up to 2,048 tokens
take 1.03 to 1.11 times the least time on a CPU; with fewer, longer (decision 35)."""


class LocalPrompts:
    """What is being computed in chunks. Pure state."""

    def __init__(self, policy: Policy, costs: Costs) -> None:
        self._policy = policy
        self._costs = costs
        self._newcomer_s = _SHARE * min(map(policy.ttft_target_s, Tier))
        """How long a newcomer can wait for the end of a step: the longest one without decodes."""
        self.of_requests: dict[DecodeRequest, LocalPrompt] = {}
        """Requests whose prompt is being computed here."""
        self.of_sequences: dict[DecodeChoice, LocalPrompt] = {}
        """Preempted sequences that are being computed again."""
        self._chunks: ChunkQueue[LocalPrompt] = ChunkQueue(ageing_s=policy.ageing_s)
        self._newest: LazyHeap[LocalPrompt] = LazyHeap()
        """All of them, the newest of the lowest tier first."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[LocalPrompt]:
        return iter(self._chunks)

    @property
    def any_left(self) -> bool:
        """Whether a prompt has tokens that are neither computed nor in an unfinished step."""
        return any(map(self._chunks.num_unscheduled, self._chunks))

    def add(
        self,
        request: DecodeRequest,
        choice: DecodeChoice | None,
        token_ids: list[int] | tuple[int, ...],
        num_computed: int,
        block_table: Sequence[int],
        now: float,
    ) -> None:
        """Compute the tokens from `num_computed` on: those of a preempted sequence, or (without one) of the request's
        prompt. It ages from `now` on."""
        rank, order = request.work.tier.rank, request.order if choice is None else choice.order
        urgency = (rank, self.due_at(request, num_computed, len(token_ids)), order)
        prompt = LocalPrompt(request, choice, token_ids, num_computed, block_table, urgency, ages_from=now)
        if choice is None:
            self.of_requests[request] = prompt
        else:
            self.of_sequences[choice] = prompt
        self._chunks.add(prompt, now)
        self._newest.add(prompt, (-rank, -order))

    def budget(self, decodes: Collection[DecodeChoice], most: int, now: float) -> int:
        """Most prompt tokens of a step while these sequences decode, in it or right after it: at most `most`.

        A step has prompts in their order until they take as long as its decodes (without decodes: until there are
        `Costs.enough_tokens`), and ends with a prompt: with others in the same step the first would wait for the last.
        By the measured costs, a step with decodes takes at most `_SHARE` of the shortest target between tokens of the
        tiers that decode, of which at least a quarter is the prompts', however long the decodes take. Where a prompt
        would else be late, after those before it, a step has all that this share allows. Where that does not suffice it
        has what does, at most the whole target; or `_late_s`, but not in a worker for latency, and not for prompts of a
        lower tier than a sequence that decodes.

        A step without decodes takes at most `_SHARE` of the shortest target of first tokens, but has at least
        `_LEAST_ALONE` tokens.
        """
        chunks, costs, token_s = self._chunks, self._costs, self._costs.prefill_s_per_token
        if not most or not len(chunks):
            return most
        if decodes and self._policy.prefill_tokens is not None:
            return min(most, self._policy.prefill_tokens)
        if decodes:
            tiers = {choice.request.work.tier for choice in decodes}
            target_s = min(map(self._policy.itl_target_s, tiers))
            share, whole = self._tokens_of(_SHARE * target_s, most), self._tokens_of(target_s, most)
            beside_s, enough = costs.decode_s, costs.decode_s / token_s if token_s else most
        else:
            within = chunks.num_within(self._newcomer_s - costs.step_s, costs, most, most)
            most = share = whole = min(most, max(_LEAST_ALONE, within))
            beside_s, enough = costs.step_s, costs.enough_tokens
        first = chunks.num_up_to_end(max(_LEAST_TOKENS, enough), most, now)
        first = min(max(_LEAST_TOKENS, first), share)

        def needed(prompts: Iterable[LocalPrompt], at_most: int) -> int:
            """Tokens of each step, at most so many, with which every prompt is in time after those before it."""
            least, num_uncomputed, work_s = 0.0, 0, 0.0
            for each in prompts:
                num_uncomputed += each.num_uncomputed
                work_s += costs.compute_s(each.num_computed, len(each.token_ids))
                spare_s = each.urgency[1] - now - work_s
                if spare_s * at_most <= num_uncomputed * beside_s:
                    return at_most
                least = max(least, num_uncomputed * beside_s / spare_s)
            return math.ceil(least)

        least = needed(chunks, most)
        if least <= first:
            return first
        num_tokens = max(share, min(whole, least))
        late_s = self._late_s()
        if not decodes or self._policy.step_target_s is not None or late_s <= target_s:
            return num_tokens
        highest = min(tier.rank for tier in tiers)
        own = list(takewhile(lambda each: each.urgency[0] <= highest, chunks))
        num_own = sum(each.num_uncomputed for each in own)
        return max(num_tokens, min(num_own, needed(own, self._tokens_of(late_s, most))))

    def _late_s(self) -> float:
        """Longest duration of a step beside decodes where prompts are late; see `_LATE_STEPS`."""
        least, most = (number * self._costs.least_step_s for number in _LATE_STEPS)
        return min(max(least, self._newcomer_s), most)

    def _tokens_of(self, step_s: float, most: int) -> int:
        """Prompt tokens, at most `most`, of a step with decodes that should take `step_s`."""
        prompts_s = _beside(self._costs.decode_s, step_s)
        return min(most, max(_LEAST_TOKENS, self._chunks.num_within(prompts_s, self._costs, most, most)))

    def plan(
        self, budget: int, now: float, permitted: Callable[[LocalPrompt], bool] | None
    ) -> list[Chunk[LocalPrompt]]:
        """Chunks of the next step, at most `budget` tokens; with `permitted`, only of prompts for which it is true."""
        chunks = self._chunks.schedule(budget, budget, now, permitted)
        for chunk in chunks:
            request = chunk.prompt.request
            if chunk.prompt.choice is None and request.started_at is None:
                request.started_at = now
        return chunks

    def found(self, prompt: LocalPrompt, block_table: Sequence[int], num_computed: int) -> None:
        """The KV of more leading tokens is known: `block_table` has it up to `num_computed`. No step in flight may
        compute a chunk of the prompt. What is left takes less time, so the prompt is due sooner."""
        assert not self._chunks.in_flight(prompt), prompt.request.story
        self._chunks.remove(prompt)
        prompt.block_table, prompt.num_computed = block_table, num_computed
        rank, due_at_s, order = prompt.urgency
        due_at_s = min(due_at_s, self.due_at(prompt.request, num_computed, len(prompt.token_ids)))
        prompt.urgency = (rank, due_at_s, order)
        self._chunks.add(prompt, prompt.ages_from)

    def step_done(self, chunks: Sequence[Chunk[LocalPrompt]]) -> list[Chunk[LocalPrompt]]:
        """A step has ended; returns its chunks of prompts that are still here."""
        return self._chunks.step_done(chunks)

    def take(self, subject: DecodeRequest | DecodeChoice) -> LocalPrompt | None:
        """Remove what is computed for a request or a sequence, whether it is done or not; None if there is nothing."""
        if isinstance(subject, DecodeChoice):
            prompt = self.of_sequences.pop(subject, None)
        else:
            prompt = self.of_requests.pop(subject, None)
        if prompt is not None:
            self._chunks.remove(prompt)
            self._newest.discard(prompt)
        return prompt

    def newest(self) -> LocalPrompt | None:
        """The newest one of the lowest tier."""
        return self._newest.first()

    def due_at(self, request: DecodeRequest, start: int, end: int) -> float:
        """When the first token is due of a request of which tokens `[start, end)` are to be computed: the target of its
        tier, and the time that these tokens take, after its arrival."""
        target_s = self._policy.ttft_target_s(request.work.tier)
        return request.arrived + target_s + self._costs.compute_s(start, end)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self._chunks.check_invariants()
        assert len(set(self._newest)) == len(self._chunks) == len(self.of_requests) + len(self.of_sequences)


def _beside(decode_s: float, step_s: float) -> float:
    """Seconds for prompts in a step that should take `step_s`, of which decodes take `decode_s`."""
    return max(step_s - decode_s, step_s / 4)
