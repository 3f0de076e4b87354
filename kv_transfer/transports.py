"""Makes the transport that a worker is to use."""

from __future__ import annotations

from collections.abc import Callable

from common.contract.ids import Incarnation
from common.runtime.config import WorkerSettings
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import PeerNetworks
from kv_transfer.regions import Region
from kv_transfer.transport import Transport


def transport_maker(
    settings: WorkerSettings, region: Region, me: Incarnation, synchronize: Callable[[], None]
) -> Callable[[], Transport]:
    """A function that makes the transport over `region`, on the thread that will use it. Raises `OperatorError`.

    NIXL is loaded only when it is asked for. `synchronize` applies to `NixlTransport`. Only the ZMQ transport binds the
    host, and only that one is encrypted, and keeps to the peers' networks: the addresses that NIXL connects to are in
    metadata that only UCX reads.
    """
    keys, peers = CurveKeys.load(settings.curve_keys), PeerNetworks.of(settings)

    def make() -> Transport:
        if settings.transport == "nixl":
            from kv_transfer.nixl_transport import NixlTransport

            return NixlTransport(region, me, synchronize, settings.max_registrations, settings.require_rdma)
        from kv_transfer.zmq_transport import ZmqTransport

        return ZmqTransport(region, me, settings.host, keys, peers)

    return make
