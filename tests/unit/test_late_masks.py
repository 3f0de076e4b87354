"""A decode worker whose sequences wait for what their grammars allow: it stands still, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from migration_bench import BUDGET_S, GATEWAY, Pause, Site, World
from step_tokens import handles

from common.contract.ids import RequestId
from common.contract.messages.gateway import Abort, Decode
from common.contract.messages.worker import Failed, Finished
from common.contract.sampling import SamplingParams
from common.engine.grammar import GaveUp, GrammarState
from common.engine.masks import Tell
from decode_worker.step import Step

MANY = 1000
"""Steps that no test needs."""


class HeldMasks:
    """In place of `Masks`: they are there when the test says so."""

    def __init__(self) -> None:
        self.awaited: dict[GrammarState, Tell] = {}

    def ask(self, grammar: str, state: GrammarState, token_ids: Sequence[int], prompt_len: int, tell: Tell) -> None:
        self.awaited[state] = tell

    def forget(self, state: GrammarState | None) -> None:
        if state is not None:
            self.awaited.pop(state, None)

    async def wait_for_expected(self) -> None:
        """Those that are late are waited for by nobody."""

    def give(self, gave_up: GaveUp | None = None) -> None:
        for state in list(self.awaited):
            state.allowed = b""
            self.awaited.pop(state)(gave_up)


class Running:
    """A worker in a loop of asyncio's."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.masks = HeldMasks()
        self.num_scheduled = 0
        schedule = site.core.scheduler.schedule

        def counted(now: float, before: Step | None = None, *, may_draft: bool = True) -> Step:
            self.num_scheduled += 1
            assert self.num_scheduled < MANY, "it plans one step after the other, and there is nothing to do"
            return schedule(now, before, may_draft=may_draft)

        async def finish(step: Pause) -> Any:
            await asyncio.sleep(0)
            return site.engine.execute(*step.step)  # type: ignore[misc]

        site.worker._masks = self.masks  # type: ignore[assignment]
        site.core.scheduler.schedule = counted  # type: ignore[method-assign]
        site.engine.finish = finish  # type: ignore[method-assign]
        site.loop.close()
        site.worker._wake = asyncio.Event()

    def ask(self, name: str, max_tokens: int, grammar: str | None = None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar)
        work = Decode(
            request=RequestId(name),
            attempt=1,
            token_ids=(1, 2, 3),
            prompt_len=3,
            choices=(0,),
            handles=handles(),
            sampling=sampling,
            budget_s=BUDGET_S,
            source=None,
            offered=None,
        )
        self.site.reader.sent(work)
        self.site.worker.on_message(GATEWAY, work)

    def ended(self, kind: type[Finished | Failed]) -> list[str]:
        return [str(message.request) for message in self.site.to_gateway if isinstance(message, kind)]


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Running]:
    worker = Running(World(["d"], **options).sites["d"])  # type: ignore[index]
    loop = asyncio.create_task(worker.site.worker._step_loop())
    try:
        yield worker
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop


async def turns(condition: Callable[[], bool] = lambda: False) -> bool:
    """Whether it comes about in many turns of the loop, in which nothing else happens."""
    for _ in range(200):
        if condition():
            return True
        await asyncio.sleep(0)
    return False


@pytest.mark.parametrize("places", [1, 8])
async def test_no_step_is_planned_while_everybody_waits_for_masks(places: int) -> None:
    """With one place, there is somebody besides who waits for it."""
    async with running(max_num_seqs=places) as worker:
        worker.ask("held", 3, "start: /x/")
        assert worker.masks.awaited, "its prompt is not computed before"
        worker.masks.give()
        assert await turns(lambda: bool(worker.masks.awaited))
        worker.ask("free", 3)
        assert await turns(lambda: bool(worker.ended(Finished))) == (places > 1)
        num_scheduled = worker.num_scheduled
        await turns()
        assert worker.num_scheduled == num_scheduled
        worker.masks.give()
        assert await turns(lambda: bool(worker.masks.awaited))
        worker.masks.give()
        assert await turns(lambda: sorted(worker.ended(Finished)) == ["free", "held"])


async def test_who_waits_for_a_mask_can_be_given_up() -> None:
    async with running() as worker:
        for name in ("aborted", "given up"):
            worker.ask(name, 3, "start: /x/")
        worker.masks.give()
        assert await turns(lambda: len(worker.masks.awaited) == 2)
        worker.site.worker.on_message(GATEWAY, Abort(request=RequestId("aborted"), attempt=1))
        assert len(worker.masks.awaited) == 1
        worker.masks.give(GaveUp("items", "too many"))
        assert worker.ended(Failed) == ["given up"]
        await turns()
        assert worker.site.pool.num_used == 0
        assert not worker.site.left().get("requests")
