"""What a worker refuses to start with: memory that cannot be registered."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common.contract.errors import OperatorError
from common.runtime.wire_guard import guard_allocator

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    "value", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments : true", "expandable_segments:TRUE"]
)
def test_expandable_segments_are_refused_on_a_gpu(variable: str, value: str) -> None:
    with pytest.raises(OperatorError, match=f"{variable}=.*expandable_segments"):
        guard_allocator("cuda", {variable: value})


@pytest.mark.parametrize(
    ("device", "value"),
    [
        ("cuda", ""),
        ("cuda", "expandable_segments:False"),
        ("cuda", "max_split_size_mb:64"),
        ("cpu", "expandable_segments:True"),
        ("auto", "expandable_segments:True"),  # asked again when it is known which
    ],
)
def test_everything_else_is_accepted(device: str, value: str) -> None:
    guard_allocator(device, dict.fromkeys(VARIABLES, value))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_ends_before_it_loads_anything(role: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"{role}_worker", "--device", "cuda", "--model", "/no/such/model"],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in ended.stderr
    assert "Traceback" not in ended.stderr
