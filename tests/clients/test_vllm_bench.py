"""`vllm bench serve`, vLLM's load generator, from the environment that `benchmarks/peers/install_vllm.py` makes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "vllm"
NUM_PROMPTS = 8
OUTPUT_TOKENS = 16
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("backend", "endpoint", "named"),
    [
        ("openai", "/v1/completions", True),
        ("openai-chat", "/v1/chat/completions", True),
        pytest.param("openai", "/v1/completions", False, id="it asks for the model's name"),
    ],
)
def test_all_succeed(
    base_url: str, model: str, model_folder: Path, tmp_path: Path, backend: str, endpoint: str, named: bool
) -> None:
    command = [str(VLLM), "bench", "serve", "--backend", backend, "--base-url", base_url.removesuffix("/v1")]
    command += ["--endpoint", endpoint]
    if named:
        command += ["--model", str(model_folder), "--served-model-name", model]
    else:
        command += ["--tokenizer", str(model_folder)]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(OUTPUT_TOKENS)]
    command += ["--num-prompts", str(NUM_PROMPTS), "--max-concurrency", "4", "--seed", "1", "--ignore-eos"]
    command += ["--disable-tqdm", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    quiet = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), done.stdout + done.stderr
    assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_TOKENS
