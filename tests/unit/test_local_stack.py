"""What the local stack gives its processes: ports that stay theirs, and variables."""

from __future__ import annotations

import socket

import pytest

from common.contract.errors import OperatorError
from common.runtime.config import ServeSettings
from common.runtime.local_stack import LocalStack, _environment


async def test_a_reserved_port_is_kept_and_can_be_listened_on_again_and_again() -> None:
    stack = LocalStack(ServeSettings())
    port = stack._reserve("127.0.0.1", 0)
    for _ in range(2):
        with socket.socket() as prober, pytest.raises(ConnectionRefusedError):
            prober.connect(("127.0.0.1", port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass
    await stack.stop()
    assert [each.fileno() for each in stack._ports] == [-1]


async def test_a_port_on_which_somebody_listens_is_not_reserved() -> None:
    stack = LocalStack(ServeSettings())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OperatorError, match=f"cannot bind the API's port 127.0.0.1:{port}"):
            stack._reserve("127.0.0.1", port, "the API's port ")
    await stack.stop()


def test_requests_wait_for_a_worker_that_is_restarted_unless_a_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BATON_PATIENCE_S", raising=False)
    assert _environment(ServeSettings())["BATON_PATIENCE_S"] == "86400"
    assert "BATON_PATIENCE_S" not in _environment(ServeSettings(restart="never"))
    monkeypatch.setenv("BATON_PATIENCE_S", "3")
    assert _environment(ServeSettings())["BATON_PATIENCE_S"] == "3"
