"""One worker as this gateway sees it. Pure state."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from common.contract.ids import Incarnation
from common.contract.kv_layout import Fingerprint
from common.contract.messages.session import Heartbeat, Phase, Profile, Role, Welcome
from common.contract.tiers import Tier
from gateway.workers.worker_life import WorkerLife


@dataclass(slots=True, kw_only=True, eq=False)
class Given:
    """Work given to a worker by a message that no heartbeat has confirmed yet."""

    number: int
    """Number of the message within its session."""
    tier: Tier
    num_tokens: int = 0
    """Prompt tokens that the worker probably has to compute."""
    num_sequences: int = 0
    num_blocks: int = 0
    at: float = 0.0
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
    opened_at: float = -math.inf
    """When its last session began; monotonic seconds."""
    lost_at: float = -math.inf
    """When its last session ended."""
    last_incarnation: Incarnation | None = None
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
    no_room_for: float = math.inf
    """Tokens of the shortest running sequence for which it had no room when it was asked last."""
    no_room_at: float = 0.0
    """When it said so."""
    broken_at: float | None = None
    """When its connection broke, while it is not known yet whether it has crashed, and others are preferred; else
    None."""
    leaving: bool = False
    """Whether it has refused a request because it drains, since its last heartbeat."""
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
    def profile(self) -> Profile:
        """What it is packed for, if it decodes."""
        return Profile.THROUGHPUT if self.welcome is None else self.welcome.profile

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

    def fits(self, fingerprint: Fingerprint | None) -> bool:
        """Whether its session is open and, if a fingerprint is given, has that one."""
        return self.welcome is not None and fingerprint in (None, self.welcome.fingerprint)

    def has_room(self, num_tokens: int, tier: Tier) -> bool:
        """Whether a sequence of `num_tokens` would probably find room there at once, and a place in the batch: lower
        tiers give way."""
        if self.load is None or self.welcome is None or self.broken_at is not None or num_tokens >= self.no_room_for:
            return False
        ahead = sum(self.sequences[: tier.rank + 1])
        # Those whose prompts are being computed elsewhere, or wait for that, have no place yet.
        inside = self.load.running + sum(given.num_sequences for given in self.unseen)
        if 0 < self.load.places <= min(ahead, inside):
            return False
        num_blocks = -(-num_tokens // self.welcome.fingerprint.layout.block_size) + 1
        return self.blocks_expected + num_blocks <= self.load.blocks_total

    def described(self) -> dict[str, object]:
        """What operators and the dashboard are told of it; JSON values only."""
        load = self.load
        said = load or self.welcome
        return {
            "id": self.address,
            "role": self.role.value,
            "profile": self.profile.value if self.role is Role.DECODE and self.welcome else None,
            "connected": self.incarnation is not None,
            "listed": self.listed,
            "ready": self.serving,
            "usable": self.usable,
            "phase": said.phase.value if said else None,
            "safe_to_delete": load is not None and load.phase is Phase.DRAINED,
            "refused": self.refused,
            "stalled": self.stalled,
            "restarts": self.restarts,
            "transport": self.welcome.transport if self.welcome else None,
            "in_flight": self.in_flight,
            "running": load.running if load else None,
            "waiting": load.waiting if load else None,
            "queued_tokens": sum(load.queued_tokens) if load else None,
            "blocks_used": load.blocks_used if load else None,
            "blocks_total": load.blocks_total if load else None,
            "prompt_tokens": load.prompt_tokens if load else None,
            "output_tokens": load.output_tokens if load else None,
        }

    def forget_given(self) -> None:
        """Forget the work given and the sequences gone, because counting starts anew."""
        self.unseen.clear()
        self.gone = [0] * len(Tier)

    @property
    def life(self) -> WorkerLife:
        """Its address and incarnation; valid only while its session is open."""
        assert self.incarnation is not None
        return WorkerLife(self.address, self.incarnation)
