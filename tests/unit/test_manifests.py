"""What `k8s/` builds is what Kubernetes takes, and fits together; each lint is shown by what it is there to find."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from manifest_lints import Object, faults

K8S = Path(__file__).parents[2] / "k8s"
VERSIONS = ("1.37", "1.36", "1.35")
"""The newest of which there are schemas."""
BUILDS = sorted(str(path.parent.relative_to(K8S)) for path in K8S.glob("**/kustomization.yaml"))

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds the manifests")


@cache
def _built(folder: str) -> list[Object]:
    done = subprocess.run(["kubectl", "kustomize", K8S / folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def built(folder: str) -> list[Object]:
    return copy.deepcopy(_built(folder))


@pytest.mark.parametrize("folder", BUILDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_kubernetes_takes(folder: str, version: str) -> None:
    objects = built(folder)
    assert objects
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("folder", BUILDS)
def test_everything_fits_together(folder: str) -> None:
    assert faults(built(folder)) == []


@pytest.mark.parametrize("folder", BUILDS)
def test_no_object_names_a_namespace(folder: str) -> None:
    assert [each for each in built(folder) if "namespace" in each["metadata"]] == []


# --- broken ones -----------------------------------------------------------------------------------------------------


def find(objects: list[Object], kind: str, name: str) -> Object:
    return next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))


def pod(objects: list[Object], role: str) -> Any:
    return find(objects, "Deployment", f"baton-{role}")["spec"]["template"]["spec"]


def container(objects: list[Object], role: str) -> Any:
    return pod(objects, role)["containers"][0]


def set_env(objects: list[Object], role: str, name: str, value: str) -> None:
    env = container(objects, role)["env"]
    env[:] = [each for each in env if each["name"] != name] + [{"name": name, "value": value}]


def drop_label(objects: list[Object]) -> None:
    template = find(objects, "Deployment", "baton-decode")["spec"]["template"]
    template["metadata"]["labels"]["app.kubernetes.io/component"] = "decoder"


def set_in(kind: str, name: str, *path: Any, value: Any) -> Callable[[list[Object]], None]:
    def change(objects: list[Object]) -> None:
        at: Any = find(objects, kind, name)
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


GATEWAY, PREFILL, DECODE = "baton-gateway", "baton-prefill", "baton-decode"
POD = ("spec", "template", "spec")
FIRST = (*POD, "containers", 0)
BROKEN: dict[str, tuple[Callable[[list[Object]], None], str]] = {
    "labels": (drop_label, "Deployment/baton-decode: its selector does not fit its own pods"),
    "a service": (
        set_in("Service", PREFILL, "spec", "selector", value={"a": "b"}),
        "Service/baton-prefill: it selects no",
    ),
    "a policy": (
        set_in("NetworkPolicy", "baton-workers", "spec", "podSelector", value={"matchLabels": {"a": "b"}}),
        "NetworkPolicy/baton-workers: it selects no pod",
    ),
    "a target port": (
        set_in("Service", GATEWAY, "spec", "ports", 0, "targetPort", value="https"),
        "Service/baton-gateway: its pods have no port https",
    ),
    "a probe's port": (
        set_in("Deployment", DECODE, *FIRST, "readinessProbe", "httpGet", "port", value="http"),
        "Deployment/baton-decode: readinessProbe asks a port that there is not: http",
    ),
    "no probe": (lambda objects: container(objects, "prefill").pop("startupProbe"), "no startupProbe"),
    "a policy's port": (
        set_in("NetworkPolicy", "baton-gateway", "spec", "ingress", value=[{"ports": [{"port": "admin"}]}]),
        "NetworkPolicy/baton-gateway: its pods have no port admin",
    ),
    "a variable": (
        lambda objects: set_env(objects, "decode", "BATON_MAX_BATCH", "8"),
        "Deployment/baton-decode: BATON_MAX_BATCH is no setting of decode",
    ),
    "another role's variable": (
        lambda objects: set_env(objects, "prefill", "BATON_MAX_NUM_SEQS", "8"),
        "BATON_MAX_NUM_SEQS is no setting of prefill",
    ),
    "a value": (lambda objects: set_env(objects, "gateway", "BATON_DISCOVERY", "consul"), "discovery: Input should be"),
    "an option": (
        set_in("Deployment", DECODE, *FIRST, "args", value=["decode", "--fast"]),
        "--fast is no option of decode",
    ),
    "a role": (set_in("Deployment", DECODE, *FIRST, "args", value=["decoder"]), "'decoder' is no role"),
    "the grace": (
        lambda objects: set_env(objects, "decode", "BATON_DRAIN_GRACE_S", "600"),
        "Deployment/baton-decode: terminationGracePeriodSeconds is below the 605 s",
    ),
    "the grace and preStop": (
        set_in("Deployment", GATEWAY, *FIRST, "lifecycle", "preStop", "exec", "command", value=["sleep", "60"]),
        "Deployment/baton-gateway: terminationGracePeriodSeconds is below the 665 s",
    ),
    "an account": (
        set_in("Deployment", GATEWAY, *POD, "serviceAccountName", value="me"),
        "there is no ServiceAccount me",
    ),
    "a volume": (set_in("Deployment", GATEWAY, *POD, "volumes", value=[]), "there is no volume tmp"),
    "a config map": (
        set_in("Deployment", GATEWAY, *FIRST, "envFrom", value=[{"configMapRef": {"name": "x"}}]),
        "there is no ConfigMap x",
    ),
    "a discovered service": (
        lambda objects: set_env(objects, "gateway", "BATON_DECODE_SERVICE", "decoders"),
        "Deployment/baton-gateway: there is no Service decoders",
    ),
    "a binding": (
        set_in("RoleBinding", GATEWAY, "roleRef", "name", value="x"),
        "RoleBinding/baton-gateway: there is no Role x",
    ),
    "a budget of none": (
        set_in("PodDisruptionBudget", DECODE, "spec", "maxUnavailable", value=0),
        "maxUnavailable 0 keeps every node from being drained",
    ),
    "a budget of all": (
        set_in("PodDisruptionBudget", DECODE, "spec", "maxUnavailable", value=2),
        "maxUnavailable is all 2 of Deployment/baton-decode",
    ),
    "a quantity": (
        set_in("Deployment", DECODE, *FIRST, "resources", "limits", "memory", value="8 GB"),
        "'8 GB' is no quantity",
    ),
    "more than the limit": (
        set_in("Deployment", DECODE, *FIRST, "resources", "requests", "memory", value="9Gi"),
        "it asks for more memory than its limit",
    ),
    "no limit": (set_in("Deployment", DECODE, *FIRST, "resources", "limits", value={}), "no limit of memory"),
    "root": (set_in("Deployment", DECODE, *POD, "securityContext", "runAsNonRoot", value=False), "it may run as root"),
    "capabilities": (
        set_in("Deployment", DECODE, *FIRST, "securityContext", "capabilities", value={}),
        "it keeps rights",
    ),
    "a root that is written to": (
        set_in("Deployment", DECODE, *FIRST, "securityContext", "readOnlyRootFilesystem", value=False),
        "its root can be written to",
    ),
    "the newest image": (
        set_in("Deployment", DECODE, *FIRST, "image", value="baton-worker:latest"),
        "baton-worker:latest is of no version",
    ),
    "service links": (
        set_in("Deployment", DECODE, *POD, "enableServiceLinks", value=True),
        "write into its environment",
    ),
    "spread": (
        set_in(
            "Deployment",
            DECODE,
            *POD,
            "topologySpreadConstraints",
            0,
            "labelSelector",
            value={"matchLabels": {"a": "b"}},
        ),
        "near to or far from pods that there are not",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_lint_finds_what_it_is_there_for(name: str) -> None:
    breaks, expected = BROKEN[name]
    objects = built("base")
    assert faults(objects) == []
    breaks(objects)
    found = faults(objects)
    assert any(expected in fault for fault in found), found
