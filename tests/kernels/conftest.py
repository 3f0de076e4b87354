"""Without a GPU the kernels run in Triton's interpreter, which has to be said before they are imported.

These tests are also for machines with a GPU that have pytest, and none of its plugins that the other tests need.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


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
