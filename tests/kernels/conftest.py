"""Without a GPU the kernels run in Triton's interpreter, which has to be said before they are imported.

These tests are also for machines with a GPU that have pytest, and none of its plugins that the other tests need.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _hasten() -> None:
    """Let the interpreter leave out what changes nothing and takes much of these tests' time: checks of overflow, whose
    result it drops; putting its own functions into Triton's language again for each launch; and a slow way to shift
    bits between bfloat16 and float32 (which also gets subnormal numbers wrong)."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch, patched = interpreter._patch_lang, set[int]()
    convert = interpreter._convert_float

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in patched:
            patch(fn)  # for good
            patched.add(id(fn.__globals__))
        return interpreter._LangPatchScope()

    def shift(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target, data.dtype) == (language.bfloat16, language.float32, np.uint16):
            return data.astype(np.uint32) << np.uint32(16)
        if (source, target, data.dtype, rounding) == (language.float32, language.bfloat16, np.float32, None):
            return (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)  # towards zero, as the interpreter does
        return convert(data, source, target, rounding)

    shift.slowly = convert  # type: ignore[attr-defined]
    interpreter._patch_lang, interpreter._convert_float = patch_once, shift


if not torch.cuda.is_available():
    _hasten()


def pytest_configure(config: pytest.Config) -> None:
    """Know the mark of pytest-timeout without it: a test then takes as long as it does."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line(
            "markers", "timeout(seconds): how long a test may take; without pytest-timeout, for ever"
        )


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
