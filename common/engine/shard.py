"""Which part of a model a rank of a group holds: Megatron's split (Shoeybi et al., arXiv:1909.08053).

| what | a rank has |
|---|---|
| queries, keys, values | the outputs of its heads |
| attention's output projection | the inputs from its query heads; the sums of all ranks are the product |
| gates and ups | the outputs of its part of the inner dimension |
| the projection down | the inputs from that part; the sums of all ranks are the product |
| embeddings and head | the rows of its part of the vocabulary |
| norms | all of them |

Consecutive query heads share a KV head, and so do consecutive ranks if there are more ranks than KV heads: each of them
then has a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.contract.errors import OperatorError
from common.contract.kv_layout import KVLayout, width_objection
from common.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` in a group of `width` ranks."""

    rank: int = 0
    width: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.width, self

    def of(self, total: int) -> range:
        """Its part of `total` things; the parts of all ranks follow one another, and differ by at most one."""
        return range(total * self.rank // self.width, total * (self.rank + 1) // self.width)

    def kv_heads(self, num_kv_heads: int) -> range:
        """Its KV heads; at least one."""
        first = num_kv_heads * self.rank // self.width
        return range(first, first + max(1, num_kv_heads // self.width))

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The model as this rank computes it, with its own numbers of heads and inner dimensions; the vocabulary is
        that of the whole model. See `require_width`."""
        return replace(
            whole,
            num_heads=len(self.of(whole.num_heads)),
            num_kv_heads=len(self.kv_heads(whole.num_kv_heads)),
            intermediate_size=len(self.of(whole.intermediate_size)),
        )

    def layout(self, whole: KVLayout) -> KVLayout:
        """Its part of a block."""
        return replace(whole, num_kv_heads=len(self.kv_heads(whole.num_kv_heads)))


WHOLE = Shard()
"""A worker of one rank has all of the model."""


def require_width(width: int, config: ModelConfig) -> None:
    """Raise `OperatorError` unless the model can be divided among `width` ranks."""
    if width > min(config.intermediate_size, config.vocab_size):
        raise OperatorError(f"--tensor-parallel {width} is more than the model's inner dimension, or its vocabulary")
    objection = width_objection(width, config.num_heads, config.num_kv_heads)
    if objection is not None:
        raise OperatorError(objection)
