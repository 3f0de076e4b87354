"""A real worker that stops at the places that a test names, until the test lets it go on.

    python -m staged_worker prefill|decode OPTIONS

The product is not changed: what is handed to the worker's constructor (engine, server) is wrapped, and the method that
starts a read. Gates, all open at first:

    step      the engine is about to compute a step
    read      a read of blocks is about to begin
    <Name>    a message of this name, to a client (server side), is about to be sent; what follows it waits too

Commands come as lines of JSON on the Unix socket `STAGE_SOCKET`: {"close": GATE}, {"open": GATE}, {"waiting": GATE}
(answered with how many wait there), {"crc": true} (answered with the CRC-32 of every block of the KV cache),
{"reconnect_s": SECONDS} (in which a client whose connection has broken must speak again), one answer a line.
`STAGE_POISON`, a token id, ends the process when it computes a sequence that begins with it, as
`STAGE_POISON_HOW` says: `kill` (SIGKILL) or `raise` (an exception in the step).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.contract.ids import Incarnation
from common.contract.messages.fields import Message
from common.runtime.channel import ends
from common.runtime.config import DecodeSettings, PrefillSettings, WorkerSettings
from common.runtime.worker_host import Worker, WorkerHost, run_worker
from kv_transfer.events import MoverAction, StartRead

if TYPE_CHECKING:
    from common.engine.batch import Decodes, Slice
    from common.worker.events import PlannedStep


class Stage:
    """The gates of one worker."""

    def __init__(self) -> None:
        self.closed: set[str] = set()
        self.waiting: dict[str, int] = {}
        self.skip: dict[str, int] = {}
        """Gate → how many more may pass although it is closed."""
        self.step_opened = threading.Condition()
        self.on_open: list[Callable[[], None]] = []
        self.crc: Callable[[], list[int]] = list

    def stops(self, gate: str) -> bool:
        """Whether whoever comes to the gate now has to wait."""
        if gate not in self.closed:
            return False
        if self.skip.get(gate, 0) > 0:
            self.skip[gate] -= 1
            return False
        return True

    def come(self, gate: str) -> None:
        self.waiting[gate] = self.waiting.get(gate, 0) + 1

    def go(self, gate: str) -> None:
        self.waiting[gate] -= 1

    async def serve(self, path: str) -> None:
        """Take commands."""
        self._server = await asyncio.start_unix_server(self._client, path)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            command = json.loads(line)
            answer: Any = None
            if "close" in command:
                self.skip[command["close"]] = command.get("skip", 0)
                self.closed.add(command["close"])
            elif "open" in command:
                self.closed.discard(command["open"])
                with self.step_opened:
                    self.step_opened.notify_all()
                for opened in self.on_open:
                    opened()
            elif "crc" in command:
                answer = self.crc()
            elif "reconnect_s" in command:
                ends.RECONNECT_S = command["reconnect_s"]
            else:
                answer = self.waiting.get(command["waiting"], 0)
            writer.write(json.dumps(answer).encode() + b"\n")


class StagedRunner:
    """A runner whose steps wait at the gate."""

    def __init__(self, runner: Any, stage: Stage) -> None:
        self._runner = runner
        self._stage = stage
        self._poison = int(os.environ.get("STAGE_POISON", -1))
        self.decoded: deque[list[int]] = deque()
        """The first tokens of the sequences that decode, for each step that is submitted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, slices: Sequence[Slice], decodes: Decodes | None = None) -> Any:
        """Wait, then compute."""
        with self._stage.step_opened:
            if self._stage.stops("step"):
                self._stage.come("step")
                self._stage.step_opened.wait_for(lambda: "step" not in self._stage.closed)
                self._stage.go("step")
        firsts = [*self.decoded.popleft(), *(self._begins(each) for each in slices)]
        if self._poison in firsts:
            if os.environ["STAGE_POISON_HOW"] == "raise":
                raise RuntimeError("CUDA error: device-side assert triggered")
            os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.submit(slices, decodes)

    @staticmethod
    def _begins(slice_: Slice) -> int:
        """The first token of a sequence, as far as a slice tells."""
        return slice_.samples[0].token_ids[0] if slice_.samples else slice_.token_ids[0]


class StagedSend:
    """`send` of a control server whose messages wait at gates of their names, without changing their order."""

    def __init__(self, send: Callable[[Incarnation, Message], None], stage: Stage) -> None:
        self._send = send
        self._stage = stage
        self._queues: dict[Incarnation, deque[Message]] = {}
        stage.on_open.append(self._let_go)

    def __call__(self, peer: Incarnation, message: Message) -> None:
        """Send now, or when the gate opens."""
        gate = self._gate(message)
        if peer in self._queues:
            self._queues[peer].append(message)
        elif self._stage.stops(gate):
            self._stage.come(gate)
            self._queues[peer] = deque([message])
        else:
            self._send(peer, message)

    def _gate(self, message: Message) -> str:
        ends = getattr(message, "finish_reason", None) is not None
        return "LastTokens" if ends else type(message).__name__

    def _let_go(self) -> None:
        for peer, queue in list(self._queues.items()):
            if self._gate(queue[0]) not in self._stage.closed:
                self._stage.go(self._gate(queue[0]))
                del self._queues[peer]
                for message in queue:
                    self._send(peer, message)


def _stage_reads(worker: Any, stage: Stage) -> None:
    mover = worker._transfers.mover
    carry_out, held = mover.carry_out, deque[StartRead]()

    def staged(action: MoverAction) -> None:
        if isinstance(action, StartRead) and (held or stage.stops("read")):
            stage.come("read")
            held.append(action)
        else:
            carry_out(action)

    def let_go() -> None:
        while held and "read" not in stage.closed:
            stage.go("read")
            carry_out(held.popleft())

    mover.carry_out = staged
    stage.on_open.append(let_go)


def _note_decoded(shell: Any, runner: StagedRunner) -> None:
    submit = shell._submit

    async def noted(work: PlannedStep) -> Any:
        choices = () if work.decodes is None else work.plan.decodes
        runner.decoded.append([each.sequence.token_ids[0] for each in choices])
        return await submit(work)

    shell._submit = noted


def main() -> None:
    """Entry point."""
    role = sys.argv.pop(1)
    stage = Stage()
    make: Callable[[Any, WorkerHost, Path], Awaitable[Worker]]
    if role == "prefill":
        from prefill_worker.__main__ import make_worker as make
    else:
        from decode_worker.__main__ import make_worker as make

    async def make_worker(settings: Any, host: WorkerHost, folder: Path) -> Worker:
        host.server.send = StagedSend(host.server.send, stage)  # type: ignore[method-assign]
        worker = await make(settings, host, folder)
        inside: Any = worker
        inside._engine.runner = runner = StagedRunner(inside._engine.runner, stage)
        _note_decoded(inside, runner)
        _stage_reads(worker, stage)
        stage.crc = lambda: list(inside._region.crc32(range(inside.core.pool.num_blocks)))
        await stage.serve(os.environ["STAGE_SOCKET"])
        return worker

    settings_type: type[WorkerSettings] = PrefillSettings if role == "prefill" else DecodeSettings
    made: Callable[[Any, WorkerHost, Path], Awaitable[Worker]] = make_worker
    run_worker(settings_type, f"baton {role}", made)


if __name__ == "__main__":
    main()
