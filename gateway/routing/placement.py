"""Which workers a flow's `Want` gets: the shell's decisions between it and its attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.contract.kv_layout import Fingerprint
from common.contract.messages import Role
from common.contract.tiers import Tier
from gateway.routing.router import Ask, Cached, Caution, Handoff, Local, Router, least_loaded_decode
from gateway.serving.attempt import Place
from gateway.serving.flow import Want
from gateway.workers.registry import Registry, WorkerView


@dataclass(frozen=True, slots=True)
class Rebind:
    """Another decode worker for an offer that stands."""

    decode: WorkerView


Route = Handoff | Local | Rebind


class Placement:
    """Chooses workers for what flows want."""

    def __init__(self, registry: Registry, router: Router) -> None:
        self._registry = registry
        self._router = router

    def stands(self, want: Want) -> bool:
        """Whether the worker whose offer is to be taken over is still there."""
        assert want.offer is not None
        place = want.offer.place
        worker = self._registry.workers.get(place.address)
        return worker is not None and worker.incarnation == place.incarnation

    def choose(
        self,
        want: Want,
        tier: Tier,
        cached: Cached,
        now: float,
        fits: Fingerprint | None = None,
        beside: frozenset[Place] = frozenset(),
        *,
        least_wait: bool = False,
    ) -> Route | None:
        """Workers for these choices, of this fingerprint if they have begun, those in `beside` if possible; None if
        they have to wait. With `least_wait` those where they wait least, however long the prompt then takes."""
        caution = Caution(avoid=want.avoid, fits=fits, beside=beside)
        ask = Ask(num_tokens=want.num_tokens, tier=tier, num_choices=len(want.choices), now=now, least_wait=least_wait)
        if want.offer is None:
            return self._router.choose(ask, cached, caution)
        decode = caution.decode(self._registry.usable(Role.DECODE))
        return Rebind(least_loaded_decode(decode, ask, cached)) if decode else None

    def refuge(self, address: str, num_tokens: int, fits: Fingerprint | None = None) -> WorkerView | None:
        """A decode worker, other than the one at `address`, that probably has room for a sequence that has to leave."""
        others = [
            worker
            for worker in Caution(fits=fits).decode(self._registry.usable(Role.DECODE))
            if worker.address != address and worker.has_room(num_tokens)
        ]
        return least_loaded_decode(others, Ask(num_tokens=num_tokens), {}) if others else None
