"""The images' locks have what pyproject.toml asks for, their Dockerfiles build it, and the gateway's lock is all that a
gateway needs; each lint is shown by what it is there to find. Nothing is built here, and nothing fetched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from bare_site import link_only, run_python
from image_lints import (
    IMAGES,
    ROOT,
    dockerfile_faults,
    ignored,
    lock_faults,
    pins,
    users,
    versions_differ,
)

LOCKS = {role: (IMAGES / f"{role}.lock").read_text() for role in ("gateway", "worker", "build")}
DOCKERFILES = {role: (IMAGES / f"{role}.Dockerfile").read_text() for role in ("gateway", "worker")}
IGNORE = (ROOT / ".dockerignore").read_text()
(USER,) = users(each for file in (ROOT / "k8s/base").glob("*.yaml") for each in yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("role", LOCKS)
def test_a_lock_has_what_its_role_needs(role: str) -> None:
    assert list(lock_faults(role, LOCKS[role])) == []


def test_images_share_versions() -> None:
    assert list(versions_differ(LOCKS)) == []
    other = re.sub(r"^msgpack==\S+", "msgpack==1.1.0", LOCKS["gateway"], flags=re.MULTILINE)
    (fault,) = versions_differ(LOCKS | {"gateway": other})
    assert fault.startswith("msgpack is 1.1.0 in the gateway, and ")


@pytest.mark.parametrize("role", DOCKERFILES)
def test_an_image_can_be_built_and_pinned_and_runs_as_nobody(role: str) -> None:
    assert list(dockerfile_faults(role, DOCKERFILES[role], IGNORE, USER)) == []


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("common", False),
        ("common/runtime/cli.py", False),
        ("k8s/images/worker.lock", False),
        ("gateway/__pycache__/api.pyc", True),
        ("common/old.pyc", True),
        ("benchmarks/results/idle.json", True),
        ("k8s/base/gateway.yaml", True),
        ("k8s/images/sub/worker.lock", True),
        (".git", True),
        ("tests/unit", True),
    ],
)
def test_what_a_build_sees(path: str, out: bool) -> None:
    assert ignored(path, IGNORE) == out


# --- what the gateway imports ----------------------------------------------------------------------------------------

PROBE = """
import ast, importlib, importlib.util, sys
from pathlib import Path

root = Path(sys.argv[1])
files = [file for folder in ("gateway", "common/runtime", "common/contract") for file in (root / folder).rglob("*.py")]
names = {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for file in files}
for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
    if isinstance(node, ast.Import):
        names.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        names.add(node.module)
for name in sorted(names):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
for name in ("torch", "triton", "nixl", "matplotlib", "pytest"):
    if importlib.util.find_spec(name) is not None:
        print(f"{name} is there")
from gateway.text.tokenizer import ModelTokenizer
ModelTokenizer.load(root / "common/demo_model")
"""
"""Imports all that a gateway ever does, wherever in its code, and loads a tokenizer: `transformers` is lazy too."""


@pytest.mark.processes
def test_a_gateway_needs_nothing_that_its_lock_lacks(tmp_path: Path) -> None:
    link_only(pins(LOCKS["gateway"]), tmp_path)
    done = run_python(tmp_path, "-c", PROBE, str(ROOT))
    assert done.stdout + done.stderr == ""


@pytest.mark.processes
def test_what_a_lock_lacks_is_missed(tmp_path: Path) -> None:
    link_only([*(pins(LOCKS["gateway"]).keys() - {"llguidance", "regex"}), "pytest"], tmp_path)
    done = run_python(tmp_path, "-c", PROBE, str(ROOT))
    said = done.stdout + done.stderr
    assert "gateway.intake.structured_output: No module named 'llguidance'" in said
    assert "No module named 'regex'" in said  # by the tokenizer
    assert "pytest is there" in said


# --- broken ones -----------------------------------------------------------------------------------------------------


def change(pattern: str, to: str) -> Callable[[str], str]:
    """The first that fits becomes `to`."""

    def changed(text: str) -> str:
        out, count = re.subn(pattern, to, text, count=1, flags=re.MULTILINE)
        assert count == 1, pattern
        return out

    return changed


HASH = f"--hash=sha256:{'0' * 64}"
BROKEN_LOCKS: dict[str, tuple[Callable[[str], str], str]] = {
    "lacking": (change(r"^aiohttp==(.*\n(    .*\n)+)", ""), "it lacks aiohttp"),
    "too new": (change(r"^msgpack==\S+", "msgpack==2.0"), "msgpack 2.0 is not"),
    "an extra": (change(r"^kubernetes-asyncio==(.*\n(    .*\n)+)", ""), "it lacks kubernetes_asyncio"),
    "no hash": (change(r"^aiohttp==(\S+).*\n(    .*\n)+", r"aiohttp==\1\n"), "with hashes alone: aiohttp=="),
    "an index": (change(r"\A", "--index-url https://example.org/simple\n"), "with hashes alone: --index-url"),
    "an address": (change(r"\A", f"x @ https://example.org/x.whl {HASH}\n"), "with hashes alone: x @ https"),
    "a range": (change(r"^aiohttp==", "aiohttp>="), "with hashes alone: aiohttp>="),
    "a GPU's": (change(r"\A", f"nvidia-cublas==13.0 {HASH}\n"), "nvidia-cublas is for GPUs"),
    "torch": (change(r"\A", f"torch==2.13.0 {HASH}\n"), "torch is for GPUs"),
}
BROKEN_DOCKERFILES: dict[str, tuple[Callable[[str], str], str]] = {
    "a fixed base": (change(r"^FROM \S+$", "FROM python:3.12-slim"), "python:3.12-slim cannot be pinned"),
    "an ARG of nowhere": (change(r"^FROM \S+$", "FROM ${BASE}"), "${BASE} is by default '', of no version"),
    "the latest": (change(r"^ARG (\w+)=.*", r"ARG \1=python:latest"), "'python:latest', of no version"),
    "another Python": (change(r"^ARG (\w+)=python:3.12", r"ARG \1=python:3.13"), "and the locks are for Python 3.12"),
    "no tag": (change(r"^ARG (\w+)=.*", r"ARG \1=python"), "'python', of no version"),
    "one stage": (change(r"^FROM \S+$", ""), "one stage"),
    "a name": (change(r"^USER .*", "USER baton"), "it runs as 'baton', and pods as"),
    "another user": (change(r"^USER .*", "USER 1000:1000"), "it runs as '1000:1000', and pods as"),
    "nobody but root": (change(r"^USER .*", ""), "it runs as '', and pods as"),
    "a user of the build": (change(r"^(WORKDIR .*[\s\S]*)^(USER .*)", r"\2\n\1"), "it runs as '', and pods as"),
    "no init": (change(r'"/usr/bin/tini", "--", ', ""), 'it starts ["baton"]'),
    "no tini": (change(r"(--no-install-recommends) tini", r"\1 dumb-init"), "tini is not in it"),
    "a health check": (change(r"^USER", "HEALTHCHECK CMD true\nUSER"), "HEALTHCHECK: probes"),
    "ADD": (change(r"^COPY common", "ADD common"), "ADD: "),
    "not locked": (change(r"--require-hashes", ""), "not locked: pip install"),
    "from an index": (change(r"--no-index --no-compile", ""), "not locked: pip --python"),
    "another's lock": (change(r"-r /locks/(gateway|worker)", "-r /locks/all"), ".lock is not installed"),
    "a source": (change(r"^COPY gateway", "COPY gateways"), "there is no gateways"),
    "what is ignored": (change(r"^COPY gateway", "COPY tests"), ".dockerignore leaves tests out"),
    "half of Baton": (change(r"^COPY kv_transfer.*", ""), "kv_transfer is not copied"),
    "another stage": (change(r"--from=build", "--from=builder"), "there is no stage builder"),
}


def test_a_worker_without_cuda_is_found() -> None:
    lock = re.sub(r"^nvidia-.*\n(    .*\n)+", "", LOCKS["worker"], flags=re.MULTILINE)
    assert list(lock_faults("worker", lock)) == ["worker: its torch has no CUDA"]


def test_a_worker_without_a_compiler_is_found() -> None:
    dockerfile = change(r" gcc libc6-dev", " gcc")(DOCKERFILES["worker"])
    assert list(dockerfile_faults("worker", dockerfile, IGNORE, USER)) == ["libc6-dev is not in it"]


@pytest.mark.parametrize("name", BROKEN_LOCKS)
def test_a_lint_of_locks_finds_what_it_is_there_for(name: str) -> None:
    breaks, expected = BROKEN_LOCKS[name]
    found = list(lock_faults("gateway", breaks(LOCKS["gateway"])))
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize("role", DOCKERFILES)
@pytest.mark.parametrize("name", BROKEN_DOCKERFILES)
def test_a_lint_of_dockerfiles_finds_what_it_is_there_for(name: str, role: str) -> None:
    breaks, expected = BROKEN_DOCKERFILES[name]
    found = list(dockerfile_faults(role, breaks(DOCKERFILES[role]), IGNORE, USER))
    assert any(expected in fault for fault in found), found
