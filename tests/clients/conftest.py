"""One `baton serve` for the tests of the clients, which run in an environment of their own (`.venv-clients`).

The model is the demo model with a chat template that also knows functions: it answers questions about facts in its
prompt, and where a grammar makes it call a function, or answer in a format, it fills that in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "demo-with-tools"
END_TIMEOUT_S = 40.0
REST_TIMEOUT_S = 30.0

# Before any client is imported: nothing is asked of the network, and nothing told.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HOME": str(ROOT / ".venv-clients" / "huggingface"),
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}

_TOOLS = """{% if tools %}{{ '<|system|>You may call ' + (tools | tojson) + '<|end|>' }}{% endif %}"""
_TURN = """{% for message in messages -%}
{{ '<|' + {'tool': 'user', 'developer': 'system'}.get(message.role, message.role) + '|>' }}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>
{%- endfor %}{{ '<|end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CHAT_TEMPLATE = "{{ bos_token }}" + _TOOLS + _TURN
"""Without functions it writes what the demo model's own does. A tool's result is a turn of the user's."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that is served, for clients that read its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    folder.mkdir()
    for name in names:
        shutil.copy(ROOT / "common" / "demo_model" / name, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the gateway is, as http://host:port. It ends in order, and has logged no traceback."""
    log = tmp_path_factory.mktemp("log") / "baton.log"
    command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "common.runtime.cli", "serve", "--port", "0"]
    command += ["--model", str(model_folder), "--end-with-parent", str(os.getpid())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environment["BATON_SERVED_MODEL_NAME"] = MODEL
    with log.open("w") as errors:
        stack = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert stack.stdout is not None
    try:
        ready = stack.stdout.readline()
        found = re.search(r"http://[0-9.]+:\d+", ready)
        assert ready.startswith("ready"), log.read_text()
        assert found is not None
        yield found.group()
        stack.send_signal(signal.SIGTERM)
        code = stack.wait(END_TIMEOUT_S)
    finally:
        stack.kill()
        stack.wait()
    assert code == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture
def base_url(server: str) -> Iterator[str]:
    """What clients are given. After the test no request of theirs is left."""
    yield f"{server}/v1"
    deadline = time.monotonic() + REST_TIMEOUT_S
    while in_flight := _in_flight(server):
        assert time.monotonic() < deadline, f"{in_flight} requests are left"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def model() -> str:
    """What the gateway calls the checkpoint."""
    return MODEL


@pytest.fixture
def in_flight(server: str) -> Callable[[], int]:
    """Asks how many requests are in flight."""
    return lambda: _in_flight(server)


def _in_flight(server: str) -> int:
    with urllib.request.urlopen(f"{server}/load", timeout=10) as response:
        return int(json.load(response)["server_load"])
