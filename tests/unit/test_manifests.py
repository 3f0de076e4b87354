"""What `k8s/` builds is what Kubernetes takes, and fits together; each lint is shown by what it is there to find."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import custom_resources
import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from kubernetes_validate import utils as schemas
from manifest_lints import Object, faults, of
from needs import needs

K8S = Path(__file__).parents[2] / "k8s"
PAGE = (K8S.parent / "docs" / "kubernetes.md").read_text()
VERSIONS = ("1.37", "1.36", "1.35")
"""The newest of which there are schemas."""
BASES = ("base", *sorted(f"overlays/{path.name}" for path in (K8S / "overlays").iterdir()))
COMPONENTS = tuple(sorted(path.name for path in (K8S / "components").iterdir()))
SCALERS = (frozenset({"hpa", "latency-hpa"}), frozenset({"keda", "latency-keda"}))
"""Of which a deployment has those of one kind."""
Build = tuple[str, ...]
"""A base or an overlay, and components."""


def builds() -> Iterator[Build]:
    """Every one by itself, with each component, and with all of them; and one overlay with each pair of components."""
    for base in BASES:
        yield (base,)
        yield from ((base, component) for component in COMPONENTS if component not in included(base))
        for scalers in SCALERS:
            others = frozenset().union(*SCALERS) - scalers | included(base)
            # Monitoring comes before what changes it.
            yield (base, "monitoring", *(each for each in COMPONENTS if each not in {*others, "monitoring"}))
    for one, other in itertools.combinations(COMPONENTS, 2):
        if not any({one} & scalers and {other} & frozenset().union(*SCALERS) - scalers for scalers in SCALERS):
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
        env = os.environ | {"GOGC": "off", "GOMEMLIMIT": "500MiB"}  # so small a program needs no garbage collection
        done = subprocess.run(["kubectl", "kustomize", folder], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def built(*build: str) -> list[Object]:
    return copy.deepcopy(_built(build))


# It reads and parses 2 MB for each object.
schemas.schema_contents = cache(schemas.schema_contents)
schemas.all_versions = cache(schemas.all_versions)


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


def test_the_documentation_names_the_versions_of_kubernetes() -> None:
    assert f"schemas of Kubernetes {VERSIONS[-1]} to {VERSIONS[0]}." in PAGE


def test_the_documentation_deletes_and_looks_for_what_the_rules_are() -> None:
    """Their names are those that they had in the component `monitoring`."""
    deployment = built("base")
    rules = [each for each in built("base", "rules") if each not in deployment]
    [deleted] = re.findall(r"^kubectl -n chat delete (.*)$", PAGE, re.MULTILINE)
    assert set(deleted.split()) == {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in rules}
    labelled = [each for each in rules if each["metadata"]["labels"].get("app.kubernetes.io/name") == "baton"]
    found = sorted(each["metadata"]["name"] for each in of(labelled, "PrometheusRule"))
    command = "kubectl get prometheusrule -A -l app.kubernetes.io/name=baton"
    assert re.search(rf"^{command} +# two: {', '.join(found)}$", PAGE, re.MULTILINE)


def test_the_base_names_no_namespace() -> None:
    every = built(
        "base", "monitoring", *(each for each in COMPONENTS if each not in {"monitoring", "keda", "latency-keda"})
    )
    assert [each for each in every if "namespace" in each["metadata"]] == []


@pytest.mark.parametrize("base", [base for base in BASES if base != "base"])
def test_an_overlay_is_in_one_namespace_altogether(base: str) -> None:
    objects = built(base)
    assert {each["metadata"]["namespace"] for each in objects} == {"baton"}
    subjects = [subject for each in objects if each["kind"] == "RoleBinding" for subject in each["subjects"]]
    assert [subject.get("namespace") for subject in subjects] == ["baton"]


def test_autoscalers_of_both_kinds_behave_alike() -> None:
    hpas = of(built("base", "hpa", "latency-hpa"), "HorizontalPodAutoscaler")
    kedas = of(built("base", "keda", "latency-keda"), "ScaledObject")
    hpa = {each["metadata"]["name"]: each["spec"] for each in hpas}
    keda = {each["metadata"]["name"]: each["spec"] for each in kedas}
    assert hpa.keys() == keda.keys() == {PREFILL, DECODE, LATENCY}
    assert hpa[LATENCY]["behavior"] == hpa[DECODE]["behavior"]
    for name, one in hpa.items():
        other = keda[name]
        assert one["behavior"] == other["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert (one["minReplicas"], one["maxReplicas"]) == (other["minReplicaCount"], other["maxReplicaCount"])


def test_there_is_no_pool_for_latency_until_somebody_says_how_many() -> None:
    """It is the pool of decode workers but for its profile, and gateways find both by the same Service."""

    def pools(*build: str) -> dict[str, Object]:
        return {each["metadata"]["name"]: each for each in of(built(*build), "Deployment")}

    assert pools("base")[LATENCY]["spec"]["replicas"] == 0
    for scaler in ("latency-hpa", "latency-keda"):
        assert "replicas" not in pools("base", scaler)[LATENCY]["spec"]
        assert pools("base", scaler)[DECODE]["spec"]["replicas"] == 2
    for overlay in (base for base in BASES if base.startswith("overlays/")):
        found = pools(overlay)
        latency, throughput = (found[name]["spec"]["template"] for name in (LATENCY, DECODE))
        latency["spec"]["containers"][0]["env"].remove({"name": "BATON_PROFILE", "value": "latency"})
        assert json.dumps(latency).replace('"baton/profile": "latency"', '"baton/profile": "throughput"') == (
            json.dumps(throughput)
        )
    service = next(each for each in of(built("base"), "Service") if each["metadata"]["name"] == DECODE)
    for name in (LATENCY, DECODE):
        labels = pools("base")[name]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()


# --- broken ones -----------------------------------------------------------------------------------------------------


def change(objects: list[Object], text: str) -> None:
    """`PLACE KEY … = VALUE` sets a value, `PLACE KEY …` removes it, and `PLACE` removes the object. A place is
    `Kind/name`, or the pod of `gateway`, `prefill` or `decode`; a key of a list is a number or a name. A variable is
    set by its name."""
    path, _, value = text.partition(" = ")
    place, *keys = path.replace(" container ", " containers 0 ").split()
    kind, name = place.split("/") if "/" in place else ("Deployment", f"baton-{place}")
    at: Any = next(each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    if not keys:
        objects.remove(at)
        return
    at = at if "/" in place else at["spec"]["template"]["spec"]
    *keys, last = keys
    for key in keys:
        if isinstance(at, list):
            at = at[int(key)] if key.isdigit() else next(each for each in at if each["name"] == key)
        else:
            at = at[key]
    if isinstance(at, list):
        at[:] = [each for each in at if each["name"] != last] + [{"name": last, "value": value}]
    elif value:
        at[last] = yaml.safe_load(value)
    else:
        del at[last]


GATEWAYS = "{matchLabels: {app.kubernetes.io/name: baton, app.kubernetes.io/component: gateway}}"
PREFILL, DECODE, LATENCY = "baton-prefill", "baton-decode", "baton-decode-latency"
COMPONENT = "spec template metadata labels app.kubernetes.io/component"
BUDGET, SCALER = "PodDisruptionBudget/baton-decode spec", "HorizontalPodAutoscaler/baton-decode"
BROKEN = (
    (f"Deployment/baton-decode {COMPONENT} = decoder", "Deployment/baton-decode: its selector does not fit its own"),
    ("Service/baton-prefill spec selector = {a: b}", "Service/baton-prefill: it selects no"),
    (
        "Deployment/baton-decode spec selector matchLabels baton/profile",
        "Deployment/baton-decode: its selector fits the pods of Deployment/baton-decode-latency, too",
    ),
    (
        "NetworkPolicy/baton-workers spec podSelector = {matchLabels: {a: b}}",
        "NetworkPolicy/baton-workers: it selects no pod",
    ),
    (
        "decode topologySpreadConstraints 0 labelSelector = {matchLabels: {a: b}}",
        "near to or far from pods that there are not",
    ),
    # Ports and probes.
    ("Service/baton-gateway spec ports http targetPort = https", "Service/baton-gateway: its pods have no port https"),
    ("decode container readinessProbe httpGet port = http", "readinessProbe asks a port that there is not: http"),
    ("prefill container startupProbe", "no startupProbe"),
    (
        "NetworkPolicy/baton-gateway spec ingress = [{ports: [{port: admin}]}]",
        "NetworkPolicy/baton-gateway: its pods have no port admin",
    ),
    ("gateway container livenessProbe httpGet scheme = HTTP", "baton-gateway: livenessProbe does not speak HTTPS"),
    (
        "decode container livenessProbe terminationGracePeriodSeconds = 345",
        "a process that hangs has its pod's whole grace",
    ),
    # Settings.
    ("decode container env BATON_MAX_BATCH = 8", "Deployment/baton-decode: BATON_MAX_BATCH is no setting of decode"),
    ("prefill container env BATON_MAX_NUM_SEQS = 8", "BATON_MAX_NUM_SEQS is no setting of prefill"),
    ("gateway container env BATON_DISCOVERY = consul", "discovery: Input should be"),
    ("decode container env BATON_PEER_NETWORKS = 10.0.0.1/8", "Deployment/baton-decode: peer_networks"),
    ("decode container args = [decode, --fast]", "--fast is no option of decode"),
    ("decode container args = [decoder]", "'decoder' is no role"),
    ("prefill container env BATON_EXPOSE_MEMORY_OVER_TCP = false", "Deployment/baton-prefill: it ends at its start"),
    (
        "decode container env UCX_TLS = rc,cuda,sm",
        "Deployment/baton-decode: it is to expose its memory over TCP, which it does not use",
    ),
    (
        "decode container env BATON_TRANSPORT = zmq",
        "Deployment/baton-decode: it ends at its start, for ZMQ does not move the memory of a GPU",
    ),
    # Times.
    ("decode container env BATON_DRAIN_GRACE_S = 600", "terminationGracePeriodSeconds is below the 615 s"),
    (
        "gateway container lifecycle preStop exec command = [sleep, '60']",
        "Deployment/baton-gateway: terminationGracePeriodSeconds is below the 675 s",
    ),
    (
        "Deployment/baton-gateway spec progressDeadlineSeconds",
        "its rollout counts as failed before pods have had 1800 s to start",
    ),
    # Names.
    ("gateway serviceAccountName = me", "there is no ServiceAccount me"),
    ("gateway volumes = []", "there is no volume tmp"),
    ("gateway container envFrom = [{configMapRef: {name: x}}]", "there is no ConfigMap x"),
    ("gateway container env BATON_DECODE_SERVICE = decoders", "Deployment/baton-gateway: there is no Service decoders"),
    ("RoleBinding/baton-gateway roleRef name = x", "RoleBinding/baton-gateway: there is no Role x"),
    ("PersistentVolumeClaim/baton-models", "there is no PersistentVolumeClaim baton-models"),
    (
        "gateway volumes = [{name: tls, secret: {secretName: certs}}]",
        "Deployment/baton-gateway: nobody is told to make the Secret certs",
    ),
    (
        "decode container env HF_TOKEN valueFrom secretKeyRef optional",
        "it does not start without the Secret baton-hf-token",
    ),
    ("decode container env HF_TOKEN name = HOME", "Deployment/baton-decode: HOME is set twice"),
    # How many there are.
    (f"{BUDGET} maxUnavailable = 0", "maxUnavailable 0 keeps every node from being drained"),
    (f"{BUDGET} maxUnavailable = 0%", "maxUnavailable 0 keeps every node from being drained"),
    (f"{BUDGET} maxUnavailable = 2", "maxUnavailable is all 2 of Deployment/baton-decode"),
    (f"{BUDGET} maxUnavailable = 3", "maxUnavailable is all 2 of Deployment/baton-decode"),
    (f"{BUDGET} maxUnavailable = 100%", "maxUnavailable is all 2 of Deployment/baton-decode"),
    (
        f"PodDisruptionBudget/baton-gateway spec = {{minAvailable: 51%, selector: {GATEWAYS}}}",
        "PodDisruptionBudget/baton-gateway: minAvailable is all 2 of Deployment/baton-gateway",
    ),
    ("Deployment/baton-decode spec replicas = 3", f"{SCALER}: Deployment/baton-decode says how many there are, too"),
    (f"{SCALER} spec scaleTargetRef name = decode", f"{SCALER}: there is no Deployment decode"),
    (
        "HorizontalPodAutoscaler/baton-prefill spec scaleTargetRef name = baton-decode",
        "Deployment/baton-decode: 2 objects scale it",
    ),
    (f"{SCALER} spec minReplicas = 8", "from 8 to 8 is no range"),
    (
        f"{SCALER} spec behavior scaleDown policies 0 periodSeconds = 60",
        "it takes workers away faster than the 300 s",
    ),
    # Resources and rights.
    ("decode container resources limits memory = 8 GB", "'8 GB' is no quantity"),
    ("decode container resources requests memory = 490Gi", "it asks for more memory than its limit"),
    ("decode container resources limits = {}", "no limit of memory"),
    ("gateway container resources limits memory = 4Gi", "its memory does not hold 4.4 GiB of requests"),
    ("gateway container env BATON_MODEL = unknown", "nobody knows the context of 'unknown'"),
    ("gateway container env BATON_MAX_MODEL_LEN = 65536", "its memory does not hold 8.2 GiB of requests"),
    (
        "decode container env BATON_MAX_WAITING = 6143",
        "Deployment/baton-decode: it refuses some of the 6144 requests that gateways let in",
    ),
    (
        "Deployment/baton-gateway spec replicas = 4",
        "Deployment/baton-prefill: it refuses some of the 10240 requests that gateways let in",
    ),
    ("decode securityContext runAsNonRoot = false", "it may run as root"),
    ("decode securityContext seccompProfile", "Deployment/baton-decode: it has no seccomp profile"),
    ("decode container securityContext capabilities = {}", "it keeps rights"),
    ("decode container securityContext readOnlyRootFilesystem = false", "its root can be written to"),
    ("decode container image = baton-worker:latest", "baton-worker:latest is of no version"),
    ("decode enableServiceLinks = true", "write into its environment"),
    ("gateway nodeSelector", "Deployment/baton-gateway: it may come to a node on which its image does not run"),
    ("prefill container resources requests ephemeral-storage = 40Gi", "keeps 40Gi of its node's disk"),
    (
        "Deployment/baton-decode spec template metadata annotations",
        "Deployment/baton-decode: the cluster autoscaler keeps its node because of the volume tmp",
    ),
    (
        "gateway container terminationMessagePolicy",
        "Deployment/baton-gateway: kubectl describe does not show why it has ended",
    ),
    # Monitors.
    ("PodMonitor/baton-gateway spec podMetricsEndpoints 0 scheme", "PodMonitor/baton-gateway: its pods speak HTTPS"),
    (
        "PodMonitor/baton-workers spec podMetricsEndpoints 0 port = metrics",
        "PodMonitor/baton-workers: its pods have no port metrics",
    ),
    (
        "PodMonitor/baton-gateway spec selector = {matchLabels: {a: b}}",
        "PodMonitor/baton-gateway: it selects no pod",
    ),
)
"""A change of what is built, and the fault that a lint finds then."""


WHOLE = ("overlays/gpu", "monitoring", "hpa", "api-keys", "curve", "model-cache", "tls")


@pytest.mark.parametrize(("broken", "expected"), BROKEN)
def test_a_lint_finds_what_it_is_there_for(broken: str, expected: str) -> None:
    objects = built(*WHOLE)
    assert faults(objects) == []
    change(objects, broken)
    found = faults(objects)
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize(("threads", "fits"), [("1", True), ("2", False), ("0", False)])
def test_a_worker_on_a_cpu_has_threads_for_the_cores_that_its_pod_requests(threads: str, fits: bool) -> None:
    """Half a core, which is one thread."""
    objects = built("overlays/cpu-dev")
    change(objects, f"decode container env BATON_NUM_THREADS = {threads}")
    expected = "Deployment/baton-decode: it computes with other threads than the 1 cores that it requests"
    assert faults(objects) == ([] if fits else [expected])


def test_a_custom_resource_with_a_field_that_does_not_exist_is_not_taken() -> None:
    for component, kind in (("monitoring", "PodMonitor"), ("rules", "PrometheusRule"), ("keda", "ScaledObject")):
        each = next(each for each in built("base", component) if each["kind"] == kind)
        custom_resources.validate(each)
        each["spec"]["intervall"] = "15s"
        with pytest.raises(jsonschema.ValidationError):
            custom_resources.validate(each)
