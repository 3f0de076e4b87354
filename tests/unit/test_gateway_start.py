"""A gateway that has no workers yet."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest
from gateway_fixtures import tokenizer

import gateway.__main__ as program
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
    monkeypatch.setattr(ModelTokenizer, "load", lambda _: tokenizer())
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
