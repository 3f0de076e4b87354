"""What `k8s/` builds is what Kubernetes takes, and fits together; each lint is shown by what it is there to find."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import custom_resources
import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from manifest_lints import Object, faults
from needs import needs

K8S = Path(__file__).parents[2] / "k8s"
VERSIONS = ("1.37", "1.36", "1.35")
"""The newest of which there are schemas."""
BASES = ("base", *sorted(f"overlays/{path.name}" for path in (K8S / "overlays").iterdir()))
COMPONENTS = tuple(sorted(path.name for path in (K8S / "components").iterdir()))
SCALERS = frozenset({"hpa", "keda"})
"""Of which a deployment has one."""
Build = tuple[str, ...]
"""A base or an overlay, and components."""


def builds() -> Iterator[Build]:
    """Every one by itself, with each component, and with all of them; and one overlay with each pair of components."""
    for base in BASES:
        yield (base,)
        yield from ((base, component) for component in COMPONENTS if component not in included(base))
        for scaler in sorted(SCALERS):
            others = SCALERS - {scaler} | included(base)
            # Monitoring comes before what changes it.
            yield (base, "monitoring", *(each for each in COMPONENTS if each not in {*others, "monitoring"}))
    for one, other in itertools.combinations(COMPONENTS, 2):
        if {one, other} != SCALERS:
            yield ("overlays/gpu", *sorted((one, other), key=lambda each: each != "monitoring"))


def included(base: str) -> frozenset[str]:
    """Components that an overlay has by itself."""
    content = yaml.safe_load((K8S / base / "kustomization.yaml").read_text())
    return frozenset(Path(path).name for path in content.get("components", ()))


BUILDS = {" + ".join(build): build for build in builds()}

pytestmark = [needs("kubectl"), pytest.mark.processes]


@cache
def _built(build: Build) -> list[Object]:
    base, *components = build
    with TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        up = os.path.relpath(K8S, folder)
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{up}/{base}"],
            "components": [f"{up}/components/{component}" for component in components],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
        done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def built(*build: str) -> list[Object]:
    return copy.deepcopy(_built(build))


@cache
def _validate(version: str, text: str) -> None:
    each = json.loads(text)
    if custom_resources.is_custom(each):
        custom_resources.validate(each)
    else:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_every_object_is_what_kubernetes_takes_and_fits_together(build: Build) -> None:
    objects = built(*build)
    assert objects
    for each in objects:
        for version in VERSIONS:
            _validate(version, json.dumps(each))
    assert faults(objects) == []


def test_the_base_names_no_namespace() -> None:
    every = built("base", "monitoring", *(each for each in COMPONENTS if each not in {"monitoring", "keda"}))
    assert [each for each in every if "namespace" in each["metadata"]] == []


@pytest.mark.parametrize("base", [base for base in BASES if base != "base"])
def test_an_overlay_is_in_one_namespace_altogether(base: str) -> None:
    objects = built(base)
    assert {each["metadata"]["namespace"] for each in objects} == {"baton"}
    subjects = [subject for each in objects if each["kind"] == "RoleBinding" for subject in each["subjects"]]
    assert [subject.get("namespace") for subject in subjects] == ["baton"]


def test_autoscalers_of_both_kinds_behave_alike() -> None:
    hpa = {each["metadata"]["name"]: each["spec"] for each in built("base", "hpa") if each["kind"].startswith("Horiz")}
    keda = {each["metadata"]["name"]: each["spec"] for each in built("base", "keda") if each["kind"] == "ScaledObject"}
    assert hpa.keys() == keda.keys() == {PREFILL, DECODE}
    for name, one in hpa.items():
        other = keda[name]
        assert one["behavior"] == other["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert (one["minReplicas"], one["maxReplicas"]) == (other["minReplicaCount"], other["maxReplicaCount"])


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


GATEWAYS = {"matchLabels": {"app.kubernetes.io/name": "baton", "app.kubernetes.io/component": "gateway"}}
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
    "memory that nobody means to expose": (
        lambda objects: set_env(objects, "prefill", "BATON_EXPOSE_MEMORY_OVER_TCP", "false"),
        "Deployment/baton-prefill: it ends at its start",
    ),
    "memory that is exposed for nothing": (
        lambda objects: set_env(objects, "decode", "UCX_TLS", "rc,cuda,sm"),
        "Deployment/baton-decode: it is to expose its memory over TCP, which it does not use",
    ),
    "networks of peers": (
        lambda objects: set_env(objects, "decode", "BATON_PEER_NETWORKS", "10.0.0.1/8"),
        "Deployment/baton-decode: peer_networks",
    ),
    "the grace": (
        lambda objects: set_env(objects, "decode", "BATON_DRAIN_GRACE_S", "600"),
        "Deployment/baton-decode: terminationGracePeriodSeconds is below the 615 s",
    ),
    "the grace and preStop": (
        set_in("Deployment", GATEWAY, *FIRST, "lifecycle", "preStop", "exec", "command", value=["sleep", "60"]),
        "Deployment/baton-gateway: terminationGracePeriodSeconds is below the 675 s",
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
    "a budget of all in percent": (
        set_in("PodDisruptionBudget", DECODE, "spec", "maxUnavailable", value="100%"),
        "maxUnavailable is all 2 of Deployment/baton-decode",
    ),
    "a budget of more than all": (
        set_in("PodDisruptionBudget", DECODE, "spec", "maxUnavailable", value=3),
        "maxUnavailable is all 2 of Deployment/baton-decode",
    ),
    "a budget of none in percent": (
        set_in("PodDisruptionBudget", DECODE, "spec", "maxUnavailable", value="0%"),
        "maxUnavailable 0 keeps every node from being drained",
    ),
    "a budget that keeps all": (
        set_in("PodDisruptionBudget", GATEWAY, "spec", value={"minAvailable": "51%", "selector": GATEWAYS}),
        "PodDisruptionBudget/baton-gateway: minAvailable is all 2 of Deployment/baton-gateway",
    ),
    "a deadline": (
        lambda objects: find(objects, "Deployment", GATEWAY)["spec"].pop("progressDeadlineSeconds"),
        "Deployment/baton-gateway: its rollout counts as failed before pods have had 1800 s to start",
    ),
    "seccomp": (
        lambda objects: pod(objects, "decode")["securityContext"].pop("seccompProfile"),
        "Deployment/baton-decode: it has no seccomp profile",
    ),
    "a quantity": (
        set_in("Deployment", DECODE, *FIRST, "resources", "limits", "memory", value="8 GB"),
        "'8 GB' is no quantity",
    ),
    "more than the limit": (
        set_in("Deployment", DECODE, *FIRST, "resources", "requests", "memory", value="490Gi"),
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
    "a scheme": (
        set_in("Deployment", GATEWAY, *FIRST, "livenessProbe", "httpGet", "scheme", value="HTTP"),
        "Deployment/baton-gateway: livenessProbe does not speak HTTPS",
    ),
    "a monitor's scheme": (
        lambda objects: find(objects, "PodMonitor", GATEWAY)["spec"]["podMetricsEndpoints"][0].pop("scheme"),
        "PodMonitor/baton-gateway: its pods speak HTTPS",
    ),
    "a monitor's port": (
        set_in("PodMonitor", "baton-workers", "spec", "podMetricsEndpoints", 0, "port", value="metrics"),
        "PodMonitor/baton-workers: its pods have no port metrics",
    ),
    "a monitor": (
        set_in("PodMonitor", GATEWAY, "spec", "selector", value={"matchLabels": {"a": "b"}}),
        "PodMonitor/baton-gateway: it selects no pod",
    ),
    "two who say how many": (
        set_in("Deployment", DECODE, "spec", "replicas", value=3),
        "HorizontalPodAutoscaler/baton-decode: Deployment/baton-decode says how many there are, too",
    ),
    "whom to scale": (
        set_in("HorizontalPodAutoscaler", DECODE, "spec", "scaleTargetRef", "name", value="decode"),
        "HorizontalPodAutoscaler/baton-decode: there is no Deployment decode",
    ),
    "two who scale": (
        lambda objects: objects.append(copy.deepcopy(find(objects, "HorizontalPodAutoscaler", DECODE))),
        "Deployment/baton-decode: 2 objects scale it",
    ),
    "no range": (
        set_in("HorizontalPodAutoscaler", DECODE, "spec", "minReplicas", value=8),
        "from 8 to 8 is no range",
    ),
    "shrinking faster than draining": (
        set_in(
            "HorizontalPodAutoscaler",
            DECODE,
            "spec",
            "behavior",
            "scaleDown",
            "policies",
            0,
            "periodSeconds",
            value=60,
        ),
        "it takes workers away faster than the 300 s",
    ),
    "a claim": (
        lambda objects: objects.remove(find(objects, "PersistentVolumeClaim", "baton-models")),
        "there is no PersistentVolumeClaim baton-models",
    ),
    "a secret": (
        set_in("Deployment", GATEWAY, *POD, "volumes", value=[{"name": "tls", "secret": {"secretName": "certs"}}]),
        "Deployment/baton-gateway: nobody is told to make the Secret certs",
    ),
    "a secret that must be there": (
        lambda objects: next(each for each in container(objects, "decode")["env"] if each["name"] == "HF_TOKEN")[
            "valueFrom"
        ]["secretKeyRef"].pop("optional"),
        "it does not start without the Secret baton-hf-token",
    ),
    "a variable twice": (
        lambda objects: container(objects, "decode")["env"].append({"name": "HOME", "value": "/"}),
        "Deployment/baton-decode: HOME is set twice",
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


WHOLE = ("overlays/gpu", "monitoring", "hpa", "api-keys", "curve", "model-cache", "tls")


@pytest.mark.parametrize("name", BROKEN)
def test_a_lint_finds_what_it_is_there_for(name: str) -> None:
    breaks, expected = BROKEN[name]
    objects = built(*WHOLE)
    assert faults(objects) == []
    breaks(objects)
    found = faults(objects)
    assert any(expected in fault for fault in found), found


def test_a_custom_resource_with_a_field_that_does_not_exist_is_not_taken() -> None:
    for component, kind in (("monitoring", "PodMonitor"), ("monitoring", "PrometheusRule"), ("keda", "ScaledObject")):
        each = next(each for each in built("base", component) if each["kind"] == kind)
        custom_resources.validate(each)
        each["spec"]["intervall"] = "15s"
        with pytest.raises(jsonschema.ValidationError):
            custom_resources.validate(each)
