"""With keys, the control channel is closed to everybody who has not got them."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from stack import Gateway, Workers, answer, generation, prompt

from common.contract.errors import OperatorError
from common.contract.ids import new_incarnation
from common.contract.messages.session import Welcome
from common.runtime.channel import ControlClient
from common.runtime.clock import Pulse, monotonic
from common.runtime.curve import CurveKeys


def make_keys(path: Path) -> CurveKeys:
    subprocess.run([sys.executable, "-m", "common.runtime.cli", "keys", str(path)], check=True)
    keys = CurveKeys.load(str(path))
    assert keys is not None
    return keys


async def welcomed(address: str, keys: CurveKeys | None, wait_s: float = 1.0) -> bool:
    """Whether a worker answers a client with these keys in time."""
    context = zmq.asyncio.Context()
    gateway = Gateway()
    link = ControlClient(context, address, new_incarnation(), gateway, monotonic, Pulse(timeout_s=30), keys)  # type: ignore[arg-type]
    running = asyncio.create_task(link.run())
    end_s = monotonic() + wait_s
    while not (found := any(isinstance(message, Welcome) for message in gateway.heard)) and monotonic() < end_s:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    context.destroy(linger=0)
    return found


@pytest.mark.parametrize("transport", ["zmq", "nixl"])
async def test_a_deployment_with_keys_serves_and_is_closed_to_others(
    transport: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    keys, others = make_keys(tmp_path / "keys"), make_keys(tmp_path / "other")
    options = ("--transport", transport, "--curve-keys", str(tmp_path / "keys"))
    workers = Workers.start(checkpoint("llama"), options=options)
    try:
        async with workers.dispatcher(keys=keys) as dispatcher:
            assert (await answer(dispatcher, generation(prompt(1, 200)))).reasons == ["length"]
        for process in workers.all:
            address = process.facts["control"]
            assert await welcomed(address, keys, 20.0)
            assert not any(await asyncio.gather(welcomed(address, None), welcomed(address, others)))
        workers.wait_for_baseline()
    finally:
        workers.signal()
        workers.wait()


def test_the_file_of_keys_is_its_owner_s_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = subprocess.run(
        [sys.executable, "-m", "common.runtime.cli", "keys", str(path)], capture_output=True, text=True
    )
    assert again.returncode == 2
    assert "error: cannot write" in again.stderr


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"public": "a", "secret": "b"}', '{"public": 1, "secret": 2}'])
def test_a_file_that_holds_no_keys_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(OperatorError, match="holds no pair of CURVE keys"):
        CurveKeys.load(str(path))
    with pytest.raises(OperatorError, match="cannot read"):
        CurveKeys.load(str(tmp_path / "missing"))


@pytest.mark.parametrize("damage", ["other encoding", "another character"])
def test_what_is_said_of_a_damaged_file_holds_no_secret(damage: str, tmp_path: Path) -> None:
    """It goes to the log."""
    path, (public, secret) = tmp_path / "keys", (each.decode() for each in zmq.curve_keypair())
    text = json.dumps({"public": public, "secret": secret})
    if damage == "other encoding":
        path.write_bytes(text.encode("utf-16"))
    else:
        path.write_text(json.dumps({"public": public, "secret": secret + chr(160)}))
    with pytest.raises(OperatorError, match="holds no pair of CURVE keys") as caught:
        CurveKeys.load(str(path))
    told = "".join(traceback.format_exception(caught.value))
    assert not any(secret[at : at + 8] in told for at in range(len(secret) - 8))


def test_keys_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    (first, _), (_, second) = zmq.curve_keypair(), zmq.curve_keypair()
    path = tmp_path / "keys"
    path.write_text(json.dumps({"public": first.decode(), "secret": second.decode()}))
    with pytest.raises(OperatorError, match="do not belong together"):
        CurveKeys.load(str(path))
