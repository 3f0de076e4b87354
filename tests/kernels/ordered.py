"""Products in Triton's interpreter whose bits do not depend on the number of rows, as numpy's do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from common.engine.kernels.tiles import INTERPRETED


def multiply_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add the products of a tile one after another, in float32, and their sum to what was there: so
    the bits show how inputs, and keys, are cut into tiles."""

    def dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total = np.zeros_like(d.data)
        for index in range(a.data.shape[1]):
            column, row = a.data[:, index : index + 1], b.data[index : index + 1]
            total += column.astype(total.dtype) * row.astype(total.dtype)
        return TensorHandle(total + d.data, d.dtype.scalar)

    if INTERPRETED:
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
