"""What the ranks of a group say to each other while they compute a model together."""

from __future__ import annotations

from typing import Protocol

import torch

from common.engine.shard import Shard


class Group(Protocol):
    """A rank's place in its group. All ranks call the same operations, in the same order, with the same shapes."""

    @property
    def shard(self) -> Shard:
        """The part of the model that this rank has."""

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' `x`, of which all of them have the same bits; may be `x` itself."""

    def beside(self, x_RV: torch.Tensor, num_columns: int) -> torch.Tensor:
        """The ranks' parts side by side, `[R, num_columns]`, at rank 0; elsewhere `[0, num_columns]`. Rank `i` has
        `Shard(i, width).of(num_columns)` of the columns."""
