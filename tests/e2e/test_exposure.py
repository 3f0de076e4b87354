"""What a stack opens to the network, by the kernel's word; and where a message can make a worker connect to.

That a stack of this machine opens nothing to others is a test in `test_serve`.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from served import Stack
from sockets import descendants, listeners
from stack import Process, gateway_of, run_forked, until, wait_until
from step_tokens import handles

from common.contract.errors import Cause
from common.contract.ids import RequestKey, new_incarnation, new_request_id
from common.contract.messages.gateway import Decode, Prefill, PrefixHint, Source
from common.contract.messages.worker import Failed, Tokens
from common.contract.sampling import SamplingParams
from common.runtime.malloc import with_large_pages
from common.runtime.ucx import allows_tcp

STRANGER = new_incarnation()


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "UCX_"))}
    return with_large_pages(kept | variables)


def test_a_stack_for_other_machines_opens_the_port_of_its_api_alone() -> None:
    """When it is killed after a handoff, it leaves no orphans."""
    with Stack("--explain-routing", "--host", "0.0.0.0") as stack:
        stack.hand_over()
        processes = descendants(stack.popen.pid)
        gateway = next(pid for pid in processes if "gateway" in Path(f"/proc/{pid}/cmdline").read_text())
        (api,) = [each for each in listeners(*processes) if not each.on_loopback]
        assert (api.pid, api.address) == (gateway, IPv4Address("0.0.0.0"))
        children = stack.children()
        assert len(children) == 3
        stack.popen.kill()
        stack.popen.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "orphans")


# Loads nixl, and tells whether a listening socket appears when UCX is told so by each argument.
_OPENED = """
import os, sys, nixl._api as nixl
from sockets import listeners
for number, tls in enumerate(sys.argv[1:]):
    os.environ["UCX_TLS"] = tls
    before = listeners(os.getpid())
    try:
        agent = nixl.nixl_agent(str(number), nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except Exception:
        pass
    print("open" if len(listeners(os.getpid())) > len(before) else "closed", file=sys.stderr)
    agent = None
"""
TLS: tuple[str, ...] = (
    "all",
    "tcp,cuda_copy",  # where there is a GPU, NIXL takes no list without it
    "\\tcp,cuda_copy",
    "sm,self,tcp,cuda_copy",
    "^tcp",
    "^\\tcp",
    "^shm,tcp",
    "^,tcp",
    "^tcp:aux",
    "^^tcp",
    "^ tcp",
    "^t*",
)
TLS += ("^all", "^rc", "^TCP", "shm,,tcp", "sm,tcp:aux", "rc,ud", "sm,self", "TCP", " tcp", "t*", "", "all,^tcp")


def test_the_rule_calls_open_whatever_ucx_opens() -> None:
    command = [sys.executable, "-c", _OPENED, *TLS]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(command, env=environment(PYTHONPATH=path), capture_output=True, text=True, check=True)
    opened = [line == "open" for line in done.stderr.splitlines() if line in ("open", "closed")]
    assert len(opened) == len(TLS), done.stderr
    assert opened[:4] == [True] * 4
    assert [tls for tls, is_open in zip(TLS, opened, strict=True) if is_open and not allows_tcp(tls)] == []
    # Nor does it call everything open.
    assert [tls for tls in TLS if not allows_tcp(tls)] == [
        *("^tcp", "^\\tcp", "^shm,tcp", "^,tcp"),
        *("rc,ud", "sm,self", "TCP", " tcp", "t*"),
    ]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_off_loopback_does_not_start_by_accident(role: str) -> None:
    """It says so at once, before it looks for a model, and names the ways out."""
    arguments = [role, "--host", "0.0.0.0", "--model", "/nowhere"]
    command = [sys.executable, "-m", "common.runtime.cli", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for way in ("--expose-memory-over-tcp", "--transport zmq", "--curve-keys", "UCX_TLS=^tcp"):
        assert way in done.stderr
    for options, variables in (
        (("--expose-memory-over-tcp",), {}),
        (("--transport", "zmq"), {}),
        ((), {"UCX_TLS": "^tcp"}),
        ((), {"BATON_EXPOSE_MEMORY_OVER_TCP": "true"}),
    ):
        done = run_forked("common.runtime.cli", [*arguments, *options], variables)
        assert done.returncode == 2
        assert "/nowhere" in done.stderr, "it should have gone on, to look for its model"


# --- where it connects to --------------------------------------------------------------------------------------------


class Canary:
    """Somebody whom nobody should call."""

    def __init__(self, address: str) -> None:
        self.socket = socket.create_server((address, 0))
        self.address = f"{address}:{self.socket.getsockname()[1]}"

    def called(self) -> bool:
        return bool(select.select([self.socket], [], [], 0)[0])


@pytest.fixture(scope="module")
def workers(checkpoint: Callable[[str], Path]) -> Iterator[dict[str, Process]]:
    """Workers that connect to 127.0.0.2 alone."""
    common = ["--model", str(checkpoint("llama")), "--num-threads", "1", "--peer-networks", "127.0.0.2/32"]
    common += ["--kv-cache-bytes", str(16 * 2**20)]
    started = {
        "prefill": Process("prefill_worker", [*common, "--pull-prefixes", "always"]),
        "decode": Process("decode_worker", common),
    }
    for process in started.values():
        process.fact("ready")
    yield started
    for process in started.values():
        process.signal()
        assert process.wait() == 0, process.log


def work(**fields: Any) -> dict[str, Any]:
    return {
        "request": new_request_id(),
        "attempt": 1,
        "token_ids": tuple(range(8, 72)),
        "prompt_len": 64,
        "sampling": SamplingParams(temperature=0.0, max_tokens=2),
        "choices": (0,),
        "budget_s": 60.0,
    } | fields


def says(worker: Process, line: str) -> bool:
    return any(line in each for each in worker.log)


async def test_a_decode_worker_connects_only_to_its_peers_networks(workers: dict[str, Process]) -> None:
    worker = workers["decode"]
    with ExitStack() as stack:
        stranger, peer = Canary("127.0.0.1"), Canary("127.0.0.2")
        stack.enter_context(stranger.socket)
        stack.enter_context(peer.socket)
        named = [stranger.address, f"localhost:{stranger.address.rpartition(':')[2]}"]
        async with gateway_of(worker.fact("control")) as (gateway, link):
            for number, address in enumerate(named, 1):
                decode = work(source=Source(address=address, incarnation=STRANGER))
                link.send(Decode(**decode, handles=handles(), offered=RequestKey(decode["request"], 1)))
                failed = await gateway.until(Failed)
                assert (failed.request, failed.cause) == (decode["request"], Cause.TRANSFER)
                assert "not within --peer-networks" in failed.message
                assert address not in failed.message, "clients may be told of it"
                assert worker.metric("baton_sources_refused_total") == number
                line = f"refused to connect to {address} (127.0.0.1), which is not within 127.0.0.2/32"
                await until(partial(says, worker, line), "the log says nothing")
            decode = work(source=Source(address=peer.address, incarnation=STRANGER))
            link.send(Decode(**decode, handles=handles(), offered=RequestKey(decode["request"], 1)))
            await until(peer.called, "it does not connect to where it may")
            assert not stranger.called()
            await gateway.until(Failed)


async def test_a_prefill_worker_computes_what_it_may_not_pull(workers: dict[str, Process]) -> None:
    worker = workers["prefill"]
    stranger = Canary("127.0.0.1")
    with stranger.socket:
        async with gateway_of(worker.fact("control")) as (gateway, link):
            hint = PrefixHint(source=Source(address=stranger.address, incarnation=STRANGER), num_tokens=48)
            link.send(Prefill(**work(prefix=hint, budget_s=20.0)))
            await gateway.until(Tokens)
        assert worker.metric("baton_sources_refused_total") == 1
        assert not stranger.called()
