"""The core of Baton's dependencies is the gateway's; what only workers import is the extra `worker`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from bare_site import link_only, run_python
from image_lints import IMAGES, ROOT, pins, project
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from common.contract.errors import OperatorError
from common.runtime.worker_packages import require_worker_packages

CORE = ("gateway", "common/contract", "common/runtime", "benchmarks/load")
WORKER = ("prefill_worker", "decode_worker", "kv_transfer", "common/engine")
OWN = {"common", "gateway", "prefill_worker", "decode_worker", "kv_transfer", "benchmarks"}
EXTRA_OF = {
    "gateway/observability/tracing.py": "otel",
    "gateway/workers/endpoint_slices.py": "kubernetes",
    "benchmarks/load/plots.py": "bench",
}
"""Modules that are imported only where their extra is asked for."""
COMES_WITH = {"pydantic-core": "pydantic"}
"""Pinned to one version by the other."""


@cache
def declared(extra: str = "") -> frozenset[str]:
    """Distributions of the core, or of an extra."""
    table = project()["project"]
    lines = table["optional-dependencies"][extra] if extra else table["dependencies"]
    return frozenset(canonicalize_name(Requirement(line).name) for line in lines)


def imports_of(file: Path) -> Iterator[str]:
    """Top-level names that a module imports anywhere, also by `importlib.import_module("name")`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports by a relative name"
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(a.value).partition(".")[0] for a in node.args if isinstance(a, ast.Constant))


@cache
def installed() -> dict[str, set[str]]:
    """Distributions that have each top-level name."""
    found = {name: {canonicalize_name(each) for each in of} for name, of in packages_distributions().items()}
    return {name: {COMES_WITH.get(each, each) for each in of} for name, of in found.items()}


@cache
def imported(folders: tuple[str, ...]) -> list[tuple[str, str]]:
    """(path, name) of each import of what is neither Python's nor Baton's."""
    return [
        (file.relative_to(ROOT).as_posix(), name)
        for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
        for name in sorted(set(imports_of(file)) - OWN - sys.stdlib_module_names)
    ]


def surplus(folders: tuple[str, ...], admitted: frozenset[str]) -> list[str]:
    """Imports of what is not declared."""
    return [
        f"{path} imports {name}"
        for path, name in imported(folders)
        if not installed().get(name, set()) & (admitted | (declared(EXTRA_OF[path]) if path in EXTRA_OF else set()))
    ]


def test_the_gateway_imports_nothing_but_the_core() -> None:
    assert surplus(CORE, declared()) == []


def test_workers_import_nothing_but_the_core_and_their_extra() -> None:
    assert surplus(WORKER, declared() | declared("worker")) == []


def test_an_import_that_is_not_declared_is_found() -> None:
    assert "common/runtime/probes.py imports aiohttp" in surplus(CORE, declared() - {"aiohttp"})
    assert "common/engine/weights.py imports safetensors" in surplus(WORKER, declared())
    assert "kv_transfer/nixl_transport.py imports nixl" in surplus(WORKER, declared() | declared("worker") - {"nixl"})


@pytest.mark.parametrize(("extra", "folders"), [("", CORE), ("worker", WORKER)])
def test_everything_declared_is_imported(extra: str, folders: tuple[str, ...]) -> None:
    used: set[str] = set().union(*(installed().get(name, set()) for _, name in imported(folders)))
    assert declared(extra) <= used


def test_the_core_has_nothing_that_the_gateways_import_contract_forbids() -> None:
    contracts = project()["tool"]["importlinter"]["contracts"]
    (contract,) = [each for each in contracts if each.get("source_modules") == ["gateway"]]
    forbidden = {name for name in contract["forbidden_modules"] if name.partition(".")[0] not in OWN}
    assert forbidden == {"torch", "triton", "nixl"}
    assert forbidden <= declared("worker")
    assert not declared() & declared("worker")


def test_a_worker_looks_for_every_package_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_worker_packages("nixl", "cuda" if importlib.util.find_spec("triton") else "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OperatorError) as raised:
        require_worker_packages("nixl", "cuda")
    named = str(raised.value).removeprefix("a worker needs ").partition(":")[0].split(", ")
    assert set(named) == declared("worker")
    with pytest.raises(OperatorError, match=r"needs safetensors, torch: "):
        require_worker_packages("zmq", "cpu")


@pytest.fixture(scope="module")
def gateway_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the gateway's image."""
    folder = tmp_path_factory.mktemp("site")
    link_only(pins((IMAGES / "gateway.lock").read_text()), folder)
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("role", ["serve", "prefill", "decode"])
def test_without_the_workers_packages_one_line_says_what_to_install(role: str, gateway_site: Path) -> None:
    done = run_python(gateway_site, "-m", "common.runtime.cli", role, "--model", "demo")
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: a worker needs torch, nixl: pip install '.[worker]' in Baton's checkout\n"
    assert done.stdout == ""


@pytest.mark.processes
@pytest.mark.parametrize("role", ["gateway", "bench", "kv-size", "api-key", "keys"])
def test_the_other_commands_do_without_them(role: str, gateway_site: Path) -> None:
    done = run_python(gateway_site, "-m", "common.runtime.cli", role, "--help")
    assert done.returncode == 0, done.stderr
