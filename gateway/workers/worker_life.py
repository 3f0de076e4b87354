"""The name of a worker process."""

from __future__ import annotations

from typing import NamedTuple

from common.contract.ids import Incarnation
from common.contract.messages.gateway import Source


class WorkerLife(NamedTuple):
    """A worker process: an address and the incarnation there."""

    address: str
    incarnation: Incarnation

    @property
    def source(self) -> Source:
        """The life in the form that a sink receives."""
        return Source(address=self.address, incarnation=self.incarnation)
