"""The hands of a worker's pulls: links to sources, and the mover.

It carries out the actions that `kv_transfer.pulls` and `kv_transfer.lender` decide on, and reports what sources and
reads do. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from prometheus_client.metrics_core import Metric

from common.contract.ids import Incarnation, RequestKey
from common.contract.kv_layout import Fingerprint
from common.contract.messages.session import Role
from common.runtime.clock import Clock
from common.runtime.config import WorkerSettings
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import PeerNetworks
from common.runtime.probes import counter, gauge
from kv_transfer.events import Connect, MoverAction, SendToSource, TransferEvent
from kv_transfer.mover import Mover
from kv_transfer.regions import Region
from kv_transfer.source_links import SourceLinks
from kv_transfer.transport import Transport


class Transfers:
    """One worker's links and mover. Every method is called on the event loop's thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        me: Incarnation,
        role: Role,
        fingerprint: Fingerprint,
        region: Region,
        make_transport: Callable[[], Transport],
        clock: Clock,
        report: Callable[[TransferEvent], None],
        open_pulls: Callable[[str], Collection[RequestKey]],
    ) -> None:
        """`report` takes each event. `open_pulls` returns the pulls from an address that are not over."""
        self.mover = Mover(region, make_transport, report, self.on_died)
        self.metadata = b""
        """What sinks need in order to read from this worker; known once started."""
        peers, keys = PeerNetworks.of(settings), CurveKeys.load(settings.curve_keys)
        self._links = SourceLinks(
            me, role, fingerprint, clock, settings.pulse, peers, keys, report, open_pulls, self.on_died
        )

    async def start(self) -> None:
        """Start the transport. Raises `TransferError` when it cannot work here."""
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.metadata = await self.mover.start()

    async def run(self) -> None:
        """Wait until cancelled. If the mover's thread hangs, or it or a link dies of a bug, raise that error."""
        await self._died

    async def close(self) -> None:
        """End every read and every link."""
        await self.mover.close()  # before the links: sources must go on serving the reads that the mover lets end
        await self._links.close()

    def carry_out(self, action: Connect | SendToSource | MoverAction) -> None:
        """Do what a core has decided."""
        match action:
            case Connect(address):
                self._links.need(address)
            case SendToSource(address, message):
                self._links.send(address, message)
            case _:
                self.mover.carry_out(action)

    def on_died(self, error: BaseException) -> None:
        """The mover's thread hangs, or it, a link's task or the worker's core has died of a bug: make `run` raise the
        error, so that the worker ends."""
        if not self._died.done():
            self._died.set_exception(error)

    def metrics(self) -> Iterable[Metric]:
        """Prometheus metrics of this moment."""
        mover = self.mover
        yield counter("baton_transfer_bytes", "Bytes pulled.", mover.num_bytes_read)
        yield counter("baton_transfer_seconds", "Durations of reads, summed; reads overlap.", mover.read_seconds)
        yield counter("baton_transfer_failures", "Reads that failed.", mover.num_reads_failed)
        yield from mover.bandwidths.metrics()
        text = "Times that the KV cache is registered for transfers now."
        yield gauge("baton_kv_registrations", text, mover.num_registrations)
        text = "Registrations that made room for a read from another source."
        yield counter("baton_kv_registrations_evicted", text, mover.num_evicted)
        yield counter("baton_sources_refused", "Addresses outside the peers' networks.", self._links.num_refused)
