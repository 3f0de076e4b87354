"""How likely a prompt's tokens were, against `transformers` and `log_softmax` of all of its logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM

from common.contract.ids import RequestId
from common.contract.messages.fields import LEAST_LOGPROB, MAX_TOLD_TOKENS
from common.contract.messages.gateway import Prefill
from common.contract.messages.worker import PromptLogprobs, TokenScores
from common.contract.sampling import SamplingParams
from common.engine import logprobs
from common.engine.batch import InvalidLogitsError, Slice
from common.engine.logprobs import Scores
from common.engine.prompt import prompt_logprobs, prompt_slice
from common.engine.runner import ModelRunner, load_runner

torch.set_num_threads(1)

PROMPT = tuple(torch.randint(0, 320, (37,), generator=torch.Generator().manual_seed(5)).tolist())
BLOCK_SIZE = 4
TABLE = list(range(20))
NUM = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), dtype="float32")


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.Tensor:
    """Log probabilities `[T, V]` of what follows each token of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0].log_softmax(dim=-1)  # type: ignore[no-any-return]


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def runner(folder: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return load_runner(folder, kv_cache_bytes=2**18, block_size=BLOCK_SIZE, cpu_kernels=request.param)


def work(prompt: tuple[int, ...] = PROMPT, num: int | None = NUM) -> Prefill:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    return Prefill(
        request=RequestId("r"), attempt=1, token_ids=prompt, prompt_len=len(prompt), choices=(0,),
        sampling=sampling, budget_s=9, prompt_logprobs=num,
    )  # fmt: skip


def in_chunks(runner: ModelRunner, *ends: int) -> list[PromptLogprobs]:
    """Of the prompt, computed in chunks that end there; with each step, slices that ask for nothing."""
    told = []
    start = 0
    for end in (*ends, len(PROMPT)):
        beside = Slice(token_ids=PROMPT[:3], start=0, block_table=[40])
        submitted = runner.submit([beside, prompt_slice(work(), start, end, TABLE), beside])
        sampled = submitted.outcomes()
        nothing, scored, _ = submitted.scores()
        assert nothing == TokenScores()
        assert len(sampled[1]) == (end == len(PROMPT))
        told += prompt_logprobs(work(), start, scored)
        start = end
    return told


def test_they_are_those_of_transformers(runner: ModelRunner, reference: torch.Tensor) -> None:
    (told,) = in_chunks(runner)
    assert told.position == 1
    assert len(told.scores) == len(PROMPT) - 1
    for before, (each, rank, token_id) in enumerate(
        zip(told.scores.each(), told.scores.ranks, PROMPT[1:], strict=True)
    ):
        row = reference[before]
        assert each.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert rank == int((row >= row[token_id]).sum())
        best = row.topk(NUM)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def flat(messages: list[PromptLogprobs]) -> list[float]:
    each = [one for message in messages for one in message.scores.each()]
    return [value for one in each for value in (one.logprob, *(value for _, value in one.top))]


@pytest.mark.parametrize("ends", [(1,), (16,), (5, 6, 20, 36)])
def test_chunks_tell_what_the_whole_would(runner: ModelRunner, ends: tuple[int, ...]) -> None:
    chunks, (whole,) = in_chunks(runner, *ends), in_chunks(runner)
    positions = [message.position for message in chunks]
    assert positions == [1, *(end + 1 for end in ends if end + 1 < len(PROMPT))]
    assert flat(chunks) == pytest.approx(flat([whole]), rel=1e-6, abs=1e-5)  # a few units of float32
    assert [rank for message in chunks for rank in message.scores.ranks] == list(whole.scores.ranks)


def test_a_few_rows_of_logits_are_there_at_once(
    runner: ModelRunner, reference: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = in_chunks(runner)
    monkeypatch.setattr(logprobs, "LOGITS_BYTES", 4 * 4 * reference.shape[1])
    sizes: list[int] = []
    decoder = runner.executor.decoder
    logits = decoder.logits

    def watched(hidden, rows, backend):  # type: ignore[no-untyped-def]
        sizes.append(len(rows))
        return logits(hidden, rows, backend)

    monkeypatch.setattr(decoder, "logits", watched)
    (told,) = in_chunks(runner)
    assert sizes == [1, *[4] * 9], "of 36 tokens, besides the one to sample from"
    assert flat([told]) == pytest.approx(flat([whole]), abs=1e-5)


def test_who_does_not_ask_costs_nothing(runner: ModelRunner) -> None:
    submitted = runner.submit([prompt_slice(work(num=None), 0, len(PROMPT), TABLE)])
    assert submitted._scores is None
    assert submitted.scores() == [TokenScores()]
    assert prompt_logprobs(work(num=None), 0, TokenScores()) == []


def test_without_alternatives_there_is_the_token_alone(runner: ModelRunner) -> None:
    submitted = runner.submit([prompt_slice(work(num=0), 0, len(PROMPT), TABLE)])
    (message,) = prompt_logprobs(work(num=0), 0, submitted.scores()[0])
    assert len(message.scores) == len(PROMPT) - 1
    assert message.scores.top_token_ids == ()


def test_a_prompt_of_one_token_has_nothing_to_tell(runner: ModelRunner) -> None:
    one = work((5,))
    assert prompt_logprobs(one, 0, runner.submit([prompt_slice(one, 0, 1, TABLE)]).scores()[0]) == []


def test_a_long_chunk_is_told_in_several_messages() -> None:
    num = 2 * MAX_TOLD_TOKENS + 5
    scores = TokenScores(
        logprobs=(-1.0,) * num,
        ranks=tuple(range(num)),
        top_token_ids=tuple(range(2 * num)),
        top_logprobs=(-1.0,) * 2 * num,
    )
    told = prompt_logprobs(work(), 16, scores)
    assert [(message.position, len(message.scores)) for message in told] == [
        (17, MAX_TOLD_TOKENS), (17 + MAX_TOLD_TOKENS, MAX_TOLD_TOKENS), (17 + 2 * MAX_TOLD_TOKENS, 5),
    ]  # fmt: skip
    assert [rank for message in told for rank in message.scores.ranks] == list(range(num))
    assert [token for message in told for token in message.scores.top_token_ids] == list(range(2 * num))


def test_what_is_not_a_number_fails_its_slice_alone() -> None:
    rows = torch.zeros(4, 8)
    rows[1, 2] = math.nan
    slices = [
        Slice(token_ids=(1, 2), start=6, block_table=(), scored=(3, 4)),
        Slice(token_ids=(1, 2), start=0, block_table=(), scored=(3, 4)),
    ]
    bad, good = Scores(slices, lambda places: rows[places], 8, torch.device("cpu")).outcomes()
    assert isinstance(good, TokenScores)
    assert good.logprobs[0] == pytest.approx(-math.log(8))
    assert good.ranks == (8, 8)
    assert isinstance(bad, InvalidLogitsError)
    with pytest.raises(InvalidLogitsError, match="from position 7 on are not numbers"):
        prompt_logprobs(work(), 6, bad)


def test_what_cannot_come_is_told_as_very_unlikely() -> None:
    rows = torch.zeros(1, 8)
    rows[0, 1:] = -math.inf
    asked = Slice(token_ids=(1,), start=0, block_table=(), scored=(3,), num_alternatives=2)
    (scores,) = Scores([asked], lambda places: rows[places], 8, torch.device("cpu")).outcomes()
    assert isinstance(scores, TokenScores)
    assert (scores.logprobs, scores.ranks, scores.top_logprobs) == ((LEAST_LOGPROB,), (8,), (0.0, LEAST_LOGPROB))
