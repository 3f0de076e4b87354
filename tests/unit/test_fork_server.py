"""The server of forks gives tests processes like those that start from nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkedProcess, ForkServer
from stack import wait_until

pytestmark = pytest.mark.processes

_PROGRAM = """
import json, os, sys, time
code, fd = map(int, sys.argv[1:])
files = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
facts = {"name": __name__, "files": files, "settings": [name for name in os.environ if name.startswith("BATON_")]}
facts |= {"variable": os.environ["SOME_VARIABLE"], "parent": os.getppid()}
os.write(fd, json.dumps(facts).encode())
os.close(fd)
print("to stderr", file=sys.stderr)
while code < 0:
    time.sleep(1)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A server in a folder with a program."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "some_program.py").write_text(_PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = ForkServer("gateway")
    yield made
    made.socket.close()


def started(server: ForkServer, code: int) -> tuple[ForkedProcess, dict[str, Any]]:
    """A process of the program, and what it says of itself."""
    reader, writer = os.pipe()
    process = ForkedProcess(server, "some_program", [str(code), str(writer)], writer)
    os.close(writer)
    with os.fdopen(reader) as said:
        return process, {"fd": writer, **json.load(said)}


@pytest.mark.parametrize("code", [0, 3])
def test_it_has_what_it_was_given_and_no_more(server: ForkServer, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    monkeypatch.setenv("SOME_VARIABLE", "of this test")
    for _ in range(2):
        process, said = started(server, code)
        assert (said["name"], said["variable"], said["settings"]) == ("__main__", "of this test", [])
        assert said["parent"] == server.pid
        assert said["files"] == [0, 1, 2, said["fd"]]
        assert process.wait(10) == process.poll() == code
        assert process.stderr.read() == "to stderr\n"


def test_it_can_be_killed(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "")
    process, _ = started(server, -1)
    other, _ = started(server, -1)
    assert process.poll() is None
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.kill()  # nobody
    assert other.poll() is None
    other.send_signal(signal.SIGTERM)
    assert other.wait(10) == -signal.SIGTERM


def test_a_server_ends_when_nobody_is_left_to_ask_it(server: ForkServer) -> None:
    """The last test: nobody can ask it any more."""
    process = Path(f"/proc/{server.pid}/stat")
    assert process.exists()
    server.socket.close()
    wait_until(lambda: process.read_text().rpartition(")")[2].split()[0] == "Z", "it goes on")
