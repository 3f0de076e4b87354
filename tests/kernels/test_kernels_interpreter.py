"""What `conftest.py` has made faster in Triton's interpreter, against the interpreter itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")


@pytest.mark.parametrize("widens", [True, False])
def test_bits_are_shifted_as_the_interpreter_does(widens: bool) -> None:
    from triton import language
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-30, 30, 5000)
    numbers[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    numbers[4] = float("nan")
    if widens:
        data, kinds = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16), ("bfloat16", "float32")
    else:
        data, kinds = numbers.numpy(), ("float32", "bfloat16")
    data = data.reshape(50, 100)
    source, target = (getattr(language, kind) for kind in kinds)
    quickly, slowly = convert(data, source, target, None), convert.slowly(data, source, target, None)
    assert quickly.dtype == slowly.dtype
    assert quickly.shape == slowly.shape
    assert np.array_equal(quickly, slowly)
