from __future__ import annotations

from array import array

import pytest
import torch

from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.ragged import Rows

CPU = torch.device("cpu")


def sample(choice: int = 0) -> Sample:
    return Sample(params=SamplingParams(max_tokens=1), choice=choice, position=1, token_ids=(5,), prompt_len=1)


def test_lays_chunks_and_decode_tokens_side_by_side() -> None:
    rows = Rows.of(
        [
            Slice(token_ids=[11, 12, 13], start=3, block_table=[7, 2]),
            Slice(token_ids=(21,), start=8, block_table=(4, 5, 6, 9), samples=(sample(0), sample(1))),
            Slice(token_ids=[31, 32], start=0, block_table=[1], samples=(sample(),)),
        ],
        block_size=4,
    )
    batch = rows.on(CPU)
    assert batch.token_ids_T.tolist() == [11, 12, 13, 21, 31, 32]
    assert batch.positions_T.tolist() == [3, 4, 5, 8, 0, 1]
    assert batch.slot_blocks_T.tolist() == [7, 2, 2, 6, 1, 1]
    assert batch.slot_offsets_T.tolist() == [3, 0, 1, 0, 0, 1]
    assert batch.query_start_B1.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens_B.tolist() == [6, 9, 2]
    assert batch.block_tables_BM.tolist() == [[7, 2, 0], [4, 5, 6], [1, 0, 0]]
    assert batch.logit_rows_R.tolist() == [3, 5]
    assert rows.sample_rows_N.tolist() == [0, 0, 1]
    assert (batch.query_lens, batch.seq_lens) == ((3, 1, 2), (6, 9, 2))


@pytest.mark.parametrize(
    ("start", "num", "begun"),
    [
        (0, 1, [7]),
        (0, 3, [7]),
        (0, 4, []),
        (1, 2, []),
        (3, 1, []),
        (3, 2, [2]),
        (4, 1, [2]),
        (5, 1, []),
        (2, 7, [3]),
        (2, 10, []),
    ],
)
def test_a_block_is_begun_if_its_first_slot_is_written_and_its_last_is_not(
    start: int, num: int, begun: list[int]
) -> None:
    piece = Slice(token_ids=[5] * num, start=start, block_table=[7, 2, 3])
    assert Rows.of([piece], 4).on(CPU).begun_blocks.tolist() == begun


def test_a_slice_needs_tokens_and_their_blocks() -> None:
    with pytest.raises(AssertionError, match="without tokens"):
        Rows.of([Slice(token_ids=[], start=4, block_table=[0, 1])], 4).on(CPU)
    with pytest.raises(AssertionError, match="blocks for slices that need"):
        Rows.of([Slice(token_ids=[5], start=4, block_table=[0])], 4).on(CPU)


def test_a_table_may_grow_while_it_is_read() -> None:
    """The next step is planned meanwhile, on another thread."""

    class Growing(array):  # type: ignore[type-arg]  # is not subscriptable in Python 3.11
        def tobytes(self) -> bytes:
            read = super().tobytes()
            self.append(9)
            return read

    tables = [Growing("q", [7, 2]), Growing("q", [4])]
    slices = [Slice(token_ids=[5], start=start, block_table=table) for start, table in zip((5, 3), tables, strict=True)]
    for _ in range(2):
        batch = Rows.of(slices, 4).on(CPU)
        assert batch.slot_blocks_T.tolist() == [2, 4]
        assert batch.block_tables_BM[0].tolist() == [7, 2]
