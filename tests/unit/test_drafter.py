"""What a draft model says, and where the step finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from common.contract.errors import OperatorError
from common.contract.sampling import SamplingParams
from common.engine.batch import NO_SAMPLE, Decodes, Drafting, Sample, SampledToken, Samples, Slice
from common.engine.drafter import Drafter
from common.engine.runner import ModelRunner, load_runner
from common.runtime.checkpoint import vocabulary
from common.scheduling.row_times import RowTimes

torch.set_num_threads(1)
BLOCK_SIZE = 4
TEXTS = [[5, 80, 17, 200, 43, 9, 300, 21, 77, 6], [9, 8, 7], [1, 2, 3, 4, 5, 6, 7]]
SAMPLING = [
    SamplingParams(max_tokens=50),
    SamplingParams(max_tokens=50, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(max_tokens=50, temperature=1.5, seed=4, logit_bias=((40, 100.0), (50, 99.0)), presence_penalty=0.1),
]
TIMES = RowTimes(rows=(1,), seconds=(1.0,))


def load(folder: Path, vocab_size: int | None = None) -> ModelRunner:
    overrides: dict[str, Any] = {} if vocab_size is None else {"vocab_size": vocab_size}
    make_checkpoint("llama", folder, **overrides)
    return load_runner(folder, kv_cache_bytes=2**18, block_size=BLOCK_SIZE)


def plain(runner: ModelRunner, text: list[int], sampling: SamplingParams, num: int) -> list[int]:
    """The next tokens without drafts."""
    tokens = list(text)
    table = list(range(60, 80))
    for _ in range(num):
        sample = Sample(params=sampling, choice=0, position=len(tokens), token_ids=list(tokens), prompt_len=len(text))
        [[outcome]] = runner.submit([Slice(token_ids=tokens, start=0, block_table=table, samples=(sample,))]).outcomes()
        assert isinstance(outcome, SampledToken)
        tokens.append(outcome.token_id)
    return tokens[len(text) :]


def planned(nums: list[int]) -> tuple[Decodes, Drafting]:
    """A step with the last token of each text and so many zeros after it, and its drafts."""
    firsts = [(index, place) for index, num in enumerate(nums) for place in range(num + 1)]
    rows = [firsts.index((index, 0)) for index in range(len(nums))]
    samples = [
        Sample(
            params=SAMPLING[index],
            choice=0,
            position=len(TEXTS[index]) + place,
            token_ids=TEXTS[index],
            prompt_len=len(TEXTS[index]),
            draft=[0] * place,
        )
        for index, place in firsts
    ]
    tables = [list(range(10 * index, 10 * index + 8)) for index in range(len(TEXTS))]
    decodes = Decodes(
        token_ids_D=np.array([0 if place else TEXTS[index][-1] for index, place in firsts], np.int64),
        positions_D=np.array([len(TEXTS[index]) - 1 + place for index, place in firsts], np.int64),
        num_blocks_D=np.full(len(firsts), 8),
        tables_DM=np.zeros((len(firsts), 8), np.int64),
        follows_D=np.full(len(firsts), NO_SAMPLE),
        samples=Samples.of(samples),
    )
    who = [index for index, num in enumerate(nums) if num]
    drafting = Drafting(
        slices=[Slice(token_ids=TEXTS[index][:-1], start=0, block_table=tables[index]) for index in who],
        rows_S=np.array([rows[index] for index in who], np.int64),
        nums_S=np.array([nums[index] for index in who], np.int64),
        tables=[tables[index] for index in who],
    )
    return decodes, drafting


@pytest.mark.parametrize("nums", [[4, 4, 4], [1, 6, 3], [0, 2, 5], [2, 0, 0]], ids=str)
def test_a_draft_model_that_is_the_model_says_what_the_model_will_say(tmp_path: Path, nums: list[int]) -> None:
    """Greedy, sampled and biased, of sequences with different numbers of drafted tokens. A penalty, which it does not
    count, is too small here to matter."""
    runner = load(tmp_path)
    expected = [plain(runner, *each) for each in zip(TEXTS, SAMPLING, nums, strict=True)]
    drafter = Drafter(runner, TIMES, runner.config.vocab_size)
    decodes, drafting = planned(nums)
    drafted, filled = drafter.draft(drafting, decodes)
    assert list(drafted.token_ids) == [each for each in expected if each]
    assert drafted.seconds > 0
    assert filled is not None
    row = 0
    for text, draft in zip(TEXTS, expected, strict=True):
        assert filled.token_ids_D[row : row + 1 + len(draft)].tolist() == [text[-1], *draft]
        for place in range(1, len(draft) + 1):
            if row + place in filled.samples.special:
                assert list(filled.samples.special[row + place].draft) == draft[:place]
        row += 1 + len(draft)
    assert set(filled.samples.special) == set(decodes.samples.special)
    assert not decodes.token_ids_D[1 : 1 + nums[0]].any(), "what was planned is not changed"


def test_without_drafts_it_computes_tokens_for_later(tmp_path: Path) -> None:
    runner = load(tmp_path)
    [expected] = [plain(runner, TEXTS[0], SAMPLING[0], 2)]
    drafter = Drafter(runner, TIMES, runner.config.vocab_size)
    decodes, drafting = planned([2, 0, 0])
    ahead = Drafting(slices=drafting.slices, rows_S=np.array([], np.int64), nums_S=np.array([], np.int64), tables=[])
    drafted, same = drafter.draft(ahead, decodes)
    assert (drafted.token_ids, same) == ((), decodes)
    decodes, drafting = planned([2, 0, 0])
    drafting.slices = []
    assert drafter.draft(drafting, decodes)[0].token_ids == [expected]


@pytest.mark.parametrize("vocab_size", [256, 640])
def test_a_vocabulary_of_another_size_is_never_left(tmp_path: Path, vocab_size: int) -> None:
    """Padding makes them differ: no token is drafted that the model lacks, nor computed that the draft model lacks."""
    runner = load(tmp_path, vocab_size)
    drafter = Drafter(runner, TIMES, 384)
    assert runner.config.vocab_size == vocab_size
    decodes, drafting = planned([5, 5, 5])
    drafted, _ = drafter.draft(drafting, decodes)
    assert [len(each) for each in drafted.token_ids] == [5, 5, 5]
    assert all(0 <= token < 384 for each in drafted.token_ids for token in each)


def test_a_logit_that_is_no_number_fails_nothing(tmp_path: Path) -> None:
    """What it says then is wrong, and no more than that."""
    make_checkpoint("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    broken = {name: torch.full_like(each, float("nan")) for name, each in weights.items()}
    save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
    runner = load_runner(tmp_path, kv_cache_bytes=2**18, block_size=BLOCK_SIZE)
    decodes, drafting = planned([3, 3, 3])
    drafted, _ = Drafter(runner, TIMES, runner.config.vocab_size).draft(drafting, decodes)
    assert all(0 <= token < runner.config.vocab_size for each in drafted.token_ids for token in each)


# --- whose tokens it knows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            '{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<s>"}]}',
            {"a": 0, "b": 1, "<s>": 2},
        ),
        ('{"model": {"type": "Unigram", "vocab": [["a", -1.5], ["b", -2.0]]}}', {"a": 0, "b": 1}),
        ('{"model": null, "added_tokens": null}', {}),
        ('{"model": {"vocab": 5}, "added_tokens": ["x"]}', {}),
    ],
)
def test_a_tokenizer_tells_its_vocabulary(tmp_path: Path, content: str, expected: dict[str, int]) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert vocabulary(tmp_path) == expected


def test_a_folder_without_a_tokenizer_tells_nothing(tmp_path: Path) -> None:
    assert vocabulary(tmp_path) == {}
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(OperatorError):
        vocabulary(tmp_path)
