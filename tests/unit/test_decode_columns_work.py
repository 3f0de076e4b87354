"""What the columns of decodes do for the sequences that only go on: nothing for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import pytest
from decode_bench import BLOCK_SIZE, request

from common.contract.ids import Handle, Incarnation
from common.contract.messages.fields import Message
from common.contract.messages.worker import StepTokens
from common.contract.sampling import SamplingParams
from common.engine.batch import Chosen, special
from common.engine.sequence import TokenSequence
from decode_worker import columns
from decode_worker.columns import DecodeColumns
from decode_worker.request import ChoiceStage, DecodeChoice
from decode_worker.step_tokens import StepReport

NUM = 64
EOS = 3
GATEWAY = Incarnation("g")


class Watched(Sequence[int]):
    """A block table that counts how often it is copied."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = list(blocks)
        self.num_copies = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        self.num_copies += index == 0
        return self.blocks[index]


def running(num: int, num_tokens: int = 9) -> DecodeChoice:
    """Sequence `num`, with blocks of its own for more tokens than it has."""
    subject = request(f"r{num}", num_tokens)
    token_ids = [*subject.work.token_ids, 7]
    sequence = TokenSequence(subject.key, 0, token_ids, num_tokens, SamplingParams(max_tokens=90), num_tokens)
    sequence.block_table = table(num, num_tokens // BLOCK_SIZE + 2)  # type: ignore[assignment]
    choice = DecodeChoice(subject, sequence, subject.chain, num, 0.5, Handle(num), stage=ChoiceStage.RUNNING)
    choice.num_sent = len(token_ids)
    return choice


def table(num: int, num_blocks: int) -> Watched:
    return Watched(range(100 * num, 100 * num + num_blocks))


def copied(choices: Sequence[DecodeChoice]) -> list[int]:
    """The sequences whose tables have been copied since the last call."""
    tables = [each.sequence.block_table for each in choices]
    assert all(isinstance(each, Watched) for each in tables)
    found = [index for index, each in enumerate(tables) if each.num_copies]  # type: ignore[attr-defined]
    for each in tables:
        each.num_copies = 0  # type: ignore[attr-defined]
    return found


def test_a_table_is_copied_when_it_is_another_or_longer() -> None:
    made = DecodeColumns(1000, {EOS})
    choices = [running(num) for num in range(NUM + 1)]

    def step(members: Sequence[DecodeChoice]) -> list[int]:
        decodes = made.decoding(members).decodes
        changed = copied(choices)
        for each, row, num in zip(members, decodes.tables_DM.tolist(), decodes.num_blocks_D.tolist(), strict=True):
            assert row[:num] == list(each.sequence.block_table)
            assert not any(row[num:])
        copied(choices)
        return changed

    assert step(choices[:NUM]) == list(range(NUM))
    assert step(choices[:NUM]) == []
    assert step(choices) == [NUM], "one has joined"
    choices[5].sequence.block_table = table(100, len(choices[5].sequence.block_table))  # type: ignore[assignment]
    choices[9].sequence.block_table.blocks.append(12345)  # type: ignore[attr-defined]
    choices[20].sequence.block_table = table(101, 2)  # type: ignore[assignment]
    assert step(choices) == [5, 9, 20]
    assert step(choices[1:]) == [], "one has left"
    assert step(choices[::-1][:NUM]) == [], "they have another order"


def test_only_a_newcomer_is_asked_whether_it_is_special(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SamplingParams] = []

    def is_special(params: SamplingParams) -> bool:
        asked.append(params)
        return special(params)

    monkeypatch.setattr(columns, "special", is_special)
    made = DecodeColumns(1000, {EOS})
    choices = [running(num) for num in range(NUM + 1)]
    choices[3].sequence.sampling = SamplingParams(max_tokens=90, logprobs=2)
    choices[NUM].sequence.sampling = SamplingParams(max_tokens=90, min_tokens=5)
    assert list(made.decoding(choices[:NUM]).decodes.samples.special) == [3]
    asked.clear()
    assert list(made.decoding(choices).decodes.samples.special) == [3, NUM]
    assert asked == [choices[NUM].sequence.sampling]
    assert list(made.decoding(choices[1:]).decodes.samples.special) == [2, NUM - 1]


class Columns(StepReport):
    """Takes no token by itself."""

    def add(self, gateway: Incarnation, handle: Handle, position: int, token_id: int) -> None:
        """Fails."""
        raise AssertionError("one by one")


def starts(choice: DecodeChoice) -> None:
    choice.num_sent = 0


def is_aborted(choice: DecodeChoice) -> None:
    choice.stage = ChoiceStage.ENDED


@pytest.mark.parametrize("change", [None, starts, is_aborted])
def test_what_becomes_of_one_sequence_costs_the_others_no_call(change: Callable[[DecodeChoice], None] | None) -> None:
    """Without a `change` it ends by its token."""
    made = DecodeColumns(1000, {EOS})
    choices = [running(num, 5 + num % 7) for num in range(NUM)]
    decoding = made.decoding(choices)
    token_ids = [10 + num for num in range(NUM)]
    if change is None:
        token_ids[17] = EOS
    else:
        change(choices[17])
    rest = [(num, 6 + num % 7, 10 + num) for num in range(NUM) if num != 17]
    report = Columns()
    said: list[tuple[int, int, int]] = []
    decoding.append(Chosen(token_ids, {}), report)

    def send(gateway: Incarnation, message: Message) -> None:
        assert gateway == GATEWAY
        assert isinstance(message, StepTokens)
        said.extend(zip(message.handles, message.positions, message.token_ids, strict=True))

    report.send_all(send)
    assert said == rest


def test_a_step_in_which_nothing_goes_on_reports_nothing() -> None:
    choice = running(1)
    decoding = DecodeColumns(1000, {EOS}).decoding([choice])
    report = StepReport()
    said: list[Message] = []
    decoding.append(Chosen([EOS], {}), report)
    report.send_all(lambda gateway, message: said.append(message))
    assert said == []
