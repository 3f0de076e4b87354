"""The wants of a request: choices that wait for workers, some with an offer of a prefill worker that still stands. Pure
state."""

from __future__ import annotations

from common.contract.ids import RequestKey
from gateway.serving.attempt import Assignment
from gateway.serving.flow_actions import Want


class Wants(list[Want]):
    """Choices that wait for workers."""

    def at(self, address: str) -> list[tuple[Want, Assignment]]:
        """The wants whose offer stands at a worker, and these offers."""
        offers = ((want, want.offer) for want in self)
        return [(want, offer) for want, offer in offers if offer is not None and offer.life.address == address]

    def find(self, key: RequestKey, address: str) -> Want | None:
        """The want whose offer a prefill worker has made under this key; None if there is none."""
        return next((want for want, offer in self.at(address) if offer.key == key), None)
