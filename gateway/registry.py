"""What the gateway knows of each worker: whether it may be given work, and how loaded it is. Pure state."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from common.contract.errors import FingerprintMismatchError
from common.contract.ids import Incarnation
from common.contract.kv_layout import PROTOCOL_VERSION
from common.contract.messages import Heartbeat, Phase, Role, Welcome
from gateway.attempt import Place


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker, as seen from here."""

    address: str
    role: Role
    incarnation: Incarnation | None = None
    """Set while its session is open."""
    life: Incarnation | None = None
    """The last one whose session was open: requests are counted for each."""
    welcome: Welcome | None = None
    load: Heartbeat | None = None
    """The last heartbeat of this session."""
    in_flight: int = 0
    """Requests that this gateway has given it and whose part there is not over."""
    in_flight_tokens: int = 0
    """Tokens of those requests' prompts, whoever computes them."""
    refused: str | None = None
    """Why it is not used although it answers."""
    idle_or_stepped_at: float = 0.0
    """When its engine last had nothing to do, or had done a step."""
    stalled: bool = False
    """Whether its engine has work and makes no progress."""

    @property
    def usable(self) -> bool:
        """Whether it may be given new work."""
        said = self.load or self.welcome
        leaving = said is not None and said.phase is not Phase.SERVING
        return self.incarnation is not None and self.refused is None and not leaving and not self.stalled

    def has_room(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` probably finds room there at once."""
        if self.load is None or self.welcome is None:
            return False
        num_blocks = -(-num_tokens // self.welcome.fingerprint.layout.block_size) + 1
        return self.load.blocks_used + num_blocks <= self.load.blocks_total

    @property
    def place(self) -> Place:
        """This life of it; only while its session is open."""
        assert self.incarnation is not None
        return Place(self.address, self.incarnation)


class Registry:
    """Every worker that this gateway was told of, by address."""

    def __init__(
        self, prefill: tuple[str, ...], decode: tuple[str, ...], config_hash: str, *, stall_s: float = 30.0
    ) -> None:
        """A worker whose engine has work and does no step for `stall_s` is not used until it does."""
        self._config_hash = config_hash
        self._stall_s = stall_s
        self.workers = {address: WorkerView(address, Role.PREFILL) for address in prefill} | {
            address: WorkerView(address, Role.DECODE) for address in decode
        }
        self.colocated = not prefill
        """Whether decode workers are there to compute every prompt."""

    def opened(self, address: str, incarnation: Incarnation, welcome: Welcome) -> None:
        """A session is open. Raises `FingerprintMismatchError` when the worker must not be used."""
        worker = self.workers[address]
        worker.incarnation, worker.welcome, worker.load = incarnation, welcome, None
        if worker.life != incarnation:
            worker.life = incarnation
            worker.in_flight = worker.in_flight_tokens = 0
        worker.refused, worker.stalled = None, False
        try:
            self._require_fit(worker, welcome)
        except FingerprintMismatchError as error:
            worker.refused = str(error)
            raise

    def lost(self, address: str) -> None:
        """Its session is over."""
        worker = self.workers[address]
        worker.incarnation = worker.welcome = worker.load = None
        worker.refused = None
        for other in self.workers.values():  # one that did not fit beside the lost one may fit now
            if other.refused is not None and other.welcome is not None:
                with contextlib.suppress(FingerprintMismatchError):
                    self._require_fit(other, other.welcome)
                    other.refused = None

    def heartbeat(self, address: str, load: Heartbeat, now: float) -> bool:
        """Its state of this moment; whether it shows, for the first time, that the engine hangs."""
        worker = self.workers[address]
        before, worker.load = worker.load, load
        if before is None or load.running == 0 or load.steps != before.steps:
            worker.idle_or_stepped_at, worker.stalled = now, False
        stalls = now - worker.idle_or_stepped_at > self._stall_s and not worker.stalled
        worker.stalled = worker.stalled or stalls
        return stalls

    def took(self, address: str, num_tokens: int) -> None:
        """A request with a prompt of `num_tokens` was given to it."""
        worker = self.workers[address]
        worker.in_flight += 1
        worker.in_flight_tokens += num_tokens

    def left(self, address: str, incarnation: Incarnation, num_tokens: int) -> None:
        """A request's part there is over; inert if that life of the worker is, too."""
        worker = self.workers[address]
        if worker.life == incarnation:
            worker.in_flight -= 1
            worker.in_flight_tokens -= num_tokens

    def usable(self, role: Role) -> list[WorkerView]:
        """Workers of a role that may be given work."""
        return [worker for worker in self.workers.values() if worker.role is role and worker.usable]

    def missing(self) -> list[Role]:
        """Roles of which there should be a usable worker, and is none."""
        roles = (Role.DECODE,) if self.colocated else (Role.PREFILL, Role.DECODE)
        return [role for role in roles if not self.usable(role)]

    def _require_fit(self, worker: WorkerView, welcome: Welcome) -> None:
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
        for other in self.workers.values():
            if other is not worker and other.usable and other.welcome is not None:
                other.welcome.fingerprint.require_equal(welcome.fingerprint, other.address, worker.address)
