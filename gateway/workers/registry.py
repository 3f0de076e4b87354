"""The gateway's knowledge of each worker: whether it may be given work, and its load. Pure state."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from common.contract.errors import FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import PROTOCOL_VERSION
from common.contract.messages.session import Heartbeat, Role, Welcome
from common.contract.tiers import Tier
from gateway.workers.discovery import Endpoint
from gateway.workers.load_table import LoadTable, Rows
from gateway.workers.worker_view import Given, WorkerView

log = logging.getLogger(__name__)

_TOGETHER_S = 3.0
"""Seconds after the opening of a decode worker's session in which others that were lost may follow. Workers that were
lost together begin to start, or can be reached again, at the same time, and so are back within a few seconds."""
_EXPECTED_S = 600.0
"""Seconds after its loss for which a worker is expected back: a large model takes minutes to load."""
_MAX_GONE = 4096
"""Most removed workers whose last incarnations are remembered."""
_NEARLY = 7 / 8
"""Share of what the largest decode worker takes in one sequence from which on another one takes nearly as much."""
_NO_ROOM_S = 1.0
"""Seconds after which a worker that had no room for a running sequence is asked again, although it holds no less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """What follows from which workers are usable."""

    rows: Mapping[Role, Rows]
    missing: list[Role]
    block_size: int
    """Block size of all usable workers; 0 without any."""
    max_sequence_tokens: int | None
    """Most tokens of one sequence at any usable decode worker; None without one."""
    usual_sequence_tokens: int | None
    """Most tokens of one sequence at the smallest usable decode worker that takes nearly as many as the largest; None
    without one."""


class Registry:
    """All workers that this gateway knows, by address.

    All usable workers have one fingerprint: that of the available decode worker with the oldest session, because a
    prefill worker alone serves nobody. Without an available decode worker, it is that of the available prefill worker
    with the oldest session. Available workers with another fingerprint are refused.
    """

    def __init__(
        self,
        prefill: tuple[str, ...],
        decode: tuple[str, ...],
        config_hash: str,
        *,
        colocated: bool | None = None,
        stall_s: float = 30.0,
    ) -> None:
        """The registry begins with these workers. `colocated` says that there will be no prefill workers; its default
        is whether `prefill` is empty. A worker whose engine has work and completes no step for `stall_s` is not used
        until it does."""
        self._config_hash = config_hash
        self._stall_s = stall_s
        self.workers = {address: WorkerView(address, Role.PREFILL) for address in prefill} | {
            address: WorkerView(address, Role.DECODE) for address in decode
        }
        self.colocated = not prefill if colocated is None else colocated
        """Whether decode workers compute every prompt, because there are no prefill workers."""
        self._sessions = itertools.count(1)
        self.num_restarts: Counter[Role] = Counter()
        """Times that a new incarnation of a worker was met at its address, by role."""
        self._gone: dict[tuple[str, str], tuple[Incarnation, int]] = {}
        """Removed worker, by address and identity → its last incarnation and its restarts; the last removed comes last.
        DNS lists no worker that is not ready: one that restarts is removed, and added again once it has loaded."""
        self.epoch = 0
        """Counter of events that may have changed which workers are usable, or which are connected again."""
        self._coming_back = (-1, -math.inf)
        """The epoch in which `coming_back_until` was found out last, and its value."""
        self._table: LoadTable | None = None
        """None until it is asked for, after the set of workers has changed."""
        self._changed: set[WorkerView] = set()
        """Workers whose row of the table is to be computed before the table is read. A heartbeat does so at once, so
        that a request after a long time does not do it for all workers; other events often come many at a time."""
        self._usable: Usable | None = None
        """None if it is to be found out."""

    def add(self, role: Role, endpoint: Endpoint) -> None:
        """Add a worker at a new address."""
        assert endpoint.address not in self.workers, endpoint
        self.workers[endpoint.address] = WorkerView(
            endpoint.address, role, identity=endpoint.identity, serving=endpoint.serving
        )
        self._forget_table()

    def relist(self, role: Role, serving: Mapping[str, bool]) -> None:
        """Set which addresses of a role are listed, and whether they may be given new work."""
        for worker in self.workers.values():
            if worker.role is role:
                worker.listed = worker.address in serving
                worker.serving = serving.get(worker.address, worker.serving)
        self._refit()

    def remove(self, address: str) -> None:
        """Remove a worker with which there is no session."""
        self.lost(address)
        worker = self.workers.pop(address)
        if worker.last_incarnation is not None:
            self._gone[address, worker.identity] = worker.last_incarnation, worker.restarts
            if len(self._gone) > _MAX_GONE:
                del self._gone[next(iter(self._gone))]
        self._forget_table()

    def opened(self, address: str, incarnation: Incarnation, welcome: Welcome, now: float = 0.0) -> None:
        """Open a session. Raises `FingerprintMismatchError` if the worker must not be used."""
        worker = self.workers[address]
        worker.opened_at = now
        worker.incarnation, worker.welcome, worker.load = incarnation, welcome, None
        worker.session = next(self._sessions)
        worker.forget_given()
        if worker.last_incarnation != incarnation:
            known = worker.last_incarnation, worker.restarts
            before, worker.restarts = self._gone.pop((address, worker.identity), known)
            if before not in (None, incarnation):
                worker.restarts += 1
                self.num_restarts[worker.role] += 1
            worker.last_incarnation = incarnation
            worker.in_flight = 0
        worker.refused, worker.stalled = None, False
        worker.leaving, worker.broken_at = False, None
        worker.no_room_for = math.inf
        self._changed.add(worker)
        self._refit(opening=worker)
        if worker.refused is not None:
            raise FingerprintMismatchError(worker.refused)

    def lost(self, address: str, now: float = 0.0) -> None:
        """End a worker's session."""
        worker = self.workers[address]
        worker.lost_at = now
        worker.incarnation = worker.welcome = worker.load = None
        worker.forget_given()
        worker.refused = worker.broken_at = None
        self._changed.add(worker)
        self._refit()

    def resynced(self, address: str) -> None:
        """Restart the counts of work given in a session, after lost messages."""
        worker = self.workers[address]
        worker.forget_given()
        if worker.broken_at is not None:
            worker.broken_at = None
            self.epoch += 1  # its room counts again
        self._changed.add(worker)

    def broken(self, address: str, now: float = 0.0) -> None:
        """Note that a worker's connection has broken: it may have crashed, or be resynced in a moment."""
        self.workers[address].broken_at = now
        self._changed.add(self.workers[address])

    def heartbeat(self, address: str, load: Heartbeat, now: float) -> bool:
        """Take a worker's heartbeat. Returns whether it shows, for the first time, that the engine hangs."""
        worker = self.workers[address]
        was_available = worker.available
        before, worker.load, worker.load_at = worker.load, load, now
        worker.gone = [0] * len(Tier)
        worker.leaving = False
        less = before is None or load.blocks_used < before.blocks_used or sum(load.sequences) < sum(before.sequences)
        if less or now - worker.no_room_at > _NO_ROOM_S:
            worker.no_room_for = math.inf
        while worker.unseen and worker.unseen[0].number <= load.received:
            worker.unseen.popleft()
        stepped = before is None or load.steps != before.steps
        # A hung engine has nothing running once what it had was taken away: only a step shows that it works again.
        if stepped or (load.running == 0 and not worker.stalled):
            worker.idle_or_stepped_at, worker.stalled = now, False
        stalls = now - worker.idle_or_stepped_at > self._stall_s and not worker.stalled
        worker.stalled = worker.stalled or stalls
        self._changed.add(worker)
        self._update_table()
        if worker.available != was_available or (before is None and worker.role is Role.DECODE):
            self._refit()  # the first one tells how many places it has
        return stalls

    def declined(self, address: str) -> None:
        """Note that a worker has refused a request because it drains; until its next heartbeat it is not asked
        again."""
        worker = self.workers[address]
        if not worker.leaving:
            worker.leaving = True
            self._refit()

    def no_room(self, address: str, num_tokens: int, now: float) -> None:
        """Note that a worker has no room for a running sequence of `num_tokens`. It is not asked to take one as long as
        that until a heartbeat shows that it holds less, or for `_NO_ROOM_S`."""
        worker = self.workers[address]
        worker.no_room_for, worker.no_room_at = min(worker.no_room_for, num_tokens), now

    def refuses(self, address: str, why: str) -> None:
        """Note that a worker refuses this gateway."""
        self.workers[address].refused = why
        self._usable = None

    def took(self, address: str, given: Given) -> None:
        """Record work given to a worker."""
        worker = self.workers[address]
        worker.in_flight += 1
        worker.unseen.append(given)
        self._changed.add(worker)

    def left(self, address: str, incarnation: Incarnation, given: Given | None = None, now: float = 0.0) -> None:
        """Record the end of a request's part at a worker. `given`, the work it was given, need no longer be confirmed.
        Inert if that incarnation of the worker is over."""
        worker = self.workers.get(address)
        if worker is None or worker.last_incarnation != incarnation:
            return
        worker.in_flight -= 1
        if given is not None:
            self._over(worker, given, now)
        self._changed.add(worker)

    def _over(self, worker: WorkerView, given: Given, now: float) -> None:
        try:
            index = worker.unseen.index(given)
        except ValueError:
            # Its heartbeats count only sequences that go on: of several, all but the last have ended before, as a rule.
            worker.gone[given.tier.rank] += min(1, given.num_sequences)
            return
        del worker.unseen[index]
        if given.num_tokens:  # it took the time until now: the work behind it begins now
            for behind in itertools.islice(worker.unseen, index, None):
                if behind.at < now:
                    behind.at = now

    def coming_back_until(self) -> float:
        """Until when decode workers are coming back, unless the epoch changes: the session of one opened a moment ago,
        and others that were lost not long before that have none yet. In the past if none are."""
        epoch, until = self._coming_back
        if epoch != self.epoch:
            listed = [worker for worker in self.workers.values() if worker.role is Role.DECODE and worker.listed]
            opened_at = max((worker.opened_at for worker in listed if worker.usable), default=-math.inf)
            losses = [worker.lost_at for worker in listed if worker.incarnation is None]
            lost_at = max((at for at in losses if at < opened_at), default=-math.inf)
            until = min(opened_at + _TOGETHER_S, lost_at + _EXPECTED_S)
            self._coming_back = self.epoch, until
        return until

    @property
    def table(self) -> LoadTable:
        """The loads of all workers. A table keeps its rows; another set of workers has another table."""
        if self._table is None:
            self._table = LoadTable(self.workers.values())
        self._update_table()
        return self._table

    def usable_rows(self, role: Role) -> Rows:
        """Rows of the table of the workers of a role that may be given work."""
        return self.usable_now.rows[role]

    @property
    def usable_now(self) -> Usable:
        """What follows from which workers are usable at present."""
        if self._usable is None:
            usable = [(row, worker) for row, worker in enumerate(self.table.workers) if worker.usable]
            rows = {
                role: np.array([row for row, worker in usable if worker.role is role], dtype=np.intp)
                for role in (Role.PREFILL, Role.DECODE)
            }
            needed = (Role.DECODE,) if self.colocated else (Role.PREFILL, Role.DECODE)
            said = [worker.welcome for _, worker in usable if worker.welcome is not None]
            sizes = [welcome.max_sequence_tokens for welcome in said if welcome.role is Role.DECODE]
            largest = max(sizes, default=0)
            self._usable = Usable(
                rows=rows,
                missing=[role for role in needed if not len(rows[role])],
                block_size=said[0].fingerprint.layout.block_size if said else 0,
                max_sequence_tokens=largest or None,
                usual_sequence_tokens=min((size for size in sizes if size >= _NEARLY * largest), default=None),
            )
        return self._usable

    def usable(self, role: Role) -> list[WorkerView]:
        """Workers of a role that may be given work."""
        return self.table.views(self.usable_rows(role))

    def missing(self) -> list[Role]:
        """Roles that need a usable worker and have none."""
        return self.usable_now.missing

    def misfit(self) -> str | None:
        """Why one of the workers with an open session is refused; None if none is."""
        sessions = (worker for worker in self.workers.values() if worker.welcome is not None)
        return next((worker.refused for worker in sessions if worker.refused is not None), None)

    def _update_table(self) -> None:
        if self._table is not None:
            for worker in self._changed:
                self._table.update(worker)
        self._changed.clear()

    def _forget_table(self) -> None:
        self._table = None
        self._changed.clear()
        self._usable = None

    def _refit(self, opening: WorkerView | None = None) -> None:
        """Decide anew which workers are refused, after the set of available workers may have changed."""
        self.epoch += 1
        self._usable = None
        first: WorkerView | None = None
        for worker in sorted(self.workers.values(), key=lambda each: (each.role is Role.PREFILL, each.session)):
            if worker.welcome is None:
                continue
            before, worker.refused = worker.refused, None
            try:
                self._require_fit(worker, worker.welcome, first)
            except FingerprintMismatchError as error:
                worker.refused = str(error)
            if first is None and worker.usable:
                first = worker
            if worker is opening:
                continue  # the caller reports a refusal of this one
            if before is None and worker.refused is not None:
                log.error("worker refused: %s", worker.refused)
            elif before is not None and worker.refused is None:
                log.info("the worker at %s is refused no longer", worker.address)

    def _require_fit(self, worker: WorkerView, welcome: Welcome, first: WorkerView | None) -> None:
        if welcome.role is not worker.role:
            raise FingerprintMismatchError(
                f"the worker at {worker.address} was given as {worker.role} but is {welcome.role}"
            )
        if welcome.fingerprint.protocol_version != PROTOCOL_VERSION:
            raise FingerprintMismatchError(
                f"fingerprint mismatch: protocol_version: {PROTOCOL_VERSION} at this gateway, "
                f"{welcome.fingerprint.protocol_version} at {worker.address}"
            )
        if welcome.fingerprint.config_hash != self._config_hash:
            raise FingerprintMismatchError(
                f"fingerprint mismatch: config_hash: {self._config_hash} at this gateway, "
                f"{welcome.fingerprint.config_hash} at {worker.address}"
            )
        if first is not None and first.welcome is not None:
            first.welcome.fingerprint.require_equal(welcome.fingerprint, first.address, worker.address)
