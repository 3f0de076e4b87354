"""The workers of the model: real leases, pulls, fences, pools and departures in shells without sockets and threads.

The shells follow `prefill_worker.worker`, `decode_worker.worker` and `kv_transfer.intake`, less scheduling, prefix
caches and preemption. A worker's memory says what each block holds: `("A", 0)` is the first block of the request's
prompt, `("B", n)` the second one with the KV of the first n tokens; a block that is free holds nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Attach,
    AttachSequence,
    Detach,
    Failed,
    Message,
    Settle,
    Tokens,
)
from kv_transfer import events
from kv_transfer import source as leases

if TYPE_CHECKING:
    from handoff_world import World

NUM_BLOCKS = 2
"""Blocks of the request."""
DEADLINE = 100.0
"""When the request's budget ends; the model's clock stands at 0."""
TTL_S = 10.0
Content = tuple[str, int]


def content(num_computed: int) -> list[Content]:
    """What the blocks of the request hold when the KV of so many tokens is there."""
    return [("A", 0), ("B", num_computed)]


def token(position: int) -> int:
    """The token at a position: there is one right answer."""
    return 100 + position


def tokens(key: RequestKey, position: int, num: int, *, ended: bool) -> Tokens:
    """The right tokens from a position on."""
    return Tokens(
        request=key.request,
        attempt=key.attempt,
        choice=0,
        position=position,
        token_ids=tuple(token(each) for each in range(position, position + num)),
        finish_reason="length" if ended else None,
    )


def _no_time_passes() -> float:
    return 0.0


class Worker:
    """What both roles have: a pool, a memory, a fence, a lease table, and links."""

    def __init__(self, world: World, address: str, life: int) -> None:
        self.world = world
        self.address = address
        self.me = Incarnation(f"{address}.{life}")
        self.pool = world.parts.pool(world.bounds.num_blocks, prefix_cache=False)
        self.memory: list[Content | None] = [None] * world.bounds.num_blocks
        self.fence = world.parts.fence(_no_time_passes)
        self.table = world.parts.table(unattached_ttl_s=TTL_S)
        self.step: Any = None
        """The step in flight: its number, and what it computes."""

    def gateway(self, message: Message) -> None:
        """To the gateway."""
        self.world.link(self.world.gateway.me, self.address).send_down(message)

    def tell(self, sink: Incarnation, message: Message) -> None:
        """To a sink."""
        link = self.world.links.get(f"{sink}>{self.address}")
        if link is not None:
            link.send_down(message)

    def refuse(self, key: RequestKey, cause: Cause, message: str) -> None:
        """Failed, to the gateway."""
        self.gateway(Failed(request=key.request, attempt=key.attempt, cause=cause, message=message))

    def release(self, blocks: Sequence[int]) -> None:
        """Give references back; what is free is soon somebody else's."""
        self.pool.release(blocks)
        self.wipe()
        self.look_again()

    def wipe(self) -> None:
        """Others write to whatever is free."""
        for block in self.pool._free:
            self.memory[block] = None

    def end_step(self) -> None:
        """The device is done with the step in flight: it has written every block, whatever happened meanwhile."""
        number, work = self.step
        self.step = None
        self.write(work)
        self.pool.step_finished(number)
        self.wipe()
        self.stepped(work)
        self.look_again()

    def expire(self, now: float) -> None:
        """Time has passed for the leases."""
        self.do(self.table.expire(now))

    # The offers, as `kv_transfer.lender.Lender` carries them out.

    def on_message(self, sink: Incarnation, message: Message) -> None:
        """A message from a sink."""
        match message:
            case Attach() | AttachSequence():
                self.do(self.table.attach(message, sink, 0.0))
            case Settle():
                self.do(self.table.settle(message, sink))
            case Detach():
                self.do(self.table.detach(message, sink, 0.0))
            case _:
                raise AssertionError(message)

    def sink_said_hello(self, sink: Incarnation, listed: Collection[RequestKey]) -> None:
        """A sink's session opens (again), or is over."""
        self.do(self.table.sink_said_hello(sink, set(listed), 0.0))

    def do(self, actions: Iterable[leases.Action]) -> None:
        """Carry out what the lease table decided."""
        self.table.check_invariants()
        for action in actions:
            match action:
                case events.Send(sink, message):
                    self.tell(sink, message)
                case events.Unpinned(key, block_ids, settled):
                    self.on_unpinned(key, block_ids, settled)
                case events.LeaseDropped(key, cause, message):
                    self.on_dropped(key, cause, message)

    def expect(self, key: RequestKey, deadline: float) -> None:
        self.table.expect(key, deadline)

    def awaits(self, key: RequestKey) -> bool:
        return self.table.awaits(key)

    def has_settled(self, key: RequestKey, sink: Incarnation) -> bool:
        return self.table.has_settled(key, sink)

    def open(self, key: RequestKey, blocks: Sequence[int], deadline: float) -> None:
        self.do(self.table.open(key, blocks, deadline, 0.0))

    def blocks_ready(self, request: RequestId, num_ready: int, checksums: Sequence[int] = ()) -> None:
        self.do(self.table.blocks_ready(request, num_ready, now=0.0))

    def complete(self, request: RequestId, first_tokens: Sequence[Tokens]) -> None:
        self.do(self.table.complete(request, first_tokens))

    def withdraw(self, request: RequestId, cause: Cause, message: str) -> None:
        self.do(self.table.withdraw(request, cause, message, now=0.0))

    # Of each role.

    def write(self, work: Any) -> None:
        raise NotImplementedError

    def stepped(self, work: Any) -> None:
        raise NotImplementedError

    def look_again(self) -> None:
        raise NotImplementedError

    def on_unpinned(self, key: RequestKey, blocks: Sequence[int], settled: bool) -> None:
        raise NotImplementedError

    def on_dropped(self, key: RequestKey, cause: Cause, message: str) -> None:
        raise NotImplementedError
