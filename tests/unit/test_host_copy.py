"""Copies between the host and the device."""

from __future__ import annotations

import torch

from common.engine.batch import Slice
from common.engine.host_copy import to_device
from common.engine.ragged import Rows


def test_a_copy_of_some_columns_needs_no_other_copy_before_it() -> None:
    """Torch copies a tensor with gaps to a GPU by way of memory that is not pinned. Block tables have gaps if one has
    more blocks than its slice needs."""
    slices = [Slice(token_ids=[5], start=3, block_table=[7, 8]), Slice(token_ids=[6], start=1, block_table=[9])]
    tables_BM = Rows.of(slices, 4).arrays["block_tables_BM"]
    assert not tables_BM.flags.c_contiguous
    copied_BM = to_device(tables_BM, torch.int64, torch.device("cpu"))
    assert copied_BM.is_contiguous()
    assert copied_BM.tolist() == [[7], [9]]
