"""`baton serve` goes on when one of its processes dies: nothing is lost but what only a dead gateway knew.

With `RESTART_RECORD` what became of the requests while workers were killed and frozen is recorded in
`benchmarks/results`, if all is well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chaos.client import Outcome, ask
from checkpoints import make_checkpoint
from model_hub import HUB_ID, model_hub
from near_ties import is_near_tie
from served import Stack
from stack import START_TIMEOUT_S, prompt, until, wait_until

from benchmarks.record import record
from common.runtime.restarts import MAX_RESTARTS

NUM_REQUESTS = int(os.environ.get("RESTART_REQUESTS", 24))
"""In flight when something befalls a process; 300 in the run that is asked for by hand."""
PATIENT = ("--heartbeat-timeout-s", "5")
"""Many processes share the machine: nobody is taken for lost who is only slow."""
SEEN_TOKENS = 8
"""Of an answer that a decode worker is generating when something befalls it."""


def bodies(number: int = NUM_REQUESTS) -> list[dict[str, Any]]:
    """Requests of their own: greedy or seeded, short or long, streaming or not."""
    return [
        {
            "prompt": prompt(1000 + index, (40, 150, 400)[index % 3]),
            "max_tokens": 400,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": index % 4 != 0,
            **({"temperature": 1.0, "top_k": 20, "seed": index} if index % 2 else {"temperature": 0.0}),
        }
        for index in range(number)
    ]


def new_session() -> aiohttp.ClientSession:
    """For as many requests at once as a test likes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=180), read_bufsize=2**20
    )


async def pools(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/pools") as response:
        view: dict[str, Any] = await response.json()
        return view


async def worker(session: aiohttp.ClientSession, url: str, address: str) -> dict[str, Any]:
    """What operators are told of a worker."""
    admin_port = (await pools(session, url))["admin_port"]
    async with session.get(f"http://127.0.0.1:{admin_port}/workers") as response:
        return next(each for each in (await response.json())["workers"] if each["id"] == address)


Asking = list[asyncio.Task[Outcome]]


async def in_the_middle(
    session: aiohttp.ClientSession,
    url: str,
    requests: list[dict[str, Any]],
    act: Callable[[Asking], Awaitable[str | None]],
) -> tuple[Asking, str]:
    """Ask, and act while the answers are generated; the requests' tasks, and what the act returns.

    All answers may end before this process comes to act: the act returns None then, and all are asked anew.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            asking = [asyncio.create_task(ask(session, url, request)) for request in requests]
            if (acted := await act(asking)) is not None:
                return asking, acted
            await asyncio.gather(*asking)
            # else who has the prompts from before is asked alone
            requests = [request | {"cache_salt": f"{request.get('cache_salt')}, anew"} for request in requests]


async def busy(session: aiohttp.ClientSession, url: str, asking: Asking) -> str | None:
    """Wait until half of the requests are in flight, and a decode worker generates; its address.

    None: all have ended, whether or not that was seen.
    """
    while not all(task.done() for task in asking):
        view = await pools(session, url)
        decoding = [each["decode"] for each in view["requests"] if each["tokens"] >= SEEN_TOKENS]
        if view["in_flight"] >= len(asking) / 2 and decoding:
            return str(max(set(decoding), key=decoding.count))
    return None


async def stopped(stack: Stack, asking: Asking) -> str | None:
    """Stop a decode worker that has answers to generate by SIGSTOP; its address, None if all have ended."""

    async def stop() -> str | None:
        async with new_session() as session:
            while (address := await busy(session, stack.url, asking)) is not None:
                pid = pid_at(stack, address)
                os.kill(pid, signal.SIGSTOP)
                if await decoding_at(session, stack.url, address):
                    return address
                os.kill(pid, signal.SIGCONT)
        return None

    # In a loop of its own: that of the test reads answers, and would come to this when all of them have ended.
    return await asyncio.to_thread(asyncio.run, stop())


async def prefill_stopped(session: aiohttp.ClientSession, stack: Stack) -> str:
    """Stop a prefill worker by SIGSTOP, before it has a prompt; its address."""
    of_role = [each for each in (await pools(session, stack.url))["workers"] if each["role"] == "prefill"]
    os.kill(pid_at(stack, of_role[0]["id"]), signal.SIGSTOP)
    return str(of_role[0]["id"])


async def asked_and_stopped(
    session: aiohttp.ClientSession, stack: Stack, requests: list[dict[str, Any]], role: str
) -> tuple[Asking, str]:
    """Requests in flight, and the address of a worker of this role that is stopped by SIGSTOP and has a part of them.

    A prefill worker is stopped before it has a prompt, a decode worker in the middle of answers.
    """
    if role == "decode":
        return await in_the_middle(session, stack.url, requests, lambda asking: stopped(stack, asking))
    address = await prefill_stopped(session, stack)
    asking = [asyncio.create_task(ask(session, stack.url, request)) for request in requests]

    async def has_some() -> bool:
        view = await pools(session, stack.url)
        return any(each["in_flight"] for each in view["workers"] if each["id"] == address)

    await becomes(has_some)
    return asking, address


async def decoding_at(session: aiohttp.ClientSession, url: str, address: str) -> bool:
    """Whether a decode worker that was stopped owes tokens, once the gateway has read what it had sent."""
    seen = None
    while True:
        view = await pools(session, url)
        now = sorted((each["id"], each["tokens"]) for each in view["requests"] if each["decode"] == address)
        if now == seen:
            return bool(now)
        seen = now
        await asyncio.sleep(0.05)


async def becomes(condition: Callable[[], Any]) -> None:
    """Wait until an awaitable condition holds."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.1)


def pid_at(stack: Stack, address: str) -> int:
    pid = stack.pid_of(f"--control-port {address.rpartition(':')[2]}")
    assert pid is not None
    return pid


async def back(session: aiohttp.ClientSession, url: str, address: str, restarts: int) -> None:
    """Wait until a worker has been restarted so often, and is used again."""

    async def condition() -> bool:
        found = await worker(session, url, address)
        return bool(found["usable"] and found["restarts"] == restarts)

    await becomes(condition)


async def killed(session: aiohttp.ClientSession, stack: Stack, address: str) -> None:
    before = (await worker(session, stack.url, address))["restarts"]
    os.kill(pid_at(stack, address), signal.SIGKILL)
    await back(session, stack.url, address, before + 1)


async def frozen(session: aiohttp.ClientSession, stack: Stack, address: str) -> None:
    """It stays stopped until the gateway has lost it; then it wakes up."""

    async def lost() -> bool:
        return not (await worker(session, stack.url, address))["usable"]

    try:
        await becomes(lost)
    finally:
        os.kill(pid_at(stack, address), signal.SIGCONT)


async def failovers(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_gateway_failovers_total{"))


class Answers:
    """Two prefill and two decode workers, and what they answer when nothing happens."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.expected = asyncio.run(self._undisturbed())
        assert {outcome.error for outcome in self.expected} == {""}
        self.cases: list[dict[str, Any]] = []
        """What became of them when something happened."""

    async def _undisturbed(self) -> list[Outcome]:
        async with new_session() as session:
            return list(await asyncio.gather(*(ask(session, self.stack.url, body) for body in bodies())))

    def differing(self, found: list[Outcome]) -> list[tuple[dict[str, Any], Outcome, Outcome]]:
        """Request, expected and found answer where those are not equal."""
        answers = zip(bodies(), self.expected, found, strict=True)
        return [(body, expected, outcome) for body, expected, outcome in answers if outcome != expected]

    def wrong(self, found: list[Outcome]) -> list[tuple[str, Outcome, Outcome]]:
        """Answers that are not what they would have been, near ties excepted."""
        return [
            (outcome.error, outcome, expected)
            for body, expected, outcome in self.differing(found)
            if not is_near_tie(self.folder, body, expected, outcome)
        ]


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Path]) -> Iterator[Answers]:
    folder = checkpoint("llama")
    with Stack("--model", str(folder), "--prefill", "2", "--decode", "2", *PATIENT) as stack:
        assert stack.ready.startswith("ready"), stack.wait()
        made = Answers(stack, folder)
        yield made
        code, log = stack.end(signal.SIGTERM)
    assert code == 0, log
    assert "Traceback" not in log, log
    if "RESTART_RECORD" in os.environ:
        command = f"RESTART_REQUESTS={NUM_REQUESTS} RESTART_RECORD=1 python -m pytest tests/e2e/test_restarts.py"
        workload = {
            "requests": NUM_REQUESTS,
            "stack": "2 prefill workers, 2 decode workers",
            "model": "llama, random",
            "max_tokens": 400,
        }
        record("restarts", workload=workload, figures={"cases": made.cases}, seed=1000, command=command)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("befalls", [killed, frozen])
async def test_nothing_is_lost_and_nothing_is_wrong(answers: Answers, befalls: Callable[..., Any], role: str) -> None:
    stack = answers.stack
    async with new_session() as session:
        before = await failovers(session, stack.url)
        salt = {"cache_salt": f"{befalls.__name__} {role}"}  # else who has the prompts from before is asked alone
        asking, address = await asked_and_stopped(session, stack, [body | salt for body in bodies()], role)
        await befalls(session, stack, address)
        found = list(await asyncio.gather(*asking))
        wrong, num_failovers = answers.wrong(found), await failovers(session, stack.url) - before
        assert not wrong
        assert num_failovers > 0, "nobody was there"
        case = {"role": role, "befalls": befalls.__name__, "failovers": num_failovers}
        case |= {"lost": sum(bool(outcome.error) for outcome in found), "wrong": len(wrong)}
        answers.cases.append(case | {"near_ties": len(answers.differing(found)) - len(wrong)})
        await until(lambda: not stack.leftovers(), "something is left")
    if befalls is killed:
        (line,) = stack.logged(rf"{role}-\d ended with signal SIGKILL")
        assert "restart 1 begins in 0.5 s" in line
        await until(lambda: bool(stack.logged(rf"{role}-\d serves again")), "it does not say so", START_TIMEOUT_S)


async def test_a_gateway_that_dies_is_back_at_its_ports(answers: Answers) -> None:
    stack, url = answers.stack, answers.stack.url
    async with new_session() as session:
        asking, _ = await in_the_middle(session, url, bodies(), lambda asking: busy(session, url, asking))
        admin_port = (await pools(session, url))["admin_port"]
        pid = stack.pid_of("-m gateway")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(outcome, aiohttp.ClientError) or outcome in answers.expected, "it was cut, or had ended"
        await until(lambda: bool(stack.logged("gateway serves again")), "no gateway", START_TIMEOUT_S)
        await until(lambda: not stack.leftovers(), "what nobody waits for is not given up")
        assert (await pools(session, url))["admin_port"] == admin_port
        found = list(await asyncio.gather(*(ask(session, url, body) for body in bodies())))
        assert not answers.wrong(found)
    assert len(stack.logged("gateway ended with signal SIGKILL; restart 1 begins in 0.5 s")) == 1


async def test_streams_wait_for_the_only_worker_of_a_role(checkpoint: Callable[[str], Path]) -> None:
    """Longer than a gateway waits by itself, however long that takes."""
    folder = checkpoint("llama")
    requests = bodies(4)
    with Stack("--model", str(folder), *PATIENT) as stack:
        async with new_session() as session:
            expected = list(await asyncio.gather(*(ask(session, stack.url, request) for request in requests)))
            for role in ("decode", "prefill"):
                salted = [request | {"cache_salt": role} for request in requests]
                asking, address = await asked_and_stopped(session, stack, salted, role)
                await killed(session, stack, address)
                for request, one, other in zip(requests, expected, await asyncio.gather(*asking), strict=True):
                    assert one == other or is_near_tie(folder, request, one, other)
        pid = stack.pid_of("-m decode_worker")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: bool(stack.logged("decode-0 ended with signal SIGKILL; restart 2")), "it says nothing")
        children = stack.children()
        code, log = stack.end(signal.SIGINT)  # in the pause before it starts again
        assert code == 0, log
        assert "Traceback" not in log, log
        assert not any(Path(f"/proc/{child}").exists() for child in children)


async def test_a_worker_that_starts_again_loads_the_commit_that_the_others_have_or_ends_with_the_stack(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """However the hub's branch has moved since: with other weights all other processes would refuse it."""
    first, second = "a" * 40, "b" * 40
    commits = {first: checkpoint("llama"), second: make_checkpoint("llama", tmp_path / "second", seed=8)}
    with (
        model_hub(commits, first) as hub,
        Stack("--model", HUB_ID, "--prefill", "0", *PATIENT, variables=hub.variables(tmp_path / "cache")) as stack,
    ):
        request = bodies(1)[0] | {"max_tokens": 8}
        async with new_session() as session:
            async with session.get(f"{stack.url}/v1/models") as response:
                assert [each["id"] for each in (await response.json())["data"]] == [HUB_ID]
            expected = await ask(session, stack.url, request)
            hub.main = second
            pid = stack.pid_of("-m decode_worker")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert await ask(session, stack.url, request | {"cache_salt": "anew"}) == expected
        await until(lambda: bool(stack.logged("decode-0 serves again")), "it does not say so", START_TIMEOUT_S)
        assert not stack.logged(second)
        pid = stack.pid_of("-m decode_worker")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: bool(stack.logged("decode-0 ended with signal SIGKILL; restart 2")), "it says nothing")
        await until(lambda: stack.pid_of("-m decode_worker") is not None, "it does not come back")
        children = stack.children()
        code, log = stack.end(signal.SIGINT)
        assert code == 0, log
        assert "Traceback" not in log, log
        assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def taken(port: int) -> socket.socket | None:
    """A listener on a port that the stack has reserved, once nobody else listens there."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener


@pytest.mark.timeout(400)
def test_after_five_restarts_it_gives_up_and_says_why() -> None:
    """Somebody has taken the port of a gateway that has died."""
    with Stack("--prefill", "0") as stack:
        pid = stack.pid_of("-m gateway")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        thief: list[socket.socket] = []
        port = int(stack.url.rpartition(":")[2])

        def take() -> bool:
            found = taken(port)
            if found is not None:
                thief.append(found)
            return found is not None

        wait_until(take, "the port is not free")
        with thief[0]:
            wait_until(lambda: stack.popen.poll() is not None, "it does not give up", 2 * START_TIMEOUT_S)
        code, log = stack.wait()
    assert code == 2
    assert "Traceback" not in log, log
    pauses = [line.rpartition("begins in ")[2] for line in log.splitlines() if "begins in" in line]
    assert pauses == ["0.5 s", "1.0 s", "2.0 s", "4.0 s", "8.0 s"]
    assert log.count(f"cannot bind 127.0.0.1:{port}") == MAX_RESTARTS
    last = log.splitlines()[-1]
    assert last.startswith("error: gateway ended with exit code 2 after 5 restarts in 60 s of service"), last
