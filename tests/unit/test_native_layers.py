"""All layers in one call of the kernels in C, against one after another, and in a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from native_builds import EMULATED_TILES, build, folder_of_run
from needs import require

from common.contract.sampling import SamplingParams
from common.engine.batch import Sample, Slice
from common.engine.kv_cache import KVCache
from common.engine.linear import Linear
from common.engine.model import Decoder
from common.engine.model_config import ModelConfig
from common.engine.native import Kernels, library
from common.engine.native.backend import NativeBackend
from common.engine.native.group import GroupEndedError, SharedGroup, memory_bytes
from common.engine.ragged import Rows
from common.engine.shard import Shard
from common.engine.weights import load_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PLACE_NUMBERS = 500
LENGTHS = [(40, 1), (33, 1), (20, 17), (5, 1), (64, 1), (1, 300)]
"""Tokens of each sequence in the first step and in the second one: decode tokens and chunks side by side."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, gates that are no panel": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 72}),
    "a hidden size that is no block": ("llama", {"hidden_size": 72, "head_dim": 16}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "norms of heads, as many of them": ("qwen3", {"num_key_value_heads": 4, "intermediate_size": 1100}),
}


class OneByOne(NativeBackend):
    """Computes a layer after another, as it must where a product is not computed in C."""

    def layers(self, *_: object) -> None:
        """See `Backend.layers`."""
        return


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")

    def make(model: str) -> Path:
        family, config = MODELS[model]
        folder = root / model.replace(" ", "-")
        return folder if folder.exists() else make_checkpoint(family, folder, seed=3, **config)

    return make


@pytest.fixture(scope="module")
def own() -> Kernels:
    require("compiler")
    return Kernels(library.load())


@pytest.fixture(scope="module")
def emulating(own: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return build(folder_of_run(tmp_path_factory), EMULATED_TILES)


@pytest.fixture(params=["widened", "in pairs", "with emulated AMX"])
def kernels(request: pytest.FixtureRequest, own: Kernels, emulating: Kernels) -> Kernels:
    """Kernels that multiply bf16 in each way."""
    found = emulating if request.param == "with emulated AMX" else own
    found.multiplies_pairs = request.param != "widened"
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Rank:
    """One rank of a worker: its part of a model, and a cache."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        backend: NativeBackend,
        kernels: Kernels,
        group: SharedGroup | None,
        num_positions: int | None = None,
    ) -> None:
        self.config = ModelConfig.from_folder(folder)
        shard = Shard() if group is None else group.shard
        weights = load_weights(self.config, folder, dtype, CPU, None, kernels, batch_invariant=True, shard=shard)
        self.decoder = Decoder(self.config, weights, group, num_positions)
        self.cache = KVCache(shard.config(self.config).layout(BLOCK_SIZE, dtype), 144, CPU)
        self._backend = backend

    @torch.inference_mode()
    def compute(self, step: int) -> torch.Tensor:
        """Logits of the last token of each sequence after this step."""
        sample = Sample(params=SamplingParams(max_tokens=1), choice=0, position=0, token_ids=(), prompt_len=0)
        slices = []
        for index, of_steps in enumerate(LENGTHS):
            start = 0 if step == 0 else of_steps[0]
            ids = [(7 * position + index) % 380 for position in range(start, start + of_steps[step])]
            table = list(range(24 * index, 24 * index + 24))
            slices.append(Slice(token_ids=ids, start=start, block_table=table, samples=(sample,)))
        return self.decoder.forward(Rows.of(slices, BLOCK_SIZE).on(CPU), self.cache, self._backend)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", MODELS)
def test_one_call_gives_the_same_bits_as_one_by_one(
    checkpoint: Callable[[str], Path], kernels: Kernels, model: str, dtype: str, number: int
) -> None:
    torch.set_num_threads(number)
    made = []
    for backend in (NativeBackend(kernels), OneByOne(kernels)):
        rank = Rank(checkpoint(model), dtype, backend, kernels, None)
        made.append((rank.compute(0), rank.compute(1), rank.cache.blocks))
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
    assert made[0][1].isfinite().all()


def test_a_position_beyond_the_table_of_angles_is_an_error(checkpoint: Callable[[str], Path], own: Kernels) -> None:
    for kind in (NativeBackend, OneByOne):
        rank = Rank(checkpoint("windows"), "float32", kind(own), own, None, num_positions=300)
        rank.compute(0)
        with pytest.raises(IndexError, match="position"):
            rank.compute(1)  # up to position 300


def group_of(kernels: Kernels, width: int) -> list[SharedGroup]:
    memory = torch.zeros(memory_bytes(kernels, width, PLACE_NUMBERS, 0), dtype=torch.uint8)
    return [SharedGroup(kernels, memory, Shard(rank, width), PLACE_NUMBERS, 0) for rank in range(width)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_give_the_same_bits_as_one_by_one(
    checkpoint: Callable[[str], Path], kernels: Kernels, dtype: str
) -> None:
    made = []
    for kind in (NativeBackend, OneByOne):
        groups = group_of(kernels, 2)
        ranks = [Rank(checkpoint("windows"), dtype, kind(kernels), kernels, group) for group in groups]

        def both(rank: Rank) -> tuple[torch.Tensor, ...]:
            torch.set_num_threads(1)
            return rank.compute(0), rank.compute(1), rank.cache.blocks

        with ThreadPoolExecutor(2) as pool:
            made.append([each for found in pool.map(both, ranks) for each in found])
        assert all(group.adding_s > 0 for group in groups)
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_a_group_that_ends_ends_the_call(checkpoint: Callable[[str], Path], own: Kernels) -> None:
    """Rank 1 computes the embeddings, and then no layer."""
    first, other = group_of(own, 2)
    rank = Rank(checkpoint("windows"), "float32", NativeBackend(own), own, first)
    num_tokens = sum(of_steps[0] for of_steps in LENGTHS)

    def leave() -> None:
        other.add(torch.zeros(num_tokens, rank.config.hidden_size))
        other.end()

    with ThreadPoolExecutor(2) as pool:
        computed = pool.submit(rank.compute, 0)
        pool.submit(leave)
        with pytest.raises(GroupEndedError):
            computed.result()


def test_products_that_are_not_in_c_are_computed_one_by_one(
    checkpoint: Callable[[str], Path], own: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = NativeBackend(own)
    expected = Rank(checkpoint("windows"), "float32", backend, own, None).compute(0)
    rank = Rank(checkpoint("windows"), "float32", backend, own, None)
    monkeypatch.setattr(Linear, "panels", None)

    def fail(_: int) -> int:
        raise AssertionError("all layers at once")

    monkeypatch.setattr(own, "forward", fail)
    assert torch.equal(rank.compute(0), expected)
