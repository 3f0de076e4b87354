"""The gateway's knowledge of each worker: whether it may be given work, and its load. Pure state."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from common.contract.errors import Cause, FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import PROTOCOL_VERSION
from common.contract.messages import Heartbeat, Phase, Role, Welcome
from common.contract.tiers import Tier
from gateway.serving.attempt import Place
from gateway.workers.discovery import Endpoint
from gateway.workers.token_rates import TokenRates

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Work given to a worker by a message that no heartbeat has confirmed yet."""

    number: int
    """Number of the message within its session."""
    tier: Tier
    num_tokens: int = 0
    """Prompt tokens that the worker probably has to compute."""
    num_sequences: int = 0
    num_blocks: int = 0
    at: float = field(default=0.0, compare=False)
    """When the work was given, or later, if the work before it took until then."""


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as this gateway sees it."""

    address: str
    role: Role
    incarnation: Incarnation | None = None
    """Set while the worker's session is open."""
    session: int = 0
    """Number of its last session, counted over all workers: a larger number means that the session began later."""
    life: Incarnation | None = None
    """The last incarnation that had an open session. Requests are counted per incarnation."""
    restarts: int = 0
    """How often another incarnation has replaced the last one."""
    welcome: Welcome | None = None
    load: Heartbeat | None = None
    """The last heartbeat of this session."""
    load_at: float = 0.0
    """When the last heartbeat arrived."""
    in_flight: int = 0
    """Requests that this gateway has given it and whose part there is not over."""
    unseen: deque[Given] = field(default_factory=deque)
    """Work given to it that its heartbeats have not confirmed yet, oldest first."""
    gone: list[int] = field(default_factory=lambda: [0] * len(Tier))
    """Sequences that have left it since its last heartbeat, by tier."""
    refused: str | None = None
    """Why it is not used although it answers; None if it is used."""
    idle_or_stepped_at: float = 0.0
    """When its engine last had nothing to do, or had completed a step."""
    stalled: bool = False
    """Whether its engine has work and makes no progress."""
    full: bool = False
    """Whether it has refused an admitted request for lack of capacity since its last heartbeat."""
    leaving: bool = False
    """Whether it has refused a request because it drains, since its last heartbeat."""
    rates: TokenRates = field(default_factory=TokenRates)
    """Token rates of this session."""
    identity: str = ""
    """Identity of the worker at this address, if discovery knows it."""
    listed: bool = True
    """Whether discovery lists this worker."""
    serving: bool = True
    """Whether discovery says that it may be given new work."""

    @property
    def there(self) -> bool:
        """Whether it may be given new work, now or later: a draining worker counts, since it can serve again. `refused`
        is ignored."""
        return self.incarnation is not None and self.listed and not self.stalled

    @property
    def available(self) -> bool:
        """Whether it may be given new work now, if its fingerprint fits."""
        said = self.load or self.welcome
        leaving = self.leaving or not self.serving or (said is not None and said.phase is not Phase.SERVING)
        return self.there and not leaving

    @property
    def usable(self) -> bool:
        """Whether it may be given new work now."""
        return self.available and self.refused is None

    @property
    def sequences(self) -> list[int]:
        """Number of its sequences by tier, most urgent tier first."""
        said = self.load.sequences if self.load else (0,) * len(Tier)
        sequences = [max(0, num - gone) for num, gone in zip(said, self.gone, strict=True)]
        for given in self.unseen:
            sequences[given.tier.rank] += given.num_sequences
        return sequences

    @property
    def blocks_expected(self) -> int:
        """The most blocks that it is expected to use, as far as is known."""
        return (self.load.blocks_used if self.load else 0) + sum(given.num_blocks for given in self.unseen)

    def holds(self, num_tokens: int) -> bool:
        """Whether it accepts a sequence of `num_tokens`, prompt and output, by its own account."""
        return self.welcome is not None and num_tokens <= self.welcome.max_sequence_tokens

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` would probably find room there at once."""
        if self.load is None or self.welcome is None:
            return False
        num_blocks = -(-num_tokens // self.welcome.fingerprint.layout.block_size) + 1
        return self.blocks_expected + num_blocks <= self.load.blocks_total

    def forget_given(self) -> None:
        """Forget the work given and the sequences gone, because counting starts anew."""
        self.unseen.clear()
        self.gone = [0] * len(Tier)

    @property
    def place(self) -> Place:
        """Its address and incarnation; valid only while its session is open."""
        assert self.incarnation is not None
        return Place(self.address, self.incarnation)


class Registry:
    """All workers that this gateway knows, by address.

    All usable workers have one fingerprint: that of the available worker with the oldest session. Workers with another
    fingerprint are refused as long as a worker with that one is available.
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
        self.epoch = 0
        """Counter of events that may have changed which workers are usable."""

    def add(self, role: Role, endpoint: Endpoint) -> None:
        """Add a worker at a new address."""
        assert endpoint.address not in self.workers, endpoint
        self.workers[endpoint.address] = WorkerView(
            endpoint.address, role, identity=endpoint.identity, serving=endpoint.serving
        )

    def relist(self, role: Role, serving: Mapping[str, bool]) -> None:
        """Set which addresses of a role are listed, and whether they may be given new work."""
        for worker in self.workers.values():
            if worker.role is role:
                worker.listed = worker.address in serving
                worker.serving = serving.get(worker.address, worker.serving)
        self._settle()

    def remove(self, address: str) -> None:
        """Remove a worker with which there is no session."""
        self.lost(address)
        del self.workers[address]

    def opened(self, address: str, incarnation: Incarnation, welcome: Welcome) -> None:
        """Open a session. Raises `FingerprintMismatchError` if the worker must not be used."""
        worker = self.workers[address]
        worker.incarnation, worker.welcome, worker.load = incarnation, welcome, None
        worker.session = next(self._sessions)
        worker.forget_given()
        if worker.life != incarnation:
            if worker.life is not None:
                worker.restarts += 1
                self.num_restarts[worker.role] += 1
            worker.life = incarnation
            worker.in_flight = 0
        worker.refused, worker.stalled = None, False
        worker.full = worker.leaving = False
        worker.rates.forget()
        self._settle(opening=worker)
        if worker.refused is not None:
            raise FingerprintMismatchError(worker.refused)

    def lost(self, address: str) -> None:
        """End a worker's session."""
        worker = self.workers[address]
        worker.incarnation = worker.welcome = worker.load = None
        worker.forget_given()
        worker.refused = None
        worker.rates.forget()
        self._settle()

    def resynced(self, address: str) -> None:
        """Restart the counts of work given in a session, after lost messages."""
        self.workers[address].forget_given()

    def heartbeat(self, address: str, load: Heartbeat, now: float) -> bool:
        """Take a worker's heartbeat. Returns whether it shows, for the first time, that the engine hangs."""
        worker = self.workers[address]
        was_available = worker.available
        before, worker.load, worker.load_at = worker.load, load, now
        worker.gone = [0] * len(Tier)
        worker.full = worker.leaving = False
        worker.rates.read(now, load.prompt_tokens, load.output_tokens)
        while worker.unseen and worker.unseen[0].number <= load.received:
            worker.unseen.popleft()
        if before is None or load.running == 0 or load.steps != before.steps:
            worker.idle_or_stepped_at, worker.stalled = now, False
        stalls = now - worker.idle_or_stepped_at > self._stall_s and not worker.stalled
        worker.stalled = worker.stalled or stalls
        if worker.available != was_available:
            self._settle()
        return stalls

    def declined(self, address: str, cause: Cause) -> None:
        """Note that a worker has refused a request because it is full or drains; until its next heartbeat it is not
        asked again."""
        worker = self.workers[address]
        if cause is Cause.CAPACITY:
            worker.full = True
        elif cause is Cause.DRAINING and not worker.leaving:
            worker.leaving = True
            self._settle()

    def takes(self, place: Place) -> bool:
        """Whether an admitted request may be sent there now."""
        worker = self.workers.get(place.address)
        return worker is not None and worker.incarnation == place.incarnation and worker.usable and not worker.full

    def took(self, address: str, given: Given) -> None:
        """Record work given to a worker."""
        worker = self.workers[address]
        worker.in_flight += 1
        worker.unseen.append(given)

    def left(self, address: str, incarnation: Incarnation, given: Given | None = None, now: float = 0.0) -> None:
        """Record the end of a request's part at a worker. `given`, the work it was given, need no longer be confirmed.
        Inert if that incarnation of the worker is over."""
        worker = self.workers.get(address)
        if worker is not None and worker.life == incarnation:
            worker.in_flight -= 1
            if given is None:
                return
            if given in worker.unseen:
                index = worker.unseen.index(given)
                del worker.unseen[index]
                if given.num_tokens:  # it took the time until now: the work behind it begins now
                    for behind in range(index, len(worker.unseen)):
                        each = worker.unseen[behind]
                        worker.unseen[behind] = replace(each, at=max(each.at, now))
            else:
                worker.gone[given.tier.rank] += given.num_sequences

    @property
    def block_size(self) -> int:
        """Block size of all usable workers."""
        welcomes = (worker.welcome for worker in self.workers.values() if worker.usable)
        return next(welcome.fingerprint.layout.block_size for welcome in welcomes if welcome is not None)

    def usable(self, role: Role) -> list[WorkerView]:
        """Workers of a role that may be given work."""
        return [worker for worker in self.workers.values() if worker.role is role and worker.usable]

    def missing(self) -> list[Role]:
        """Roles that need a usable worker and have none."""
        roles = (Role.DECODE,) if self.colocated else (Role.PREFILL, Role.DECODE)
        return [role for role in roles if not self.usable(role)]

    def _settle(self, opening: WorkerView | None = None) -> None:
        """Decide anew which workers are refused, after the set of available workers may have changed."""
        self.epoch += 1
        first: WorkerView | None = None
        for worker in sorted(self.workers.values(), key=lambda each: each.session):
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
