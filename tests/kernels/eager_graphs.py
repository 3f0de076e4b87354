"""Decode steps as a graph computes them, where nothing can be captured."""

from __future__ import annotations

from common.engine.graphs import Computed, DecodeGraphs


class EagerGraphs(DecodeGraphs):
    """Computes what a graph would have captured, from the same buffers, into new ones."""

    def _replay(self, size: int) -> Computed:
        self.replayed = size
        computed = self._room(size)
        self._forward(computed)
        return computed
