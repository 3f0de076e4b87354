"""Processes of Baton that are forked from one that has imported what they import.

Most of the CPU time of tests of real processes would go into imports: torch takes a worker two seconds, and a gateway's
libraries take one and a half. Behind its imports such a process does what it does in production. What `baton serve`
starts, starts from nothing.

    python fork_server.py worker|gateway FD

Requests come over the Unix socket FD, with file descriptors (`ForkedProcess`). The server ends when the other end is
closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

_IMPORTS = {
    "worker": (
        "prefill_worker.core",
        "decode_worker.core",
        "common.worker.start",
        "common.runtime.worker_host",
        "kv_transfer.nixl_transport",
        "kv_transfer.zmq_transport",
        "nixl._api",
        "uvloop",
    ),
    "gateway": ("gateway.__main__", "transformers.models.auto.tokenization_auto", "uvloop"),
}
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2
_MESSAGE_BYTES = 2**17
_NUMBER = struct.Struct("i")


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process without Baton's settings, for a process with one core, and `more`. A worker does
    not have to start again for large pages."""
    from common.runtime.malloc import with_large_pages  # here: the server imports nothing before it knows from where

    mine = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return with_large_pages(mine | {"OMP_NUM_THREADS": "1"} | dict(more))


class ForkServer:
    """A process that forks workers, or gateways, which must not have torch."""

    def __init__(self, kind: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = subprocess.Popen(
                [sys.executable, __file__, kind, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment({}),
            ).pid


@functools.cache
def fork_server(kind: str) -> ForkServer:
    """The one of this process for a kind, which starts with the first call."""
    return ForkServer(kind)


class ForkedProcess:
    """`python -m MODULE OPTIONS`, forked by a server, with the methods of `subprocess.Popen` that tests use.

    It has the variables of this process but for Baton's settings, and `variables`; what is read at an import, or when
    the kernels in C are loaded, comes too late. It inherits `fd` under the same number, or under `number`, runs in a
    network namespace if that has a name, and may end with its parent, the server.
    """

    def __init__(
        self,
        server: ForkServer,
        module: str,
        options: Sequence[str],
        fd: int,
        variables: Mapping[str, str] = MappingProxyType({}),
        namespace: str = "",
        number: int | None = None,
    ) -> None:
        self.args = ["python", "-m", module, *options]
        self.returncode: int | None = None
        self._lock = threading.Lock()
        reader, writer = os.pipe()
        told, status = os.pipe()
        self._told = os.fdopen(told, "rb", buffering=0)
        request = {
            "module": module,
            "options": list(options),
            "environment": environment(variables),
            "fd": fd if number is None else number,
            "namespace": namespace,
        }
        socket.send_fds(server.socket, [json.dumps(request).encode()], [writer, status, fd])
        os.close(writer)
        os.close(status)
        self.stderr = os.fdopen(reader)
        self.pid = self._number()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. Raises `subprocess.TimeoutExpired`."""
        deadline_s = time.monotonic() + (3600.0 if timeout is None else timeout)
        while self.returncode is None:
            readable, _, _ = select.select([self._told], [], [], max(0.0, min(0.1, deadline_s - time.monotonic())))
            with self._lock:
                if readable and self.returncode is None:
                    self.returncode = self._number()
            if self.returncode is None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        told = self._told.read(_NUMBER.size)
        assert told, "the server of forks is gone"
        return int(*_NUMBER.unpack(told))


def _serve(requests: socket.socket) -> tuple[str, list[str]]:
    """Fork what is asked for; returns in each child, with its module and options."""
    events = selectors.DefaultSelector()
    events.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in events.select():
            if key.data is None:
                message, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
                if not message:
                    sys.exit(0)
                if (pid := os.fork()) == 0:
                    requests.close()  # now: its number may be that of another file later
                    events.close()
                    request = json.loads(message)
                    _become(request["environment"], stderr=fds[0], inherited=fds[2], number=request["fd"])
                    if request["namespace"]:
                        _enter(request["namespace"])
                    return request["module"], request["options"]
                stderr, status, inherited = fds
                os.write(status, _NUMBER.pack(pid))
                os.close(stderr)
                os.close(inherited)
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
            else:
                pid, status = key.data
                _, ended = os.waitpid(pid, 0)
                events.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(ended)))
                os.close(status)


def _become(environment: Mapping[str, str], *, stderr: int, inherited: int, number: int) -> None:
    """Give this process the variables and files of the one that is asked for, and no other files."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.dup2(stderr, 2)
    os.closerange(3, inherited)
    os.closerange(inherited + 1, 2**16)
    if inherited != number:
        os.dup2(inherited, number)
        os.close(inherited)


def _enter(namespace: str) -> None:
    """Go where `ip netns exec` goes: to the network of that name, with a /sys that shows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        done = [libc.setns(network.fileno(), _CLONE_NEWNET), libc.unshare(_CLONE_NEWNS)]
    done.append(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))
    done.append(libc.umount2(b"/sys", _MNT_DETACH))
    done.append(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    if any(done):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


def main() -> None:
    """Entry point."""
    _, kind, fd = sys.argv
    sys.path[0] = os.getcwd()  # as `python -m` has it
    if kind == "gateway":
        from gateway.text.tokenizer import keep_torch_out

        keep_torch_out()
    raise_logging_exceptions = logging.raiseExceptions
    for name in _IMPORTS[kind]:
        importlib.import_module(name)
    logging.raiseExceptions = raise_logging_exceptions  # which nixl changes
    if kind == "worker":
        importlib.import_module("common.engine.native").kernels()
    if kind == "gateway":
        del sys.modules["torch"]  # each process keeps it out itself
        del sys.modules["gateway.__main__"]  # it is run as a program
    gc.collect()
    gc.freeze()  # a collection would copy what is shared
    module, options = _serve(socket.socket(fileno=int(fd)))
    sys.argv[:] = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
