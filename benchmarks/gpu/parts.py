"""The measurements of each part, and their time limits in seconds.

Uses the standard library alone: a missing package makes only those measurements fail that use it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Measurement

MODELS = ("llama-3-8b", "qwen3-0.6b")
TOLD_BY_UCX = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "used"}


def device() -> Measurement:
    """The measurement that comes before every run on a GPU."""
    return _of("device", "device", "timing:device", 60)


def compile_(capability: int) -> list[Measurement]:
    """Resources that the kernels take of a multiprocessor; needs no GPU."""
    return [_of("compile", "compile", "compiled:binaries", 900, capability=capability)]


def check(out: Path, scratch: Path) -> list[Measurement]:
    """What the machine has, and whether the kernels and the engine are right."""
    return [
        _of("check", "inventory", "inventory:inventory", 60),
        _of("check", "check decode", "checks:decode", 90),
        _of("check", "check prefill", "checks:prefill", 90),
        _of("check", "check models", "inventory:models", 200),
        _of("check", "check sizes", "inventory:sizes", 120),
        _of("check", "check sanitizer", "inventory:sanitizer", 75, optional=True),  # no device in some sandboxes
    ]


def kernels(out: Path, scratch: Path) -> list[Measurement]:
    """Every kernel against the device, and beside torch's."""
    of_layer = [_of("kernels", f"kernels {name}", f"kernels:{name}", 100) for name in ("decode", "prefill", "others")]
    return [*of_layer, _of("kernels", "kernels products", "products:measured", 100)]


def tune(out: Path, scratch: Path) -> list[Measurement]:
    """The tuning table of this GPU."""
    return [
        _of("tune", "tune attention", "tune:attention", 200, out=str(out)),
        _of("tune", "tune products", "tune:few_rows", 200, out=str(out)),
    ]


def engine(out: Path, scratch: Path) -> list[Measurement]:
    """Whole steps of models of well-known shapes, against their floors."""
    steps = [
        _of("engine", f"{kind} {model}", f"engine:{kind}", 100, model=model)
        for model in MODELS
        for kind in ("decode", "prefill")
    ]
    of_one = [
        _of("engine", f"{kind} {MODELS[0]}", f"engine:{kind}", 200, model=MODELS[0], optional=kind == "early")
        for kind in ("profile", "invariant", "early")  # the last is of launches that are off
    ]
    return [*steps, *of_one]


def transfer(out: Path, scratch: Path) -> list[Measurement]:
    """NIXL between two processes on the GPU. If that fails, again with UCX settings that it may need."""
    return [
        _of("transfer", "transfer", "transfer:run", 75, env=TOLD_BY_UCX),
        _of("transfer", "transfer, UCX told", "transfer:run", 75, env=TOLD_BY_UCX | ucx(), instead_of="transfer"),
    ]


def stack(out: Path, scratch: Path) -> list[Measurement]:
    """The whole stack, beside transformers' continuous and static batching."""

    def system(name: str, suffix: str = "", **options: Any) -> Measurement:
        name_ = f"stack {name}{suffix}"
        return _of("stack", name_, "stack:run", 300, system=name, scratch=str(scratch), **options)

    return [
        system("baton colocated"),
        system("baton pair"),
        system("baton pair", ", UCX told", env=ucx(), instead_of="stack baton pair"),
        system("baton pair, MPS", optional=True),
        system("generate_batch", optional=True),
        system("static batching", optional=True),
    ]


PARTS: dict[str, Callable[[Path, Path], list[Measurement]]] = {
    "check": check,
    "kernels": kernels,
    "tune": tune,
    "engine": engine,
    "transfer": transfer,
    "stack": stack,
}
"""The parts that need a GPU. `out` is the folder of the results, `scratch` a folder that all measurements of a run
share."""


def ucx() -> dict[str, str]:
    """UCX variables: where it finds its CUDA modules, and which transports it may use.

    NIXL's wheel for CUDA 13 does not always find the modules. Without them UCX takes a GPU's memory for host memory,
    and NIXL refuses it (github.com/ai-dynamo/nixl/issues/1628).
    """
    told = {"UCX_TLS": "cuda_copy,cuda_ipc,sm,tcp,self"}
    spec = importlib.util.find_spec("nixl_cu13")
    modules = Path(spec.origin).parents[1] / "nixl_cu13.libs" / "ucx" if spec and spec.origin else None
    return told | ({"UCX_MODULE_DIR": str(modules)} if modules and modules.is_dir() else {})


def _of(
    part: str,
    name: str,
    function: str,
    timeout_s: float,
    *,
    env: dict[str, str] | None = None,
    instead_of: str = "",
    optional: bool = False,
    **arguments: Any,
) -> Measurement:
    return Measurement(
        part=part, name=name, function=f"benchmarks.gpu.{function}", timeout_s=timeout_s, arguments=arguments,
        env=env or {}, instead_of=instead_of, optional=optional,
    )  # fmt: skip
