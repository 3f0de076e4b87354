"""What must hold of a worker's memory and devices so that KV blocks move as its operator expects."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from common.contract.errors import OperatorError
from common.runtime.config import WorkerSettings

RDMA_DEVICES = Path("/sys/class/infiniband")

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*true\b", re.IGNORECASE)
_RDMA = re.compile(r"\\?(ib|rc|dc|ud|srd|gga)(_\w+)?")
_CUDA_IPC = re.compile(r"\\?(cuda|cuda_ipc)")
_FAMILIES = {_RDMA: (("ib",), ("rc", "dc", "ud")), _CUDA_IPC: (("cuda",), ("cuda_ipc",))}
"""What, after a ^ in `UCX_TLS`, leaves all of them out."""


def guard_allocator(device: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse expandable segments on a GPU ("cuda"); what the variables say does not matter to other devices.

    PyTorch then maps a tensor from several pieces of physical memory. NIXL must register what `cudaMalloc` gives: UCX
    opens a GPU's memory to another process by a CUDA IPC handle, which such a mapping does not have.
    Raises `OperatorError`.
    """
    if device != "cuda":
        return
    for variable in _ALLOCATOR_VARIABLES:
        value = environ.get(variable, "")
        if _EXPANDABLE.search(value):
            raise OperatorError(
                f"{variable}={value}: with expandable segments the KV cache on a GPU cannot be registered for "
                "transfers; remove expandable_segments:True from the variable"
            )


def guard_route(
    settings: WorkerSettings, device: str, environ: Mapping[str, str] = os.environ, rdma_devices: Path = RDMA_DEVICES
) -> None:
    """With `--require-rdma`: refuse what cannot move blocks by RDMA or, from GPU to GPU, by `cuda_ipc`.

    What UCX then takes for each source is looked at when it is read (`kv_transfer.nixl_transport`). Whether a device
    `auto` is a GPU is not known yet, so that one is asked about again. Raises `OperatorError`.
    """
    if not settings.require_rdma:
        return
    if settings.transport != "nixl":
        raise OperatorError(f"--require-rdma: --transport {settings.transport} moves blocks over TCP; use nixl")
    for variable in ("UCX_LOG_FILE", "UCX_PROTO_INFO"):
        if environ.get(variable):
            raise OperatorError(f"--require-rdma: the worker needs UCX's log to know the transport; unset {variable}")
    tls = environ.get("UCX_TLS")
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


def _allows(tls: str | None, family: re.Pattern[str]) -> bool:
    """Whether `UCX_TLS` has some of a family: names or, after a ^, what to leave out. `ud:aux` carries no blocks."""
    names = [name for name in (tls or "all").removeprefix("^").split(",") if name]
    if tls is not None and tls.startswith("^"):
        return not any(set(left_out) <= set(names) for left_out in _FAMILIES[family])
    return not names or any(name == "all" or family.fullmatch(name) for name in names)


def _is_active(rdma_device: Path) -> bool:
    """Whether a port of it is: sysfs says `4: ACTIVE`."""
    return any(state.read_text().startswith("4:") for state in rdma_device.glob("ports/*/state"))


def _chooses(chosen: str, rdma_device: str) -> bool:
    """Whether `UCX_NET_DEVICES` has a device: names with ports, as in `mlx5_0:1`, `all` or, after a ^, what not."""
    named = rdma_device in [name.partition(":")[0] for name in chosen.removeprefix("^").split(",")]
    return not named if chosen.startswith("^") else named or chosen == "all"
