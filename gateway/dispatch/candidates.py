"""Which workers may take the choices of a want, or a sequence that leaves its worker, and which is the best. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.contract.kv_layout import Fingerprint
from common.contract.messages.session import Phase, Role
from common.contract.tiers import Tier
from gateway.dispatch.router import Ask, Cached, Caution, Handoff, Local, Router
from gateway.serving.choice import Choice
from gateway.serving.flow_actions import Want
from gateway.workers.load_table import Rows
from gateway.workers.registry import Registry
from gateway.workers.worker_life import WorkerLife
from gateway.workers.worker_view import WorkerView


@dataclass(frozen=True, slots=True)
class Rebind:
    """Route to another decode worker, for an offer that still stands."""

    decode: WorkerView


_ONE_TOKEN = Ask(num_tokens=1, tier=Tier.INTERACTIVE)
"""The least that a sequence can ask for."""
Route = Handoff | Local | Rebind


class Candidates:
    """Questions about the registry's workers."""

    def __init__(self, registry: Registry, router: Router) -> None:
        self._registry = registry
        self._router = router

    def able(self, want: Want, fingerprint: Fingerprint | None) -> list[WorkerView]:
        """The decode workers that may take these choices."""
        return self._registry.table.views(self._rows(_caution(want, fingerprint), _ask(want)))

    def hope(self, want: Want, fingerprint: Fingerprint | None) -> bool:
        """Whether a decode worker exists that may take these choices, now or after draining."""
        caution, table = _caution(want, None), self._registry.table
        there = [
            row
            for row, worker in enumerate(table.workers)
            if worker.role is Role.DECODE and worker.there and worker.refused is None and worker.fits(fingerprint)
        ]
        return len(caution.able(table, np.array(there, dtype=np.intp), _ask(want))) > 0

    def all_too_small(self, want: Want, fingerprint: Fingerprint | None) -> bool:
        """Whether decode workers are usable, and all have said that they can never hold these choices."""
        ask = _ask(want)
        return len(self._rows(Caution(fingerprint=fingerprint), ask)) > 0 and not len(
            self._rows(_caution(want, fingerprint), ask)
        )

    def choose(
        self,
        want: Want,
        tier: Tier,
        cached: Cached,
        now: float,
        fingerprint: Fingerprint | None = None,
        beside: frozenset[WorkerLife] = frozenset(),
        *,
        least_wait: bool = False,
    ) -> Route | None:
        """Workers for these choices; None if they have to wait.

        They have this fingerprint, if given. Workers in `beside` are preferred. `least_wait` minimises the wait,
        however long the prompt then takes.
        """
        caution = _caution(want, fingerprint, beside)
        ask = _ask(want, tier, now, least_wait=least_wait)
        if want.offer is None:
            return self._router.choose(ask, cached, caution)
        table = self._registry.table
        decode = caution.decode(table, self._registry.usable_rows(Role.DECODE), ask)
        if not len(decode):
            return None
        return Rebind(self._router.taker(decode, ask, cached))

    def may_leave(self, address: str) -> bool:
        """Whether the worker at `address` is a draining decode worker, and another one may have room for its
        sequences."""
        leaving = self._registry.workers.get(address)
        if leaving is None or leaving.role is not Role.DECODE:
            return False
        if leaving.welcome is None or leaving.load is None or leaving.load.phase is Phase.SERVING:
            return False
        others = self._rows(Caution(fingerprint=leaving.welcome.fingerprint), _ONE_TOKEN)
        return any(
            worker.has_room(_ONE_TOKEN.num_tokens, _ONE_TOKEN.tier) for worker in self._registry.table.views(others)
        )

    def refuge(
        self,
        address: str,
        choice: Choice,
        most_tokens: int,
        fingerprint: Fingerprint | None = None,
        tier: Tier = Tier.STANDARD,
    ) -> WorkerView | None:
        """A decode worker other than the one at `address` that probably has room for a leaving sequence; None without
        one. Those that have failed to take it over are the last ones."""
        ask = Ask(num_tokens=choice.next_position, most_tokens=most_tokens, tier=tier)
        caution = Caution(fingerprint=fingerprint, too_small=frozenset(choice.too_small), admitted=True)
        rows = self._rows(caution, ask)
        others = {
            row: worker.life
            for row, worker in zip(rows.tolist(), self._registry.table.views(rows), strict=True)
            if worker.address != address and worker.has_room(ask.num_tokens, tier)
        }
        untried = [row for row, life in others.items() if life not in choice.bad_sinks]
        if not untried:
            choice.bad_sinks.clear()  # each of them is tried again, in turn
        if not others:
            return None
        return self._router.taker(np.array(untried or list(others)), ask, {})

    def _rows(self, caution: Caution, ask: Ask) -> Rows:
        return caution.able(self._registry.table, self._registry.usable_rows(Role.DECODE), ask)


def _caution(want: Want, fingerprint: Fingerprint | None, beside: frozenset[WorkerLife] = frozenset()) -> Caution:
    return Caution(
        avoid=want.avoid, fingerprint=fingerprint, beside=beside, too_small=want.too_small, admitted=want.admitted
    )


def _ask(want: Want, tier: Tier = Tier.STANDARD, now: float = 0.0, *, least_wait: bool = False) -> Ask:
    return Ask(
        num_tokens=want.num_tokens,
        tier=tier,
        num_choices=len(want.choices),
        most_tokens=want.most_tokens,
        now=now,
        least_wait=least_wait,
    )
