"""What must hold of a worker's memory and devices, and of UCX's variables: KV blocks move as its operator expects, and
nobody else reaches the memory, for which UCX asks no credential.

Over TCP, UCX lets the process itself carry out a peer's request: it copies from and to any address that a message
names. So everybody who reaches UCX's TCP port controls the whole process, and neither CURVE nor NIXL's metadata
prevents it. UCX listens on every interface unless it is configured otherwise before it is loaded.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from common.contract.errors import OperatorError
from common.runtime.config import WorkerSettings

log = logging.getLogger(__name__)

RDMA_DEVICES = Path("/sys/class/infiniband")

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NOT_BY_MALLOC = {
    "expandable_segments:True": re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE),
    "backend:cudaMallocAsync": re.compile(r"\bbackend\s*:\s*cudaMallocAsync\b", re.IGNORECASE),
}
"""Settings of PyTorch's allocator with which memory does not come from `cudaMalloc`."""
_TCP = ("tcp", "\\tcp")
"""UCX's names for TCP; the backslash form is the same transport, not an alias."""
_RDMA = re.compile(r"\\?(ib|rc|dc|ud|srd|gga)(_\w+)?")
_CUDA_IPC = re.compile(r"\\?(cuda|cuda_ipc)")
_FAMILIES = {_RDMA: (("ib",), ("rc", "dc", "ud")), _CUDA_IPC: (("cuda",), ("cuda_ipc",))}
"""What, after a ^ in `UCX_TLS`, leaves all of them out."""
_CUDA_COPY = {"all", "cuda", "cuda_copy", "\\cuda_copy"}
"""What has `cuda_copy`, without which UCX does not tell a GPU's memory from a host's."""


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
            "a network of their own, and say so by --expose-memory-over-tcp; or use RDMA, by UCX_TLS=^tcp,cuda_ipc; "
            "or, on a CPU, --transport zmq with --curve-keys"
        )
    devices = environ.get("UCX_NET_DEVICES")
    beyond_this_machine = with_tcp and devices != "lo"
    level = logging.WARNING if beyond_this_machine else logging.INFO
    log.log(level, "UCX opens this worker's memory, without a credential, over %s", "; ".join(_open(environ, with_tcp)))


def _open(environ: MutableMapping[str, str], with_tcp: bool) -> Sequence[str]:
    """The ways into this worker's memory that UCX may open, and who can use each of them."""
    devices = environ.get("UCX_NET_DEVICES", "every interface")
    ways = ["shared memory, to processes of its own user"]
    if with_tcp and devices == "lo":
        ways.append("TCP on lo, to every user of this machine")
    elif with_tcp:
        ports = environ.get("UCX_TCP_PORT_RANGE", "any")
        ways.append(f"TCP on {devices} (ports: {ports}), to whoever reaches it")
    rdma = sorted(path.name for path in RDMA_DEVICES.glob("*"))
    if rdma and devices != "lo":
        ways.append(
            f"RDMA ({', '.join(rdma)}, as far as UCX_TLS and UCX_NET_DEVICES let it), to whoever is on its fabric"
        )
    return ways


def guard_allocator(device: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse expandable segments and `cudaMallocAsync` on a GPU ("cuda"); what the variables say does not matter to
    other devices.

    NIXL must register what `cudaMalloc` gives: UCX opens a GPU's memory to another process by a CUDA IPC handle, which
    neither a mapping of several pieces of physical memory has nor memory of a stream-ordered pool.
    Raises `OperatorError`.
    """
    if device != "cuda":
        return
    for variable in _ALLOCATOR_VARIABLES:
        value = environ.get(variable, "")
        for setting, pattern in _NOT_BY_MALLOC.items():
            if pattern.search(value):
                raise OperatorError(
                    f"{variable}={value}: with {setting} the KV cache on a GPU cannot be registered for transfers; "
                    "remove it from the variable"
                )


def guard_route(
    settings: WorkerSettings, device: str, environ: Mapping[str, str] = os.environ, rdma_devices: Path = RDMA_DEVICES
) -> None:
    """Refuse what does not move the memory of a GPU ("cuda"): `--transport zmq`, and a `UCX_TLS` without `cuda_copy`,
    with which NIXL does not start; and with `--require-rdma` what cannot move blocks by RDMA or, from GPU to GPU, by
    `cuda_ipc`.

    What UCX then takes for each source is looked at when it is read (`kv_transfer.nixl_transport`). Whether a device
    `auto` is a GPU is not known yet, so that one is asked about again. Raises `OperatorError`.
    """
    if settings.transport == "zmq" and device == "cuda":
        raise OperatorError("--transport zmq moves host memory only, not that of a GPU: use nixl, or --device cpu")
    tls = environ.get("UCX_TLS")
    left_out, names = _transports(tls)
    if device == "cuda" and left_out != _CUDA_COPY.isdisjoint(names):
        raise OperatorError(f"UCX_TLS={tls} leaves out cuda_copy, without which UCX does not move the memory of a GPU")
    if not settings.require_rdma:
        return
    if settings.transport != "nixl":
        raise OperatorError(f"--require-rdma: --transport {settings.transport} moves blocks over TCP; use nixl")
    for variable in ("UCX_LOG_FILE", "UCX_PROTO_INFO"):
        if environ.get(variable):
            raise OperatorError(f"--require-rdma: the worker needs UCX's log to know the transport; unset {variable}")
    if device != "cpu" and _allows(tls, _CUDA_IPC):
        return
    if not _allows(tls, _RDMA):
        raise OperatorError(f"--require-rdma: UCX_TLS={tls} leaves RDMA out")
    active = [path.name for path in sorted(rdma_devices.glob("*")) if _is_active(path)]
    if not active:
        raise OperatorError(f"--require-rdma: there is no RDMA device with an active port in {rdma_devices}")
    chosen = environ.get("UCX_NET_DEVICES")
    if chosen is not None and not any(_chooses(chosen, name) for name in active):
        raise OperatorError(
            f"--require-rdma: UCX_NET_DEVICES={chosen} leaves out the RDMA devices with an active port "
            f"({', '.join(active)}); on a loopback --host a worker sets it to lo unless UCX_TLS is ^tcp"
        )


def allows_tcp(tls: str | None) -> bool:
    """Whether UCX may open TCP with this value of `UCX_TLS`.

    UCX compares names exactly. A value that UCX would reject counts as open.
    """
    left_out, names = _transports(tls)
    if left_out:
        return not any(name in _TCP for name in names)
    return not names or any(name.partition(":")[0] in ("all", *_TCP) for name in names)


def _allows(tls: str | None, family: re.Pattern[str]) -> bool:
    """Whether `UCX_TLS` has some of a family. `ud:aux` carries no blocks."""
    left_out, names = _transports(tls)
    if left_out:
        return not any(set(each) <= set(names) for each in _FAMILIES[family])
    return not names or any(name == "all" or family.fullmatch(name) for name in names)


def _transports(tls: str | None) -> tuple[bool, list[str]]:
    """Whether the names in `UCX_TLS` are, after a ^, those that are left out; and the names."""
    tls = tls or "all"
    return tls.startswith("^"), [name for name in tls.removeprefix("^").split(",") if name]


def _is_active(rdma_device: Path) -> bool:
    """Whether a port of it is: sysfs says `4: ACTIVE`."""
    return any(state.read_text().startswith("4:") for state in rdma_device.glob("ports/*/state"))


def _chooses(chosen: str, rdma_device: str) -> bool:
    """Whether `UCX_NET_DEVICES` has a device: names with ports, as in `mlx5_0:1`, `all` or, after a ^, what not."""
    named = rdma_device in [name.partition(":")[0] for name in chosen.removeprefix("^").split(",")]
    return not named if chosen.startswith("^") else named or chosen == "all"
