"""The sequences that decode, as columns of arrays that stay from step to step.

Between two steps nearly nothing changes: each sequence has one token more, one in `block_size` a block more, and a few
join or leave. So the columns are kept, and each step brings them up to date. What holds for as long as a sequence
decodes is read once, when it gets a row. A row belongs to a sequence until a step without it. The sequences' own tokens
and block tables are what counts; nobody has to tell the columns of a change.

Shapes: D decodes of a step, S rows, M blocks of the longest table so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import is_not, itemgetter
from typing import Any

import numpy as np

from common.contract.ids import Handle, Incarnation
from common.engine.batch import (
    NO_SAMPLE,
    PARAMETERS,
    Chosen,
    Decodes,
    Ints,
    Sample,
    Sampled,
    SampledToken,
    Samples,
    parameters,
    special,
)
from common.engine.sequence import TokenSequence
from decode_worker.request import ChoiceStage, DecodeChoice
from decode_worker.step_tokens import StepReport

_FIRST_ROWS, _FIRST_BLOCKS = 8, 8
_last = itemgetter(-1)
_Rows = np.ndarray[Any, np.dtype[np.void]]

_ENDS = np.dtype([("num_tokens", "i8"), ("plain", "?"), ("ignores_eos", "?"), ("special", "?")])
"""How a sequence ends: with its `num_tokens`-th token, and by the model's ending tokens unless it `ignores_eos`. A
sequence that is not `plain` needs a closer look at each token, as all do whose samples are `special`."""


def next_sample(choice: DecodeChoice, position: int, draft: Sequence[int] = ()) -> Sample:
    """The sample of a sequence's token at `position`, after the drafted tokens if there are any."""
    sequence = choice.sequence
    return Sample(
        params=sequence.sampling,
        choice=sequence.choice,
        position=position,
        token_ids=sequence.token_ids,
        prompt_len=sequence.prompt_len,
        allowed=None if sequence.grammar_state is None else sequence.grammar_state.allowed,
        counts=sequence.counts,
        draft=draft,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """The sequences of a step, in its order, and what does not change while they are the same."""

    choices: list[DecodeChoice]
    sequences: list[TokenSequence]
    handles: list[Handle]
    gateways: list[Incarnation]
    one_gateway: bool
    rows_D: Ints
    parameters_D: _Rows
    ends_D: _Rows
    special: list[int]
    """Indices of sequences whose samples are `special`."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """The decodes of a step: what the engine computes, and what becomes of the tokens."""

    decodes: Decodes
    _members: _Members
    _eos_token_ids: Collection[int]
    _drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Index of a sequence → its drafted tokens. Their rows follow that of the sequence's last token."""
    _rows_D: Ints | None = None
    """The row of each sequence's last token; None without drafts."""

    def append(self, chosen: Chosen, report: StepReport) -> tuple[int, list[int]]:
        """Append to each sequence that runs its token, and report it, if the sequence goes on and nothing else is to be
        told or done. Returns the number of these sequences, and the indices of the others that run. Those with drafts
        are among the others."""
        members = self._members
        if self._rows_D is not None:
            chosen = chosen.take(self._rows_D.tolist())
        num = len(members.choices)
        token_ids = chosen.token_ids if len(chosen.token_ids) == num else chosen.token_ids[:num]
        going_on = self._going_on(np.array(token_ids, np.int64), chosen).tolist()
        for index in self._drafts:
            going_on[index] = False
        others = []
        for index, (choice, token_id, goes_on) in enumerate(zip(members.choices, token_ids, going_on, strict=True)):
            if goes_on and choice.num_sent and choice.stage is ChoiceStage.RUNNING:
                sequence = choice.sequence
                sequence.num_computed = num_computed = len(sequence.token_ids)
                sequence.token_ids.append(token_id)
                choice.num_sent = num_computed + 1
            else:
                going_on[index] = False
                if choice.stage is ChoiceStage.RUNNING:
                    others.append(index)
        self._report(token_ids, going_on, report)
        return sum(going_on), others

    def outcomes(self, index: int, chosen: Chosen) -> Iterator[Sampled]:
        """The tokens of a sequence: the sampled one, and as long as the last one is what was drafted, the next."""
        row = index if self._rows_D is None else int(self._rows_D[index])
        for drafted in self._drafts.get(index, ()):
            outcome = chosen.outcome(row)
            yield outcome
            if not isinstance(outcome, SampledToken) or outcome.token_id != drafted:
                return
            row += 1
        yield chosen.outcome(row)

    def _going_on(self, token_ids_D: Ints, chosen: Chosen) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which sequences go on after their token, and have nothing else to tell."""
        ends_D = self._members.ends_D
        going_on_D = ends_D["plain"] & (self._positions + 1 < ends_D["num_tokens"])
        for eos in self._eos_token_ids:
            going_on_D &= (token_ids_D != eos) | ends_D["ignores_eos"]
        for index in chosen.told:
            if index < len(going_on_D):
                going_on_D[index] = False
        return going_on_D

    def row_of(self) -> dict[DecodeChoice, int]:
        """The row of each sequence's last token."""
        rows = range(len(self._members.choices)) if self._rows_D is None else self._rows_D.tolist()
        return dict(zip(self._members.choices, rows, strict=True))

    @property
    def _positions(self) -> Ints:
        """The position of the token that each sequence gets."""
        positions_N = self.decodes.samples.positions_N
        return positions_N if self._rows_D is None else positions_N[self._rows_D]

    def _report(self, token_ids: Sequence[int], which: Sequence[bool], report: StepReport) -> None:
        members, handles, positions = self._members, self._members.handles, self._positions.tolist()
        if not members.one_gateway:
            for columns in compress(zip(members.gateways, handles, positions, token_ids, strict=True), which):
                report.add(*columns)
            return
        if not all(which):
            handles, positions = list(compress(handles, which)), list(compress(positions, which))
            token_ids = list(compress(token_ids, which))
        report.add_all(members.gateways[0], handles, positions, token_ids)


class DecodeColumns:
    """Columns over the sequences of the last step. Used on the event loop's thread; what it returns is not changed."""

    def __init__(self, max_sequence_tokens: int, eos_token_ids: Collection[int]) -> None:
        self._max_sequence_tokens = max_sequence_tokens
        self._eos_token_ids = eos_token_ids
        self._rows: dict[DecodeChoice, int] = {}
        self._free = list(range(_FIRST_ROWS))
        self._parameters_S = np.zeros(_FIRST_ROWS, PARAMETERS)
        self._ends_S = np.zeros(_FIRST_ROWS, _ENDS)
        self._tables_SM = np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int64)
        self._num_blocks_S = np.zeros(_FIRST_ROWS, np.int64)
        """Blocks of each row of `_tables_SM`."""
        self._tables_S: list[Sequence[int]] = [()] * _FIRST_ROWS
        """The table that each row of `_tables_SM` is a copy of. A sequence that loses blocks gets another table."""
        self._written: list[Sequence[int]] = []
        """The block tables of `_members`, as last copied."""
        self._members = self._seat([])

    def decoding(
        self,
        choices: Sequence[DecodeChoice],
        before: Sequence[DecodeChoice] = (),
        drafts: Mapping[DecodeChoice, Sequence[int]] | None = None,
    ) -> Decoding:
        """The decodes of a step of `choices`, at least one. `before` are the decodes of the step that still
        runs. `drafts` are tokens to be verified after those of some of the sequences."""
        if choices != self._members.choices:
            self._members = self._seat(list(choices))
        members = self._members
        num = len(members.choices)
        texts = [each.token_ids for each in members.sequences]
        num_tokens_D = np.fromiter(map(len, texts), np.int64, num)
        num_blocks_D = self._update_tables()
        follows_D = np.full(num, NO_SAMPLE)
        if before:
            follows_D = _places(members.choices, before)
            num_tokens_D += follows_D != NO_SAMPLE
        positions = num_tokens_D.tolist() if members.special else []
        samples = Samples(
            parameters_N=members.parameters_D,
            positions_N=num_tokens_D,
            special={index: next_sample(members.choices[index], positions[index]) for index in members.special},
        )
        decodes = Decodes(
            token_ids_D=np.fromiter(map(_last, texts), np.int64, num),
            positions_D=num_tokens_D - 1,
            num_blocks_D=num_blocks_D,
            tables_DM=self._tables_SM[:, : num_blocks_D.max()][members.rows_D],
            follows_D=follows_D,
            samples=samples,
        )
        if not drafts:
            return Decoding(decodes, members, self._eos_token_ids)
        of_indices = {index: drafts[each] for index, each in enumerate(members.choices) if each in drafts}
        nums_D = np.ones(num, np.int64)
        nums_D[list(of_indices)] += list(map(len, of_indices.values()))
        rows_D = np.cumsum(nums_D) - nums_D
        decodes = _with_drafts(decodes, members, of_indices, np.repeat(np.arange(num), nums_D), rows_D)
        return Decoding(decodes, members, self._eos_token_ids, of_indices, rows_D)

    def check_invariants(self) -> None:
        """Assert what must hold between any two steps."""
        assert set(self._rows) == set(self._members.choices)
        assert sorted([*self._rows.values(), *self._free]) == list(range(len(self._tables_SM))), "a row is lost"

    def _seat(self, choices: list[DecodeChoice]) -> _Members:
        """Give rows to the sequences that have none, and take those of the sequences that are gone."""
        rows = self._rows
        for gone in rows.keys() - choices:
            self._free.append(rows.pop(gone))
        for choice in choices:
            if choice not in rows:
                rows[choice] = self._fill(choice)
        rows_D = np.fromiter((rows[each] for each in choices), np.int64, len(choices))
        ends_D = self._ends_S[rows_D]
        gateways = [each.request.gateway for each in choices]
        self._written = [self._tables_S[row] for row in rows_D.tolist()]
        return _Members(
            choices,
            [each.sequence for each in choices],
            [each.handle for each in choices],
            gateways,
            len(set(gateways)) == 1,
            rows_D,
            self._parameters_S[rows_D],
            ends_D,
            np.flatnonzero(ends_D["special"]).tolist(),
        )

    def _fill(self, choice: DecodeChoice) -> int:
        """Write what does not change while the sequence decodes to a free row; returns its number."""
        if not self._free:
            self._grow_rows()
        row = self._free.pop()
        sequence = choice.sequence
        sampling = sequence.sampling
        self._parameters_S[row] = parameters(sampling, sequence.choice)
        most, is_special = sequence.most_tokens(self._max_sequence_tokens), special(sampling)
        plain = not is_special and not sampling.stop_token_ids
        self._ends_S[row] = most, plain, sampling.ignore_eos, is_special
        return row

    def _update_tables(self) -> Ints:
        """Bring the tables of the members up to date; returns their lengths."""
        rows_D = self._members.rows_D
        tables = [each.block_table for each in self._members.sequences]
        num_blocks_D = np.fromiter(map(len, tables), np.int64, len(tables))
        # A table that is the same object has got further blocks at most.
        changed_D = num_blocks_D != self._num_blocks_S[rows_D]
        if any(map(is_not, tables, self._written)):
            changed_D |= np.fromiter(map(is_not, tables, self._written), np.bool_, len(tables))
        if changed_D.any():
            longest = int(num_blocks_D.max())
            if longest > self._tables_SM.shape[1]:
                self._tables_SM = _larger(self._tables_SM, (len(self._tables_SM), 2 * longest))
            for index in np.flatnonzero(changed_D).tolist():
                row, table = rows_D[index], tables[index]
                self._tables_SM[row, : len(table)] = table
                self._tables_SM[row, len(table) :] = 0
                self._num_blocks_S[row] = len(table)
                self._tables_S[row] = table
            self._written = list(tables)
        return num_blocks_D

    def _grow_rows(self) -> None:
        num = len(self._tables_SM)
        self._free += range(num, 2 * num)
        self._parameters_S = _larger(self._parameters_S, (2 * num,))
        self._ends_S = _larger(self._ends_S, (2 * num,))
        self._num_blocks_S = _larger(self._num_blocks_S, (2 * num,))
        self._tables_SM = _larger(self._tables_SM, (2 * num, self._tables_SM.shape[1]))
        self._tables_S += [()] * num


def _with_drafts(
    decodes: Decodes, members: _Members, drafts: Mapping[int, Sequence[int]], of_row: Ints, rows_D: Ints
) -> Decodes:
    """`decodes` with further rows for the drafted tokens. `of_row` is the index of each row's sequence, and `rows_D`
    each sequence's first row. `drafts` are in the order of the sequences."""
    place = np.arange(len(of_row)) - rows_D[of_row]
    token_ids = decodes.token_ids_D[of_row]
    token_ids[place > 0] = list(chain.from_iterable(drafts.values()))
    positions = decodes.samples.positions_N[of_row] + place
    special = {}
    for row, (index, num) in enumerate(zip(of_row.tolist(), place.tolist(), strict=True)):
        if num and index in decodes.samples.special:
            special[row] = next_sample(members.choices[index], int(positions[row]), drafts[index][:num])
        elif index in decodes.samples.special:
            special[row] = decodes.samples.special[index]
    return Decodes(
        token_ids_D=token_ids,
        positions_D=decodes.positions_D[of_row] + place,
        num_blocks_D=decodes.num_blocks_D[of_row],
        tables_DM=decodes.tables_DM[of_row],
        follows_D=decodes.follows_D[of_row],
        samples=Samples(parameters_N=decodes.samples.parameters_N[of_row], positions_N=positions, special=special),
    )


def _places(choices: Sequence[DecodeChoice], before: Sequence[DecodeChoice]) -> Ints:
    """Index in `before` of each sequence; `NO_SAMPLE` if it is not there."""
    if choices == before:
        return np.arange(len(before))
    places = {each: index for index, each in enumerate(before)}
    return np.array([places.get(each, NO_SAMPLE) for each in choices], np.int64)


def _larger(array: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A copy with more room, which is zero."""
    copy = np.zeros(shape, array.dtype)
    copy[tuple(slice(size) for size in array.shape)] = array
    return copy
