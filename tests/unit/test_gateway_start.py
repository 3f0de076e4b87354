"""A gateway that has no workers yet."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_fixtures import tokenizer

import gateway.__main__ as program
from common.contract.errors import OperatorError
from common.runtime.checkpoint import DEMO_FOLDER
from common.runtime.config import GatewaySettings
from gateway.text.tokenizer import ModelTokenizer

TIMEOUT_S = 20.0


@pytest.mark.usefixtures("limit_of_files_restored")
async def test_what_it_has_loaded_is_frozen_before_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may serve without prefill workers for days, and is not ready without."""
    frozen, stop = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(program, "freeze_startup_objects", frozen.set)
    monkeypatch.setattr(ModelTokenizer, "load", lambda *_: tokenizer())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    caplog.set_level(logging.INFO)
    given = GatewaySettings(prefill_workers=("127.0.0.1:1",), decode_workers=("127.0.0.1:2",), port=0)
    serving = asyncio.create_task(program.serve(given, DEMO_FOLDER, stop))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await frozen.wait()
    finally:
        stop.set()
        await serving
    said = [record.getMessage() for record in caplog.records]
    assert any(message.startswith("HTTP on ") for message in said)
    assert "ready" not in said


@pytest.mark.parametrize(("setting", "name"), [("port", ""), ("admin_port", "the admin port ")])
async def test_an_occupied_port_is_reported_before_the_tokenizer_is_loaded(
    setting: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelTokenizer, "load", lambda *_: pytest.fail("it is loaded"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports: dict[str, Any] = {"port": 0, setting: number}
        given = GatewaySettings(decode_workers=("127.0.0.1:1",), **ports)
        with pytest.raises(OperatorError, match=f"cannot bind {name}127.0.0.1:{number}: Address already in use"):
            await program.serve(given, DEMO_FOLDER, asyncio.Event())


@pytest.mark.usefixtures("limit_of_files_restored")
async def test_connections_are_refused_while_the_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connected by then would wait for an answer as long as that takes."""
    found: list[bool] = []
    frozen, stop = asyncio.Event(), asyncio.Event()
    with reserved() as port, reserved() as admin_port:

        def load(*_: Path | None) -> ModelTokenizer:
            found.extend(map(takes_connections, (port, admin_port)))
            return tokenizer()

        monkeypatch.setattr(program, "freeze_startup_objects", frozen.set)
        monkeypatch.setattr(ModelTokenizer, "load", load)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        given = GatewaySettings(decode_workers=("127.0.0.1:1",), port=port, admin_port=admin_port)
        serving = asyncio.create_task(program.serve(given, DEMO_FOLDER, stop))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await frozen.wait()
            found.extend(map(takes_connections, (port, admin_port)))
        finally:
            stop.set()
            await serving
    assert found == [False, False, True, True]


async def test_a_chat_template_that_cannot_be_read_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    given = GatewaySettings(decode_workers=("127.0.0.1:1",), port=0, chat_template=str(tmp_path / "nowhere"))
    with pytest.raises(OperatorError, match=r"--chat-template: cannot read .*nowhere"):
        await program.serve(given, DEMO_FOLDER, asyncio.Event())


@pytest.mark.usefixtures("limit_of_files_restored")
async def test_files_that_change_while_the_tokenizer_is_loaded_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would take workers with the hash of the files before, and tokenise by those after."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))

    def load(*_: Path | None) -> ModelTokenizer:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text() + "\n")
        return tokenizer()

    monkeypatch.setattr(ModelTokenizer, "load", load)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop = asyncio.Event()
    stop.set()
    given = GatewaySettings(decode_workers=("127.0.0.1:1",), port=0)
    with pytest.raises(OperatorError, match="model has changed while the model was loaded"):
        await program.serve(given, folder, stop)


@contextmanager
def reserved() -> Iterator[int]:
    """A port that nobody gets but a gateway that is told of it, as `baton serve` reserves it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def takes_connections(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0
