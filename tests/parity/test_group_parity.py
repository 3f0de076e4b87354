"""Groups of ranks that share memory: their logits are those of one rank, and their tokens those of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from needs import require
from transformers import AutoModelForCausalLM

from common.contract.errors import OperatorError
from common.contract.sampling import SamplingParams
from common.engine import native
from common.engine.backend import Backend, TorchBackend
from common.engine.batch import Sample, Samples, Slice
from common.engine.draw import draw, random_numbers
from common.engine.kv_cache import KVCache
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.native.backend import NativeBackend
from common.engine.native.group import SharedGroup, memory_bytes
from common.engine.ragged import Rows
from common.engine.shard import Shard, require_width
from common.engine.weights import load_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 8
PLACE_NUMBERS = 1000
"""Less than a prompt's activations, so that they take several turns."""
PROMPT = [7 * index % 380 for index in range(50)]


class Ranks:
    """All ranks of a group, as threads of this process."""

    def __init__(self, folder: Path, width: int, dtype: str = "float32", *, in_c: bool = True) -> None:
        kernels = native.kernels()
        assert kernels is not None
        own = kernels if in_c else None
        self.config = ModelConfig.from_folder(folder)
        require_width(width, self.config)
        memory = torch.zeros(memory_bytes(kernels, width, PLACE_NUMBERS, 0), dtype=torch.uint8)
        self.decoders: list[Decoder] = []
        self.caches: list[KVCache] = []
        for rank in range(width):
            group = SharedGroup(kernels, memory, Shard(rank, width), PLACE_NUMBERS, 0)
            weights = load_weights(self.config, folder, dtype, CPU, None, own, batch_invariant=in_c, shard=group.shard)
            self.decoders.append(Decoder(self.config, weights, group))
            self.caches.append(KVCache(group.shard.config(self.config).layout(BLOCK_SIZE, dtype), 16, CPU))
        self._backend: Backend = NativeBackend(kernels) if in_c else TorchBackend()
        self._pool = ThreadPoolExecutor(width)

    def logits(self, token_ids: list[int], start: int = 0) -> torch.Tensor:
        """Logits of the last of these tokens, `[V]`."""
        sample = Sample(params=SamplingParams(max_tokens=1), choice=0, position=0, token_ids=(), prompt_len=0)
        piece = Slice(token_ids=token_ids, start=start, block_table=list(range(15, 0, -1)), samples=(sample,))

        @torch.inference_mode()
        def run(rank: int) -> torch.Tensor:
            torch.set_num_threads(1)
            batch = Rows.of([piece], BLOCK_SIZE).on(CPU)
            return self.decoders[rank].forward(batch, self.caches[rank], self._backend)

        first, *_ = self._pool.map(run, range(len(self.decoders)))
        return first[0]


@pytest.fixture(autouse=True)
def _compiler() -> None:
    require("compiler")


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str, num_kv_heads: int, width: int) -> None:
    """With fewer KV heads than ranks, as many, and more."""
    biases: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder = make_checkpoint(family, tmp_path, num_key_value_heads=num_kv_heads, **biases)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        theirs = model(torch.tensor([PROMPT])).logits[0, -1]
    ranks = Ranks(folder, width)
    logits = ranks.logits(PROMPT)
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
    tokens = list(PROMPT)
    for _ in range(20):
        tokens.append(int(logits.argmax()))
        logits = ranks.logits(tokens[-1:], len(tokens) - 1)
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_c", [True, False])
def test_logits_differ_by_rounding_alone_where_a_head_is_tied_and_nothing_divides_evenly(
    tmp_path: Path, dtype: str, in_c: bool
) -> None:
    """A vocabulary and an inner dimension of which the ranks have different parts. Sums of a product are added up in
    other places, which the last bits show."""
    folder = make_checkpoint("qwen3", tmp_path, vocab_size=387, intermediate_size=101, tie_word_embeddings=True)
    alone = Ranks(folder, 1, dtype, in_c=in_c).logits(PROMPT)
    ranks = Ranks(folder, 4, dtype, in_c=in_c)
    together = ranks.logits(PROMPT)
    assert together.shape == (387,)
    tolerance = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    assert (together.float() - alone.float()).norm() < tolerance * alone.float().norm()


def samples_at(position: int, params: Sequence[SamplingParams]) -> Samples:
    """A sample of each of these at one position."""
    return Samples.of([Sample(params=each, choice=0, position=position, token_ids=(), prompt_len=1) for each in params])


def drawn(logits_V: torch.Tensor, samples: Samples, num: int) -> torch.Tensor:
    """A token for each of the samples."""
    return draw(logits_V.repeat(num, 1), logits_V.max().repeat(num), samples)


def differing_draws(
    alone_V: torch.Tensor, drawn_P: torch.Tensor, other_P: torch.Tensor, top_k: int, samples: Samples
) -> list[float]:
    """Tokens drawn from these logits and from others: of those that differ, how far the random number of each is from a
    border of the cumulative distribution."""
    kept_V = alone_V.double()
    if top_k:
        kept_V = kept_V.masked_fill(alone_V < alone_V.topk(top_k).values[-1], -torch.inf)
    borders_V = torch.cat((kept_V.new_zeros(1), kept_V.softmax(dim=-1).cumsum(dim=-1)))
    numbers_P = torch.from_numpy(random_numbers(samples))
    return [(borders_V - numbers_P[row]).abs().min().item() for row in torch.nonzero(drawn_P != other_P).flatten()]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("top_k", [0, 20])
def test_drawn_tokens_differ_only_where_logits_within_a_tolerance_decide(
    tmp_path: Path, dtype: str, tolerance: float, top_k: int
) -> None:
    """A token is drawn where the cumulative distribution reaches a random number. Logits that are off by `tolerance`
    move its borders by less than twice that, and the edge of the most likely tokens. Nothing else may tell widths
    apart; nor logits that are that far off on purpose."""
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=2)
    one, four = Ranks(folder, 1, dtype), Ranks(folder, 4, dtype)
    generator = torch.Generator().manual_seed(0)
    params = [SamplingParams(max_tokens=1, temperature=1.0, top_k=top_k, seed=seed) for seed in range(5000)]
    distances, of_purpose, tokens = [], [], list(PROMPT)
    for start in (0, *range(len(PROMPT), len(PROMPT) + 12)):
        alone_V, together_V = (ranks.logits(tokens[start:], start).float() for ranks in (one, four))
        assert (alone_V - together_V).abs().max() < tolerance
        tokens.append(int(alone_V.argmax()))
        edge = alone_V.topk(top_k + 1).values[-2:]
        if top_k and edge[0] - edge[1] < 2 * tolerance:
            continue  # which tokens can be drawn is decided by as little
        off_V = alone_V + tolerance * (2 * torch.rand(alone_V.shape, generator=generator) - 1)
        samples = samples_at(len(tokens), params)
        of_alone, of_together, of_off = (drawn(each, samples, len(params)) for each in (alone_V, together_V, off_V))
        distances += differing_draws(alone_V, of_alone, of_together, top_k, samples)
        of_purpose += differing_draws(alone_V, of_alone, of_off, top_k, samples)
    assert max(distances, default=0.0) < 2 * tolerance
    assert 0 < max(of_purpose) < 2 * tolerance


def test_ranks_hold_their_part_of_the_whole_cache(tmp_path: Path) -> None:
    """Rank by rank the heads of a block are those of a worker alone, and copies of a head have the same bits."""
    folder = make_checkpoint("llama", tmp_path, num_key_value_heads=2)
    one, four = Ranks(folder, 1), Ranks(folder, 4)
    one.logits(PROMPT)
    four.logits(PROMPT)
    for rank, cache in enumerate(four.caches):
        part = Shard(rank, 4).kv_heads(2)
        torch.testing.assert_close(cache.blocks, one.caches[0].blocks[:, part.start : part.stop], rtol=1e-4, atol=1e-4)
    assert torch.equal(four.caches[0].blocks, four.caches[1].blocks)
    assert not torch.equal(four.caches[1].blocks, four.caches[2].blocks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "message"),
    [
        (4, 2, 3, "3 does not divide the model's 4 query heads"),
        (12, 4, 6, "6 neither divides the model's 4 KV heads nor is a multiple of them"),
        (4, 4, 8, "8 does not divide the model's 4 query heads"),
    ],
)
def test_other_widths_are_refused_with_the_reason(
    heads: int, kv_heads: int, width: int, message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=96)
    with pytest.raises(OperatorError, match=message):
        require_width(width, ModelConfig.from_folder(folder))
