"""Without a GPU the kernels run in Triton's interpreter, which has to be said before they are imported.

These tests are also for machines with a GPU that have pytest, and none of its plugins that the other tests need.
"""

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def _patch_once() -> None:
    """Let the interpreter put its own functions into Triton's language once for each launch. It looks at every name of
    the language again for every function that a kernel calls, which takes a fifth of these tests' time."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def once(fn: Any) -> Any:
        used = [each for each in fn.__globals__.values() if each is language or each is language.core]
        is_patched = bool(used) and all(each.static_print is print for each in used)
        return interpreter._LangPatchScope() if is_patched else patch(fn)

    interpreter._patch_lang = once


if not torch.cuda.is_available():
    _patch_once()


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
