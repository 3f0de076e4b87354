"""What a worker refuses to start with: memory that cannot be registered or moved; no RDMA where it is required."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from stack import run_forked

from common.contract.errors import OperatorError
from common.runtime.config import DecodeSettings
from common.runtime.ucx import guard_allocator, guard_route
from common.worker.start import on_its_device

ROOT = Path(__file__).parents[2]
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    "value", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments : true", "expandable_segments:TRUE"]
)
def test_expandable_segments_are_refused_on_a_gpu(variable: str, value: str) -> None:
    with pytest.raises(OperatorError, match=f"{variable}=.*expandable_segments"):
        guard_allocator("cuda", {variable: value})


@pytest.mark.parametrize("value", ["backend:cudaMallocAsync", "max_split_size_mb:64, backend : cudaMallocAsync"])
def test_memory_of_a_stream_ordered_pool_is_refused_on_a_gpu(value: str) -> None:
    with pytest.raises(OperatorError, match=r"cudaMallocAsync.*cannot be registered"):
        guard_allocator("cuda", {VARIABLES[0]: value})


@pytest.mark.parametrize(
    ("device", "value"),
    [
        ("cuda", ""),
        ("cuda", "expandable_segments:False"),
        ("cuda", "max_split_size_mb:64"),
        ("cuda", "backend:native"),
        ("cpu", "expandable_segments:True"),
        ("auto", "expandable_segments:True"),  # asked again when it is known which
    ],
)
def test_everything_else_is_accepted(device: str, value: str) -> None:
    guard_allocator(device, dict.fromkeys(VARIABLES, value))


@pytest.mark.processes
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_ends_before_it_loads_anything(role: str) -> None:
    options = ["--device", "cuda", "--model", "/no/such/model"]
    ended = run_forked(f"{role}_worker", options, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert ended.returncode != 0
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A machine with two RDMA devices, one of them without a cable."""
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    return tmp_path


REQUIRED = DecodeSettings(require_rdma=True)


@pytest.mark.parametrize(
    ("device", "environ"),
    [
        ("cpu", {}),
        ("cpu", {"UCX_TLS": "^tcp"}),
        ("cpu", {"UCX_TLS": "rc,sm"}),
        ("cpu", {"UCX_TLS": "rc_mlx5,ud:aux"}),
        ("cpu", {"UCX_TLS": "^rc"}),
        ("cpu", {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}),
        ("cpu", {"UCX_NET_DEVICES": "^eth0"}),
        ("cpu", {"UCX_NET_DEVICES": "all"}),
        ("cuda", {"UCX_TLS": "tcp,rc,cuda_copy"}),
    ],
)
def test_rdma_that_there_is_is_enough(sysfs: Path, device: str, environ: dict[str, str]) -> None:
    guard_route(REQUIRED, device, environ, sysfs)


@pytest.mark.parametrize(
    ("device", "environ", "why"),
    [
        ("cpu", {"UCX_TLS": "tcp,sm"}, "UCX_TLS=tcp,sm leaves RDMA out"),
        ("cpu", {"UCX_TLS": "^ib"}, "leaves RDMA out"),
        ("cpu", {"UCX_TLS": "^rc,dc,ud"}, "leaves RDMA out"),
        ("cpu", {"UCX_TLS": "tcp,ud:aux"}, "leaves RDMA out"),
        ("cpu", {"UCX_TLS": "cuda_ipc,tcp"}, "leaves RDMA out"),
        ("cuda", {"UCX_TLS": "tcp,cuda_copy"}, "leaves RDMA out"),
        ("cpu", {"UCX_NET_DEVICES": "lo"}, r"UCX_NET_DEVICES=lo leaves out .*mlx5_0"),
        ("cpu", {"UCX_NET_DEVICES": "mlx5_1:1"}, "leaves out"),
        ("cpu", {"UCX_NET_DEVICES": "^mlx5_0:1"}, "leaves out"),
        ("cpu", {"UCX_LOG_FILE": "/tmp/ucx"}, "unset UCX_LOG_FILE"),
        ("cpu", {"UCX_PROTO_INFO": "y"}, "unset UCX_PROTO_INFO"),
    ],
)
def test_what_keeps_ucx_from_rdma_is_refused(sysfs: Path, device: str, environ: dict[str, str], why: str) -> None:
    with pytest.raises(OperatorError, match=f"--require-rdma: .*{why}"):
        guard_route(REQUIRED, device, environ, sysfs)
    guard_route(DecodeSettings(), device, environ, sysfs)


@pytest.mark.parametrize("tls", [None, "^tcp", "cuda,tcp", "cuda_ipc,cuda_copy,tcp,self"])
def test_a_gpu_may_have_nvlink_alone(tmp_path: Path, tls: str | None) -> None:
    environ = {} if tls is None else {"UCX_TLS": tls}
    guard_route(REQUIRED, "cuda", environ, tmp_path)
    guard_route(REQUIRED, "auto", environ, tmp_path)  # asked again when it is known which
    with pytest.raises(OperatorError, match=r"no RDMA device with an active port|leaves RDMA out"):
        guard_route(REQUIRED, "cpu", environ, tmp_path)


@pytest.mark.parametrize("tls", ["^cuda_ipc", "tcp,cuda_copy,rc"])
def test_a_gpu_without_nvlink_needs_rdma(sysfs: Path, tmp_path: Path, tls: str) -> None:
    guard_route(REQUIRED, "cuda", {"UCX_TLS": tls}, sysfs)
    with pytest.raises(OperatorError, match="no RDMA device with an active port"):
        guard_route(REQUIRED, "cuda", {"UCX_TLS": tls}, tmp_path / "none")


@pytest.mark.parametrize("tls", ["tcp", "tcp,rc", "cuda_ipc,tcp", "^cuda", "^tcp,cuda_copy", "^all"])
def test_transports_without_cuda_copy_are_refused_on_a_gpu(tls: str) -> None:
    """NIXL would refuse them, when the model is loaded."""
    for device in ("cpu", "auto"):
        guard_route(DecodeSettings(), device, {"UCX_TLS": tls})
    with pytest.raises(OperatorError, match="leaves out cuda_copy"):
        guard_route(DecodeSettings(), "cuda", {"UCX_TLS": tls})


@pytest.mark.parametrize("tls", ["all", "rc,cuda_copy", "\\cuda_copy,tcp", "cuda", "^tcp,cuda_ipc", "^sm,ib"])
def test_transports_with_cuda_copy_are_accepted_on_a_gpu(tls: str) -> None:
    guard_route(DecodeSettings(), "cuda", {"UCX_TLS": tls})


def test_tests_and_benchmarks_start_nixl_on_a_machine_with_a_gpu() -> None:
    """There it needs `cuda_copy` for memory of the host, too. Tests of the rules alone may name what they like."""
    found = {
        tls
        for folder in ("tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if path.name not in ("test_wire_guard.py", "test_ucx.py")
        for tls in re.findall(r'"UCX_TLS"(?:: |, )"(.*?)"', path.read_text())
    }
    assert "^sm,ib" in found
    for tls in found:
        guard_route(DecodeSettings(), "cuda", {"UCX_TLS": tls})


def test_zmq_is_no_rdma(sysfs: Path) -> None:
    with pytest.raises(OperatorError, match="--require-rdma: --transport zmq"):
        guard_route(DecodeSettings(require_rdma=True, transport="zmq"), "cpu", {}, sysfs)


def test_zmq_moves_no_memory_of_a_gpu() -> None:
    for device in ("cpu", "auto"):
        guard_route(DecodeSettings(transport="zmq"), device, {})
    with pytest.raises(OperatorError, match="--transport zmq moves host memory only"):
        guard_route(DecodeSettings(transport="zmq"), "cuda", {})


@pytest.mark.parametrize("there", [False, True])
def test_a_device_that_the_worker_chooses_is_asked_about_before_anything_is_loaded(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    settings = DecodeSettings(device="auto", transport="zmq")
    if there:
        with pytest.raises(OperatorError, match="not that of a GPU"):
            on_its_device(settings)
        monkeypatch.setenv(VARIABLES[0], "expandable_segments:True")
        with pytest.raises(OperatorError, match="cannot be registered"):
            on_its_device(DecodeSettings(device="auto"))
    else:
        assert on_its_device(settings).device == "cpu"


@pytest.mark.processes
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--require-rdma"], "--require-rdma: --transport zmq moves blocks over TCP"),
        (["--device", "cuda"], "--transport zmq moves host memory only, not that of a GPU"),
    ],
)
def test_a_worker_whose_blocks_cannot_be_moved_ends_before_it_loads_anything(
    role: str, options: list[str], why: str
) -> None:
    ended = run_forked(f"{role}_worker", [*options, "--transport", "zmq", "--model", "/no/such/model"])
    assert ended.returncode != 0
    assert why in ended.stderr
    assert "Traceback" not in ended.stderr
