"""The prefill worker of the model: `prefill_worker.worker`, as far as a handoff sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.contract.errors import Cause
from common.contract.ids import Incarnation, RequestId, RequestKey
from common.contract.messages import (
    Abort,
    Cancelled,
    Finished,
    Message,
    Prefill,
)

if TYPE_CHECKING:
    from handoff_world import World
from handoff_workers import DEADLINE, NUM_BLOCKS, Worker, content, tokens


@dataclass(eq=False)
class Computed:
    """A prompt that is computed."""

    work: Prefill
    blocks: list[int] = field(default_factory=list)
    num_ready: int = 0


class PrefillShell(Worker):
    """`prefill_worker.worker.PrefillWorker`, as far as a handoff sees it."""

    def __init__(self, world: World, address: str, life: int) -> None:
        super().__init__(world, address, life)
        self.owners: dict[RequestId, int] = {}
        self.prompts: dict[RequestId, Computed] = {}

    def hear(self, peer: Incarnation, message: Message) -> None:
        match message:
            case Prefill():
                self.on_prefill(message)
            case Abort():
                attempt = self.owners.get(message.request)
                if attempt is not None and attempt <= message.attempt:
                    self.end(message.request, Cause.CANCELLED, "aborted")
                    self.gateway(Cancelled(request=message.request, attempt=message.attempt))
            case _:
                self.on_message(peer, message)

    def on_hello(self, peer: Incarnation, listed: Collection[RequestKey]) -> tuple[RequestKey, ...]:
        """A session (re)opens."""
        if peer == self.world.gateway.me:
            for key in self.owned():
                if key not in listed:
                    self.end(key.request, Cause.CANCELLED, "unknown to its gateway")
            return tuple(self.owned())
        self.sink_said_hello(peer, listed)
        return ()

    def on_peer_lost(self, peer: Incarnation) -> None:
        """A session is over."""
        self.on_hello(peer, ())

    def owned(self) -> list[RequestKey]:
        return [RequestKey(request, attempt) for request, attempt in self.owners.items()]

    def on_prefill(self, work: Prefill) -> None:
        if not self.fence.admits(work.key):
            return
        if work.request in self.owners:
            self.end(work.request, Cause.SUPERSEDED, "a newer attempt arrived")
        if self.world.refusing:
            self.refuse(work.key, Cause.CAPACITY, "full")
            return
        self.owners[work.request] = work.attempt
        self.prompts[work.request] = Computed(work)
        self.expect(work.key, DEADLINE)
        self.look_again()

    def look_again(self) -> None:
        """Admit what there is room for, and compute."""
        for prompt in list(self.prompts.values()):
            if not prompt.blocks and self.pool.num_free >= NUM_BLOCKS:
                prompt.blocks = self.pool.allocate(NUM_BLOCKS)
                self.pool.share(prompt.blocks)
                self.open(prompt.work.key, prompt.blocks, DEADLINE)
        chunks = [(each, tuple(each.blocks), self.next_end(each)) for each in self.prompts.values() if each.blocks]
        if self.step is None and chunks:
            self.step = (self.pool.step_started(), chunks)

    def next_end(self, prompt: Computed) -> int:
        return NUM_BLOCKS if self.world.bounds.chunks == 1 else prompt.num_ready + 1

    def write(self, work: list[tuple[Computed, tuple[int, ...], int]]) -> None:
        for prompt, blocks, end in work:
            held = content(len(prompt.work.token_ids))
            for index in range(prompt.num_ready, end):
                self.memory[blocks[index]] = held[index]

    def stepped(self, work: list[tuple[Computed, tuple[int, ...], int]]) -> None:
        for prompt, _, end in work:
            request = prompt.work.request
            if self.prompts.get(request) is not prompt:
                continue
            prompt.num_ready = end
            self.blocks_ready(request, end)
            if end == NUM_BLOCKS:
                del self.prompts[request]
                self.finish(prompt)

    def finish(self, prompt: Computed) -> None:
        request, attempt = prompt.work.key
        position = len(prompt.work.token_ids)
        first = tokens(
            prompt.work.key, position, 1, ended=self.world.bounds.first_ends and self.world.enough(position + 1)
        )
        self.complete(request, [first])
        self.gateway(first)
        if first.finish_reason is not None:
            self.gateway(Finished(request=request, attempt=attempt))
        self.release(prompt.blocks)

    def end(self, request: RequestId, cause: Cause, message: str) -> None:
        """Give back whatever the request holds here."""
        self.owners.pop(request, None)
        prompt = self.prompts.pop(request, None)
        if prompt is not None and prompt.blocks:
            self.release(prompt.blocks)
        self.withdraw(request, cause, message)

    def on_unpinned(self, key: RequestKey, blocks: Sequence[int], settled: bool) -> None:
        self.owners.pop(key.request, None)
        self.release(blocks)

    def on_dropped(self, key: RequestKey, cause: Cause, message: str) -> None:
        owned = key.request in self.owners
        self.end(key.request, cause, message)
        if owned:
            self.refuse(key, cause, message)

    def check(self) -> None:
        """No block of the step in flight is free."""
        if self.step is not None:
            named = {block for _, blocks, _ in self.step[1] for block in blocks}
            assert named.isdisjoint(self.pool._free), "two owners: a step in flight names a free block"

    def check_idle(self) -> None:
        assert not self.owners, f"leak: {self.address} holds {self.owners}"
        assert not self.prompts, f"leak: {self.address} computes"
