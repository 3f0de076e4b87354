"""Makes a transport by its name."""

from __future__ import annotations

from collections.abc import Callable

from common.contract.ids import Incarnation
from common.runtime.config import DEFAULT_MAX_REGISTRATIONS
from common.runtime.curve import CurveKeys
from common.runtime.peer_networks import EVERYWHERE, PeerNetworks
from kv_transfer.regions import Region
from kv_transfer.transport import Transport


def transport_maker(
    name: str,
    region: Region,
    me: Incarnation,
    host: str,
    keys: CurveKeys | None = None,
    synchronize: Callable[[], None] = lambda: None,
    peers: PeerNetworks = EVERYWHERE,
    max_registrations: int = DEFAULT_MAX_REGISTRATIONS,
    require_rdma: bool = False,
) -> Callable[[], Transport]:
    """A function that makes the transport `name` ("nixl" or "zmq") over `region`, on the thread that will use it.

    `host` is where peers reach this worker. Only the ZMQ transport binds it, and only that one is encrypted, by `keys`.
    NIXL is loaded only when it is asked for. `synchronize`, `max_registrations` and `require_rdma` apply to
    `NixlTransport`. `peers` apply to `ZmqTransport` alone, because the addresses that NIXL connects to are in metadata
    that only UCX reads.
    """

    def make() -> Transport:
        if name == "nixl":
            from kv_transfer.nixl_transport import NixlTransport

            return NixlTransport(region, me, synchronize, max_registrations, require_rdma)
        from kv_transfer.zmq_transport import ZmqTransport

        return ZmqTransport(region, me, host, keys, peers)

    return make
