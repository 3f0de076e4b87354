"""Who reaches a worker's memory by UCX: the rule, what it sets, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.contract.errors import OperatorError
from common.runtime import ucx
from common.runtime.config import DecodeSettings, PrefillSettings, WorkerSettings
from common.runtime.ucx import allows_tcp, guard_memory

Environment = dict[str, str]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.LogCaptureFixture:
    """What is said, on a machine without RDMA."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(ucx, "RDMA_DEVICES", tmp_path)
    return caplog


@pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize(
    ("options", "before", "devices", "said"),
    [
        ({}, {}, "lo", "INFO TCP on lo, to every user of this machine"),
        ({"host": "127.8.0.1"}, {"UCX_TLS": "cma,tcp"}, "lo", "INFO TCP on lo, to every user of this machine"),
        ({"expose_memory_over_tcp": True}, {}, "lo", "INFO TCP on lo"),
        ({}, {"UCX_NET_DEVICES": "eth1"}, "eth1", "WARNING TCP on eth1 (ports: any), to whoever reaches it"),
        ({}, {"UCX_TLS": "^tcp"}, None, "INFO shared memory, to processes of its own user"),
        (
            {"host": "10.1.2.3", "expose_memory_over_tcp": True},
            {"UCX_TCP_PORT_RANGE": "7100-7199"},
            None,
            "WARNING TCP on every interface (ports: 7100-7199), to whoever reaches it",
        ),
        ({"host": "0.0.0.0"}, {"UCX_TLS": "^tcp"}, None, "INFO shared memory"),
        ({"host": "0.0.0.0"}, {"UCX_TLS": "rc,cuda"}, None, "INFO shared memory"),
        ({"host": "0.0.0.0", "transport": "zmq"}, {}, None, "INFO UCX is not used: blocks move by zmq"),
    ],
)
def test_what_is_open_and_to_whom(
    log: pytest.LogCaptureFixture,
    kind: type[WorkerSettings],
    options: dict[str, object],
    before: Environment,
    devices: str | None,
    said: str,
) -> None:
    environ = dict(before)
    guard_memory(kind.model_validate(options), environ)
    assert environ == before | ({} if devices is None else {"UCX_NET_DEVICES": devices})
    (record,) = log.records
    level, _, words = said.partition(" ")
    assert record.levelname == level
    assert words in record.getMessage()
    assert ("TCP" in record.getMessage()) == ("TCP" in words)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "192.168.1.1"])
@pytest.mark.parametrize("before", [{}, {"UCX_TLS": "all"}, {"UCX_TLS": "^rc"}, {"UCX_NET_DEVICES": "lo"}])
def test_another_host_is_refused_unless_the_operator_has_said_so(host: str, before: Environment) -> None:
    environ = dict(before)
    with pytest.raises(OperatorError, match="--expose-memory-over-tcp"):
        guard_memory(PrefillSettings(host=host), environ)
    assert environ == before


def test_rdma_is_named_where_there_is_some(log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    guard_memory(PrefillSettings(host="10.1.2.3"), {"UCX_TLS": "^tcp"})
    guard_memory(PrefillSettings(), {})
    there, not_used = (record.getMessage() for record in log.records)
    assert "RDMA (mlx5_0, as far as UCX_TLS and UCX_NET_DEVICES let it), to whoever is on its fabric" in there
    assert "RDMA" not in not_used, "UCX_NET_DEVICES=lo leaves its devices out"


@pytest.mark.parametrize(
    ("tls", "allowed"),
    [
        (None, True),
        ("", True),  # UCX takes no empty list
        ("^", True),
        ("all", True),
        ("tcp", True),
        ("\\tcp", True),
        ("sm,self,tcp", True),
        ("rc,,tcp", True),
        ("rc,tcp:aux", True),
        ("^rc", True),
        ("^all", True),
        ("^tcp:aux", True),
        ("^TCP", True),
        ("^ tcp", True),
        ("^t*", True),
        ("^^tcp", True),
        ("all,^tcp", True),  # UCX refuses it
        ("^tcp", False),
        ("^\\tcp", False),
        ("^sm,tcp", False),
        ("ud,rc", False),
        ("ib,cuda,sm", False),
        ("rc_mlx5:aux", False),
    ],
)
def test_which_lists_of_transports_leave_tcp_out(tls: str | None, allowed: bool) -> None:
    """`tests/e2e/test_exposure.py` asks UCX itself."""
    assert allows_tcp(tls) is allowed
