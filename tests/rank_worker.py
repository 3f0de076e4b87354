"""A worker of several ranks for tests, without what only tests need: its processes start soon."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, SampledToken, Slice
from common.engine.device_group import Collectives
from common.engine.ranks import GroupPlan
from common.engine.runner import ModelRunner, load_runner
from common.runtime.clock import Pulse
from common.runtime.config import DeviceType

BLOCK_SIZE = 16
PROMPT = [7 * index % 380 for index in range(50)]
PATIENT = Pulse(timeout_s=20.0)
"""A process that tests share ends when a rank of its group is silent for longer."""


def load(
    folder: Path,
    width: int,
    collectives: Collectives | None = None,
    device: DeviceType = "cpu",
    *,
    kv_cache_bytes: int = 2**20,
    pulse: Pulse = PATIENT,
) -> ModelRunner:
    """A runner of `width` ranks."""
    plan = None
    if width > 1:
        gpus = (0,) * width if device == "cuda" else ()
        plan = GroupPlan(width=width, num_threads=1, pulse=pulse, device=device, gpus=gpus, collectives=collectives)
    return load_runner(
        folder,
        kv_cache_bytes=kv_cache_bytes,
        block_size=BLOCK_SIZE,
        dtype="float32",
        device=device,
        swap_bytes=2**18,
        group=plan,
    )


def decoded(runner: ModelRunner, tokens: list[int], num: int, table: list[int], start: int = 0) -> list[int]:
    """The next greedy tokens; those of `tokens` before `start` are in the cache."""
    tokens = list(tokens)
    params = SamplingParams(max_tokens=num, temperature=0.0)
    for _ in range(num):
        sample = Sample(params=params, choice=0, position=len(tokens), token_ids=tokens, prompt_len=len(PROMPT))
        piece = Slice(token_ids=tokens[start:], start=start, block_table=table, samples=(sample,))
        [[outcome]] = runner.step([piece])
        assert isinstance(outcome, SampledToken)
        start = len(tokens)
        tokens.append(outcome.token_id)
    return tokens


def main() -> None:
    """Compute with two ranks, and say so: all the time if `busy`, and once if not."""
    torch.set_num_threads(1)
    runner = load(Path(sys.argv[1]), 2, pulse=Pulse())
    busy = sys.argv[2] == "busy"
    while True:
        decoded(runner, PROMPT, 5, list(range(10)))
        print("computed", flush=True)
        time.sleep(0 if busy else 1000)


if __name__ == "__main__":
    main()
