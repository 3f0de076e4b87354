"""Whether the packages of the extra `worker` are installed; a gateway does without them."""

from __future__ import annotations

import importlib.util

from common.contract.errors import OperatorError

_ALWAYS = ("safetensors", "torch")


def require_worker_packages(transport: str, device: str) -> None:
    """Look for the packages that a worker imports with this transport and device, without importing them.

    Raises `OperatorError` with the command that installs them.
    """
    wanted = [*_ALWAYS]
    if transport == "nixl":
        wanted.append("nixl")
    if device == "cuda":
        wanted.append("triton")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise OperatorError(f"a worker needs {', '.join(missing)}: pip install '.[worker]' in Baton's checkout")
