"""The measurement of whole stacks on a GPU, here with a tiny model on a CPU; and that it waits for nothing for ever."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from transformers import Qwen3Config

from benchmarks.gpu import stack
from benchmarks.peers.process import PeerError, free_port

TINY = Qwen3Config(
    vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
)  # fmt: skip


@pytest.mark.parametrize("system", ["baton colocated", "baton pair", "static batching"])
def test_a_system_is_measured_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(stack, "SHAPES", {"qwen3-0.6b": TINY})
    monkeypatch.setattr(stack, "DEVICE", "cpu")
    monkeypatch.setattr(stack, "KV_BYTES", 64 * 2**20)
    monkeypatch.setattr(stack, "REQUESTS", 4)
    monkeypatch.setattr(stack, "WARMUP", 1)
    monkeypatch.setattr(stack, "LENGTHS", (*stack.LENGTHS[:-1], "20"))
    rows = list(stack.run(system, str(tmp_path)))
    rounds = 1 if system == "static batching" else 2
    assert [(each["system"], each["round"], each["failed"]) for each in rows] == [
        (system, each, 0) for each in range(rounds)
    ]
    assert all(each["output_tokens_per_s"] > 0 for each in rows)


def test_a_system_that_does_not_answer_is_killed_and_what_it_printed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sh", "-c", "echo I am thinking; exec sleep 600"]
    url = f"http://127.0.0.1:{free_port()}/health"
    with pytest.raises(PeerError, match="I am thinking"):
        with stack.started(command, dict(os.environ), url, tmp_path / "log", patience_s=2.0):
            pass
    assert "I am thinking" in capsys.readouterr().out


def test_a_load_that_is_never_answered_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(subprocess.TimeoutExpired):
            stack.load(url, seed=0, warmup=0, output=tmp_path / "run.json", timeout_s=6.0)
