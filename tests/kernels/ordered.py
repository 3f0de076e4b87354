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
        columns, rows = a.data.T.astype(d.data.dtype, order="C"), b.data.astype(d.data.dtype)
        # numpy adds along the first of several axes one after another.
        total = np.add.reduce(columns[:, :, None] * rows[:, None, :], axis=0)
        return TensorHandle(total + d.data, d.dtype.scalar)

    if INTERPRETED:
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
