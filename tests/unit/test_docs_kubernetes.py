"""What docs/kubernetes.md shows and says of the manifests is so: its overlay builds, and its sums are theirs."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_lints import Object, containers, environment, faults, of, templates
from needs import needs

from common.runtime.kv_size import KNOWN_SHAPES, KVSizeSettings, size_of_model, table_of_known_models

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
COMPONENTS = ROOT / "k8s" / "components"
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""That the Pod Security level `restricted` allows."""

needs_kubectl = needs("kubectl")


def between(mark: str) -> str:
    """The block of code between two marks of the page."""
    found = re.search(rf"<!-- {mark}[^>]* -->\n```\w*\n(.*?)```\n<!-- /{mark} -->", PAGE, re.DOTALL)
    assert found is not None, mark
    return found[1]


def build(folder: Path) -> list[Object]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def example(tmp_path: Path, text: str, name: str = "chat") -> list[Object]:
    """What an overlay builds that lies beside a checkout `baton`, as the page has it."""
    if not (tmp_path / "baton").exists():
        (tmp_path / "baton").symlink_to(ROOT)
    (tmp_path / name).mkdir()
    (tmp_path / name / "kustomization.yaml").write_text(text)
    return build(tmp_path / name)


@cache
def overlay(name: str) -> list[Object]:
    return build(ROOT / "k8s" / "overlays" / name)


@pytest.mark.processes
@needs_kubectl
def test_the_example_overlay_fits_together(tmp_path: Path) -> None:
    objects = example(tmp_path, between("example overlay"))
    assert faults(objects) == []
    assert {each["metadata"].get("namespace") for each in objects} == {"chat"}
    images = [container["image"] for _, _, container in containers(objects)]
    assert len(images) == 4
    assert all(re.fullmatch(r"registry\.example\.org/baton-(gateway|worker)@sha256:\w{64}", each) for each in images)
    assert {str(environment(objects, container)["BATON_MODEL"]) for _, _, container in containers(objects)} == {
        "Qwen/Qwen3-8B"
    }


@pytest.mark.processes
@needs_kubectl
def test_every_query_of_the_example_asks_for_its_namespace(tmp_path: Path) -> None:
    scaled = list(of(example(tmp_path, between("example overlay")), "ScaledObject"))
    asked = {each["metadata"]["name"]: each["spec"]["triggers"][0]["metadata"] for each in scaled}
    assert {name: trigger["query"] for name, trigger in asked.items()} == {
        "baton-prefill": 'baton:prefill_workers:wanted{namespace="chat"}',
        "baton-decode": 'baton:decode_workers:wanted{namespace="chat", profile="throughput"}',
        "baton-decode-latency": 'baton:decode_workers:wanted{namespace="chat", profile="latency"}',
    }
    assert len({trigger["serverAddress"] for trigger in asked.values()}) == 1


@pytest.mark.processes
@needs_kubectl
def test_two_deployments_have_each_rule_once(tmp_path: Path) -> None:
    """Rules with the same name would overwrite each other's series, as Prometheus takes those of all namespaces."""
    text = between("example overlay")
    objects = example(tmp_path, text) + example(tmp_path, text.replace("chat", "bulk"), "bulk")
    objects += example(tmp_path, between("rules overlay"), "rules")
    assert {each["metadata"].get("namespace") for each in objects} == {"chat", "bulk", "monitoring"}
    groups = [group for each in of(objects, "PrometheusRule") for group in each["spec"]["groups"]]
    names = Counter(rule.get("record") or rule["alert"] for group in groups for rule in group["rules"])
    assert {"baton:prefill_workers:wanted", "BatonTargetsMissed"} <= names.keys()
    assert [name for name, num in names.items() if num > 1] == []
    assert len([each for each in of(objects, "ConfigMap") if "baton.json" in each["data"]]) == 1
    selected = {each["metadata"]["labels"]["release"] for each in of(objects, "PodMonitor", "PrometheusRule")}
    assert selected == {"kube-prometheus-stack"}


@pytest.mark.processes
@needs_kubectl
def test_the_example_overlay_builds_with_the_other_autoscaler(tmp_path: Path) -> None:
    text = between("example overlay")
    text = re.sub(r"components/(latency-)?keda", r"components/\1hpa", text)
    objects = example(tmp_path, text)
    assert faults(objects) == []
    assert len(list(of(objects, "HorizontalPodAutoscaler"))) == 3
    assert not list(of(objects, "ScaledObject"))


def test_the_example_overlays_have_every_component_but_those_of_the_other_autoscaler() -> None:
    used = set(re.findall(r"components/([\w-]+)", between("example overlay") + between("rules overlay")))
    assert used | {"hpa", "latency-hpa"} == {path.name for path in COMPONENTS.iterdir() if path.is_dir()}


@pytest.mark.processes
@needs_kubectl
def test_the_secrets_that_the_page_makes_are_those_that_the_pods_mount(tmp_path: Path) -> None:
    objects = example(tmp_path, between("example overlay"))
    made = dict(re.findall(r"create secret \w+ ([\w-]+)\s+--(?:from-file|cert)=(\S+)", PAGE))
    mounted = {
        volume["secret"]["secretName"]
        for _, pod in templates(objects)
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    }
    assert made.keys() == mounted | {"baton-hf-token"}
    named = {value for _, _, each in containers(objects) for value in environment(objects, each).values() if value}
    assert f"/etc/baton/api-keys/{made['baton-api-keys']}" in named
    assert f"/etc/baton/curve/{made['baton-curve']}" in named


def test_what_the_page_applies_is_there() -> None:
    applied = re.findall(r"kubectl (?:apply|diff) -k ([\w/-]+)", PAGE)
    assert applied
    there = [each for each in applied if each not in {"chat", "rules"}]
    assert [each for each in there if not (ROOT / each / "kustomization.yaml").is_file()] == []


@pytest.mark.processes
@needs_kubectl
def test_the_first_request_is_handed_over() -> None:
    """The page looks for it in `baton_gateway_handoffs_total`, and its prompt is short."""
    assert "| grep ^baton_gateway_handoffs_total" in PAGE
    objects = overlay("cpu-dev")
    [gateway] = [each for _, _, each in containers(objects) if each["args"] == ["gateway"]]
    assert environment(objects, gateway)["BATON_LOCAL_PREFILL_TOKENS"] == "0"


def gpus(objects: list[Object]) -> list[tuple[Object, int]]:
    """What makes pods with GPUs, and how many GPUs a pod has."""
    made = [(each, container["resources"]["limits"]) for each, _, container in containers(objects)]
    return [(each, int(limits["nvidia.com/gpu"])) for each, limits in made if "nvidia.com/gpu" in limits]


@pytest.mark.processes
@needs_kubectl
@pytest.mark.parametrize("name", ["gpu", "gpu-ranks"])
def test_the_gpus_that_an_overlay_needs_are_in_its_row(name: str) -> None:
    pools = [(each["spec"]["replicas"], num) for each, num in gpus(overlay(name))]
    needed, further = (sum(replicas * num for replicas, num in pools), sum(num for replicas, num in pools if replicas))
    row = re.search(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    assert row is not None
    assert f"| {needed} GPUs, {needed + further} in a rollout, in nodes with" in row[0]


@pytest.mark.processes
@needs_kubectl
def test_the_gpus_that_the_example_overlay_may_have_are_those_of_the_page(tmp_path: Path) -> None:
    objects = example(tmp_path, between("example overlay"))
    num = {each["metadata"]["name"]: num for each, num in gpus(objects)}
    scaled = [each["spec"] for each in of(objects, "ScaledObject")]
    least, most = (
        sum(spec[bound] * num[spec["scaleTargetRef"]["name"]] for spec in scaled)
        for bound in ("minReplicaCount", "maxReplicaCount")
    )
    assert re.search(rf" {least} GPUs at least \([^)]*\), {most} at most\s", PAGE)


def test_commands_on_workers_reach_all_of_a_pool_and_leave_their_settings() -> None:
    commands = [line for block in re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert any(" set env " in command for command in commands)
    assert any(" logs " in command for command in commands)
    for command in commands:
        assert "kubectl get --raw" not in command, "of an answer other than 2xx it shows no body"
        assert re.search(r" logs deployment/baton-(prefill|decode)", command) is None, "one pod of several"
        assert " set env " not in command or "BATON_" not in command.partition("#")[0], command


@pytest.mark.processes
@needs_kubectl
def test_the_seconds_of_the_page_are_those_of_the_manifests() -> None:
    objects = build(ROOT / "k8s" / "base")
    told = 0
    for _, spec, container in containers(objects):
        role = container["args"][0]
        variable = "BATON_SHUTDOWN_GRACE_S" if role == "gateway" else "BATON_DRAIN_GRACE_S"
        grace_s = int(environment(objects, container)[variable] or 0)
        command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        stop_s, total_s = int(command[1]), spec["terminationGracePeriodSeconds"]
        before = f"{stop_s} s (`preStop`)" if stop_s else ""
        row = ("", role, before, f"{grace_s} s (`{variable}`)", f"{total_s - stop_s - grace_s} s", f"{total_s}", "")
        assert re.sub(r" +", " ", " | ".join(row)).strip() in PAGE, row
        told += 1
    assert told == 4, "decode workers of both profiles"


def test_the_sizes_of_the_page_are_what_the_command_prints() -> None:
    settings = KVSizeSettings(tokens=(1366, 8192), device="cuda")
    assert between("kv-size") == table_of_known_models(settings) + "\n"


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b"])
def test_the_sequences_that_the_page_fits_into_a_gpu_fit(model: str) -> None:
    assert model in KNOWN_SHAPES
    row = re.search(rf"\| {re.escape(model)} \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", PAGE)
    assert row is not None
    blocks, kept, short, long = map(int, row.groups())
    assert f"{blocks} blocks" in size_of_model(model, KVSizeSettings(kv_cache_bytes=60 * 2**30, device="cuda"))
    assert kept == int(blocks * 0.95)
    assert (short, long) == (kept // -(-1366 // 64), kept // (8192 // 64))


def unrestricted(objects: list[Object]) -> list[Any]:
    """What Pod Security's level `restricted` refuses, of what the other lints do not."""
    volumes = [
        kind for _, pod in templates(objects) for each in pod["spec"]["volumes"] for kind in each.keys() - {"name"}
    ]
    shared = [
        key for _, pod in templates(objects) for key in ("hostNetwork", "hostPID", "hostIPC") if pod["spec"].get(key)
    ]
    added = [each for *_, one in containers(objects) for each in one["securityContext"]["capabilities"].get("add", ())]
    return [kind for kind in volumes if kind not in RESTRICTED_VOLUMES] + shared + added


@pytest.mark.processes
@needs_kubectl
def test_only_rdma_needs_more_than_the_level_restricted(tmp_path: Path) -> None:
    assert unrestricted(overlay("cpu-dev")) == unrestricted(overlay("gpu")) == []
    text = between("example overlay")
    dropping = re.search(r"^  ```yaml\n(.*?)^  ```$", PAGE, re.DOTALL | re.MULTILINE)
    assert dropping is not None
    assert set(unrestricted(overlay("gpu-rdma"))) == {"IPC_LOCK"}
    objects = example(tmp_path, text + dropping[1])
    assert unrestricted(objects) == []
    assert faults(objects) == []
