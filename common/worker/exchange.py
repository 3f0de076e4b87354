"""The pulls and the leases of one core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from common.runtime.config import WorkerSettings
from common.worker.agenda import Agenda
from kv_transfer.lender import UNATTACHED_TTL_S, FindPrefix, Lender
from kv_transfer.pulls import Pulls
from kv_transfer.regions import Region


class Exchange:
    """What a core takes from other workers, and what it gives them. Pure state."""

    def __init__(
        self,
        agenda: Agenda,
        settings: WorkerSettings,
        region: Region,
        find_prefix: FindPrefix,
        unattached_ttl_s: float = UNATTACHED_TTL_S,
    ) -> None:
        self.checksum: Callable[[Sequence[int]], Sequence[int]] | None = region.crc32 if settings.checksums else None
        """CRC-32 of each block; None if the deployment does not use checksums."""
        self.pulls = Pulls(
            emit=agenda.emit,
            clock=agenda.clock,
            transport=settings.transport,
            block_bytes=region.block_bytes,
            quarantine_bound_s=settings.quarantine_bound_s,
            read_bound_s=settings.read_bound_s,
        )
        self.lender = Lender(
            emit=agenda.emit,
            clock=agenda.clock,
            find_prefix=find_prefix,
            unattached_ttl_s=unattached_ttl_s,
            checksum=self.checksum,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is here that time could end."""
        return not (self.pulls.num_reads or self.lender.num_leases or self.lender.num_parked)

    @property
    def empty(self) -> bool:
        """Whether no pull, no lease and no reader is left."""
        pulls, lender = self.pulls, self.lender
        return not (pulls.num_pulls or pulls.num_quarantined or lender.num_leases or lender.num_readers)

    def tick(self, now: float) -> None:
        """End what is overdue at `now`."""
        self.pulls.tick()
        self.lender.expire(now)

    def counts(self) -> Mapping[str, object]:
        """What is held for other workers, and from them."""
        return {
            "reads": self.pulls.num_reads,
            "blocks_quarantined": self.pulls.num_quarantined,
            "leases": self.lender.num_leases,
            "readers": self.lender.num_readers,
            "parked": self.lender.num_parked,
        }

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        yield from self.pulls.metrics()
        yield from self.lender.metrics()

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.pulls.check_invariants()
        self.lender.check_invariants()
