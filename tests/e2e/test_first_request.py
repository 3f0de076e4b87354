"""The first request of README's quick start and of docs/kubernetes.md, with `BATON_LOCAL_PREFILL_TOKENS=0`."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import urllib.request

from served import Stack


def test_the_first_request_is_handed_over_and_counted() -> None:
    with Stack(variables={"BATON_LOCAL_PREFILL_TOKENS": "0"}) as stack:
        command = shlex.split(stack.ready.removeprefix("ready:"))
        answer = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        with urllib.request.urlopen(f"{stack.url}/metrics", timeout=10) as response:
            metrics = response.read().decode().splitlines()
        code, log = stack.end(signal.SIGTERM)
    assert code == 0, log
    assert answer["choices"][0]["message"]["content"].strip() == "4817"
    assert [line for line in metrics if line.startswith("baton_gateway_handoffs_total")] == [
        "baton_gateway_handoffs_total 1.0"
    ]
