"""What the local stack gives its processes: ports that stay theirs, and variables."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import pty
import shlex
import socket
import struct
import sys
import termios
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path

import pytest

from common.contract.errors import OperatorError
from common.runtime import local_stack
from common.runtime.config import GatewaySettings, ServeSettings, load
from common.runtime.local_stack import (
    Child,
    LocalStack,
    _curl,
    _describe_exit,
    _environment,
    refuse_variables_of_the_stack,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations" / "settings.md"


class NotStarted(LocalStack):
    """A stack whose processes are named, and not started."""

    async def _keep(self, child: Child) -> None:
        child.facts.update(ready=True, url="http://127.0.0.1:1")
        async with self._changed:
            self._changed.notify_all()
        await asyncio.Event().wait()

    @property
    def gateway(self) -> Child:
        return next(child for child in self._children if child.role == "gateway")


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


@pytest.mark.parametrize("name", ["TENSOR_PARALLEL", "GPU_SHARE", "NUM_THREADS", "HTTP_PORT", "PREFILL_WORKERS"])
def test_what_the_stack_decides_is_not_silently_ignored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    refuse_variables_of_the_stack(ServeSettings())
    monkeypatch.setenv(f"BATON_{name}", "1")
    with pytest.raises(OperatorError, match=f"BATON_{name}: baton serve decides"):
        refuse_variables_of_the_stack(ServeSettings())


def test_a_grace_that_the_stack_would_cut_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match="--grace-s must be more than the 5 s"):  # the gateway's default
        refuse_variables_of_the_stack(ServeSettings(grace_s=5))
    refuse_variables_of_the_stack(ServeSettings(grace_s=5.1))
    monkeypatch.setenv("BATON_SHUTDOWN_GRACE_S", "60")
    with pytest.raises(OperatorError, match="--grace-s must be more than the 60 s"):
        refuse_variables_of_the_stack(ServeSettings(grace_s=60))
    refuse_variables_of_the_stack(ServeSettings(grace_s=61))
    monkeypatch.setenv("BATON_SHUTDOWN_GRACE_S", "soon")
    refuse_variables_of_the_stack(ServeSettings())  # the gateway refuses it


def test_the_question_to_paste_has_what_the_gateway_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _curl("http://host:1", demo=True, chats=True).startswith("curl -sS http://host:1/v1/chat/completions ")
    monkeypatch.setenv("BATON_API_KEYS", "keys.toml")
    assert _curl("https://host:1", demo=False, chats=True).startswith(
        'curl -sS -k -H "Authorization: Bearer $KEY" https://host:1/'
    )


def test_the_question_to_paste_is_a_prompt_where_there_is_no_chat_template() -> None:
    *_, url, _, _, _, body = shlex.split(_curl("http://host:1", demo=False, chats=False))
    assert url == "http://host:1/v1/completions"
    assert json.loads(body) == {"prompt": "Say hello.", "max_tokens": 32, "temperature": 0}


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_an_occupied_port_is_told_before_a_model_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    def download(*_: object, **__: object) -> Path:
        pytest.fail("it downloads the model first")

    monkeypatch.setattr(local_stack, "resolve_model", download)
    monkeypatch.setattr(local_stack, "require_worker_packages", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told = {"--model": "owner/name", "--port": "0"} | {option: str(port)}
        monkeypatch.setattr(sys, "argv", ["baton serve", *(word for pair in told.items() for word in pair)])
        with pytest.raises(SystemExit) as leaving:
            local_stack.main()
    assert leaving.value.code == 2
    assert f" port 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


async def test_the_cores_that_the_stack_may_use_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.runtime.local_stack.cores_here", lambda: 8)
    stack = NotStarted(ServeSettings(prefill=1, decode=2, port=0))
    await stack.start()
    told = [child.options[child.options.index("--num-threads") + 1] for child in stack._children[:-1]]
    assert told == ["2", "2", "2"]
    await stack.stop()


@pytest.mark.parametrize(
    ("gpus", "options", "told"),
    [
        ("0", [], True),
        ("0", ["--device", "cuda", "--prefill", "0", "--decode", "2"], True),
        ("0", ["--prefill", "0"], False),
        ("0,1", [], False),
        ("0", ["--device", "cpu"], False),
        ("", [], False),
    ],
)
async def test_workers_that_share_a_gpu_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: str, options: list[str], told: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    stack = NotStarted(load(ServeSettings, "baton serve", ["--port", "0", *options]))
    await stack.start()
    assert ("workers share a GPU" in caplog.text) is told
    await stack.stop()


async def test_every_process_is_given_the_commit_that_the_stack_has_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not the branch, which may have moved when a process starts again. The model's name stays."""
    commit = "c" * 40
    monkeypatch.setattr(local_stack, "resolve_model", lambda *_, **__: tmp_path / commit)
    found: list[ServeSettings] = []

    async def serve(settings: ServeSettings, stop: asyncio.Event, **_: bool) -> None:
        found.append(settings)

    def run(body: Callable[[asyncio.Event], Coroutine[object, object, None]]) -> None:
        with contextlib.suppress(StopIteration):
            body(asyncio.Event()).send(None)

    monkeypatch.setattr(local_stack, "serve", serve)
    monkeypatch.setattr(local_stack, "run", run)
    monkeypatch.setattr(local_stack, "configure_logging", lambda *_: None)
    monkeypatch.setattr(local_stack, "require_worker_packages", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["baton serve", "--model", "owner/name", "--port", "0"])
    local_stack.main()
    stack = NotStarted(found[0])
    await stack.start()
    told = [dict(zip(child.options, child.options[1:], strict=False)) for child in stack._children]
    assert [(each["--model"], each["--revision"]) for each in told] == [("owner/name", commit)] * 3
    await stack.stop()


class Scarce(LocalStack):
    """Some of its processes cannot be started."""

    def __init__(self, missing: Collection[int]) -> None:
        super().__init__(ServeSettings())
        self.missing, self.num_tried = missing, 0

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        self.num_tried += 1
        if self.num_tried in self.missing:
            raise OSError(errno.EAGAIN, "no more processes")
        return await asyncio.create_subprocess_exec("true")


@pytest.mark.processes
async def test_a_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that has ended: the others serve meanwhile."""
    child, stack = Child("decode-0", "decode", []), Scarce({2})
    stack._serves = True
    monkeypatch.setattr(child.restarts, "ended", lambda now: 0.0 if stack.num_tried < 3 else None)
    with pytest.raises(OperatorError, match="the stack gives it up"):
        await stack._keep(child)
    assert stack.num_tried == 3
    assert "decode-0 could not be started: no more processes; restart" in caplog.text


async def test_a_process_that_cannot_be_started_at_all_is_an_operators_error() -> None:
    with pytest.raises(OperatorError, match="decode-0 could not be started: no more processes while starting"):
        await Scarce({1})._keep(Child("decode-0", "decode", []))


def test_a_stack_without_an_output_for_errors_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    LocalStack(ServeSettings())._screen.show([])


def test_progress_is_one_row_of_the_terminal_and_what_others_write_begins_at_its_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = [Child(f"{role}-{index}", role, []) for role in ("prefill", "decode") for index in (0, 1)]
    for child in children:
        child.facts.update(loaded=3, total=311)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(controller, "rb", buffering=0) as screen, os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        stack = LocalStack(ServeSettings())
        stack._screen.show([*children, Child("gateway", "gateway", [])])
        shown = screen.read(1000).decode()
        asyncio.run(stack.stop())
        print("error: why", end="", file=stderr, flush=True)
        then = ""
        while not then.endswith("why"):
            then += screen.read(1000).decode()
        monkeypatch.undo()
    assert shown.startswith("\033[Kprefill-0 loading 3/311  prefill-1 loading 3/311  decode-0 ")
    assert shown.endswith("\r")
    assert len(shown.removeprefix("\033[K").rstrip("\r")) == 79
    assert then == "\r\033[Kerror: why", "it has a row of its own"


def test_requests_wait_for_a_worker_that_is_restarted_unless_a_variable_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _environment(ServeSettings())["BATON_PATIENCE_S"] == "86400"
    assert "BATON_PATIENCE_S" not in _environment(ServeSettings(restart="never"))
    monkeypatch.setenv("BATON_PATIENCE_S", "3")
    assert _environment(ServeSettings())["BATON_PATIENCE_S"] == "3"


@pytest.mark.parametrize(
    ("options", "variable", "explains"),
    [
        ([], None, False),
        (["--explain-routing"], None, True),
        (["--no-explain-routing"], None, False),
        ([], "true", True),
        (["--no-explain-routing"], "true", False),
        (["--explain-routing"], "false", True),
        (["--restart", "never", "--prefill", "0", "--host", "0.0.0.0", "--log-level", "debug"], None, False),
    ],
)
async def test_clients_are_told_the_workers_addresses_only_where_the_operator_says_so(
    monkeypatch: pytest.MonkeyPatch, options: list[str], variable: str | None, explains: bool
) -> None:
    if variable is not None:
        monkeypatch.setenv("BATON_EXPLAIN_ROUTING", variable)
    settings = load(ServeSettings, "baton serve", ["--port", "0", *options])
    stack = NotStarted(settings)
    await stack.start()
    for name, value in _environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load(GatewaySettings, "baton gateway", stack.gateway.options).explain_routing is explains
    await stack.stop()


def test_that_clients_may_be_told_the_workers_addresses_is_documented() -> None:
    for row in _rows("--explain-routing"):
        _, _, default, meaning, _ = row.split("|")
        assert default.strip() == "off"
        assert "the workers' addresses" in meaning


def _rows(option: str) -> list[str]:
    """The rows of the tables about an option: the gateway's, and that of `baton serve`."""
    text = DOCUMENT.read_text()
    at = text.index("### `baton serve`")
    tables = text[:at], text[at:]
    return [next(line for line in each.splitlines() if line.startswith(f"| `{option}` |")) for each in tables]


@pytest.mark.parametrize(
    ("code", "told"),
    [(3, "exit code 3"), (0, "exit code 0"), (-9, "signal SIGKILL"), (-40, "signal 40")],
)
def test_an_exit_is_told_whatever_has_ended_the_process(code: int, told: str) -> None:
    """Most real-time signals have no name."""
    assert _describe_exit(code) == told
