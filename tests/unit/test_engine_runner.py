from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from common.contract.errors import OperatorError
from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Sampled, SampledToken, Slice
from common.engine.runner import ModelRunner, load_runner

torch.set_num_threads(1)

PROMPT = [5, 80, 17, 200, 43, 9, 300, 21, 77, 6]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), dtype="bfloat16")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, kv_cache_bytes=2**16, block_size=BLOCK_SIZE, dtype="float32")


def ask(token_ids: list[int], choice: int, sampling: SamplingParams) -> Sample:
    return Sample(params=sampling, choice=choice, position=len(token_ids), token_ids=token_ids, prompt_len=len(PROMPT))


def token_of(outcome: Sampled) -> int:
    assert isinstance(outcome, SampledToken)
    return outcome.token_id


def test_outcomes_come_slice_by_slice(runner: ModelRunner) -> None:
    sampling = SamplingParams(max_tokens=4, seed=1)
    table = [3, 1, 2]
    middle = Slice(token_ids=PROMPT[:4], start=0, block_table=[8])
    several = Slice(
        token_ids=PROMPT, start=0, block_table=table, samples=tuple(ask(PROMPT, i, sampling) for i in range(6))
    )
    one = Slice(token_ids=PROMPT, start=0, block_table=[5, 6, 7], samples=(ask(PROMPT, 4, sampling),))
    nothing, six, single = runner.step([middle, several, one])
    assert nothing == ()
    assert len(six) == 6
    assert single == (six[4],)
    assert len({token_of(each) for each in six}) > 1, "choices differ"


def test_a_fork_goes_on_from_copied_blocks(runner: ModelRunner) -> None:
    """Two choices share the full blocks and each has its own last one; they do not disturb each other."""
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    runner.step([Slice(token_ids=PROMPT, start=0, block_table=[3, 1, 2])])
    runner.copy_block(2, 9)

    def step(forks: dict[int, list[int]]) -> list[int]:
        slices = [
            Slice(
                token_ids=tokens[-1:],
                start=len(tokens) - 1,
                block_table=[3, 1, last],
                samples=(ask(tokens, 0, sampling),),
            )
            for last, tokens in forks.items()
        ]
        return [token_of(outcome) for (outcome,) in runner.step(slices)]

    together = step({2: [*PROMPT, 50], 9: [*PROMPT, 60]})
    fresh = [
        token_of(runner.step([Slice(token_ids=tokens, start=0, block_table=[4, 5, 6], samples=(asked,))])[0][0])
        for tokens in ([*PROMPT, 50], [*PROMPT, 60])
        for asked in (ask(tokens, 0, sampling),)
    ]
    assert together == fresh


def test_knows_its_model_and_its_cache(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    runner = load_runner(folder, kv_cache_bytes=10_000, progress=lambda done, total: seen.append((done, total)))
    assert runner.config.architecture == "LlamaForCausalLM"
    assert runner.layout == runner.config.layout(16, "bfloat16")
    assert runner.cache.num_blocks == 10_000 // runner.layout.block_bytes == 2
    assert seen[-1] == (21, 21)


def test_a_cache_of_no_block_is_refused(folder: Path) -> None:
    with pytest.raises(
        OperatorError, match="a KV cache of 100 bytes does not hold one block: 4096 bytes for 16 tokens"
    ):
        load_runner(folder, kv_cache_bytes=100)
