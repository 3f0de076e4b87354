"""What is wrong with Kubernetes objects that no schema knows: names that nothing bears, seconds that do not add up,
settings that do not exist. Each lint takes all objects of a deployment and yields a line for each fault."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from common.runtime.config import ENV_PREFIX, DecodeSettings, GatewaySettings, PrefillSettings
from common.runtime.ucx import allows_tcp

Object = dict[str, Any]
ROLES: Mapping[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
SECRETS = frozenset({"baton-api-keys", "baton-curve", "baton-hf-token", "baton-tls"})
"""That an operator makes; `docs/operations/security.md` says how."""
_END_S = 15
"""Seconds that a process gets beyond its grace."""
_CONTEXTS = {"demo": 2048, "Qwen/Qwen2.5-7B-Instruct": 32768, "Qwen/Qwen2.5-32B-Instruct": 32768}
"""Tokens of prompt and answer that the models of the overlays take."""
_IDLE_BYTES = 200 * 2**20
"""Of a gateway's process without requests."""
_BYTES_OF_A_WAITING_TOKEN = 60
_LOGS_BYTES = 4 * 2**30
"""Of a node's disk, that a pod's container takes beyond its volumes."""
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


def of(objects: Iterable[Object], *kinds: str) -> Iterator[Object]:
    """Those of these kinds."""
    return (each for each in objects if each["kind"] in kinds)


def named(each: Object) -> str:
    """For a fault's line."""
    return f"{each['kind']}/{each['metadata']['name']}"


def templates(objects: Iterable[Object]) -> Iterator[tuple[Object, Object]]:
    """What makes pods, and its pods' template."""
    for each in of(objects, "Deployment", "StatefulSet"):
        yield each, each["spec"]["template"]


def containers(objects: Iterable[Object]) -> Iterator[tuple[Object, Object, Object]]:
    """Each container, its pod's spec, and what makes its pods."""
    for each, template in templates(objects):
        for container in template["spec"]["containers"]:
            yield each, template["spec"], container


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector fits."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for term in selector.get("matchExpressions", ()):
        value, values = labels.get(term["key"]), term.get("values", ())
        held = {"In": value in values, "NotIn": value not in values, "Exists": value is not None}
        if not held.get(term["operator"], value is None):
            return False
    return True


def _selected(objects: list[Object], selector: Object) -> list[Object]:
    return [pod for _, pod in templates(objects) if selects(selector, pod["metadata"]["labels"])]


def selectors_fit(objects: list[Object]) -> Iterator[str]:
    """Everything that selects pods selects some; and whatever makes pods, its own, and no others."""
    for each, template in templates(objects):
        if not selects(each["spec"]["selector"], template["metadata"]["labels"]):
            yield f"{named(each)}: its selector does not fit its own pods"
        for other, foreign in templates(objects):
            if other is not each and selects(each["spec"]["selector"], foreign["metadata"]["labels"]):
                yield f"{named(each)}: its selector fits the pods of {named(other)}, too"
    for each in of(objects, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        spec = each["spec"]
        selectors = [{"matchLabels": spec["selector"]} if each["kind"] == "Service" else spec.get("selector") or {}]
        if each["kind"] == "NetworkPolicy":
            rules = [peer for rule in spec.get("ingress", ()) for peer in rule.get("from", ())]
            selectors = [spec["podSelector"], *(peer["podSelector"] for peer in rules if "podSelector" in peer)]
        for selector in selectors:
            if not _selected(objects, selector):
                yield f"{named(each)}: it selects no pod: {selector}"
    for each, template in templates(objects):
        spread = template["spec"].get("topologySpreadConstraints", ())
        near = template["spec"].get("affinity", {}).get("podAffinity", {})
        terms = [term["podAffinityTerm"] for term in near.get("preferredDuringSchedulingIgnoredDuringExecution", ())]
        for selector in (part["labelSelector"] for part in (*spread, *terms)):
            if not _selected(objects, selector):
                yield f"{named(each)}: it wants to be near to or far from pods that there are not: {selector}"


def ports_exist(objects: list[Object]) -> Iterator[str]:
    """Ports of Services, probes and policies are ports of the containers that they are about."""

    def of_pod(spec: Object) -> set[Any]:
        ports = [port for container in spec["containers"] for port in container.get("ports", ())]
        return {port["name"] for port in ports} | {port["containerPort"] for port in ports}

    for each in of(objects, "Service"):
        for pod in _selected(objects, {"matchLabels": each["spec"]["selector"]}):
            for port in each["spec"]["ports"]:
                if port.get("targetPort", port["port"]) not in of_pod(pod["spec"]):
                    yield f"{named(each)}: its pods have no port {port.get('targetPort', port['port'])}"
    for each, spec, container in containers(objects):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe not in container:
                yield f"{named(each)}: no {probe}"
            elif container[probe]["httpGet"]["port"] not in of_pod(spec):
                yield f"{named(each)}: {probe} asks a port that there is not: {container[probe]['httpGet']['port']}"
            elif container[probe]["httpGet"].get("scheme", "HTTP") != _scheme(objects, container):
                yield f"{named(each)}: {probe} does not speak {_scheme(objects, container)}"
        if container.get("livenessProbe", {}).get("terminationGracePeriodSeconds", 3600) > 60:
            yield f"{named(each)}: a process that hangs has its pod's whole grace"
    for each in of(objects, "NetworkPolicy"):
        for pod in _selected(objects, each["spec"]["podSelector"]):
            for port in (port for rule in each["spec"].get("ingress", ()) for port in rule.get("ports", ())):
                if isinstance(port["port"], str) and port["port"] not in of_pod(pod["spec"]):
                    yield f"{named(each)}: its pods have no port {port['port']}"


def environment(objects: list[Object], container: Object) -> dict[str, str | None]:
    """A container's variables; None for a value that the cluster fills in."""
    maps = {each["metadata"]["name"]: each.get("data", {}) for each in of(objects, "ConfigMap")}
    variables: dict[str, str | None] = {}
    for source in container.get("envFrom", ()):
        variables |= maps.get(source.get("configMapRef", {}).get("name"), {})
    return variables | {each["name"]: each.get("value") for each in container.get("env", ())}


def _scheme(objects: list[Object], container: Object) -> str:
    return "HTTPS" if "BATON_TLS_CERT" in environment(objects, container) else "HTTP"


def settings_exist(objects: list[Object]) -> Iterator[str]:
    """Every variable `BATON_*` and every option is a setting of the role, with a value that it takes."""
    for each, _, container in containers(objects):
        role, *options = container.get("args", ("",))
        if role not in ROLES:
            yield f"{named(each)}: {role!r} is no role"
            continue
        fields = ROLES[role].model_fields
        given: dict[str, Any] = {}
        for name, value in environment(objects, container).items():
            if name.startswith(ENV_PREFIX):
                field = name.removeprefix(ENV_PREFIX).lower()
                if field not in fields:
                    yield f"{named(each)}: {name} is no setting of {role}"
                elif value is not None:
                    given[field] = value
        for option in options:
            name, _, value = option.removeprefix("--").partition("=")
            field = name.replace("-", "_")
            if not option.startswith("--") or field not in fields:
                yield f"{named(each)}: {option} is no option of {role}"
            else:
                given[field] = value
        try:
            ROLES[role](**given)
        except ValidationError as error:
            first = error.errors()[0]
            yield f"{named(each)}: {'.'.join(map(str, first['loc'])) or role}: {first['msg']}"


def memory_is_opened_on_purpose(objects: list[Object]) -> Iterator[str]:
    """A worker, which never binds loopback in a pod, exposes its memory over TCP if and only if UCX speaks TCP. A GPU's
    memory is moved by nothing but UCX."""
    for each, _, container in containers(objects):
        variables = environment(objects, container)
        if container.get("args", ("",))[0] not in ("prefill", "decode"):
            continue
        with_tcp = variables.get("BATON_TRANSPORT") != "zmq" and allows_tcp(variables.get("UCX_TLS"))
        exposed = variables.get("BATON_EXPOSE_MEMORY_OVER_TCP") == "true"
        if variables.get("BATON_TRANSPORT") == "zmq" and variables.get("BATON_DEVICE") == "cuda":
            yield f"{named(each)}: it ends at its start, for ZMQ does not move the memory of a GPU"
        if with_tcp and not exposed:
            yield f"{named(each)}: it ends at its start, for it would expose its memory over TCP"
        if exposed and not with_tcp:
            yield f"{named(each)}: it is to expose its memory over TCP, which it does not use"


def grace_adds_up(objects: list[Object]) -> Iterator[str]:
    """A pod gets as long to end as what happens then may take."""
    for each, spec, container in containers(objects):
        role = container.get("args", ("",))[0]
        if role not in ROLES:
            continue
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ())
        stop_s = int(shlex.split(" ".join(command))[1]) if command[:1] == ["sleep"] else 0
        variable = "BATON_SHUTDOWN_GRACE_S" if role == "gateway" else "BATON_DRAIN_GRACE_S"
        default = ROLES[role].model_fields[variable.removeprefix(ENV_PREFIX).lower()].default
        needed = stop_s + float(environment(objects, container).get(variable) or default) + _END_S
        if spec.get("terminationGracePeriodSeconds", 30) < needed:
            yield f"{named(each)}: terminationGracePeriodSeconds is below the {needed:g} s that it may take to end"


def starts_have_time(objects: list[Object]) -> Iterator[str]:
    """A rollout is not given up while pods may still be starting."""
    starts = [
        (each, container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"])
        for each, _, container in containers(objects)
        if "startupProbe" in container
    ]
    longest = max((start_s for _, start_s in starts), default=0)
    for each, _ in starts:
        if each["spec"].get("progressDeadlineSeconds", 600) <= longest:
            yield f"{named(each)}: its rollout counts as failed before pods have had {longest} s to start"


def names_resolve(objects: list[Object]) -> Iterator[str]:
    """Accounts, roles, maps, volumes, claims and Services that are named are there; Secrets, which no repository has,
    are those that the documentation tells how to make."""
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for each, spec, container in containers(objects):
        claimed = [
            volume["persistentVolumeClaim"] for volume in spec.get("volumes", ()) if "persistentVolumeClaim" in volume
        ]
        for claim in claimed:
            if ("PersistentVolumeClaim", claim["claimName"]) not in names:
                yield f"{named(each)}: there is no PersistentVolumeClaim {claim['claimName']}"
        secrets = [volume["secret"]["secretName"] for volume in spec.get("volumes", ()) if "secret" in volume]
        keys = [variable.get("valueFrom", {}).get("secretKeyRef") for variable in container.get("env", ())]
        for secret in (*secrets, *(key["name"] for key in keys if key)):
            if secret not in SECRETS:
                yield f"{named(each)}: nobody is told to make the Secret {secret}"
        for key in keys:
            if key and not key.get("optional"):
                yield f"{named(each)}: it does not start without the Secret {key['name']}"
        if ("ServiceAccount", spec.get("serviceAccountName")) not in names:
            yield f"{named(each)}: there is no ServiceAccount {spec.get('serviceAccountName')}"
        for source in container.get("envFrom", ()):
            name = source.get("configMapRef", {}).get("name")
            if name is not None and ("ConfigMap", name) not in names:
                yield f"{named(each)}: there is no ConfigMap {name}"
        twice = [name for name, num in Counter(v["name"] for v in container.get("env", ())).items() if num > 1]
        for name in twice:
            yield f"{named(each)}: {name} is set twice"
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in volumes:
                yield f"{named(each)}: there is no volume {mount['name']}"
        for variable in ("BATON_PREFILL_SERVICE", "BATON_DECODE_SERVICE"):
            service = environment(objects, container).get(variable)
            if service is not None and ("Service", service) not in names:
                yield f"{named(each)}: there is no Service {service}"
    for each in of(objects, "RoleBinding"):
        for reference in (each["roleRef"], *each["subjects"]):
            if (reference["kind"], reference["name"]) not in names:
                yield f"{named(each)}: there is no {reference['kind']} {reference['name']}"


def budgets_let_pods_go(objects: list[Object]) -> Iterator[str]:
    """A disruption budget keeps some pods, and does not keep nodes from being drained."""
    for each in of(objects, "PodDisruptionBudget"):
        spec = each["spec"]
        for maker, pod in templates(objects):
            replicas = _least(objects, maker)
            if replicas and selects(spec["selector"], pod["metadata"]["labels"]):
                if "maxUnavailable" in spec and _share(spec["maxUnavailable"], replicas) == 0:
                    yield f"{named(each)}: maxUnavailable 0 keeps every node from being drained"
                if "minAvailable" in spec and _share(spec["minAvailable"], replicas) >= replicas:
                    yield f"{named(each)}: minAvailable is all {replicas} of {named(maker)}"
                if "maxUnavailable" in spec and _share(spec["maxUnavailable"], replicas) >= replicas > 1:
                    yield f"{named(each)}: maxUnavailable is all {replicas} of {named(maker)}"


def _share(of: int | str, replicas: int) -> int:
    """What a number or percentage of a budget or a rollout comes to; it is rounded up."""
    return math.ceil(int(of[:-1]) * replicas / 100) if isinstance(of, str) else of


def _least(objects: list[Object], maker: Object) -> int:
    """How many pods there are at least."""
    least = [
        each["spec"]["minReplicas"] if each["kind"] == "HorizontalPodAutoscaler" else each["spec"]["minReplicaCount"]
        for each in of(objects, "HorizontalPodAutoscaler", "ScaledObject")
        if each["spec"]["scaleTargetRef"]["name"] == maker["metadata"]["name"]
    ]
    return int(min(least, default=maker["spec"].get("replicas", 1)))


def scalers_fit(objects: list[Object]) -> Iterator[str]:
    """What scales a pool is the only one to say how many, keeps at least what its disruption budget and its rollout
    need, and shrinks no faster than a worker drains."""
    pools = {each["metadata"]["name"]: each for each in of(objects, "Deployment")}
    scaled: Counter[str] = Counter()
    for each in of(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        spec = each["spec"]
        name = spec["scaleTargetRef"]["name"]
        scaled[name] += 1
        if name not in pools:
            yield f"{named(each)}: there is no Deployment {name}"
            continue
        if "replicas" in pools[name]["spec"]:
            yield f"{named(each)}: Deployment/{name} says how many there are, too"
        hpa = each["kind"] == "HorizontalPodAutoscaler"
        least, most = (
            (spec["minReplicas"], spec["maxReplicas"]) if hpa else (spec["minReplicaCount"], spec["maxReplicaCount"])
        )
        if not 1 <= least < most:
            yield f"{named(each)}: from {least} to {most} is no range to scale in"
        behavior = spec["behavior"] if hpa else spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        container = pools[name]["spec"]["template"]["spec"]["containers"][0]
        drain_s = float(environment(objects, container).get("BATON_DRAIN_GRACE_S") or 0)
        for policy in behavior["scaleDown"]["policies"]:
            if policy["type"] != "Pods" or policy["periodSeconds"] < drain_s * policy["value"]:
                yield f"{named(each)}: it takes workers away faster than the {drain_s:g} s that each may drain"
    for name, num in scaled.items():
        if num > 1:
            yield f"Deployment/{name}: {num} objects scale it"


def monitors_reach(objects: list[Object]) -> Iterator[str]:
    """Monitors scrape ports that there are, as the pods speak there."""
    for each in of(objects, "PodMonitor"):
        for pod in _selected(objects, each["spec"]["selector"]):
            container = pod["spec"]["containers"][0]
            ports = {port["name"] for port in container["ports"]}
            scheme = _scheme(objects, container)
            for endpoint in each["spec"]["podMetricsEndpoints"]:
                if endpoint["port"] not in ports:
                    yield f"{named(each)}: its pods have no port {endpoint['port']}"
                if endpoint.get("scheme", "http").upper() != scheme:
                    yield f"{named(each)}: its pods speak {scheme}"


def _amount(quantity: str) -> float:
    found = re.fullmatch(r"([0-9.]+)(m|[kMGTP]i?|)", quantity.replace("K", "k"))
    assert found is not None
    unit = found[2]
    factor = 1e-3 if unit == "m" else (1024 if unit.endswith("i") else 1000) ** ("kMGTP".find(unit[:1]) + 1)
    return float(found[1]) * (factor if unit else 1)


def _number(objects: list[Object], container: Object, name: str) -> int:
    """The value of a setting: the one that a container is given, or its role's default."""
    given = environment(objects, container).get(f"{ENV_PREFIX}{name.upper()}")
    return int(given or ROLES[container["args"][0]].model_fields[name].default or 0)


def gateways_hold_what_they_let_in(objects: list[Object]) -> Iterator[str]:
    """A gateway's memory holds as many waiting prompts of a whole context as it lets in."""
    for each, _, container in containers(objects):
        if container.get("args", ("",))[0] != "gateway":
            continue
        model = environment(objects, container).get("BATON_MODEL") or ""
        context = _number(objects, container, "max_model_len") or _CONTEXTS.get(model, 0)
        if not context:
            yield f"{named(each)}: nobody knows the context of {model!r}, and so not what its requests take"
        waiting = _number(objects, container, "max_in_flight") * context * _BYTES_OF_A_WAITING_TOKEN
        needed = _IDLE_BYTES + 256 * 2**20 + 120 * _number(objects, container, "prefix_index_names") + waiting
        limit = str(container.get("resources", {}).get("limits", {}).get("memory", "0"))
        if _QUANTITY.fullmatch(limit) is not None and _amount(limit) < needed:
            yield f"{named(each)}: its memory does not hold {needed / 2**30:.1f} GiB of requests that it lets in"


def workers_take_what_gateways_let_in(objects: list[Object]) -> Iterator[str]:
    """A worker refuses none of the requests, of one prompt each, that all gateways of a rollout together let in."""
    let_in = 0
    for each, _, container in containers(objects):
        if container.get("args", ("",))[0] == "gateway":
            replicas = each["spec"].get("replicas", 1)
            surge = each["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", "25%")
            let_in += (replicas + _share(surge, replicas)) * _number(objects, container, "max_in_flight")
    for each, _, container in containers(objects):
        is_worker = container.get("args", ("",))[0] in {"prefill", "decode"}
        if is_worker and _number(objects, container, "max_waiting") < let_in:
            yield f"{named(each)}: it refuses some of the {let_in} requests that gateways let in"


def quantities_are_some(objects: list[Object]) -> Iterator[str]:
    """Resources and sizes are quantities, and requests are within limits."""
    for each, spec, container in containers(objects):
        resources = container.get("resources", {})
        given = [value for part in resources.values() for value in part.values()]
        given += [
            v["emptyDir"]["sizeLimit"] for v in spec.get("volumes", ()) if "sizeLimit" in (v.get("emptyDir") or {})
        ]
        wrong = [value for value in given if _QUANTITY.fullmatch(str(value)) is None]
        for value in wrong:
            yield f"{named(each)}: {value!r} is no quantity"
        for name, least in resources.get("requests", {}).items():
            most = resources.get("limits", {}).get(name)
            if not wrong and most is not None and _amount(str(least)) > _amount(str(most)):
                yield f"{named(each)}: it asks for more {name} than its limit"
        if "memory" not in resources.get("limits", {}):
            yield f"{named(each)}: no limit of memory"


def pods_may_do_little(objects: list[Object]) -> Iterator[str]:
    """Pods run as nobody, write to what was given to them, and have images of a version."""
    for each, spec, container in containers(objects):
        pod, own = spec.get("securityContext", {}), container.get("securityContext", {})
        if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
            yield f"{named(each)}: it may run as root"
        if own.get("allowPrivilegeEscalation") is not False or "ALL" not in own.get("capabilities", {}).get("drop", ()):
            yield f"{named(each)}: it keeps rights"
        if not own.get("readOnlyRootFilesystem"):
            yield f"{named(each)}: its root can be written to"
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{named(each)}: it has no seccomp profile"
        if spec.get("enableServiceLinks", True):
            yield f"{named(each)}: Services around it write into its environment"
        if re.search(r":(?!latest$)[\w][\w.-]*$|@sha256:[0-9a-f]{64}$", container["image"]) is None:
            yield f"{named(each)}: {container['image']} is of no version"


def threads_fit(objects: list[Object]) -> Iterator[str]:
    """A worker that computes on CPUs has no more threads, of all its ranks, than cores that are kept for it: by default
    they are those of the node."""
    for each, _, container in containers(objects):
        resources, variables = container.get("resources", {}), environment(objects, container)
        gpus = [name for name in resources.get("limits", {}) if "gpu" in name]
        if container.get("args", ("",))[0] not in {"prefill", "decode"} or gpus:
            continue
        cores = math.ceil(_amount(str(resources.get("requests", {}).get("cpu", "0"))))
        said = [one for one in container.get("env", ()) if one["name"] == "BATON_NUM_THREADS"]
        source = said[0].get("valueFrom", {}).get("resourceFieldRef", {}).get("resource") if said else None
        threads = cores if source == "requests.cpu" else int(variables.get("BATON_NUM_THREADS") or 0)
        if not 1 <= threads * int(variables.get("BATON_TENSOR_PARALLEL") or 1) <= cores:
            yield f"{named(each)}: it computes with other threads than the {cores} cores that it requests"


def nodes_run_the_images(objects: list[Object]) -> Iterator[str]:
    """The locked packages of the images are those of one architecture."""
    for each, template in templates(objects):
        if template["spec"].get("nodeSelector", {}).get("kubernetes.io/arch") != "amd64":
            yield f"{named(each)}: it may come to a node on which its image does not run"


def disks_are_for_what_is_written(objects: list[Object]) -> Iterator[str]:
    """A worker whose weights are on a shared volume keeps little of its node's disk from others."""
    for each, spec, container in containers(objects):
        volumes = spec.get("volumes", ())
        if not any(volume["name"] == "models" and "persistentVolumeClaim" in volume for volume in volumes):
            continue
        folders = [folder for volume in volumes if (folder := volume.get("emptyDir")) and "medium" not in folder]
        written = sum(_amount(folder.get("sizeLimit", "0")) for folder in folders)
        asked = container.get("resources", {}).get("requests", {}).get("ephemeral-storage", "0")
        if _amount(asked) > written + _LOGS_BYTES:
            yield f"{named(each)}: it keeps {asked} of its node's disk, and writes less"


_MAY_BE_LOST = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"


def nodes_are_given_back(objects: list[Object]) -> Iterator[str]:
    """The cluster autoscaler removes no node with a pod that has an `emptyDir` on its disk, unless an annotation names
    each of them."""
    for each, template in templates(objects):
        named_ones = template["metadata"].get("annotations", {}).get(_MAY_BE_LOST, "").split(",")
        for volume in template["spec"].get("volumes", ()):
            on_disk = "emptyDir" in volume and (volume["emptyDir"] or {}).get("medium") != "Memory"
            if on_disk and volume["name"] not in named_ones:
                yield f"{named(each)}: the cluster autoscaler keeps its node because of the volume {volume['name']}"


def ends_are_explained(objects: list[Object]) -> Iterator[str]:
    """`kubectl describe` shows the last lines of a container that has ended with an error."""
    for each, _, container in containers(objects):
        if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            yield f"{named(each)}: kubectl describe does not show why it has ended"


LINTS: tuple[Callable[[list[Object]], Iterator[str]], ...] = (
    selectors_fit,
    ports_exist,
    settings_exist,
    memory_is_opened_on_purpose,
    grace_adds_up,
    starts_have_time,
    names_resolve,
    budgets_let_pods_go,
    scalers_fit,
    monitors_reach,
    gateways_hold_what_they_let_in,
    workers_take_what_gateways_let_in,
    quantities_are_some,
    threads_fit,
    pods_may_do_little,
    nodes_run_the_images,
    disks_are_for_what_is_written,
    nodes_are_given_back,
    ends_are_explained,
)


def faults(objects: list[Object]) -> list[str]:
    """Of all lints."""
    return [fault for lint in LINTS for fault in lint(objects)]
