"""What is wrong with the images of `k8s/images`: a lock that lacks something, a Dockerfile that builds on what nobody
can pin, or copies what is not there. Each lint yields a line for each fault."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "k8s/images"
EXTRAS = {"gateway": ("kubernetes", "otel"), "worker": ("worker",)}
DEBIAN = {"gateway": ("tini",), "worker": ("tini", "gcc", "libc6-dev")}
"""Of its packages: workers compile (`common.engine.native`, and Triton)."""
_SAFE_INSTALLS = ({"--require-hashes", "--only-binary"}, {"--no-deps", "--no-index"})
_GPU = re.compile(r"torch|triton|nixl.*|nvidia-.*|cuda-.*")
_PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)(?P<hashes>( --hash=sha256:[0-9a-f]{64})+)")


# --- locks -----------------------------------------------------------------------------------------------------------


def project() -> dict[str, Any]:
    """`pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def required(role: str) -> list[Requirement]:
    """What the image of `gateway` or `worker` needs, or `build`, by `pyproject.toml`."""
    if role == "build":
        return [Requirement(each) for each in project()["build-system"]["requires"]]
    declared = project()["project"]
    lines = declared["dependencies"] + [line for e in EXTRAS[role] for line in declared["optional-dependencies"][e]]
    return [Requirement(line) for line in lines]


def locked_python() -> str:
    """The version that the locks are for."""
    found = re.search(r"--python-version (\S+)", (IMAGES / "lock.sh").read_text())
    assert found is not None
    return found[1]


def logical_lines(text: str) -> list[str]:
    """Without comments, and with continued lines in one."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return [" ".join(line.split()) for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines() if line.strip()]


def pins(lock: str) -> dict[str, Version]:
    """What a lock has."""
    found = (_PIN.fullmatch(line) for line in logical_lines(lock))
    return {canonicalize_name(pin["name"]): Version(pin["version"]) for pin in found if pin is not None}


def lock_faults(role: str, lock: str) -> Iterator[str]:
    """It has what the role needs, in a version that is admitted, by hash, and nothing that the role does without."""
    for line in logical_lines(lock):
        if _PIN.fullmatch(line) is None:
            yield f"{role}: not a version with hashes alone: {line[:60]}"
    have = pins(lock)
    for requirement in required(role):
        version = have.get(canonicalize_name(requirement.name))
        if version is None:
            yield f"{role}: it lacks {requirement.name}"
        elif version not in requirement.specifier:
            yield f"{role}: {requirement.name} {version} is not {requirement.specifier}"
    for name in have:
        if role == "gateway" and _GPU.fullmatch(name):
            yield f"{role}: {name} is for GPUs"
    if role == "worker" and not any(name.startswith("nvidia-") for name in have):
        yield f"{role}: its torch has no CUDA"


def versions_differ(locks: Mapping[str, str]) -> Iterator[str]:
    """Of what two images share."""
    gateway, worker = pins(locks["gateway"]), pins(locks["worker"])
    for name in gateway.keys() & worker.keys():
        if gateway[name] != worker[name]:
            yield f"{name} is {gateway[name]} in the gateway, and {worker[name]} in workers"


# --- Dockerfiles -----------------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    """A line of a Dockerfile."""

    name: str
    rest: str


def instructions(dockerfile: str) -> list[Instruction]:
    """Of all stages."""
    return [Instruction(name.upper(), rest) for name, _, rest in (n.partition(" ") for n in logical_lines(dockerfile))]


def _last_stage(lines: list[Instruction]) -> list[Instruction]:
    return lines[max(i for i, line in enumerate(lines) if line.name == "FROM") :]


def _base_faults(lines: list[Instruction], python: str) -> Iterator[str]:
    """Two stages or more, on images that a build may pin, of a version, and with the locks' Python."""
    arguments: dict[str, str] = {}
    stages = 0
    for line in lines:
        if line.name == "ARG" and not stages:
            name, _, arguments[name] = line.rest.partition("=")
        if line.name == "FROM":
            stages += 1
            image = line.rest.split()[0]
            default = arguments.get(image.strip("${}"), "") if image.startswith("$") else None
            if default is None:
                yield f"{image} cannot be pinned: no ARG"
            elif re.search(r":(?!latest$)[\w][\w.-]*$|@sha256:[0-9a-f]{64}$", default) is None:
                yield f"{image} is by default {default!r}, of no version"
            elif not default.startswith(f"python:{python}-"):
                yield f"{image} is by default {default!r}, and the locks are for Python {python}"
    if stages < 2:
        yield "what builds it stays in it: one stage"


def _run_faults(lines: list[Instruction], role: str, user: int) -> Iterator[str]:
    """Who it runs as, and what, and what that needs."""
    last = _last_stage(lines)
    users = [line.rest for line in last if line.name == "USER"] or [""]
    if users[-1].partition(":")[0] != str(user):
        yield f"it runs as {users[-1]!r}, and pods as {user}"
    entries = [line.rest for line in last if line.name == "ENTRYPOINT"] or ["[]"]
    if json.loads(entries[-1]) != ["/usr/bin/tini", "--", "baton"]:
        yield f"it starts {entries[-1]}"
    installed = [re.findall(r"apt-get install ([^&]*)", line.rest) for line in last if line.name == "RUN"]
    for package in DEBIAN[role]:
        if package not in " ".join(part for found in installed for part in found).split():
            yield f"{package} is not in it"
    for line in lines:
        if line.name in ("HEALTHCHECK", "ADD"):
            yield f"{line.name}: probes are the cluster's, and nothing is fetched"


def _install_faults(lines: list[Instruction], role: str) -> Iterator[str]:
    """Whatever pip installs is locked, or was made here."""
    commands = [part for line in lines if line.name == "RUN" for part in line.rest.split("&&")]
    for command in (part.strip() for part in commands if re.search(r"\bpip\b.* (install|wheel)\b", part)):
        if not any(options <= set(command.split()) for options in _SAFE_INSTALLS):
            yield f"not locked: {command}"
    for lock in ("build", role):
        if not any(f"-r /locks/{lock}.lock" in command for command in commands):
            yield f"{lock}.lock is not installed"


def _copy_faults(lines: list[Instruction], root: Path, ignore: str) -> Iterator[str]:
    """What is copied is there, and all of Baton is."""
    stages = {line.rest.split()[-1] for line in lines if line.name == "FROM" and " AS " in line.rest.upper()}
    copied: set[str] = set()
    for rest in (line.rest for line in lines if line.name == "COPY"):
        *sources, _ = (part for part in rest.split() if not part.startswith("--"))
        stage = re.search(r"--from=(\S+)", rest)
        if stage is not None:
            if stage[1] not in stages:
                yield f"there is no stage {stage[1]}"
            continue
        for source in sources:
            copied.add(source)
            if not (root / source).exists():
                yield f"there is no {source}"
            elif ignored(source, ignore):
                yield f".dockerignore leaves {source} out"
    packages = {package.partition(".")[0] for package in project()["tool"]["setuptools"]["packages"]}
    for name in sorted({"pyproject.toml", "README.md", "LICENSE"} | packages):
        if name not in copied:
            yield f"{name} is not copied"


def dockerfile_faults(role: str, dockerfile: str, ignore: str, user: int) -> Iterator[str]:
    """Of the image of `gateway` or `worker`, whose pods run as `user`."""
    lines = instructions(dockerfile)
    yield from _base_faults(lines, locked_python())
    yield from _run_faults(lines, role, user)
    yield from _install_faults(lines, role)
    yield from _copy_faults(lines, ROOT, ignore)


def ignored(path: str, ignore: str) -> bool:
    """Whether `.dockerignore` leaves a path out: the last pattern that fits it, or a folder that it is in, decides."""
    parts = path.split("/")
    ways = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    out = False
    for line in logical_lines(ignore):
        pattern = line.removeprefix("!").strip("/")
        regex = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(regex, way) for way in ways):
            out = not line.startswith("!")
    return out


def users(objects: Iterable[Mapping[str, Any]]) -> set[int]:
    """Whom the pods of Deployments run as."""
    specs = (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment")
    return {spec["securityContext"]["runAsUser"] for spec in specs}
