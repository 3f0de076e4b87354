"""Limits who can reach a worker's memory through UCX, which asks for no credential.

Over TCP, UCX lets the process itself carry out a peer's request: it copies from and to any address that a message
names. So everybody who reaches UCX's TCP port controls the whole process, and neither CURVE nor NIXL's metadata
prevents it. UCX listens on every interface unless it is configured otherwise before it is loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from common.contract.errors import OperatorError
from common.runtime.config import WorkerSettings

log = logging.getLogger(__name__)

_TCP = ("tcp", "\\tcp")
"""UCX's names for TCP; the backslash form is the same transport, not an alias."""
_RDMA_DEVICES = Path("/sys/class/infiniband")


def guard_memory(settings: WorkerSettings, environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep UCX's TCP on loopback if the worker is on loopback; elsewhere require that it is off or explicitly allowed.

    Sets `UCX_NET_DEVICES`, so it must be called before UCX is loaded. Logs which ways into the memory are open, and to
    whom. Raises `OperatorError` if TCP is on and neither loopback nor `expose_memory_over_tcp` allows it.
    """
    if settings.transport != "nixl":
        log.info("UCX is not used: blocks move by %s", settings.transport)
        return
    on_loopback = IPv4Address(settings.host).is_loopback
    with_tcp = allows_tcp(environ.get("UCX_TLS"))
    if with_tcp and on_loopback:
        environ.setdefault("UCX_NET_DEVICES", "lo")
    elif with_tcp and not settings.expose_memory_over_tcp:
        raise OperatorError(
            f"with --host {settings.host} whoever reaches the port that UCX listens on could read and write this "
            "worker's memory without a credential; keep everybody but the workers away from it, by a network policy or "
            "a network of their own, and say so by --expose-memory-over-tcp; or use --transport zmq with --curve-keys; "
            "or RDMA alone, by UCX_TLS=^tcp"
        )
    devices = environ.get("UCX_NET_DEVICES")
    beyond_this_machine = with_tcp and devices != "lo"
    level = logging.WARNING if beyond_this_machine else logging.INFO
    log.log(level, "UCX opens this worker's memory, without a credential, over %s", "; ".join(_open(environ, with_tcp)))


def allows_tcp(tls: str | None) -> bool:
    """Whether UCX may open TCP with this value of `UCX_TLS`: a list of transports or, after a ^, of excluded ones.

    UCX compares names exactly. A value that UCX would reject counts as open.
    """
    names = [name for name in (tls or "all").removeprefix("^").split(",") if name]
    if tls is not None and tls.startswith("^"):
        return not any(name in _TCP for name in names)
    return not names or any(name.partition(":")[0] in ("all", *_TCP) for name in names)


def _open(environ: MutableMapping[str, str], with_tcp: bool) -> Sequence[str]:
    """The ways into this worker's memory that UCX may open, and who can use each of them."""
    devices = environ.get("UCX_NET_DEVICES", "every interface")
    ways = ["shared memory, to processes of its own user"]
    if with_tcp and devices == "lo":
        ways.append("TCP on lo, to every user of this machine")
    elif with_tcp:
        ports = environ.get("UCX_TCP_PORT_RANGE", "any")
        ways.append(f"TCP on {devices} (ports: {ports}), to whoever reaches it")
    rdma = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    if rdma and devices != "lo":
        ways.append(
            f"RDMA ({', '.join(rdma)}, as far as UCX_TLS and UCX_NET_DEVICES let it), to whoever is on its fabric"
        )
    return ways
