"""The columns of the sequences that decode against slices made one by one, over random changes between steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from decode_bench import BLOCK_SIZE, request
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_slices import decode_slices

from common.contract.ids import Handle, Incarnation
from common.contract.messages.fields import Message
from common.contract.messages.worker import StepTokens
from common.contract.sampling import SamplingParams
from common.engine.batch import Chosen, InvalidLogitsError, Sampled, SampledToken, Samples
from common.engine.ragged import Rows
from common.engine.sequence import TokenSequence, finish_reason
from decode_worker.columns import DecodeColumns, Decoding
from decode_worker.request import ChoiceStage, DecodeChoice
from decode_worker.step_tokens import StepReport

EOS = frozenset({3})
MOST_TOKENS = 40
"""Most tokens of one sequence."""
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-40, "top_k": 3},
    {"top_p": 0.9, "min_p": 0.1, "seed": 2**63 - 1},
    {"stop_token_ids": (5,)},
    {"ignore_eos": True},
    {"logprobs": 2},
    {"min_tokens": 3},
    {"logit_bias": ((1, 2.0),)},
    {"presence_penalty": 0.5},
]


class Game:
    """Sequences that come, go, lose their blocks and get others, and the steps that compute them."""

    def __init__(self, choose: Callable[[list[Any]], Any]) -> None:
        self.choose = choose
        self.columns = DecodeColumns(MOST_TOKENS, EOS)
        self.running: list[DecodeChoice] = []
        self.paused: list[DecodeChoice] = []
        self.before: list[DecodeChoice] = []
        self.num_blocks = 0
        self.num_requests = 0

    def join(self) -> None:
        """A sequence joins, a new one or one that has waited."""
        if self.paused and self.choose([True, False]):
            self.running.append(self.paused.pop())
            self.running[-1].stage = ChoiceStage.RUNNING
            return
        num = self.num_requests = self.num_requests + 1
        sampling = SamplingParams(max_tokens=self.choose([2, 9, 90]), **self.choose(KINDS))
        subject = request(f"r{num}", self.choose([1, 3, 4, 5, 30]))
        subject.gateway = Incarnation(self.choose(["g", "g", "h"]))
        token_ids = [*subject.work.token_ids, 7]
        sequence = TokenSequence(subject.key, num % 3, token_ids, len(token_ids) - 1, sampling, len(token_ids) - 1)
        choice = DecodeChoice(subject, sequence, subject.chain, num, 0.5, Handle(num), stage=ChoiceStage.RUNNING)
        choice.num_sent = self.choose([0, len(token_ids), len(token_ids)])
        self.running.append(choice)

    def leave(self) -> None:
        """A sequence ends, or loses its place and perhaps its blocks."""
        if not self.running:
            return
        choice = self.choose(self.running)
        self.running.remove(choice)
        kind = self.choose(["end", "pause", "preempt"])
        choice.stage = ChoiceStage.ENDED if kind == "end" else ChoiceStage.PREEMPTED
        if kind != "end":
            self.paused.append(choice)
        if kind == "preempt":
            choice.sequence.block_table = array("q")

    def feed(self, choice: DecodeChoice, num_more: int) -> None:
        """It has the blocks that it needs, and perhaps more."""
        table = choice.sequence.block_table
        needed = -(-(choice.sequence.num_tokens + num_more) // BLOCK_SIZE) + self.choose([0, 0, 1])
        while len(table) < needed:
            self.num_blocks += 1
            table.append(self.num_blocks)

    def step(self) -> None:
        """A step begins, and ends at once or after the next one has begun."""
        members = [each for each in self.running if self.choose([True, True, True, False])]
        if not members:
            self.before = []
            return
        drafts: dict[DecodeChoice, list[int]] = {}
        if not self.before and self.choose([True, False]):
            options: list[list[int]] = [[], [5], [8, 5, 8], [8, 8]]
            drafts = {each: draft for each in members if (draft := self.choose(options))}
        for each in members:
            self.feed(each, len(drafts.get(each, ())) + (each in self.before))
        decoding = self.columns.decoding(members, self.before, drafts)
        self.columns.check_invariants()
        self.check_input(decoding, members, drafts)
        if self.before:
            self.before = []  # the tokens of the step before are dropped, and those of this one
        elif drafts or self.choose([True, True, False]):
            self.check_tokens(decoding, members, drafts)
        else:
            self.before = members

    def check_input(
        self, decoding: Decoding, members: list[DecodeChoice], drafts: dict[DecodeChoice, list[int]]
    ) -> None:
        """The engine gets what slices would have told it."""
        slices = decode_slices(members, self.before, drafts)
        ours, theirs = Rows.of([], BLOCK_SIZE, decoding.decodes), Rows.of(slices, BLOCK_SIZE)
        for name, expected in theirs.arrays.items():
            assert np.array_equal(ours.arrays[name], expected), name
        assert np.array_equal(ours.follows_B, theirs.follows_B)
        assert np.array_equal(ours.sample_rows_N, theirs.sample_rows_N)
        both, twice = Rows.of(slices, BLOCK_SIZE, decoding.decodes), Rows.of([*slices, *slices], BLOCK_SIZE)
        for name, expected in twice.arrays.items():
            assert np.array_equal(both.arrays[name], expected), name
        assert all(torch.equal(one, other) for one, other in zip(*map(tensors, (both, twice)), strict=True))
        samples = Samples.of([each for one in slices for each in one.samples])
        assert np.array_equal(decoding.decodes.samples.parameters_N, samples.parameters_N)
        assert np.array_equal(decoding.decodes.samples.positions_N, samples.positions_N)
        assert decoding.decodes.samples.special == samples.special

    def check_tokens(
        self, decoding: Decoding, members: list[DecodeChoice], drafts: dict[DecodeChoice, list[int]]
    ) -> None:
        """What goes on is told, and the rest is left as it was. Of a draft, each token follows one that was right."""
        of_member = [[self.choose([3, 5, 8]) for _ in (0, *drafts.get(each, ()))] for each in members]
        firsts = [sum(map(len, of_member[:index])) for index in range(len(members))]
        of_rows: dict[int, Any] = {
            first + place: SampledToken(token)
            for first, each, sampled in zip(firsts, members, of_member, strict=True)
            for place, token in enumerate(sampled)
            if each.sequence.sampling.logprobs
        }
        if self.choose([False, False, True]):
            of_rows[0] = InvalidLogitsError("NaN")
        chosen = Chosen([*(token for sampled in of_member for token in sampled), 99], of_rows)
        for index, each in enumerate(members):
            self.check_draft(list(decoding.outcomes(index, chosen)), chosen, firsts[index], drafts.get(each, []))
        tokens = [sampled[0] for sampled in of_member]
        told = {index: of_rows[first] for index, first in enumerate(firsts) if first in of_rows}
        if self.choose([False, False, True]) and members[-1] in self.running:
            members[-1].stage = ChoiceStage.ENDED  # aborted meanwhile
            self.running.remove(members[-1])
        lens = [each.sequence.num_tokens for each in members]
        expected = [
            each not in drafts and self.goes_on(each, tokens[row], row in told) for row, each in enumerate(members)
        ]
        running = [each.stage is ChoiceStage.RUNNING for each in members]
        report = StepReport()
        num, others = decoding.append(chosen, report)
        assert num == sum(expected)
        assert others == [row for row in range(len(members)) if running[row] and not expected[row]]
        said: list[tuple[Incarnation, int, int, int]] = []

        def send(gateway: Incarnation, message: Message) -> None:
            assert isinstance(message, StepTokens)
            said.extend(
                (gateway, *columns)
                for columns in zip(message.handles, message.positions, message.token_ids, strict=True)
            )

        report.send_all(send)
        rows = [row for row, goes_on in enumerate(expected) if goes_on]
        assert sorted(said) == sorted(
            (members[row].request.gateway, members[row].handle, lens[row], tokens[row]) for row in rows
        )
        for row, each in enumerate(members):
            sequence = each.sequence
            assert sequence.num_tokens == lens[row] + expected[row]
            if expected[row]:
                assert (sequence.token_ids[-1], sequence.num_computed) == (tokens[row], lens[row])
                assert each.num_sent == sequence.num_tokens
        for row in others:
            self.end(members[row])

    def check_draft(self, outcomes: list[Sampled], chosen: Chosen, first: int, draft: list[int]) -> None:
        """A sequence gets its token, and a further one after each drafted token that is the last one it got."""
        expected = [chosen.outcome(first)]
        for place, token in enumerate(draft, start=1):
            if not isinstance(expected[-1], SampledToken) or expected[-1].token_id != token:
                break
            expected.append(chosen.outcome(first + place))
        assert outcomes == expected

    def goes_on(self, choice: DecodeChoice, token: int, told: bool) -> bool:
        """Whether there is nothing to do after this token."""
        sequence, sampling = choice.sequence, choice.sequence.sampling
        num_tokens = sequence.num_tokens + 1
        reason = finish_reason(token, num_tokens - sequence.prompt_len, sampling, EOS, num_tokens, MOST_TOKENS)
        special = sampling.min_tokens or sampling.logprobs or sampling.logit_bias or sampling.penalised
        plain = not (special or sampling.stop_token_ids or told) and choice.num_sent > 0
        return plain and reason is None and choice.stage is ChoiceStage.RUNNING

    def end(self, choice: DecodeChoice) -> None:
        """The worker looks closer: here, it ends it or sends what it has not been sent."""
        if self.choose([True, False]) and choice.sequence.num_tokens < MOST_TOKENS - 1:
            choice.sequence.token_ids.append(8)
            choice.num_sent = choice.sequence.num_tokens
        elif choice in self.running:
            self.running.remove(choice)
            choice.stage = ChoiceStage.ENDED


def tensors(rows: Rows) -> list[torch.Tensor]:
    """A batch on the device."""
    batch = rows.on(torch.device("cpu"))
    return [batch.token_ids_T, batch.slot_blocks_T, batch.begun_blocks, batch.block_tables_BM, batch.logit_rows_R]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_columns_say_what_slices_would(data: st.DataObject) -> None:
    game = Game(lambda options: data.draw(st.sampled_from(options)))
    for _ in range(data.draw(st.integers(5, 30))):
        event = data.draw(st.sampled_from(["join", "join", "leave", "step", "step", "step"]))
        getattr(game, event)()
