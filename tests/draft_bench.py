"""A decode scheduler with a draft model, on a cache that says what each slot of the draft model's blocks holds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate
from typing import Any

from decode_bench import BLOCK_SIZE, EAGER, Bench

from common.engine.batch import Drafted
from common.scheduling.row_times import RowTimes
from decode_worker.draft_model import DraftModel
from decode_worker.request import ChoiceStage, DecodeChoice
from decode_worker.speculation import Speculation
from decode_worker.step import Step

WRONG = -1
"""A token that no sequence gets."""
NEXT_TO_NOTHING = RowTimes(rows=(1, 1000), seconds=(0.01, 0.02))
FREE = RowTimes(rows=(1, 1000), seconds=(1.0, 1.01))


class DraftBench(Bench):
    """What is drafted comes true as `is_right` says. A step takes what `times` say, a pass what `draft_times` do."""

    def __init__(
        self,
        num_blocks: int = 1000,
        *,
        num_draft_blocks: int = 1000,
        times: RowTimes = FREE,
        draft_times: RowTimes = NEXT_TO_NOTHING,
        is_right: Callable[[DecodeChoice], bool] = lambda choice: True,
        looks_up: bool = False,
        context: int = 100_000,
        **policy: Any,
    ) -> None:
        super().__init__(
            num_blocks, **{"memory_reserve": EAGER, "token_budget": 1024, "itl_target_s": lambda tier: 100.0, **policy}
        )
        self.is_right = is_right
        self.model = DraftModel(self.policy, draft_times, num_draft_blocks, context)
        self.speculation = Speculation(self.policy, times, self.model, looks_up=looks_up)
        self.scheduler.speculation = self.speculation
        self.num_drafted = 0
        """Drafts of the draft model."""
        self.memory: dict[tuple[int, int], int] = {}
        """Of the draft model: block and slot → a hash of the tokens up to this one."""

    def end_step(self, step: Step, ends: Collection[DecodeChoice] = ()) -> None:
        """It is done, and its drafts are verified."""
        self.speculation.drafted(step, self.draft(step))
        super().end_step(step, ends)

    def _decoded(self, choice: DecodeChoice, step: Step, ends: Collection[DecodeChoice]) -> None:
        num_before, draft = choice.sequence.num_tokens, step.drafts.get(choice, [])
        self._advance(choice, ends)
        for token in draft:
            if choice.sequence.token_ids[-1] != token or choice.stage is not ChoiceStage.RUNNING:
                break
            self._advance(choice, ends)
        if choice in step.drafts:
            num_right = choice.sequence.num_tokens - num_before - 1
            self.scheduler.sequences.drafted(choice, num_right)
            if step.draft_work is not None and choice in step.draft_work.drafts:
                self.model.verified(choice, num_before, len(draft), num_right)

    def draft(self, step: Step) -> Drafted:
        """What the engine does before the step: the slices, then the passes."""
        work = step.draft_work
        if work is None:
            return Drafted()
        drafting = work.drafting({choice: row for row, choice in enumerate(step.decodes)})
        for each, (choice, (start, _)) in zip(
            drafting.slices, [item for item in work.chunks.items() if item[1][0] < item[1][1]], strict=True
        ):
            assert each.start == start
            for position, token in enumerate(each.token_ids, start):
                self.compute(each.block_table, [*choice.sequence.token_ids[:position], token])
        self.num_drafted += len(work.drafts)
        said = []
        for choice, num, table in zip(work.drafts, drafting.nums_S.tolist(), drafting.tables, strict=True):
            tokens, first = list(choice.sequence.token_ids), choice.sequence.num_tokens
            for _ in range(num):
                self.compute(table, tokens)
                tokens.append(len(tokens) if self.is_right(choice) else WRONG)
            said.append(tokens[first:])
        return Drafted(said, sum(map(self.model.times.step_s, work.passes)))

    def compute(self, table: Any, tokens: list[int]) -> None:
        """The KV of the last of these tokens, which attends to that of all before it."""
        *before, last = accumulate(tokens, lambda up_to, token: hash((up_to, token)), initial=0)
        for position, expected in enumerate(before[1:]):
            found = self.memory.get((table[position // BLOCK_SIZE], position % BLOCK_SIZE))
            assert found == expected, f"attends to other tokens at {position} of {tokens}"
        position = len(tokens) - 1
        self.memory[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = last

    def check(self) -> None:
        """Each block of the draft model's is somebody's, or free."""
        super().check()
        cache = self.model.cache
        choices = [choice for request in self.requests for choice in request.choices]
        tables = [choice.draft for choice in choices if choice.draft is not None]
        held = [block for table in tables for block in table.block_table]
        assert sorted([*held, *cache.free]) == list(range(cache.num_blocks))
        assert cache.num_used == len(held)
        for choice in choices:
            if choice.draft is not None and choice.stage is not ChoiceStage.RUNNING:
                assert not choice.draft.block_table or choice.stage is ChoiceStage.READY, choice.stage
            if choice.draft is not None:
                assert choice.draft.num_computed <= len(choice.draft.block_table) * BLOCK_SIZE
                assert choice.draft.num_computed <= choice.sequence.num_tokens
