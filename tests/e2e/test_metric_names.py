"""What processes export is what the documentation lists, and has all that `k8s/` asks for."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from metric_names import TARGET_LABELS, Family, documented, documents, exported, query_faults
from stack import Process, Workers, wait_until

ROOT = Path(__file__).parents[2]
CLOSED = "http://127.0.0.1:9"
"""Nobody listens there: a collector that takes no spans."""
SECRET = "baton-of-alice"


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Iterator[dict[str, str]]:
    """`/metrics` of a gateway with everything switched on, and of its two workers, after what shows most labels."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    keys.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{digest}"\nrequests_per_minute = 2\n')
    workers = Workers.start(checkpoint("llama"), options=("--transport", "zmq"))
    processes = {"prefill": workers.prefill[0], "decode": workers.decode[0]}
    options = ["--model", str(workers.folder), "--port", "0", "--dashboard", "on", "--otlp-endpoint", CLOSED]
    options += ["--api-keys", str(keys), "--discovery", "dns", "--local-prefill-tokens", "0"]
    options += [f"--{role}-service={process.facts['control']}" for role, process in processes.items()]
    gateway = processes["gateway"] = Process("gateway", options)
    try:
        gateway.fact("url")
        wait_until(lambda: usable(gateway) == 2, "the workers are not found")
        assert [ask(gateway, token) for token in (8, 9, 10)] == [200, 200, 429]
        assert processes["decode"].metric("baton_requests_ended_total", end="finished") == 2  # handed over, both
        keys.write_text("no keys")
        address = urlsplit(gateway.facts["url"])
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(b"no request\r\n\r\n")
            assert client.recv(1000)
        refused = 'file_refused{file="api_keys"} 1'
        wait_until(
            lambda: ask(gateway, 11) == 429 and refused in gateway.get("/metrics"), "the keys are not read again"
        )
        yield {role: process.get("/metrics") for role, process in processes.items()}
    finally:
        gateway.signal()
        workers.signal()
        assert gateway.wait() == 0, gateway.log
        workers.wait()


def usable(gateway: Process) -> int:
    return int(gateway.metric("baton_gateway_workers_usable"))


def ask(gateway: Process, token: int) -> int:
    """The status of the answer to a prompt of its own."""
    body = json.dumps({"prompt": [token] * 40, "max_tokens": 8, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"}
    try:
        request = urllib.request.Request(f"{gateway.facts['url']}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture(scope="module")
def families(scraped: dict[str, str]) -> dict[str, dict[str, Family]]:
    return {role: exported(text) for role, text in scraped.items()}


def test_everything_that_is_asked_for_is_exported(families: dict[str, dict[str, Family]]) -> None:
    assert list(query_faults(documents(ROOT / "k8s"), families)) == []


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_the_documentation_lists_what_is_exported(role: str, families: dict[str, dict[str, Family]]) -> None:
    listed = documented((ROOT / "docs" / "operations" / "monitoring.md").read_text())[role]
    assert sorted(families[role]) == sorted(listed)
    for name, family in families[role].items():
        assert family.kind == listed[name].kind, name
        assert family.labels in (None, listed[name].labels), name


@pytest.mark.parametrize(("role", "num_tokens"), [("prefill", 2 * 40), ("decode", 2 * 7)])
def test_the_tokens_of_every_step_are_counted(scraped: dict[str, str], role: str, num_tokens: int) -> None:
    def value(name: str) -> float:
        (found,) = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", scraped[role], re.M)
        return float(found)

    assert value("vllm:iteration_tokens_total_count") == value("baton_engine_steps_total") > 0
    assert value("vllm:iteration_tokens_total_sum") == num_tokens


def test_no_metric_has_a_label_of_its_target(families: dict[str, dict[str, Family]]) -> None:
    labels = {
        (role, name, label)
        for role, of in families.items()
        for name, family in of.items()
        for label in family.labels or ()
    }
    assert len(labels) > 20
    allowed = {("gateway", "profile")}  # which workers alone have from their pods
    assert [each for each in labels if each[2] in TARGET_LABELS and (each[0], each[2]) not in allowed] == []
