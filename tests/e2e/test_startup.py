"""What the operator must change ends a process with one clear line and exit code 2, never with a traceback."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from model_hub import HUB_ID, model_hub
from served import Stack
from stack import START_TIMEOUT_S, Workers, answer, generation, run_forked, wait_until

from common.contract.errors import Cause, FingerprintMismatchError
from common.contract.messages.session import Welcome
from gateway.workers.registry import Registry
from gateway.workers.worker_view import WorkerView

Checkpoint = Callable[[str], Path]


def run_to_the_end(module: str, options: Sequence[str], kind: str = "gateway") -> str:
    """Run a process that must refuse to start, `fresh` or forked by the server of this kind; the one line that it
    printed."""
    options = ["--log-level", "error", *options]
    if kind == "fresh":
        command = [sys.executable, "-m", module, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    else:
        done = run_forked(module, options, kind=kind)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert done.stdout == ""
    return lines[0]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def taken_port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        ("prefill_worker", ["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        ("decode_worker", ["--model", "./nothing"], "./nothing"),
        ("prefill_worker", ["--bogus", "1"], "--bogus"),
        ("decode_worker", ["--kv-cache-bytes", "many"], "--kv-cache-bytes"),
        ("prefill_worker", ["--kv-cache-bytes", "10"], "10 bytes"),
        ("gateway", [], "--prefill-workers"),
        ("gateway", ["--prefill-workers", "x", "--decode-workers", "127.0.0.1:1"], "'x' is not host:port"),
        ("decode_worker", ["--speculation", "draft"], "speculation draft needs a draft_model"),
        ("common.runtime.local_stack", ["--model", "/nowhere/at/all", "--port", "0"], "/nowhere/at/all"),
    ],
)
def test_a_bad_option_or_model_is_one_line(module: str, options: list[str], expected: str) -> None:
    is_first = options[:2] in (["--model", "/nowhere/at/all"], [])
    assert expected in run_to_the_end(module, options, "fresh" if is_first else "gateway")


def test_threads_of_a_worker_sleep_when_idle_and_are_bound_to_no_core(checkpoint: Checkpoint) -> None:
    """OpenMP says what it has read from the environment when torch is loaded. Variables that bind threads bind none."""
    command = [sys.executable, "-m", "decode_worker", "--model", str(checkpoint("llama"))]
    told = {"OMP_DISPLAY_ENV": "true", "OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": "0", "OMP_PLACES": "cores"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | told) as worker:
        try:
            assert worker.stderr is not None
            before = list(itertools.takewhile(lambda line: "loaded" not in line, worker.stderr))
            found = [allowed_of(int(task.name)) for task in Path(f"/proc/{worker.pid}/task").iterdir()]
        finally:
            worker.kill()
    policies = [line.strip() for line in before if "OMP_WAIT_POLICY" in line]
    assert any("PASSIVE" in each for each in policies), policies
    assert len(found) > 2
    assert all(each in (None, os.sched_getaffinity(0)) for each in found)


def allowed_of(thread: int) -> set[int] | None:
    """The cores that a thread may use; None if it has ended."""
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("before", [None, "glibc.malloc.hugetlb=0"])
def test_malloc_gives_a_worker_large_pages(before: str | None, checkpoint: Checkpoint) -> None:
    """It starts again before it says anything, as the same process."""
    command = [sys.executable, "-m", "prefill_worker", "--model", str(checkpoint("llama"))]
    mine = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    told = mine if before is None else mine | {"GLIBC_TUNABLES": before}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=told) as worker:
        try:
            assert worker.stderr is not None
            assert any("probes on" in line for line in worker.stderr)
            variables = Path(f"/proc/{worker.pid}/environ").read_text().split("\0")
            heap = Path(f"/proc/{worker.pid}/smaps").read_text().partition("[heap]")[2]
        finally:
            worker.kill()
    assert f"GLIBC_TUNABLES={before or 'glibc.malloc.hugetlb=1'}" in variables
    name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "other 0").split()
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    unasked = not switch.exists() or "[madvise]" not in switch.read_text()  # then glibc does not ask
    if name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35) and before is None and not unasked:
        assert "hg" in heap.partition("VmFlags:")[2].splitlines()[0].split()


def test_a_worker_that_downloads_ends_when_it_is_told_to(
    listener: socket.socket, taken_port: int, tmp_path: Path
) -> None:
    """From a hub that takes connections and never answers."""
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{taken_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "decode_worker", "--model", "somebody/some-model"],
        env=os.environ | hub,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "probes on" in next(line for line in process.stderr if "probes on" in line)
        listener.settimeout(60)
        with listener.accept()[0]:  # it has begun
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_stack_that_downloads_ends_with_ctrl_c(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It does not wait for the files that it is downloading."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start programs with the signal ignored
    commit = "a" * 40
    with model_hub({commit: checkpoint("llama")}, commit) as hub:
        hub.gives_weights.clear()
        with Stack("--model", HUB_ID, wait=False, variables=hub.variables(tmp_path / "cache")) as stack:
            weights = f"GET /{HUB_ID}/resolve/{commit}/model.safetensors"
            wait_until(lambda: weights in hub.asked, "it asks for no weights", START_TIMEOUT_S)
            code, log = stack.end(signal.SIGINT)
    assert code == -signal.SIGINT, log
    assert "Traceback" not in log, log


def test_a_draft_model_with_other_tokens_is_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    draft_model = make_checkpoint("llama", tmp_path / "other")
    tokenizer = json.loads((draft_model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    *_, first, second = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft_model / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = ["--model", str(checkpoint("llama")), "--speculation", "draft", "--draft-model", str(draft_model)]
    line = run_to_the_end("decode_worker", options, "worker")
    assert f"has another tokenizer than the model: {first!r} differs" in line
    assert "/nowhere" in run_to_the_end("decode_worker", [*options, "--draft-model", "/nowhere"], "worker")


@pytest.mark.parametrize(
    ("module", "option"),
    [("prefill_worker", "--control-port"), ("decode_worker", "--http-port"), ("common.runtime.local_stack", "--port")],
)
def test_an_occupied_port_is_one_line(module: str, option: str, taken_port: int) -> None:
    assert str(taken_port) in run_to_the_end(module, [option, str(taken_port)])


def test_a_gateways_occupied_port_is_one_line(taken_port: int) -> None:
    workers = ["--prefill-workers", "127.0.0.1:1", "--decode-workers", "127.0.0.1:2"]
    assert str(taken_port) in run_to_the_end("gateway", [*workers, "--port", str(taken_port)])


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = run_to_the_end("prefill_worker", ["--model", str(tmp_path)], "worker")
    assert "GPT2LMHeadModel" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize(
    ("size", "value"),
    [
        ("vocab_size", "-5"),
        ("vocab_size", "1e999"),
        ("vocab_size", "true"),
        ("max_position_embeddings", "1" + "0" * 40),
        ("max_position_embeddings", '"many"'),
        ("max_position_embeddings", "null"),
    ],
)
def test_an_absurd_size_of_a_model_is_named(size: str, value: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": "100", "max_position_embeddings": "100"} | {size: value}
    said = ", ".join(f'"{name}": {value}' for name, value in sizes.items())
    (tmp_path / "config.json").write_text("{" + said + "}")
    line = run_to_the_end("gateway", ["--model", str(tmp_path), "--decode-workers", "127.0.0.1:1", "--port", "0"])
    assert size in line


def test_a_gateway_beside_workers_of_another_model_ends_with_both_values(
    main_pool: Workers, checkpoint: Checkpoint
) -> None:
    workers = main_pool
    addresses = [
        "--prefill-workers",
        workers.prefill[0].facts["control"],
        "--decode-workers",
        workers.decode[0].facts["control"],
    ]
    line = run_to_the_end("gateway", ["--port", "0", "--model", str(checkpoint("qwen3")), *addresses])
    assert "fingerprint mismatch" in line
    assert line.count("config_hash") == 1
    assert workers.prefill[0].facts["control"] in line or workers.decode[0].facts["control"] in line


async def test_workers_with_other_weights_are_refused_with_both_values(
    main_pool: Workers, pools: dict[str, Workers], tmp_path: Path
) -> None:
    """Same configuration, other weights: the gateway ends at start, and a decode worker does without its source."""
    workers = main_pool
    patient = ("--heartbeat-timeout-s", "10")  # it counts who is lost
    other = Workers.start(make_checkpoint("llama", tmp_path / "other", seed=8), prefill=0, options=patient)
    pools["other weights"] = other
    mixed = Workers(workers.folder, prefill=workers.prefill[:1], decode=other.decode)
    with pytest.raises(FingerprintMismatchError, match="weights_hash"):
        async with mixed.dispatcher():
            pass

    class Trusting(Registry):
        """A gateway that compares nothing: the workers do."""

        def _require_fit(self, worker: WorkerView, welcome: Welcome, first: WorkerView | None) -> None:
            pass

    async with mixed.dispatcher(mixed.registry(Trusting)) as dispatcher:
        found = await asyncio.wait_for(answer(dispatcher, generation(range(8, 60))), 30)
        assert dispatcher.recovery.tally.failures == {Cause.FINGERPRINT: 1}
    assert found.reasons == ["length"], "the decode worker has computed it all by itself"
    refusals = [line for line in other.decode[0].log if "refuses this worker" in line and "weights_hash" in line]
    assert refusals
    assert refusals[0].count(" at ") >= 2
